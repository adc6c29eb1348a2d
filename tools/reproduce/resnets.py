"""Deep residual networks of the paper's shape: what their plans need, and one real training step.

Chen et al. 2016 (arXiv:1604.06174, section 5) train residual networks of 100 to 1000 layers on images of 3×224×224 in
batches of 32. The example in their code has ResNet-200's stages, (3, 24, 36, 3) bottleneck blocks; the paper does not
say which stages the deeper ones have. Here they are multiples of these.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_memsaver
from tf_memsaver.ir.graph import Graph, MemoryKind, Phase
from tools.reproduce.shapes import CLASSES, DEFAULT_OVERHEAD, SHAPES

FILTERS = (64, 128, 256, 512)
"""Of the 3×3 convolutions of each stage; the blocks' outputs have four times as many."""

LOSS = "sparse_categorical_crossentropy"


def residual_network(blocks: tuple[int, ...], pixels: int) -> keras.Model:
    """Return a network of bottleneck blocks, so many in each of four stages, compiled with SGD."""
    inputs = keras.Input((pixels, pixels, 3))
    x = keras.layers.ReLU()(_convolution(inputs, FILTERS[0], 7, strides=2))
    x = keras.layers.MaxPooling2D(3, strides=2, padding="same")(x)
    for stage, (count, filters) in enumerate(zip(blocks, FILTERS, strict=True)):
        for number in range(count):
            x = _bottleneck(x, filters, strides=2 if stage and not number else 1, projects=not number)
    outputs = keras.layers.Dense(CLASSES, activation="softmax")(keras.layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, outputs, name=f"resnet{3 * sum(blocks) + 2}")
    model.compile("sgd", LOSS)
    return model


def _convolution(x: keras.KerasTensor, filters: int, size: int, strides: int = 1) -> keras.KerasTensor:
    x = keras.layers.Conv2D(filters, size, strides=strides, padding="same", use_bias=False)(x)
    return keras.layers.BatchNormalization()(x)


def _bottleneck(x: keras.KerasTensor, filters: int, strides: int, projects: bool) -> keras.KerasTensor:
    y = keras.layers.ReLU()(_convolution(x, filters, 1, strides))
    y = keras.layers.ReLU()(_convolution(y, filters, 3))
    shortcut = _convolution(x, 4 * filters, 1, strides) if projects else x
    return keras.layers.ReLU()(keras.layers.Add()([shortcut, _convolution(y, 4 * filters, 1)]))


# Predicted ------------------------------------------------------------------------------------------------------------


def predicted(name: str, batch_size: int, pixels: int) -> dict[str, Any]:
    """Return what the step of a network of ``SHAPES`` needs by each plan, as JSON data; nothing is run.

    The bytes of ``plans`` are what the step needs beyond what is there before it: weights and the batch.
    """
    model = residual_network(SHAPES[name], pixels)
    begin = time.process_time()
    traced = tf_memsaver.trace(model, batch_size=batch_size)
    capture_seconds = time.process_time() - begin
    graph = traced.graph
    forward = forward_share(graph)
    plans = {
        "plain": _planned(graph, lambda: traced.plan(strategy="plain")),
        "ours": _planned(graph, traced.plan),
        "sqrt": _planned(graph, lambda: traced.plan(strategy="chen_sqrt")),
        "nested": _planned(graph, lambda: traced.plan(max_overhead=max(forward, DEFAULT_OVERHEAD))),
    }
    return {
        "name": name,
        "batch_size": batch_size,
        "pixels": pixels,
        "keras_layers": len(model.layers),
        "units": len(graph.units),
        "operations": len(graph.ops),
        "weight_bytes": 4 * model.count_params(),
        "weight_gradient_bytes": graph.bytes_of(MemoryKind.WEIGHT_GRADIENT),
        "resident_bytes": graph.resident_bytes,
        "forward_share": forward,
        "capture_seconds": capture_seconds,
        "plans": plans,
    }


def forward_share(graph: Graph) -> float:
    """Return the time of the forward pass as a share of the step: what one extra forward pass costs."""
    return sum(op.seconds for op in graph.ops if op.phase is Phase.FORWARD) / graph.step_seconds


def _planned(graph: Graph, make: Callable[[], tf_memsaver.Plan]) -> dict[str, Any]:
    begin = time.process_time()
    plan = make()
    return {
        "bytes": plan.peak_bytes - graph.resident_bytes,
        "peak_bytes": plan.peak_bytes,
        "overhead": plan.step_overhead,
        "planner": plan.planner,
        "segments": len(plan.segments),
        "seconds": time.process_time() - begin,
    }


# Measured -------------------------------------------------------------------------------------------------------------


def measured(name: str, batch_size: int, pixels: int) -> dict[str, Any]:
    """Return what one real step of a network of ``SHAPES`` takes by our plan, and how long each part of it takes.

    The plain step is traced, which allocates nothing, and is not run.
    """
    from tools.shared.memory import live, peak, reset_peak  # Has the memory counted, before the first operation.

    model = residual_network(SHAPES[name], pixels)
    begin = time.process_time()
    optimized = tf_memsaver.optimize(model, batch_size=batch_size)
    optimize_seconds = time.process_time() - begin
    _, plain_trace_seconds = _traced(model, batch_size, pixels)
    step, trace_seconds = _traced(optimized, batch_size, pixels)
    generator = np.random.default_rng(0)
    x = tf.constant(generator.standard_normal((batch_size, pixels, pixels, 3), dtype=np.float32))
    y = tf.constant(generator.integers(0, CLASSES, batch_size), tf.int32)
    before = live()
    reset_peak()
    begin = time.perf_counter()
    loss = float(step(x, y)["loss"])
    step_seconds = time.perf_counter() - begin
    plan = optimized.memsaver_plan
    return {
        "name": name,
        "batch_size": batch_size,
        "pixels": pixels,
        "loss": loss,
        "live_bytes": before,
        "peak_bytes": peak(),
        "bytes": peak() - before,
        "predicted_bytes": plan.peak_bytes - before,
        "predicted_overhead": plan.step_overhead,
        "optimize_seconds": optimize_seconds,
        "plan_seconds": plan.plan_seconds,
        "plain_trace_seconds": plain_trace_seconds,
        "trace_seconds": trace_seconds,
        "step_seconds": step_seconds,
    }


def _traced(model: Any, batch_size: int, pixels: int) -> tuple[Any, float]:
    """Return a model's training step, traced, and how long that took."""
    model.optimizer.build(model.trainable_variables)
    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False)
    specs = tf.TensorSpec((batch_size, pixels, pixels, 3)), tf.TensorSpec((batch_size,), tf.int32)
    begin = time.process_time()
    concrete = step.get_concrete_function(*specs)
    return concrete, time.process_time() - begin
