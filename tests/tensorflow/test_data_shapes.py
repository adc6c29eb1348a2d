"""Models that make sizes of their data as the step runs: texts that are split inside are as long as the longest one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tf_memsaver.plan.plan import Plan
from tf_memsaver.tfgraph.sizes import Sizes

WORDS = [f"w{number}" for number in range(20)]
LENGTH, BATCH = 24, 8
TEXTS = [" ".join(WORDS[(row + place) % 20] for place in range(LENGTH - row)) for row in range(BATCH)]
CLASSES = np.arange(BATCH) % 3


class KerasStep:
    """Nothing of one's own."""


class OwnStep:
    """A step of one's own."""

    def train_step(self: Any, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class OwnLoss:
    """A loss of one's own."""

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **more: Any) -> Any:
        del more
        return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))


def split_by_layer(length: int | None = None) -> Any:
    return layers.TextVectorization(vocabulary=WORDS, output_sequence_length=length)


def split_by_hand() -> Any:
    look_up = layers.StringLookup(vocabulary=WORDS)
    return lambda texts: look_up(tf.strings.split(texts).to_tensor(""))


def blocks() -> list[Any]:
    convolutions = [layers.Conv1D(64, 3, padding="same", activation="relu") for _ in range(4)]
    return [layers.Embedding(30, 64), *convolutions, layers.GlobalAveragePooling1D(), layers.Dense(3)]


def functional(step: Any, vectorize: Any) -> Any:
    class Texts(step, keras.Model):  # type: ignore[misc]
        pass

    x = inputs = keras.Input((), dtype="string")
    for layer in (vectorize, *blocks()):
        x = layer(x)
    return Texts(inputs, x)


def subclassed(step: Any, vectorize: Any) -> Any:
    class Texts(step, keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.vectorize, self.blocks = vectorize, blocks()

        def call(self, texts: Any) -> Any:
            x = self.vectorize(texts)
            for block in self.blocks:
                x = block(x)
            return x

    return Texts()


def of_ids() -> Any:
    return keras.Sequential([keras.Input((LENGTH,), dtype="int64"), *blocks()])


def compiled(model: Any) -> Any:
    keras.utils.set_random_seed(0)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model


def data(count: int = 1) -> Any:
    return tf.data.Dataset.from_tensor_slices((TEXTS, CLASSES)).batch(BATCH).repeat(count)


SPECS = (tf.TensorSpec((BATCH,), tf.string), tf.TensorSpec((BATCH,), tf.int64))


@pytest.mark.parametrize("step", [KerasStep, OwnStep, OwnLoss])
@pytest.mark.parametrize(
    ("make", "vectorize"),
    [(functional, split_by_layer), (subclassed, split_by_layer), (subclassed, split_by_hand)],
)
def test_activations_are_those_of_texts_that_are_split_before(step: Any, make: Any, vectorize: Any) -> None:
    before = tf_memsaver.estimate(
        compiled(of_ids()), data=(np.ones((BATCH, LENGTH), "int64"), CLASSES)
    ).activation_bytes
    found = tf_memsaver.capture_graph(compiled(make(step, vectorize())), data=data())
    assert found.data_shapes == ((BATCH, LENGTH),)
    assert tf_memsaver.Estimate.from_graph(found).activation_bytes == pytest.approx(before, rel=0.05)


@pytest.mark.parametrize("step", [KerasStep, OwnStep])
def test_a_length_that_a_layer_says_needs_no_batch(step: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = compiled(functional(step, split_by_layer(LENGTH)))
    assert tf_memsaver.estimate(model, data=SPECS).activation_bytes > 4 * BATCH * LENGTH * 64 * 4
    assert not caplog.records


def test_what_cannot_be_counted_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = compiled(subclassed(OwnStep, split_by_layer()))
    tf_memsaver.estimate(model, data=SPECS)
    assert "not known before the step runs" in caplog.text and "embedding" in caplog.text and "data=" in caplog.text


class OfSomeRows(layers.Layer):
    """Passes on to a layer, in a branch, as many rows as the data says."""

    def build(self, shape: Any) -> None:
        self.dense = layers.Dense(shape[-1], "tanh")
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        def some() -> Any:
            places = tf.where(tf.reduce_sum(x, -1) > 0.0)
            return tf.tensor_scatter_nd_add(x, places, self.dense(tf.gather_nd(x, places)))

        return tf.cond(tf.reduce_sum(x) > -1e9, some, lambda: x)


def test_what_cannot_be_counted_in_a_branch_is_told(caplog: pytest.LogCaptureFixture) -> None:
    x = inputs = keras.Input((8,))
    x = OfSomeRows(name="some_rows")(layers.Dense(8)(x))
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile("sgd", "mse", jit_compile=False)
    tf_memsaver.trace(model, data=(np.zeros((4, 8), np.float32), np.zeros((4, 1), np.float32)), granularity="op")
    assert "/cond' are not known before the step runs" in caplog.text and "measure" in caplog.text


@pytest.mark.parametrize("first", [[], [layers.Masking()]], ids=["all", "masked"])
def test_all_sizes_of_recurrent_layers_with_dropout_are_known(first: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A loop's condition has arguments of unknown shape, which it does not read: nothing of that is an activation."""
    recurrent = layers.LSTM(8, return_sequences=True, dropout=0.2)
    model = keras.Sequential([keras.Input((6, 8)), *first, layers.Bidirectional(recurrent), recurrent, layers.Dense(1)])
    model.compile("sgd", "mse")
    tf_memsaver.trace(model, batch_size=4, granularity="layer")
    assert not caplog.records


def test_a_step_in_which_sizes_were_worked_out_wrong_is_planned_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(*_: Any) -> None:
        raise ValueError("a shape that cannot be")

    monkeypatch.setattr(Sizes, "note", wrong)
    model = compiled(functional(KerasStep, split_by_layer(LENGTH)))
    graph = tf_memsaver.trace(model, data=data(), granularity="op").graph
    assert (
        graph.ops
        and "sizes in its loops and branches are not known (ValueError: a shape that cannot be), so" in caplog.text
    )


def test_a_plan_has_the_shapes_that_it_was_made_with(tmp_path: Path) -> None:
    plan = tf_memsaver.search_plan(compiled(subclassed(OwnStep, split_by_layer())), data=data(), strategy="min_peak")
    assert plan.recomputed
    plan.save(tmp_path / "plan.json")
    other = compiled(subclassed(OwnStep, split_by_layer()))
    # Certified without a batch, as in a process that loads the model.
    applied = tf_memsaver.apply_plan(other, Plan.load(tmp_path / "plan.json"), data=SPECS)
    assert applied.memsaver_plan == plan


def test_training_keeps_its_bits() -> None:
    losses = []
    for optimize in (False, True):
        model = compiled(subclassed(OwnStep, split_by_layer()))
        trained = tf_memsaver.optimize(model, data=data(), strategy="recompute_all") if optimize else model
        losses.append(trained.fit(data(3), epochs=2, shuffle=False, verbose=0).history["loss"])
    assert losses[0] == losses[1]


def test_a_batch_is_read_only_where_shapes_depend_on_it() -> None:
    read = []

    def noted() -> Any:
        read.append(1)
        yield np.array(TEXTS), CLASSES

    def given() -> Any:
        return tf.data.Dataset.from_generator(noted, output_signature=SPECS)

    tf_memsaver.estimate(compiled(functional(KerasStep, split_by_layer(LENGTH))), data=given())
    assert not read
    tf_memsaver.estimate(compiled(functional(KerasStep, split_by_layer())), data=given())
    assert len(read) == 1
