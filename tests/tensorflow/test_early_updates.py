"""In an ordered step the gradients of weights go to their updates as they are made; sums and bearers of gates wait."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tf_memsaver
from tests.tensorflow.plans import hand_plan, labels
from tf_memsaver.capture.model_step import capture_graph
from tf_memsaver.check.watch import StepWatch
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.judge.simulate import Simulator
from tf_memsaver.rewrite.optimized_model import make_uncertified
from tools.shared import memory as memory  # It has memory counted.

UNITS, DEPTH = 512, 10
WEIGHT = 4 * UNITS * UNITS


def chain() -> Any:
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((UNITS,))
    for _ in range(DEPTH):
        x = layers.Dense(UNITS, "tanh")(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", jit_compile=False)
    return model


def in_one_segment(model: Any, *, order: bool) -> Any:
    """Return a model of which all layers but the last are replayed at once."""
    names = labels(model)
    plan = hand_plan(model, (names[0], names[DEPTH - 1]))
    plan = dataclasses.replace(plan, batch_size=256, request=dataclasses.replace(plan.request, order=order))
    return make_uncertified(model, plan)


def trained(optimized: Callable[[Any], Any]) -> tuple[list[bytes], int]:
    """Return what four steps leave, and the most that one takes beyond what was there."""
    generator = np.random.default_rng(0)
    x, y = (generator.standard_normal((4 * 256, size)).astype("float32") for size in (UNITS, 1))
    model, watch = optimized(chain()), StepWatch()
    model.fit(x, y, batch_size=256, shuffle=False, verbose=0, callbacks=[watch])
    found = [np.asarray(each).tobytes() for each in (*model.variables, *model.optimizer.variables)]
    return found, max(p - live for p, live in list(zip(watch.steps.peaks, watch.steps.lives, strict=True))[1:])


def test_gradients_of_one_segment_are_not_all_in_memory_at_its_end() -> None:
    plain, _ = trained(lambda model: model)
    ordered, taken = trained(functools.partial(in_one_segment, order=True))
    free, taken_free = trained(functools.partial(in_one_segment, order=False))
    assert plain == ordered == free
    # Without an order a gradient of each weight waits for the last one.
    assert taken + DEPTH // 2 * WEIGHT < taken_free


def test_the_judge_counts_updates_as_they_come() -> None:
    graph = capture_graph(chain(), batch_size=256)
    stop = len(graph.units) - 1
    segments = (
        Segment(start=0, stop=stop, mode=SegmentMode.RECOMPUTE),
        Segment(start=stop, stop=stop + 1, mode=SegmentMode.STORE),
    )
    taken = Simulator(graph).ordered_peak(segments) - graph.resident_bytes
    activations = DEPTH * 256 * UNITS * 4
    assert activations < taken < activations + 7 * WEIGHT


@pytest.mark.parametrize("kind", ["shared", "frozen"])
def test_shared_and_frozen_weights_train_the_same(kind: str) -> None:
    def make() -> Any:
        keras.utils.set_random_seed(0)
        inputs = x = keras.Input((UNITS,))
        shared = layers.Dense(UNITS, "tanh")
        for place in range(6):
            layer = shared if kind == "shared" and place % 2 else layers.Dense(UNITS, "tanh")
            layer.trainable = kind != "frozen" or place > 2
            x = layer(x)
        model = keras.Model(inputs, layers.Dense(1)(x))
        model.compile("adam", "mse", jit_compile=False)
        return model

    x, y = np.ones((512, UNITS), "float32"), np.ones((512, 1), "float32")
    models = make(), tf_memsaver.optimize(make(), batch_size=128, strategy="min_peak")
    for model in models:
        model.fit(x, y, batch_size=128, shuffle=False, verbose=0)
    first, second = ([np.asarray(v) for v in (*m.variables, *m.optimizer.variables)] for m in models)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
