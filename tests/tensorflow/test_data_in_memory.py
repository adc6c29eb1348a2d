"""What training data holds in the CPU's memory, which is the same that a step takes its tensors from."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tf_memsaver.api.asked import bytes_of_others, request_of
from tf_memsaver.check.watch import StepWatch
from tf_memsaver.compat.counting import count_memory, counts_all
from tf_memsaver.compat.datasets import Held, held_by
from tf_memsaver.cost.device import CPU, CPU_BFC, GPU
from tf_memsaver.ir.graph import MemoryKind
from tf_memsaver.ir.scaling import Scaling
from tf_memsaver.program.data import data_of
from tf_memsaver.program.told import Told, told_of
from tools.shared.processes import in_own_process

MIB = 1 << 20
TUNED = tf.data.AUTOTUNE
ROW, COUNT = 64, 10
X, Y = np.zeros((COUNT, ROW // 4), np.float32), np.arange(COUNT)
SLICED = ((COUNT * ROW, 1), (COUNT * 8, 1))


class Loader:
    """Batches of another library."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(X, Y)])


def sliced() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y))


def generated(x: Any = X, y: Any = Y) -> tf.data.Dataset:
    specs = tf.TensorSpec(x.shape[1:]), tf.TensorSpec((), tf.int64)
    return tf.data.Dataset.from_generator(lambda: iter(zip(x, y, strict=True)), output_signature=specs)


def of_known_length(rows: tf.data.Dataset) -> tf.data.Dataset:
    return rows.apply(tf.data.experimental.assert_cardinality(128))


def double(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return x * 2.0, y


@pytest.mark.parametrize(
    ("made", "buffers", "batches"),
    [
        (lambda: sliced().batch(4), SLICED, 1),
        (lambda: sliced().batch(4).prefetch(3), SLICED, 3),
        (lambda: sliced().batch(4).map(double, TUNED).prefetch(TUNED), SLICED, 2),
        (lambda: sliced().prefetch(100).batch(4), SLICED, 1),
        (lambda: sliced().map(double).cache().batch(4), (*SLICED, (ROW, COUNT), (8, COUNT)), 1),
        (lambda: sliced().map(double).cache("file").batch(4), SLICED, 1),
        (lambda: sliced().map(double).shuffle(6).batch(4), (*SLICED, (ROW, 6), (8, 6)), 1),
        (lambda: sliced().map(double).shuffle(99).batch(4), (*SLICED, (ROW, COUNT), (8, COUNT)), 1),
        (lambda: sliced().repeat().map(double).shuffle(99).batch(4), (*SLICED, (ROW, 99), (8, 99)), 1),
        # Slices are views of what they are taken from, unless they begin between two multiples of 64 bytes.
        (lambda: sliced().shuffle(6).repeat().prefetch(9).batch(4), (*SLICED, (8, 6)), 1),
        (lambda: sliced().batch(4).cache(), (*SLICED, (4 * ROW, 3), (4 * 8, 3)), 1),
        (lambda: tf.data.Dataset.from_tensors((X, Y)).repeat(), SLICED, 1),
        (lambda: tf.data.Dataset.from_tensor_slices((["a"], [1])).batch(1), ((0, 1), (4, 1)), 1),
        # Elements that are datasets.
        (lambda: sliced().window(2).shuffle(3).flat_map(lambda x, y: x).batch(4), SLICED, 1),
    ],
)
def test_what_the_steps_of_a_dataset_hold(
    made: Callable[[], tf.data.Dataset], buffers: tuple[tuple[int, int], ...], batches: int
) -> None:
    assert held_by(made()) == Held(buffers, batches)


def test_what_is_kept_of_data_of_unknown_length_is_named() -> None:
    # It begins with the number of the generator.
    assert held_by(generated().shuffle(99).cache().batch(4).prefetch(2)) == Held(((4, 1),), 2, ("cache", "shuffle"))
    assert not held_by(of_known_length(generated()).shuffle(99).cache().batch(4)).not_counted
    assert not held_by(tf.data.TextLineDataset(["a"]).shuffle(99).batch(4)).not_counted


@pytest.mark.parametrize("has_gpu", [False, True])
def test_what_is_not_counted_is_said_once(
    has_gpu: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tf_memsaver.program.told.has_gpu", lambda: has_gpu)
    model = keras.Sequential([keras.Input(X.shape[1:]), layers.Dense(1)])
    for _ in range(2):
        told_of(model, {"data": generated().cache().batch(4), "batch_size": None})
    said = [record.getMessage() for record in caplog.records if "assert_cardinality" in record.getMessage()]
    assert len(said) == (0 if has_gpu else 1) and all("what cache() keeps" in each for each in said)


def test_batches_of_unknown_sizes_count_for_none() -> None:
    data = data_of((tf.TensorSpec((4, None)), tf.TensorSpec((4,))))
    object.__setattr__(data, "held", Held(batches=3))
    assert Told(None, 4, data).data_bytes(CPU_BFC) == 3 * 64


def test_keras_copies_arrays_as_a_whole_and_has_batches_ready() -> None:
    assert data_of((X.astype(np.float64), Y), batch_size=4).held == Held(SLICED, 3)


def test_a_batch_tells_of_nothing_else() -> None:
    assert data_of((X, Y)).held == Held()


def test_other_loaders_have_a_batch_ready() -> None:
    assert data_of(Loader()).held == Held(batches=1)


@pytest.mark.parametrize(
    ("held", "on_cpu", "on_counting_cpu"),
    [
        # Two batches of 40 KiB, and labels.
        (Held((), 2), 0, 2 * (40 * 1024 + 64)),
        # What is largest has a region of its own, whose size is a power of two; small tensors are not counted.
        (Held(((48 * MIB, 1), (100, 1))), 64 * MIB, 64 * MIB + 128),
        (Held(((600 * MIB, 1),)), 600 * MIB, 600 * MIB),
        # Elements that are kept are many.
        (Held(((MIB, 3), (1024, 3))), 3 * MIB, 3 * MIB + 3 * 1024),
    ],
)
def test_what_counts_on_a_device(held: Held, on_cpu: int, on_counting_cpu: int) -> None:
    data = data_of((np.zeros((10, 1024), np.float32), np.zeros(10, np.int32)))
    object.__setattr__(data, "held", held)
    told = Told(None, 10, data)
    assert [told.data_bytes(device) for device in (CPU, CPU_BFC, GPU)] == [on_cpu, on_counting_cpu, 0]


def convolutional() -> keras.Model:
    parts: list[Any] = [keras.Input((64, 64, 3))]
    for _ in range(4):
        parts += [layers.Conv2D(16, 3, padding="same"), layers.Activation("swish")]
    model = keras.Sequential([*parts, layers.GlobalAveragePooling2D(), layers.Dense(5)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def warned_of_others(beside: int, optimizer: str) -> list[str]:
    """Return what is said of others for a budget, and then without one, with so many MiB in a tensor beside."""
    held, said = tf.zeros(beside * MIB // 4), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("absl").addHandler(handler)
    for options in ({"budget": "80%"}, {}):
        small = convolutional()
        wide = keras.Model(small.inputs, layers.Dense(5)(layers.Dense(256 * 1024)(small.layers[-2].output)))
        wide.compile(optimizer, small.loss)
        tf_memsaver.optimize(wide, batch_size=32, **options)
    del held
    return [each for each in said if "does not cover these" in each]


@pytest.mark.parametrize(
    ("beside", "optimizer", "times"),
    [
        (60, "sgd", 1),
        (0, "sgd", 0),
        # It will have 44 MiB of slots, which are not there yet.
        (60, "adam", 1),
    ],
)
def test_what_lies_beside_a_step_is_told_where_there_is_a_budget(beside: int, optimizer: str, times: int) -> None:
    found = in_own_process(warned_of_others, beside, optimizer)
    assert len(found) == times and all("this process holds 6" in each for each in found)


IMAGES, LABELS = np.zeros((256, 64, 64, 3), np.float32), np.zeros(256, np.int64)


def test_a_prediction_is_more_by_what_the_data_holds() -> None:
    model = convolutional()
    alone = tf_memsaver.trace(model, data=(IMAGES[:32], LABELS[:32]))
    beside = tf_memsaver.trace(model, data=tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(32))
    data = beside.graph.bytes_of(MemoryKind.DATA)
    assert alone.graph.bytes_of(MemoryKind.DATA) == 0 and data >= IMAGES.nbytes + IMAGES[:32].nbytes
    assert beside.estimate().data_bytes == data == beside.estimate().peak_bytes - alone.estimate().peak_bytes
    for limits in ({}, {"strategy": "min_peak"}):
        one, other = alone.plan(**limits), beside.plan(**limits)
        assert one.segments == other.segments
        assert other.peak_bytes - one.peak_bytes == other.highest_peak_bytes - one.highest_peak_bytes == data
        assert other.plain_peak_bytes - one.plain_peak_bytes == data
    # What a budget leaves for the step is what the data does not take.
    budget = round(0.8 * alone.plan().plain_peak_bytes)
    assert alone.plan(budget=budget).segments == beside.plan(budget=budget + data).segments
    with pytest.raises(tf_memsaver.InfeasibleBudgetError) as least:
        beside.plan(budget=data)
    assert least.value.least_bytes > data


def test_at_other_batch_sizes_the_dataset_stays_and_the_ready_batches_grow() -> None:
    model, data = convolutional(), tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(16)
    small, large = (tf_memsaver.capture_graph(model, data=data, batch_size=size) for size in (32, 64))
    found = [graph.bytes_of(MemoryKind.DATA) for graph in (small, Scaling(small, large).at(96), large)]
    assert found[2] - found[0] == IMAGES[:32].nbytes + 32 * 8 * counts_all()
    assert found[1] - found[2] == found[2] - found[0]


def told_and_found(kind: str) -> tuple[int, int]:
    """Return the bytes that data is told to hold, and those that lie there before most steps of the last epoch."""
    count_memory()
    x, y = IMAGES[:128] + 1, LABELS[:128]
    if kind == "arrays":
        given, fitted = {"data": (x, y), "batch_size": 16}, {"x": x, "y": y, "batch_size": 16}
    else:
        rows = of_known_length(generated(x, y)) if kind == "generated" else tf.data.Dataset.from_tensor_slices((x, y))
        batches = rows.batch(16)
        batches = {"shuffled": batches.shuffle(4), "cached": batches.cache().prefetch(2)}.get(kind, batches)
        given, fitted = {"data": batches}, {"x": batches, "shuffle": False}
    model, watch = convolutional(), StepWatch()
    told = tf_memsaver.estimate(model, **given).data_bytes
    model.fit(**fitted, epochs=2, verbose=0, callbacks=[watch])
    return told, int(statistics.median(watch.steps.lives[-7:]))


@pytest.mark.parametrize("kind", ["sliced", "shuffled", "cached", "arrays", "generated"])
def test_what_fit_finds_in_memory_before_a_step(kind: str) -> None:
    told, found = in_own_process(told_and_found, kind)
    least, batch = 0 if kind == "generated" else IMAGES[:128].nbytes, IMAGES[:16].nbytes
    assert told >= least + batch and found >= least
    # One or two batches more or fewer may be ready.
    assert told - 2 * batch <= found <= told + batch


def test_a_measurement_in_a_process_of_its_own_counts_the_data() -> None:
    model = convolutional()
    data = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(16)
    alone = tf_memsaver.measure(model, data=(IMAGES[:16], LABELS[:16]), steps=2)
    beside = tf_memsaver.measure(model, data=data, steps=2)
    assert beside.data_bytes == tf_memsaver.estimate(model, data=data).data_bytes > alone.data_bytes == 0
    assert beside.peak_bytes - alone.peak_bytes == pytest.approx(beside.data_bytes, rel=0.1)
    assert beside.activation_bytes == pytest.approx(alone.activation_bytes, rel=0.1)
    assert "of data in memory" in repr(beside) and "data in memory" not in repr(alone)


def test_what_is_left_for_a_step_has_room_for_data_that_is_there_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tf_memsaver.api.asked.bytes_left", lambda: 1000 * MIB)
    model, data = convolutional(), tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(16)
    given = [request_of({"budget": "auto"}, model, data=each).budget_bytes or 0 for each in (None, data)]
    assert given[1] - given[0] == IMAGES.nbytes + LABELS.nbytes


def test_others_in_a_process_are_less_by_the_data_that_counts_for_the_step() -> None:
    model = convolutional()
    assert bytes_of_others(model) - bytes_of_others(model, 5) == 5
