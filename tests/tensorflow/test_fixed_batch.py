"""Models that are made for batches of one size, or were built with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tf_memsaver.errors import InvalidRequestError, UnsupportedModelError
from tf_memsaver.program.signature import signature_of

WIDTH, BATCH = 8, 2048


@keras.saving.register_keras_serializable("test_fixed_batch")
class Halves(layers.Layer):
    """A residual block that computes with the batch size in Python, which cannot be done with an open one."""

    def build(self, shape: Any) -> None:
        self.wide, self.back = layers.Dense(128), layers.Dense(shape[-1])
        self.wide.build(shape)
        self.back.build((shape[0], 128))

    def call(self, x: Any) -> Any:
        halves = tf.reshape(tf.nn.tanh(tf.nn.gelu(self.wide(x))), (2 * x.shape[0], 64))
        return x + self.back(tf.reshape(halves, (x.shape[0], 128)))


@keras.saving.register_keras_serializable("test_fixed_batch")
class OwnCall(keras.Model):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.blocks = [Halves() for _ in range(4)]

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


@keras.saving.register_keras_serializable("test_fixed_batch")
class OwnStep(OwnCall):
    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def functional() -> Any:
    x = inputs = keras.Input((WIDTH,), batch_size=BATCH)
    for _ in range(4):
        x = Halves()(x)
    return keras.Model(inputs, x)


def sequential() -> Any:
    model = keras.Sequential([Halves() for _ in range(4)])
    model(np.zeros((BATCH, WIDTH), np.float32))
    return model


def data() -> tf.data.Dataset:
    x = np.random.default_rng(0).standard_normal((2 * BATCH, WIDTH)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, x)).batch(BATCH, drop_remainder=True)


MODELS = [OwnCall, OwnStep, functional, sequential]


@pytest.mark.parametrize("granularity", ["auto", "op", "layer"])
@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_code_that_computes_with_the_batch_size_is_planned(build: Any, granularity: str) -> None:
    model = build()
    model.compile("adam", "mse", jit_compile=False)
    optimized = tf_memsaver.optimize(model, data=data(), granularity=granularity)
    plan = optimized.memsaver_plan
    assert plan.peak_bytes < 0.6 * plan.plain_peak_bytes
    assert tf_memsaver.verify(model, optimized, data=data(), steps=3).identical


def test_arrays_that_fill_all_batches_have_one_size_in_fit() -> None:
    x = np.zeros((4 * BATCH, WIDTH), np.float32)
    model = OwnCall()
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(UnsupportedModelError, match="drop_remainder=True"):
        tf_memsaver.search_plan(model, data=(x[1:], x[1:]), batch_size=BATCH)
    optimized = tf_memsaver.optimize(model, data=(x, x), batch_size=BATCH)
    plan = optimized.memsaver_plan
    assert plan.peak_bytes < 0.6 * plan.plain_peak_bytes
    optimized.fit(x, x, batch_size=BATCH, verbose=0)


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_it_is_saved_and_loaded(build: Any, tmp_path: Path) -> None:
    model = build()
    model.compile("adam", "mse", jit_compile=False)
    optimized = tf_memsaver.optimize(model, data=data())
    optimized.fit(data(), shuffle=False, verbose=0)
    optimized.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.memsaver_plan == optimized.memsaver_plan
    histories = [each.fit(data(), shuffle=False, verbose=0).history for each in (optimized, loaded)]
    assert histories[0] == histories[1]


def test_the_batch_size_must_be_that_one_then() -> None:
    model = functional()
    with pytest.raises(InvalidRequestError, match="fixed batch size 2048, which a layer needs"):
        tf_memsaver.search_plan(model, batch_size=4)
    model = keras.Sequential([keras.Input((9, 2), batch_size=8), layers.LSTM(4, stateful=True), layers.Dense(2)])
    with pytest.raises(InvalidRequestError, match="fixed batch size 8, which a layer needs"):
        tf_memsaver.search_plan(model, batch_size=4)


@pytest.mark.parametrize("batch_size", [None, 8])
def test_a_sparse_input_is_refused_with_a_batch_size_and_without(batch_size: int | None) -> None:
    inputs = keras.Input((6,), batch_size=batch_size, sparse=True)
    model = keras.Model(inputs, layers.Dense(2)(layers.Dense(5)(inputs)))
    with pytest.raises(InvalidRequestError, match="is sparse or ragged"):
        tf_memsaver.search_plan(model, batch_size=8)


def test_eager_steps_of_another_size_are_traced_for_it() -> None:
    """The trace for the batches of the data has their size in its constants."""
    model = OwnCall()
    model.compile("sgd", "mse", jit_compile=False)
    optimized = tf_memsaver.optimize(model, data=data(), granularity="op")
    x = tf.random.stateless_normal((64, WIDTH), (1, 2))
    gradients = []
    for each in (model, optimized):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(each(x, training=True) ** 2)
        gradients.append(tape.gradient(loss, model.trainable_variables))
    for plain, ours in zip(*gradients, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-3)


class Block(layers.Layer):
    """A residual block that leaves the batch size open."""

    def build(self, shape: Any) -> None:
        self.wide, self.back = layers.Dense(128), layers.Dense(shape[-1])

    def call(self, x: Any) -> Any:
        return x + self.back(tf.nn.tanh(tf.nn.gelu(self.wide(x))))


def built_by_a_call(first: int) -> Any:
    model = keras.Sequential([Block() for _ in range(4)])
    model(np.zeros((first, WIDTH), np.float32))
    return model


def with_a_batch_size(first: int) -> Any:
    x = inputs = keras.Input((WIDTH,), batch_size=first)
    for _ in range(4):
        x = Block()(x)
    return keras.Model(inputs, x)


@pytest.mark.parametrize("build", [built_by_a_call, with_a_batch_size], ids=lambda build: build.__name__)
def test_a_model_that_was_built_with_a_small_batch_is_planned_for_a_larger_one(build: Any) -> None:
    """Taken for the batch of the data, one row would make all activations too small to count."""
    for first in (1, 7):
        model = build(first)
        assert signature_of(model).inputs.shape == (None, WIDTH)
        model.compile("sgd", "mse", jit_compile=False)
        plan = tf_memsaver.search_plan(model, batch_size=BATCH)
        assert plan.peak_bytes < 0.6 * plan.plain_peak_bytes
        optimized = tf_memsaver.apply_plan(model, plan)
        assert tf_memsaver.verify(model, optimized, data=data(), steps=3).identical
