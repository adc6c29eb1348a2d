"""The largest batch of a real model: found by planning, confirmed by steps."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tf_memsaver.errors import InfeasibleBudgetError, InvalidRequestError

MIB = 1 << 20
WIDTH = 256


def deep() -> Any:
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((WIDTH,))
    for _ in range(8):
        x = layers.Dense(WIDTH, activation="tanh")(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile("sgd", "mse")
    return model


def batch(size: int) -> tuple[tf.Tensor, tf.Tensor]:
    generator = np.random.default_rng(0)
    return tf.constant(generator.standard_normal((size, WIDTH)), "float32"), tf.zeros((size, 1))


def test_the_largest_batch_fits_and_a_larger_one_does_not() -> None:
    model = deep()
    before = [v.numpy().tobytes() for v in model.variables]
    # Samples of the batch come again where more are asked for.
    found = tf_memsaver.max_batch_size(model, data=batch(512), budget="24MiB")
    assert found.measured_peak_bytes is not None and found.measured_peak_bytes <= 24 * MIB
    assert 512 < found.plain_batch_size < found.batch_size and found.plan.batch_size == found.batch_size
    assert [v.numpy().tobytes() for v in model.variables] == before
    plan = tf_memsaver.search_plan(model, batch_size=found.plain_batch_size, budget="24MiB")
    assert not plan.recomputed
    with pytest.raises(InfeasibleBudgetError):
        tf_memsaver.search_plan(model, batch_size=int(1.1 * found.batch_size), budget=found.plan.request.budget_bytes)
    # It trains.
    tf_memsaver.apply_plan(model, found.plan).fit(*batch(found.batch_size), batch_size=found.batch_size, verbose=0)


def test_without_data_and_without_a_step() -> None:
    found = tf_memsaver.max_batch_size(deep(), budget=24 * MIB, max_overhead=0.1, predict_only=True)
    assert found.measured_peak_bytes is None and found.plan.step_overhead <= 0.1 and found.batch_size > 32
    assert found.plan.peak_bytes <= 24 * MIB


def test_what_is_no_budget_for_several_batch_sizes() -> None:
    with pytest.raises(InvalidRequestError, match="depends on the batch size"):
        tf_memsaver.max_batch_size(deep(), budget="80%")
    with pytest.raises(InfeasibleBudgetError):
        tf_memsaver.max_batch_size(deep(), budget="1MiB", predict_only=True)
