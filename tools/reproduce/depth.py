"""How capture, planning, rewriting, tracing and a step grow with the number of layers.

Seconds are the process's CPU time, which other work on the machine changes least.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

import tf_memsaver
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import solve
from tools.bench.planner import residual, transformer
from tools.shared.nets import chain

WIDTH = 16
BATCH_SIZE = 64
LENGTH = 8
"""Of the transformer's sequences."""

FRAMES_PER_LAYER = 10
"""More than Keras's recursion over a chain needs for a layer, as it builds one (``keras/src/ops/function.py``)."""

MOST_OPTIMIZED_LAYERS = 1000
"""Of deeper networks the steps run without TensorFlow's graph optimizer, whose time grows faster than the graph."""

GRAPHS = {
    "ResNet-like": residual,
    "transformer-like": transformer,
    "chain": lambda length: chain([8] * length, scale=1024),
}
"""Made-up steps of as many blocks."""


def dense_chain(layers: int) -> keras.Model:
    """Return a chain of narrow dense layers, compiled with SGD."""
    dense = (keras.layers.Dense(WIDTH, activation="tanh") for _ in range(layers))
    return _compiled(keras.Sequential([keras.Input((WIDTH,)), *dense], name=f"chain{layers}"))


def transformer_blocks(blocks: int) -> keras.Model:
    """Return a stack of narrow transformer blocks, compiled with SGD."""
    x = inputs = keras.Input((LENGTH, WIDTH))
    for _ in range(blocks):
        y = keras.layers.LayerNormalization()(x)
        x = keras.layers.Add()([x, keras.layers.MultiHeadAttention(2, WIDTH // 2)(y, y)])
        y = keras.layers.Dense(4 * WIDTH, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = keras.layers.Add()([x, keras.layers.Dense(WIDTH)(y)])
    return _compiled(keras.Model(inputs, x, name=f"transformer{blocks}"))


def _compiled(model: keras.Model) -> keras.Model:
    model.compile("sgd", "mse")
    return model


NETWORKS = {"dense layers": dense_chain, "transformer blocks": transformer_blocks}


def trained(kind: str, count: int) -> dict[str, Any]:
    """Return how long each part of the way to a trained step takes, for a network of so many layers or blocks."""
    sys.setrecursionlimit(max(sys.getrecursionlimit(), FRAMES_PER_LAYER * count))
    seconds: dict[str, float] = {}
    optimizes_graphs = count <= MOST_OPTIMIZED_LAYERS
    if not optimizes_graphs:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    with _timed(seconds, "build"):
        model = NETWORKS[kind](count)
    with _timed(seconds, "capture"):
        traced = tf_memsaver.trace(model, batch_size=BATCH_SIZE)
    with _timed(seconds, "plan"):
        plan = traced.plan()
    with _timed(seconds, "rewrite"):
        optimized = traced.apply(plan)
    model.optimizer.build(model.trainable_variables)
    batch = tf.zeros((BATCH_SIZE, *model.input_shape[1:]))
    for name, each in (("plain ", model), ("", optimized)):
        with _timed(seconds, f"{name}trace"):
            step = _train_step(each).get_concrete_function(batch, batch)
        with _timed(seconds, f"{name}first step"):
            step(batch, batch)
        with _timed(seconds, f"{name}step"):
            step(batch, batch)
    return {
        "kind": kind,
        "count": count,
        "operations": len(traced.graph.ops),
        "optimizes_graphs": optimizes_graphs,
        "segments": len(plan.segments),
        "overhead": plan.step_overhead,
        "peak_bytes": plan.peak_bytes,
        "plain_peak_bytes": plan.plain_peak_bytes,
        "seconds": seconds,
    }


def _train_step(model: Any) -> Any:
    return tf.function(lambda x, y: model.train_step((x, y)), autograph=False)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    begin = time.process_time()
    yield
    seconds[name] = time.process_time() - begin


# Planning alone -------------------------------------------------------------------------------------------------------


def planned(kind: str, operations: int) -> dict[str, Any]:
    """Return how long a made-up step of about so many operations takes to plan: for half its peak, and by default."""
    build = GRAPHS[kind]
    graph = build(max(1, operations * 10 // len(build(10).ops)))
    half = solve(graph, Request(strategy="plain")).peak_bytes // 2
    seconds: dict[str, float] = {}
    with _timed(seconds, "half"):
        by_budget = solve(graph, Request(budget_bytes=half))
    with _timed(seconds, "default"):
        by_default = solve(graph, Request())
    return {
        "kind": kind,
        "operations": len(graph.ops),
        "units": len(graph.units),
        "seconds": seconds,
        "overhead": {"half": by_budget.step_overhead, "default": by_default.step_overhead},
    }
