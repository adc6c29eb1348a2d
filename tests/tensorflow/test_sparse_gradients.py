"""Segments whose weights have sparse gradients (``tf.IndexedSlices``): they stay sparse, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tests.tensorflow.plans import optimized_between_cuts
from tf_memsaver.capture.model_step import capture_graph
from tools.shared.function_training import train_function
from tools.shared.records import differing
from tools.shared.training import assert_trains_alike, fit

TOKENS, WIDTH, LENGTH = 50, 16, 12


class Positions(layers.Layer):
    """Adds learned positions, which it gathers, and attends: as blocks with windows do."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(2 * LENGTH, shape[-1]))
        self.attention = layers.MultiHeadAttention(2, 8)
        self.attention.build(shape, shape)

    def call(self, x: Any) -> Any:
        places = keras.ops.arange(LENGTH) * 7 % (2 * LENGTH)
        x = x + keras.ops.take(self.table, places, axis=0)
        return x + self.attention(x, x)


class TiedHead(layers.Layer):
    """Makes logits by the table of an embedding, as language models do."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def call(self, x: Any) -> Any:
        return keras.ops.matmul(x, keras.ops.transpose(self.table.embeddings))


def words() -> Any:
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(TOKENS, WIDTH)(inputs)
    for _ in range(2):
        x = layers.Dense(WIDTH, "gelu")(Positions()(x))
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


def bags() -> Any:
    """Tokens and positions of two tables, one of which two branches read in one layer."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(TOKENS, WIDTH)(inputs)
    y = layers.Embedding(TOKENS, WIDTH)(inputs)
    x = layers.Dense(WIDTH, "tanh")(layers.Multiply()([x, y]))
    x = layers.LSTM(WIDTH)(layers.Dense(WIDTH, "tanh")(layers.Add()([x, y])))
    return keras.Model(inputs, layers.Dense(2)(x))


def ids(count: int) -> Any:
    return np.random.default_rng(0).integers(0, TOKENS, (count, LENGTH)).astype(np.int32)


@pytest.mark.parametrize("build", [words, bags], ids=lambda build: build.__name__)
@pytest.mark.parametrize("granularity", ["layer", "op"])
def test_tables_in_segments_train_alike(build: Callable[[], Any], granularity: Any) -> None:
    model = build()
    graph = capture_graph(model, batch_size=8, granularity=granularity)
    assert not any("sparse" in unit.pinned for unit in graph.units)
    modes = ("graph", "eager") if granularity == "layer" else ("graph",)
    assert_trains_alike(model, optimized_between_cuts(model, length=3, granularity=granularity), modes, batch_size=8)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lion"])
def test_tables_are_updated_alike_in_fit(optimizer: str) -> None:
    model = words()
    optimized = optimized_between_cuts(model, length=2)

    def fitted(trained: Any) -> Any:
        keras.utils.set_random_seed(0)
        trained.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
        return fit(trained, ids(26), np.arange(26) % 2, batch_size=8)

    assert not differing(fitted(model), fitted(optimized))


def test_rows_that_one_layer_looks_up_at_each_time_step_are_added_in_the_plain_order() -> None:
    """All steps get their gradients at once: the first one is the first to be done, not the last."""
    letters = keras.Sequential([keras.Input((LENGTH // 3,), dtype="int32"), layers.Embedding(TOKENS, WIDTH)])
    letters.add(layers.GlobalMaxPooling1D())
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.TimeDistributed(letters)(layers.Reshape((3, LENGTH // 3))(inputs))
    model = keras.Model(inputs, layers.Dense(2)(layers.Flatten()(layers.Dense(WIDTH, "tanh")(x))))
    optimized = optimized_between_cuts(model, length=2)

    def fitted(trained: Any) -> Any:
        trained.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
        return fit(trained, ids(58), np.arange(58) % 2, batch_size=16)

    assert not differing(fitted(model), fitted(optimized))


def test_gradients_stay_sparse() -> None:
    model = words()
    optimized = optimized_between_cuts(model, length=2)

    def kinds(trained: Any) -> list[str]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(trained(ids(4), training=True))
        return [type(each).__name__ for each in tape.gradient(loss, trained.trainable_variables)]

    for run in (kinds, tf.function(kinds, autograph=False)):
        assert run(optimized) == run(model)
    assert kinds(model).count("IndexedSlices") == 3


def test_a_table_that_several_segments_read_is_kept_out() -> None:
    inputs = keras.Input((LENGTH,), dtype="int32")
    table = layers.Embedding(TOKENS, WIDTH, name="table")
    x = layers.Dense(WIDTH, "tanh")(table(inputs))
    x = layers.Add()([x, table(keras.ops.flip(inputs, 1))])
    model = keras.Model(inputs, layers.Dense(2)(layers.Dense(WIDTH, "tanh")(x)))
    pinned = {unit.label: unit.pinned for unit in capture_graph(model, batch_size=8).units}
    assert (
        "has a sparse gradient of table/embeddings, to which others are added" == pinned["table"] == pinned["table#2"]
    )


class SharedPositions(keras.Model):
    """Blocks that add learned relative positions of one table to what they attend with, each scaled by its own gate."""

    def __init__(self) -> None:
        super().__init__()
        self.table = self.add_weight(shape=(2 * LENGTH, 1), name="table")
        self.gates = [self.add_weight(shape=(), initializer="ones", name=f"gate_{n}") for n in range(3)]
        self.queries = [layers.Dense(WIDTH) for _ in self.gates]
        self.wide = [layers.Dense(4 * WIDTH, activation="gelu") for _ in self.gates]
        self.narrow = [layers.Dense(WIDTH) for _ in self.gates]
        self.out = layers.Dense(3)

    def call(self, x: Any) -> Any:
        places = keras.ops.arange(LENGTH)
        distances = keras.ops.expand_dims(places, 1) - keras.ops.expand_dims(places, 0) + LENGTH
        biases = keras.ops.squeeze(keras.ops.take(self.table, distances, axis=0), -1)
        for gate, query, wide, narrow in zip(self.gates, self.queries, self.wide, self.narrow, strict=True):
            scores = keras.ops.matmul(query(x), keras.ops.transpose(x, (0, 2, 1))) + biases * gate
            x = x + narrow(wide(keras.ops.matmul(keras.ops.softmax(scores), x)))
        return self.out(x)


@pytest.mark.parametrize("granularity", ["auto", "op"])
def test_what_reads_a_table_made_in_front_of_all_segments_is_recomputed(granularity: Any) -> None:
    """All softmaxes were kept: each was said to have a sparse gradient of the table of its own."""

    def fitted(**options: Any) -> tuple[Any, Any]:
        keras.utils.set_random_seed(0)
        model, data = SharedPositions(), np.random.default_rng(0).standard_normal((24, LENGTH, WIDTH)).astype("float32")
        model(data[:1])
        model.compile("adam", "mse", jit_compile=False)
        if options:
            model = tf_memsaver.optimize(model, data=(data[:8], data[:8, :, :3]), **options)
        return fit(model, data, data[:, :, :3], batch_size=8, epochs=3), model

    plain, _ = fitted()
    found, model = fitted(granularity=granularity, strategy="recompute_all")
    plan = model.memsaver_plan
    assert not any("sparse" in reason for reason in plan.reasons)
    assert sum("oftmax" in label for label in plan.recomputed) == 3
    assert len(plain) > 9 and not differing(plain, found)


def test_slots_are_compared_with_the_weights_and_not_with_their_sparse_gradients() -> None:
    model = words()
    model.compile("adam", "mse", jit_compile=False)
    estimate = tf_memsaver.estimate(model, batch_size=1)
    weights = sum(v.numpy().nbytes for v in model.weights)
    assert estimate.gradient_bytes < estimate.trained_bytes == pytest.approx(weights, rel=0.01)
    assert estimate.optimizer_slots == pytest.approx(2.0, abs=0.02)


def test_a_function_that_gathers() -> None:
    table = tf.Variable(tf.random.stateless_normal((TOKENS, WIDTH), (1, 2)))
    kernels = [tf.Variable(tf.random.stateless_normal((WIDTH, WIDTH), (3, seed))) for seed in range(3)]

    @tf.function(input_signature=[tf.TensorSpec((None, LENGTH), tf.int32)])
    def function(tokens: Any) -> Any:
        x = tf.gather(table, tokens)
        for kernel in kernels:
            x = tf.nn.gelu(x @ kernel)
        return x

    optimized = tf_memsaver.optimize_function(
        function, tf.TensorSpec((None, LENGTH), tf.int32), batch_size=8, strategy="recompute_all", max_overhead=5.0
    )

    case = [table, *kernels], [tf.constant(ids(8))]
    assert optimized.memsaver_plan.recomputed
    assert not differing(train_function(function, *case), train_function(optimized, *case))


@pytest.mark.parametrize("is_read_whole", [False, True])
def test_gradients_of_a_table_that_is_read_twice_are_counted_as_a_tape_hands_them_on(is_read_whole: bool) -> None:
    """Those of lookups are one behind the other, and an optimizer works on as many rows, not on those of the table."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    table = layers.Embedding(TOKENS, WIDTH)
    x = layers.Dense(WIDTH, "tanh")(table(inputs)) + table(TOKENS - 1 - inputs)
    if is_read_whole:
        x = TiedHead(table)(x)
    model = keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))
    model.compile("adagrad", "mse", jit_compile=False)
    x, y = ids(8), np.zeros((8, 2), np.float32)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    gradient = tape.gradient(loss, table.embeddings.value)
    assert isinstance(gradient, tf.IndexedSlices) != is_read_whole
    handed_on = gradient if is_read_whole else gradient.values
    graph = capture_graph(model, batch_size=8)
    squares = [graph.values[op.outputs[0]].nbytes for op in graph.ops if op.type == "Square" and op.outputs]
    assert max(squares) == handed_on.shape[0] * WIDTH * 4
