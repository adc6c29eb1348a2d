"""What ``data=`` may be, and what is learnt from it without disturbing training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tf_memsaver.compat import datasets
from tf_memsaver.compat.datasets import flat_shapes
from tf_memsaver.errors import InvalidRequestError
from tf_memsaver.program.batch import batch_specs
from tf_memsaver.program.data import Batch, data_of
from tf_memsaver.program.signature import trained_on

X = np.random.default_rng(0).standard_normal((10, 8))
Y = np.arange(10) % 3


class Batches(keras.utils.PyDataset):
    """Two batches of four, with noise from NumPy's generator."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, place: int) -> Any:
        rows = slice(4 * place, 4 * place + 4)
        return X[rows] + np.random.rand(), Y[rows]


class Counted(keras.utils.PyDataset):
    """Batches that say their number as Keras 3 asks for it; None is no end of them."""

    def __init__(self, count: int | None) -> None:
        super().__init__()
        self.count = count

    @property
    def num_batches(self) -> int | None:
        return self.count

    def __getitem__(self, place: int) -> Any:
        return X[:4], Y[:4]


class Loader:
    """What can be iterated again and again, such as a loader of another library."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(X[:4], Y[:4])])


def dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X.astype(np.float32), Y)).shuffle(10).batch(4)


@pytest.mark.parametrize(
    "given",
    [
        dataset(),
        dataset().map(lambda x, y: (x * 2, y)).prefetch(2),
        Batches(),
        Counted(2),
        Counted(None),
        Loader(),
        (X[:4], Y[:4]),
        [tf.constant(X[:4], tf.float32), Y[:4]],
        (tf.TensorSpec((4, 8)), tf.TensorSpec((4,), tf.int64)),
        (keras.KerasTensor((4, 8)), keras.KerasTensor((4,), "int64")),
    ],
    ids=lambda given: type(given).__name__,
)
def test_a_batch_of_any_data(given: Any) -> None:
    found = data_of(given)
    assert found.batch_size == 4
    assert found.specs == Batch(tf.TensorSpec((None, 8), tf.float32), tf.TensorSpec((None,), tf.int64))


def test_parts_of_other_sizes_stay_as_they_are() -> None:
    graph = {"nodes": tf.zeros((30, 5)), "edges": tf.zeros((70, 2), tf.int32), "scale": tf.constant(1.0)}
    found = data_of((graph, tf.zeros((6, 1)), tf.zeros((6,))))
    assert found.batch_size == 6
    assert {name: tuple(spec.shape) for name, spec in found.specs.x.items()} == {
        "nodes": (30, 5),
        "edges": (70, 2),
        "scale": (),
    }
    assert found.specs.y.shape[0] is None and found.specs.sample_weight.shape.rank == 1


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (iter(dataset()), r"data is an iterator.*data=next\(iterator\)"),
        ((each for each in [X]), "data is an iterator"),
        ("train.csv", r"data must be a tf\.data\.Dataset.*got 'train\.csv'"),
        (3, "data must be"),
        ({}, "data must be"),
        (["a.csv", "b.csv"], r"data must be .*got \['a\.csv'"),
        (([[0.0, 1.0]], [1]), "data must be"),
        ((X, True), r"data has True \(bool\) beside its tensors.*step=tf\.function"),
        (dataset().take(0), "data is empty"),
        (dataset().filter(lambda x, y: False), "data is empty"),
        ((X, Y, Y, Y), "has 4 parts"),
        (tf.data.Dataset.from_tensors(tf.sparse.eye(3)), "ragged or sparse"),
        ((tf.ragged.constant([[1], [2, 3]]), Y[:2]), "ragged or sparse"),
    ],
)
def test_what_data_may_not_be(given: Any, sentence: str) -> None:
    if isinstance(given, tf.data.Dataset) and "is empty" in sentence:
        given = given.map(lambda x, y: (tf.numpy_function(lambda each: each, [x], tf.float32), y))
    with pytest.raises(InvalidRequestError, match=sentence):
        data_of(given)


def test_shapes_behind_the_steps_of_a_dataset() -> None:
    batches = dataset()
    doubled = batches.map(lambda x, y: (tf.concat([x, x], 0), {"one": tf.one_hot(y, 3)}))
    split = keras.layers.TextVectorization(vocabulary=["a", "b"], output_sequence_length=5)
    texts = tf.data.Dataset.from_tensor_slices(["a b", "b"]).batch(2).map(split)
    lengths = tf.data.Dataset.range(6).map(lambda n: tf.ones((n,)))
    assert flat_shapes(batches.prefetch(1).cache().repeat(2)) == [(4, 8), (4,)]
    assert flat_shapes(doubled) == [(8, 8), (4, 3)]
    assert flat_shapes(tf.data.Dataset.zip((batches, texts))) == [(4, 8), (4,), (2, 5)]
    assert [shape.as_list() for shape in flat_shapes(lengths.padded_batch(3))] == [[3, None]]
    assert flat_shapes(lengths.padded_batch(3, padded_shapes=(7,))) == [(3, 7)]


def of_open_lengths() -> Any:
    lengths = tf.data.Dataset.range(1, 9).map(lambda n: tf.ones((n,)) * tf.cast(n, tf.float32)).cache()
    return lengths.shuffle(4).shuffle(8).padded_batch(2).prefetch(1)


def of_looked_up_words() -> Any:
    words = keras.layers.TextVectorization(vocabulary=["a", "b", "c"], ragged=True)
    texts = tf.data.Dataset.from_tensor_slices(["a b", "b", "c a b", "a"]).shuffle(4).batch(2)
    return texts.map(lambda text: words(text).to_tensor()).repeat(2)


def of_a_generator() -> Any:
    spec = tf.TensorSpec((None,), tf.float32)
    numbers = tf.data.Dataset.from_generator(lambda: (np.full(n, n, "f4") for n in range(1, 7)), output_signature=spec)
    return numbers.shuffle(4).padded_batch(2)


@pytest.mark.parametrize("make", [dataset, of_open_lengths, of_looked_up_words, of_a_generator])
def test_a_dataset_comes_in_the_same_order_as_if_it_had_not_been_looked_at(
    make: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    orders = []
    for look in (False, True):
        keras.utils.set_random_seed(0)
        given = make()
        if look:
            found = data_of(given)
            assert all(leaf.shape[1:].is_fully_defined() for leaf in found.specs.leaves)
            # What measure and verify run on.
            assert len(found.first(3)) == 3
        orders.append([[tf.nest.flatten(batch)[-1].numpy().tolist() for batch in given] for _ in range(3)])
    assert orders[0] == orders[1] and orders[0][0] != orders[0][1]
    assert not caplog.records


def test_reading_an_element_of_a_shuffled_dataset_that_cannot_be_copied_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "unshuffled", lambda dataset: None)
    assert data_of(of_open_lengths()).batch_size == 2
    assert "training will see the order that would have come one epoch later" in caplog.text


def test_random_numbers_that_data_draws_come_again() -> None:
    random.seed(3)
    np.random.seed(3)
    before = random.getstate(), np.random.get_state(legacy=False)
    data_of(Batches())
    after = random.getstate(), np.random.get_state(legacy=False)
    assert before[0] == after[0] and str(before[1]) == str(after[1])


def test_running_steps_leaves_order_and_random_numbers_as_they_were() -> None:
    model, orders = embedding(), []
    for run in (False, True):
        keras.utils.set_random_seed(0)
        given = dataset().map(lambda x, y: (x, tf.stack([tf.cast(y, tf.float32)] * 3, -1)))
        if run:
            optimized = tf_memsaver.optimize(model, data=given, budget="100%", calibrate=True)
            assert tf_memsaver.verify(model, optimized, data=given, steps=2).identical
            tf_memsaver.measure(optimized, data=given, steps=1, isolate=False)
        orders.append(([batch[1].numpy().tolist() for batch in given], random.random(), np.random.rand()))
    assert orders[0] == orders[1]


@pytest.mark.parametrize("wrap", [np.asarray, tf.constant])
def test_arrays_that_are_longer_than_a_batch_are_batched(wrap: Any, caplog: pytest.LogCaptureFixture) -> None:
    x, y = np.arange(8 * 5000, dtype=np.float32).reshape(5000, 8), np.ones((5000, 3), np.float32)
    found = data_of(({"x": wrap(x), "fixed": wrap(x[:7])}, wrap(y), wrap(y[:, 0])), batch_size=32)
    assert found.batch_size == 32 and found.specs.x["fixed"].shape == (7, 8)
    assert [leaf.shape[0] for leaf in found.specs.leaves if leaf.shape != (7, 8)] == [None] * 3
    first = found.first(200)
    assert np.array_equal(first[1].x["x"], x[32:64]) and np.array_equal(first[156].x["x"], first[0].x["x"])
    model = embedding()
    optimized = tf_memsaver.optimize(model, data=(x, y), batch_size=32, strategy="recompute_all")
    assert optimized.memsaver_plan.batch_size == 32
    assert tf_memsaver.verify(model, optimized, data=(x / 1e5, y), batch_size=32, steps=2).identical
    assert "count as one batch" not in caplog.text
    assert tf_memsaver.estimate(model, data=(x, y)).batch_size == 5000
    assert "arrays of 5000 samples, which count as one batch" in caplog.text
    caplog.clear()
    assert tf_memsaver.estimate(model, data=(x, y), batch_size=5000).batch_size == 5000
    tf_memsaver.estimate(model, data=(tf.TensorSpec((5000, 8)), tf.TensorSpec((5000, 3))))
    assert "count as one batch" not in caplog.text


def embedding() -> Any:
    """A network whose targets are no outputs: three numbers for a sample, and a weight for each."""
    layer = [keras.Input((8,))]
    layer += [layers.Dense(64, "gelu", name=f"d{number}") for number in range(6)]
    model = keras.Sequential([*layer, layers.Dense(2)])

    def distance(y: Any, found: Any) -> Any:
        return tf.reduce_sum(y * tf.constant([1.0, 2.0, 3.0]), axis=-1) * tf.reduce_sum(found**2, axis=-1)

    model.compile("adam", distance)
    return model


def test_targets_have_the_shapes_of_the_data(caplog: pytest.LogCaptureFixture) -> None:
    model, given = embedding(), (X[:4], np.ones((4, 3)), np.ones((4,)))
    graph = tf_memsaver.capture_graph(model, data=given)
    assert graph.batch_size == 4 and "stands in" not in caplog.text
    optimized = tf_memsaver.optimize(model, data=given, strategy="recompute_all")
    assert tf_memsaver.verify(model, optimized, data=given).identical
    assert trained_on(optimized) == trained_on(model)
    # Told once, it is known.
    assert [tuple(leaf.shape) for leaf in batch_specs(model, 5).leaves] == [(5, 8), (5, 3), (5,)]
    assert tf_memsaver.search_plan(model, batch_size=5).batch_size == 5


def test_batches_of_another_size_than_the_datas_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = keras.Sequential([keras.Input(X.shape[1:]), layers.Flatten(), layers.Dense(8), layers.Dense(1)])
    model.compile("sgd", "mse")
    tf_memsaver.optimize(model, data=dataset(), batch_size=4)
    assert "batch_size" not in caplog.text
    tf_memsaver.optimize(model, data=dataset(), batch_size=2)
    assert "data has batches of 4, and batch_size=2 was asked for" in caplog.text


def test_data_without_targets_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8), layers.Dense(1)])
    model.compile("sgd", "mse")
    tf_memsaver.search_plan(model, data=np.zeros((4, 8), np.float32))
    assert "cannot be computed on the targets of data (data has no targets: give data=(x, y))" in caplog.text


def test_made_up_targets_ask_for_data(caplog: pytest.LogCaptureFixture) -> None:
    tf_memsaver.capture_graph(embedding(), batch_size=4)
    assert "The mean square of the outputs replaces it" in caplog.text and "Give data=" in caplog.text


class Blocks(keras.Model):
    """A network with a ``call`` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [keras.Sequential([layers.Dense(64, "gelu"), layers.Dense(8)]) for _ in range(4)]
        self.out = layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        x = inputs["features"]
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


def test_a_model_with_a_call_of_its_own_is_built_by_its_data() -> None:
    keras.utils.set_random_seed(0)
    model = Blocks()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    given = dataset().map(lambda x, y: ({"features": x}, y))
    optimized = tf_memsaver.optimize(model, data=given, strategy="recompute_all")
    assert optimized.memsaver_plan.batch_size == 4 and optimized.memsaver_plan.recomputed
    assert tf_memsaver.verify(model, optimized, data=given).identical


def test_an_open_length_is_that_of_the_first_element() -> None:
    inputs = keras.Input((None,), dtype="int32")
    hidden = layers.Embedding(20, 16)(inputs)
    model = keras.Model(inputs, layers.Dense(20)(layers.LSTM(16, return_sequences=True)(hidden)))
    graph = tf_memsaver.capture_graph(model, data=np.ones((4, 12), np.int32))
    assert any(value.nbytes == 4 * 12 * 16 * 4 for value in graph.values)


@pytest.mark.parametrize("count", [40, 20])
def test_a_plan_is_for_the_longest_of_the_first_batches(count: int, caplog: pytest.LogCaptureFixture) -> None:
    """A budget that was kept for the first batch was exceeded almost three times by later ones."""
    lengths = [5, 9, 30, 7, *[8] * (count - 4)]
    rows = [np.full(length, place, np.float32) for place, length in enumerate(lengths) for _ in range(4)]
    given = tf.data.Dataset.from_generator(lambda: iter(rows), output_signature=tf.TensorSpec((None,), tf.float32))
    found = data_of(given.padded_batch(4))
    assert [spec.shape.as_list() for spec in found.specs.leaves] == [[None, 30]] and found.batch_size == 4
    # What is measured has it, too.
    assert [batch.x[0, 0].numpy() for batch in found.first(3)] == [2, 0, 1]
    # Of the shorter data all was seen.
    assert ("largest of the first 32: (4, 30)" in caplog.text) is (count == 40)


def test_data_that_the_model_does_not_take() -> None:
    with pytest.raises(InvalidRequestError, match=r"data: model '.*' takes \(None, 8\), but a batch has \(None, 9\)"):
        tf_memsaver.estimate(embedding(), data=np.zeros((4, 9)))
    with pytest.raises(InvalidRequestError, match=r"Give data= .*, or batch_size="):
        tf_memsaver.estimate(embedding())
    with pytest.raises(InvalidRequestError, match="data does not give the batch size"):
        tf_memsaver.estimate(embedding(), data=tf.TensorSpec((None, 8)))
    assert tf_memsaver.estimate(embedding(), data=tf.TensorSpec((None, 8)), batch_size=4).batch_size == 4


def test_a_task_prepares_its_data() -> None:
    class Task(keras.Sequential):
        """What KerasHub's tasks do in ``fit``: they make tensors of raw texts."""

        preprocessor = "there"

        def preprocess_samples(self, x: Any, y: Any = None, sample_weight: Any = None) -> Any:
            return keras.utils.pack_x_y_sample_weight(tf.stack([tf.strings.length(x)] * 8, axis=1), y, sample_weight)

    model = Task([keras.Input((8,)), layers.Dense(3)])
    tf_memsaver.estimate(model, data=(np.array(["a", "bc"]), Y[:2]))
    assert batch_specs(model, 2).x == tf.TensorSpec((2, 8), tf.int32)


def test_what_a_model_is_trained_on_is_saved_with_it(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((8,)), *(layers.Dense(8, "relu") for _ in range(4)), layers.Dense(3)])
    model.compile("sgd", "mse")
    optimized = tf_memsaver.optimize(model, data=(X[:4], np.zeros((4, 3)), np.ones((4, 1))), strategy="recompute_all")
    optimized.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert trained_on(loaded) == trained_on(model) is not None


def test_a_measurement_is_of_real_data() -> None:
    texts = keras.layers.TextVectorization(vocabulary=["a", "b"], output_sequence_length=256)
    parts = [keras.Input((), dtype="string"), texts, layers.Embedding(4, 256), layers.GlobalAveragePooling1D()]
    model = keras.Sequential([*parts, layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    given = tf.data.Dataset.from_tensor_slices((["a b", "b", "a", "b a"], [0, 1, 2, 0])).batch(4)
    found = tf_memsaver.measure(model, data=given, steps=1)
    assert found.batch_size == 4 and found.peak_bytes >= 4 * 256 * 256 * 4
