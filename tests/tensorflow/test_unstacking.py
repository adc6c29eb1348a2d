"""Steps of a loop in Python, or of a ``TimeDistributed``: in less memory, since no gradient of a slice is as large as
the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver

STEPS, WIDTH = 12, 32


class StepByStep(layers.Layer):
    """A recurrent layer as people write one: a loop in Python over the steps."""

    def build(self, shape: Any) -> None:
        self.wide = layers.Dense(WIDTH)
        self.wide.build(shape)

    def call(self, x: Any) -> Any:
        currents = self.wide(x)
        state, states = tf.zeros_like(currents[:, 0]), []
        for step in range(STEPS):
            state = 0.9 * state + currents[:, step]
            state = state * tf.sigmoid(state)
            states.append(state)
        return tf.stack(states, 1)


def loops() -> list[Any]:
    return [StepByStep(), StepByStep()]


def of_each_step() -> list[Any]:
    """A network that runs on each step, on what a layer makes of all."""
    x = step = keras.Input((WIDTH,))
    for made in (layers.Dense(WIDTH, "silu"), layers.LayerNormalization(), layers.Dense(WIDTH, "tanh")):
        x = made(x)
    return [layers.Conv1D(WIDTH, 3, padding="same"), layers.TimeDistributed(keras.Model(step, x))]


def fitted(build: Callable[[], list[Any]], **options: Any) -> tuple[list[Any], Any]:
    # Names are part of the result.
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    parts = [keras.Input((STEPS, WIDTH)), *build(), layers.GlobalAveragePooling1D(), layers.Dense(3)]
    model = keras.Sequential(parts)
    model.compile("adam", "mse", jit_compile=False)
    numbers = np.random.default_rng(0)
    x, y = (numbers.standard_normal((20, *shape)).astype(np.float32) for shape in ((STEPS, WIDTH), (3,)))
    if options:
        model = tf_memsaver.optimize(model, data=(x, y), batch_size=8, **options)
    losses = model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0).history["loss"]
    return [losses, *(np.asarray(v) for v in (*model.variables, *model.optimizer.variables))], model


@pytest.mark.parametrize("build", [loops, of_each_step])
def test_steps_train_alike_without_a_whole_gradient_for_each(build: Callable[[], list[Any]]) -> None:
    plain, model = fitted(build)
    types = {op.type for op in tf_memsaver.trace(model, batch_size=8).graph.ops}
    assert "Pack" in types and "StridedSliceGrad" not in types
    found, model = fitted(build, strategy="min_peak")
    assert all(np.array_equal(a, b) for a, b in zip(plain, found, strict=True))
    plan = model.memsaver_plan
    assert plan.peak_bytes < 0.8 * plan.plain_peak_bytes


def test_the_plain_step_is_predicted_with_a_gradient_for_each() -> None:
    _, model = fitted(loops)
    graph = tf_memsaver.trace(model, batch_size=8, granularity="op").graph
    replaced = [op.replaced_bytes for op in graph.ops if op.replaced_bytes]
    assert replaced == [(STEPS - 2) * 8 * STEPS * WIDTH * 4] * 2
