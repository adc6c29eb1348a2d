"""The traps of recomputation, each with what a naive ``tf.recompute_grad`` wrapper makes of it.

The numbers are those of the list of traps that the project keeps; every test shows the naive wrapper falling in (a
wrong number, an error, or no memory saved) and the optimized model training as the plain one, bit for bit.
"""

from __future__ import annotations

import gc
import subprocess
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tests.tensorflow.plans import labels, naive, optimized_between_cuts, optimized_by_hand, plan_of
from tf_memsaver.capture.model_step import capture_graph
from tf_memsaver.errors import InvalidRequestError, UnknownDimensionError, UnsupportedModelError
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tf_memsaver.program.layer_calls import list_layer_calls
from tools.shared.memory import peak_over_live
from tools.shared.models import small as models
from tools.shared.processes import run_code
from tools.shared.records import assert_identical, differing
from tools.shared.training import assert_trains_alike, batch_for, square_loss, train

AS_WRITTEN = ("as_written", "eager")
"""For segments cut by hand between ops that TensorFlow's graph optimizer fuses in the plain step and not in replays."""


def activation_peak(model: Any, x: Any, steps: int = 9) -> float:
    """Return the bytes that a gradient step in graph mode takes on top of what was live before it.

    It is the median of several steps, since the executor's threads race.
    """

    @tf.function
    def step(x: Any) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            loss = square_loss(model(x, training=True))
        return loss, tape.gradient(loss, [v.value for v in model.trainable_variables])

    for _ in range(2):
        step(x)[0].numpy()
    gc.collect()
    return float(np.median([peak_over_live(lambda: step(x)[0].numpy()) for _ in range(steps)]))


# 1: replays start at once, and nothing is saved ---------------------------------------------------------------------


def _early_heads(blocks: int, width: int) -> tuple[Any, list[tuple[str, str]]]:
    """Blocks whose first output goes straight into the loss, so that its gradient is there before all others."""
    x = inputs = keras.Input((width,))
    sides, spans = [], []
    for block in range(blocks):
        for number in range(4):
            x = layers.Dense(width, activation="tanh", use_bias=False, name=f"d{block}_{number}")(x)
        side, x = models.TwoHeads(width, name=f"heads{block}")(x)
        sides.append(side)
        spans.append((f"d{block}_0", f"heads{block}"))
    return keras.Model(inputs, layers.Add(name="sum")([*sides, layers.Dense(1, name="last")(x)])), spans


def test_trap_1_a_replay_waits_for_the_gradients_of_all_outputs() -> None:
    model, spans = _early_heads(blocks=8, width=64)
    x = tf.constant(np.random.default_rng(0).standard_normal((4096, 64)), tf.float32)
    plain = activation_peak(model, x)
    # Forty layers keep 1 MiB each; with a plan, eight inputs and one block of five. A naive replay of a block starts as
    # soon as the gradient of its side output is there, which is at once.
    assert plain > 35 * 2**20
    assert activation_peak(naive(model, *spans), x) > 0.75 * plain
    ours = activation_peak(optimized_by_hand(model, *spans), x)
    assert 0.2 * plain < ours < 0.55 * plain
    assert_trains_alike(model, optimized_by_hand(model, *spans), AS_WRITTEN)


# 2, 3: dropout, BatchNorm and other state ----------------------------------------------------------------------------


def test_trap_2_the_replay_draws_the_same_dropout_masks() -> None:
    model = models.dropout_chain()
    span = ("d0", "drop1")
    plain = train(model, steps=3)
    wrong = differing(plain, train(naive(model, span), steps=3))
    assert ("gradient", "d0/kernel", 0) in wrong and ("loss", 0) not in wrong
    assert_trains_alike(model, optimized_by_hand(model, span), steps=3)


def test_trap_3_batch_norm_statistics_and_seeds_are_updated_once() -> None:
    model = models.residual_net()
    span = ("norm0", "add1")
    wrong = differing(train(model, steps=1), train(naive(model, span), steps=1))
    assert ("variable", "norm0/moving_mean", 0) in wrong
    assert any(key[0] == "variable" and "seed" in key[1] for key in wrong)
    assert_trains_alike(model, optimized_by_hand(model, span), steps=3)


def test_trap_3_state_of_custom_layers_is_updated_once() -> None:
    x = inputs = keras.Input((5,))
    x = layers.Dense(5, name="d0")(x)
    x = models.Counter(name="count0")(x)
    x = models.Counter(name="count1")(layers.Dense(5, name="d1")(x))
    model = keras.Model(inputs, layers.Dense(2, name="head")(x))
    span = ("d0", "count1")
    wrong = differing(train(model, steps=1), train(naive(model, span), steps=1))
    assert ("variable", "count0/calls", 0) in wrong
    assert_trains_alike(model, optimized_by_hand(model, span), steps=3)


# 4: losses that layers add -------------------------------------------------------------------------------------------


def _with_losses() -> Any:
    x = inputs = keras.Input((5,))
    x = layers.Dense(5, activation="tanh", activity_regularizer="l2", kernel_regularizer="l2", name="d0")(x)
    x = models.AddsLoss(name="adds")(x)
    x = layers.Dense(5, activity_regularizer="l1", name="d1")(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.Dense(5, name="d2")(x)))


def test_trap_4_losses_added_inside_a_segment_keep_their_gradient() -> None:
    model = _with_losses()
    span = ("d0", "d2")
    plain = train(model, mode="eager", steps=1)
    wrong = differing(plain, train(naive(model, span), mode="eager", steps=1))
    assert ("gradient", "d0/kernel", 0) in wrong and ("gradient", "adds/gain", 0) in wrong
    optimized = optimized_by_hand(model, span)
    assert_trains_alike(model, optimized, steps=3)
    x = batch_for(model)
    model(x, training=True)
    values = [float(loss) for loss in model.losses]
    optimized(x, training=True)
    assert len(values) == 4 and [float(loss) for loss in optimized.losses] == values


# 5 to 9: what may cross the boundary of a segment --------------------------------------------------------------------


def test_trap_5_every_float_tensor_that_enters_gets_its_gradient() -> None:
    model = models.unet()
    span = ("grow1", "up0")
    wrong = differing(train(model, steps=1), train(naive(model, span, capture_skips=True), steps=1))
    assert ("gradient", "down0/kernel", 0) in wrong
    assert_trains_alike(model, optimized_by_hand(model, span))


def test_trap_5_several_inputs_and_outputs_of_a_segment() -> None:
    model = models.unet()
    assert_trains_alike(model, optimized_by_hand(model, ("down0", "shrink1"), ("middle", "up0")))


def _with_tensor_keyword() -> Any:
    inputs = keras.Input((5,))
    scale = layers.Dense(5, name="scale")(inputs)
    x = layers.Dense(5, name="d0")(inputs)
    x = models.Scale(name="scaled")(x, scale=scale)
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.Dense(5, name="d1")(x)))


def test_trap_6_tensors_passed_by_keyword() -> None:
    layer, x, scale = models.Scale(), tf.ones((2, 3)), tf.fill((2, 3), 2.0)
    with tf.GradientTape() as tape:
        tape.watch(scale)
        y = tf.recompute_grad(layer)(x, scale=scale)
    assert tape.gradient(y, scale) is None
    with pytest.raises(ValueError, match="keyword"):
        tf.function(lambda x, s: tf.recompute_grad(layer)(x, scale=s))(x, scale)
    model = _with_tensor_keyword()
    assert_trains_alike(model, optimized_by_hand(model, ("d0", "scaled")))
    assert_trains_alike(model, optimized_by_hand(model, ("scaled", "scaled")), AS_WRITTEN)


def _with_bool_tensor() -> Any:
    inputs = keras.Input((5,))
    x = layers.Dense(5, name="d0")(inputs)
    positive = keras.ops.greater(x, 0.0)
    x = keras.ops.where(positive, layers.Dense(5, name="d1")(x), x)
    x = layers.Dense(5, activation="tanh", name="d2")(x)
    y = keras.ops.where(positive, x, 2.0 * x)
    return keras.Model(inputs, layers.Dense(2, name="head")(y))


def test_trap_7_bool_tensors_enter_and_leave() -> None:
    model = _with_bool_tensor()
    names = labels(model)
    assert names[:5] == ["d0", "greater", "d1", "where", "d2"], names
    entering, leaving = ("where", "d2"), ("d0", "greater")
    with pytest.raises((TypeError, ValueError)):
        train(naive(model, entering), steps=1)
    for span in (entering, leaving):
        assert_trains_alike(model, optimized_by_hand(model, span))


def test_trap_7_integer_tensors_enter() -> None:
    inputs, order = keras.Input((5,)), keras.Input((5,), dtype="int32", name="order")
    x = layers.Dense(5, name="d0")(inputs)
    x = keras.ops.take_along_axis(x, order, axis=1)
    x = layers.Dense(5, activation="tanh", name="d1")(x)
    model = keras.Model([inputs, order], layers.Dense(2, name="head")(x))
    assert_trains_alike(model, optimized_by_hand(model, ("d0", "d1")))


def test_trap_8_arguments_that_are_no_tensors_stay_what_they_are() -> None:
    layer = models.Switch()
    with pytest.raises((AssertionError, TypeError, ValueError)):
        tf.function(lambda x: tf.recompute_grad(layer.call)(x, "tanh", True))(tf.ones((2, 3)))
    x = inputs = keras.Input((5,))
    x = layers.Dense(5, name="d0")(x)
    x = models.Switch(name="switch")(x, kind="tanh", negate=True, extra=None, power=3)
    x = layers.Dense(5, name="d1")(x)
    model = keras.Model(inputs, layers.Dense(2, name="head")(x))
    assert_trains_alike(model, optimized_by_hand(model, ("d0", "d1")))


def _with_sparse() -> Any:
    x = inputs = keras.Input((5,))
    x = layers.Dense(5, name="d0")(x)
    x = models.ToSparse(name="to_sparse")(x)
    x = models.FromSparse(name="from_sparse")(x)
    x = layers.Dense(5, activation="tanh", name="d1")(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.Dense(5, name="d2")(x)))


def test_trap_9_sparse_tensors_are_kept_out_of_segments() -> None:
    model = _with_sparse()
    with pytest.raises((TypeError, ValueError, AttributeError)):
        train(naive(model, ("from_sparse", "d1")), steps=1)
    graph = capture_graph(model, batch_size=4)
    pinned = {unit.label for unit in graph.units if unit.pinned}
    assert pinned == {"to_sparse", "from_sparse", "head"}
    assert_trains_alike(model, optimized_by_hand(model, ("d1", "d2")))
    best = tf_memsaver.optimize(model, batch_size=4, strategy="min_peak")
    assert not pinned & set(best.memsaver_plan.recomputed)
    assert_trains_alike(model, best)


@pytest.mark.parametrize("span", [("from_sparse", "d1"), ("d0", "to_sparse")])
def test_trap_9_a_segment_with_a_sparse_tensor_at_its_boundary_is_refused(span: tuple[str, str]) -> None:
    model = _with_sparse()
    with pytest.raises(UnsupportedModelError, match="sparse"):
        train(optimized_by_hand(model, span), steps=1)


def test_trap_9_sparse_and_ragged_inputs_are_refused() -> None:
    inputs = keras.Input((5,), sparse=True)
    model = keras.Model(inputs, layers.Dense(2)(inputs))
    with pytest.raises(InvalidRequestError, match="sparse or ragged"):
        tf_memsaver.optimize(model, batch_size=4)


# 10, 11: the form of gradients ---------------------------------------------------------------------------------------


def test_trap_10_embedding_gradients_stay_sparse() -> None:
    model = models.text_lstm()
    plain = train(model, steps=1)
    assert plain["gradient", "embed/embeddings", 0][0] == "sparse"
    dense = train(naive(model, ("embed", "embed")), steps=1)["gradient", "embed/embeddings", 0]
    assert isinstance(dense, np.ndarray) and dense.shape == (7, 5)
    assert_identical(plain, train(optimized_by_hand(model, ("embed", "embed")), steps=1))
    optimized = tf_memsaver.optimize(model, batch_size=4, strategy="min_peak")
    assert optimized.memsaver_plan.recomputed
    assert_identical(plain, train(optimized, steps=1))


def _first_only(outputs: Any) -> Any:
    return tf.reduce_mean(tf.square(outputs[0]))


def _with_unused_head() -> Any:
    x = inputs = keras.Input((5,))
    x = layers.Dense(5, activation="tanh", name="d0")(x)
    used = layers.Dense(5, activation="tanh", name="used")(x)
    unused = layers.Dense(5, activation="tanh", name="unused")(x)
    return keras.Model(inputs, [layers.Dense(2, name="a")(used), layers.Dense(2, name="b")(unused)])


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_trap_11_gradients_that_are_none_stay_none(mode: str) -> None:
    model = _with_unused_head()
    names = labels(model)
    span = (names[0], next(name for name in reversed(names) if name in ("used", "unused")))
    assert {"d0", "used", "unused"} <= set(names[names.index(span[0]) : names.index(span[1]) + 1])
    decay = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    options: dict[str, Any] = {"loss": _first_only, "optimizer": decay, "mode": mode, "steps": 2}
    plain = train(model, **options)
    assert plain["gradient", "unused/kernel", 0] is None
    careless = train(naive(model, span), **options)
    assert not np.any(careless["gradient", "unused/kernel", 0])
    before = model.get_layer("unused").kernel.numpy()
    assert not np.array_equal(careless["variable", "unused/kernel", 1], before)
    ours = train(optimized_by_hand(model, span), **options)
    assert np.array_equal(ours["variable", "unused/kernel", 1], before)
    assert_identical(plain, ours)


# 15, 16: masks and export --------------------------------------------------------------------------------------------


def test_trap_15_masks_cross_the_boundaries_of_segments() -> None:
    inputs = keras.Input((6, 3))
    x = layers.Masking(name="mask")(inputs)
    x = layers.Dense(5, activation="tanh", name="d0")(x)
    x = layers.Dropout(0.2, name="drop")(x)
    x = layers.LSTM(4, return_sequences=True, name="lstm")(x)
    x = layers.GlobalAveragePooling1D(name="pool")(x)
    model = keras.Model(inputs, layers.Dense(2, name="head")(x))
    data = np.random.default_rng(0).standard_normal((4, 6, 3)).astype("float32")
    data[:2, 3:] = 0.0
    options: dict[str, Any] = {"batches": lambda number: tf.constant(data), "steps": 1}
    plain = train(model, **options)

    class Wrapper(layers.Layer):
        """A layer around a layer, as people write it: it passes no mask on."""

        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

        def call(self, x: Any, training: bool = False) -> Any:
            return tf.recompute_grad(lambda t: self.inner(t, training=training))(x)

    def forward_of_wrapped() -> Any:
        y = Wrapper(model.get_layer("d0"))(model.get_layer("mask")(data))
        return model.get_layer("head")(model.get_layer("pool")(model.get_layer("lstm")(y)))

    with pytest.warns(UserWarning, match="destroy the mask"):
        unmasked = forward_of_wrapped()
    assert not np.allclose(unmasked, model(data, training=False))

    for spans in ([("mask", "d0"), ("drop", "lstm")], [("d0", "drop")], [("drop", "drop"), ("lstm", "pool")]):
        optimized = optimized_by_hand(model, *spans)
        assert_identical(plain, train(optimized, **options))
        assert_trains_alike(model, optimized, batches=options["batches"])


@pytest.mark.parametrize("build", [models.text_lstm, models.text_attention], ids=["lstm", "attention"])
def test_trap_15_masks_of_embeddings(build: Any) -> None:
    model = build()
    assert_trains_alike(model, optimized_between_cuts(model, length=2))


RELOAD = """
    import json, sys
    import numpy as np
    import tensorflow as tf
    assert "tf_memsaver" not in sys.modules
    loaded = tf.saved_model.load(sys.argv[1])
    x = tf.constant(np.load(sys.argv[2]))
    def step(x):
        with tf.GradientTape() as tape:
            y = loaded(x, training=True) if len(sys.argv) < 5 else loaded.train(x)
            loss = tf.reduce_mean(tf.square(y))
        return tape.gradient(loss, loaded.trainable_variables)
    names = [v.name for v in loaded.trainable_variables]
    gradients = tf.function(step)(x)
    np.savez(sys.argv[3], *[g.numpy() for g in gradients])
    assert not any(m.split(".")[0] in ("tf_memsaver", "tests") for m in sys.modules)
"""


def _reload(tmp_path: Path, saved: Path, x: Any, *more: str) -> subprocess.CompletedProcess[str]:
    np.save(tmp_path / "x.npy", x)
    return run_code(RELOAD, saved, tmp_path / "x.npy", tmp_path / "g.npz", *more)


def test_trap_16_an_export_trains_in_a_fresh_process(tmp_path: Path) -> None:
    model = models.residual_net()
    optimized = optimized_between_cuts(model)
    x = batch_for(model).numpy()
    tf_memsaver.export_saved_model(optimized, tmp_path / "saved")
    done = _reload(tmp_path, tmp_path / "saved", x)
    assert done.returncode == 0, done.stderr[-2000:]
    plain = train(model, steps=1, batches=lambda number: tf.constant(x))
    gradients = np.load(tmp_path / "g.npz")
    assert len(gradients.files) == len(model.trainable_variables)
    for place, variable in enumerate(model.trainable_variables):
        expected = plain["gradient", variable.path, 0]
        assert gradients[f"arr_{place}"].tobytes() == expected.tobytes(), variable.path


def test_trap_16_an_export_without_custom_gradients_does_not_train(tmp_path: Path) -> None:
    optimized = optimized_by_hand(models.chain(), ("d0", "d3"))
    root = tf.Module()
    root.train = tf.function(
        lambda x: optimized(x, training=True), input_signature=[tf.TensorSpec((None, 6), tf.float32)]
    )
    root.weights = [v.value for v in optimized.variables]
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    tf.saved_model.save(root, str(tmp_path / "naive"), options=options)
    loaded = tf.saved_model.load(str(tmp_path / "naive"))
    x = tf.ones((2, 6))

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loaded.train(x))
        return tape.gradient(loss, loaded.weights)

    with pytest.raises((LookupError, TypeError)):
        gradients()


# 18, 20: plans -------------------------------------------------------------------------------------------------------


def test_trap_18_neither_one_tiny_nor_one_huge_segment_is_best() -> None:
    x = inputs = keras.Input((64,))
    for number in range(24):
        x = layers.Dense(64, activation="tanh", use_bias=False, name=f"d{number}")(x)
    model = keras.Model(inputs, layers.Dense(1, name="head")(x))
    batch = 4096
    graph = capture_graph(model, batch_size=batch)
    problem = Problem.build(graph, Request())
    count = len(graph.units)

    def simulated(first: int, stop: int) -> tuple[int, Any]:
        edges = [(0, first, "store"), (first, stop, "recompute"), (stop, count, "store")]
        segments = [Segment(start=a, stop=b, mode=SegmentMode(m)) for a, b, m in edges if a < b]
        return problem.simulator.run(segments).peak_bytes, plan_of(list_layer_calls(model), segments, batch)

    tiny, _ = simulated(11, 12)
    huge, huge_plan = simulated(0, count - 1)
    best = tf_memsaver.search_plan(model, batch_size=batch, strategy="min_peak")
    plain = problem.plain.peak_bytes
    assert best.plain_peak_bytes == pytest.approx(plain, rel=0.1)
    assert tiny > 0.9 * plain and huge > 0.9 * plain
    assert best.peak_bytes < 0.6 * plain
    # And so it is when it runs.
    data = tf.constant(np.random.default_rng(0).standard_normal((batch, 64)), tf.float32)
    measured = activation_peak(model, data)
    assert activation_peak(tf_memsaver.apply_plan(model, huge_plan), data) > 0.85 * measured
    assert activation_peak(tf_memsaver.apply_plan(model, best), data) < 0.6 * measured


def test_trap_20_unknown_dimensions_are_errors() -> None:
    inputs = keras.Input((None, 3), name="sound")
    model = keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(inputs)))
    with pytest.raises(UnknownDimensionError, match=r"sound.*\(None, None, 3\)") as caught:
        tf_memsaver.optimize(model, batch_size=4)
    assert caught.value.input_name == "sound" and caught.value.shape == (None, None, 3)


@pytest.mark.parametrize("batch_size", [None, 0, -1, 2.5, "8", True])
def test_trap_20_the_batch_size_is_never_guessed(batch_size: Any) -> None:
    with pytest.raises(InvalidRequestError, match="batch_size"):
        tf_memsaver.optimize(models.chain(), batch_size=batch_size)
    with pytest.raises(InvalidRequestError, match="batch_size"):
        tf_memsaver.optimize(models.chain())


@pytest.mark.usefixtures("costs_with_onednn")
def test_trap_20_bytes_follow_the_batch_size() -> None:
    model = models.residual_net()
    peaks = [tf_memsaver.search_plan(model, batch_size=size).plain_peak_bytes for size in (16, 32, 64)]
    # Everything but weights and scratch is proportional to it.
    assert 1.5 < (peaks[2] - peaks[1]) / (peaks[1] - peaks[0]) < 2.5


# Cuts that would reorder a sum ---------------------------------------------------------------------------------------


def _three_readers() -> Any:
    inputs = keras.Input((6,))
    x = layers.Dense(6, activation="tanh", name="shared")(inputs)
    y = layers.Dense(6, name="a")(x)
    y = layers.Add(name="add0")([layers.Dense(6, name="b")(y), x])
    y = layers.Add(name="add1")([layers.Dense(6, name="c")(y), x])
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.Dense(6, name="last")(y)))


@pytest.mark.parametrize("ends", [("a", "add0", "add1"), ("add0", "add1"), ("add0", "last"), ("a", "last")])
def test_a_cut_may_part_the_readers_of_a_tensor_whose_gradient_is_a_sum_of_three(ends: tuple[str, ...]) -> None:
    model = _three_readers()
    names = labels(model)
    # The biases of b and c are added in one sum with what the residual addition adds.
    assert capture_graph(model, batch_size=4).joined == (names.index("add0"), names.index("add1"))
    starts = ("shared", *(names[names.index(end) + 1] for end in ends[:-1]))
    assert_trains_alike(model, optimized_by_hand(model, *zip(starts, ends, strict=True)))
