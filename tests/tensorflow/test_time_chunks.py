"""Recurrent layers that are cut along time train alike, to the bit, and need less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tf_memsaver.program.kinds import program_of
from tools.shared.training import assert_fit_alike, assert_trains_alike, batch_for, train

STEPS, FEATURES, UNITS = 13, 5, 6
"""A number of steps that no chunk divides."""


def stack(*steps: Any, shape: tuple[int, ...] = (STEPS, FEATURES), masked: bool = False) -> keras.Model:
    x = inputs = keras.Input(shape)
    if masked:
        x = layers.Masking()(x)
    for step in steps:
        x = step(x)
    x = layers.Dense(3)(x if len(x.shape) < 4 else layers.Flatten()(x))
    return keras.Model(inputs, x)


def with_states() -> keras.Model:
    sequence, start = keras.Input((STEPS, FEATURES)), keras.Input((FEATURES,))
    first = [layers.Dense(UNITS)(start), layers.Dense(UNITS)(start)]
    y, h, c = layers.LSTM(UNITS, return_state=True, return_sequences=True)(sequence, initial_state=first)
    y = layers.GRU(UNITS)(y, initial_state=h)
    return keras.Model([sequence, start], layers.Dense(3)(layers.concatenate([y, h, c])))


def of_words() -> keras.Model:
    words = keras.Input((STEPS,), dtype="int32")
    x = layers.Embedding(5, FEATURES, mask_zero=True)(words)
    return keras.Model(words, layers.Dense(3)(layers.LSTM(UNITS, return_sequences=True)(x)))


def residual() -> keras.Model:
    x = inputs = keras.Input((STEPS, FEATURES))
    x = layers.Dense(UNITS)(x)
    for _ in range(2):
        x = layers.add([x, layers.GRU(UNITS, return_sequences=True)(x)])
    return keras.Model(inputs, layers.Dense(3)(x))


MODELS: dict[str, Callable[[], keras.Model]] = {
    "lstm": lambda: stack(layers.LSTM(UNITS, return_sequences=True), layers.LSTM(UNITS)),
    "gru": lambda: stack(layers.GRU(UNITS, return_sequences=True), layers.GRU(UNITS, return_sequences=True)),
    "simple": lambda: stack(layers.SimpleRNN(UNITS)),
    "plain gru": lambda: stack(layers.GRU(UNITS, reset_after=False, use_bias=False)),
    "backwards": lambda: stack(layers.LSTM(UNITS, go_backwards=True, return_sequences=True), layers.GRU(UNITS)),
    "masked": lambda: stack(layers.LSTM(UNITS, return_sequences=True), layers.LSTM(UNITS), masked=True),
    "masked backwards": lambda: stack(layers.GRU(UNITS, return_sequences=True, go_backwards=True), masked=True),
    "masked with zeros": lambda: stack(
        layers.LSTM(UNITS, return_sequences=True, zero_output_for_mask=True), layers.SimpleRNN(UNITS), masked=True
    ),
    "dropout": lambda: stack(
        layers.LSTM(UNITS, dropout=0.3, recurrent_dropout=0.2, return_sequences=True, seed=3),
        layers.GRU(UNITS, recurrent_dropout=0.5, seed=4),
    ),
    "states": with_states,
    "words": of_words,
    "residual": residual,
    "cells": lambda: stack(
        layers.RNN(layers.LSTMCell(UNITS), return_sequences=True),
        layers.RNN([layers.LSTMCell(UNITS), layers.GRUCell(UNITS, dropout=0.3, seed=1)]),
    ),
    "images": lambda: stack(
        layers.ConvLSTM2D(2, 3, padding="same", return_sequences=True),
        layers.ConvLSTM2D(2, 3, padding="same"),
        shape=(STEPS, 6, 6, 1),
    ),
    "both directions, masked, dropout": lambda: stack(
        layers.Bidirectional(layers.GRU(UNITS, return_sequences=True, dropout=0.3, seed=5)),
        layers.LSTM(UNITS, recurrent_dropout=0.2, seed=6),
        masked=True,
    ),
    "penalties": lambda: stack(layers.LSTM(UNITS, kernel_regularizer="l2", kernel_constraint="max_norm")),
    "both directions": lambda: stack(
        layers.Bidirectional(layers.LSTM(UNITS, return_sequences=True)), layers.Bidirectional(layers.GRU(UNITS))
    ),
    "both directions, masked": lambda: stack(
        layers.Bidirectional(layers.LSTM(UNITS, return_sequences=True), merge_mode="ave"),
        layers.Bidirectional(layers.GRU(UNITS), merge_mode="sum"),
        masked=True,
    ),
}


def in_chunks(model: keras.Model, steps: Any = 4) -> keras.Model:
    plan = tf_memsaver.search_plan(model, batch_size=4, time_chunks=steps, strategy="min_peak")
    assert plan.recomputed and plan.note == "", plan
    return tf_memsaver.apply_plan(model, plan)


def samples(model: keras.Model) -> tuple[Any, Any]:
    """Return a batch and a half; what ``Masking`` masks are steps in front, in the middle, and a whole sequence."""
    x = keras.tree.map_structure(np.array, batch_for(model, 6))
    for each in keras.tree.flatten(x):
        if each.ndim == 3:
            each[0, -4:] = each[1, :3] = each[2, 5:8] = each[3] = 0
    return x, np.random.default_rng(1).standard_normal((6, *model.output_shape[1:])).astype(np.float32)


@pytest.mark.parametrize("name", list(MODELS))
def test_fit_leaves_the_same_bits(name: str) -> None:
    model = MODELS[name]()
    model.compile("adam", "mse")
    optimized = in_chunks(model)
    assert any("#4:8" in label for label in optimized.memsaver_plan.labels)
    assert_fit_alike(model, optimized, *samples(model), batch_size=4)


def test_all_gradients_have_the_same_bits_in_graphs() -> None:
    model = MODELS["lstm"]()
    assert_trains_alike(model, in_chunks(model), modes=("graph", "xla"))


def test_eager_steps_differ_by_rounding_alone() -> None:
    """A tape adds the gradients of all steps of an eager loop at once, but those of a chunk first."""
    model = MODELS["lstm"]()
    plain, other = train(model, mode="eager"), train(in_chunks(model), mode="eager")
    for key, value in plain.items():
        # Measured: 2e-7 of the largest gradient of a weight.
        np.testing.assert_allclose(value, other[key], rtol=0, atol=1e-6 * np.abs(value).max(), err_msg=str(key))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_other_precisions_keep_their_bits(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    model = MODELS["masked"]()
    assert_trains_alike(model, in_chunks(model), modes=("graph",))


def test_a_model_that_is_frozen_in_part_trains_alike() -> None:
    model = MODELS["lstm"]()
    model.layers[1].trainable = False
    model.compile("adam", "mse")
    assert_fit_alike(model, in_chunks(model), *samples(model), batch_size=4)


def test_a_plan_from_a_file_trains_alike(tmp_path: Any) -> None:
    model = MODELS["lstm"]()
    model.compile("adam", "mse")
    in_chunks(model, "auto").memsaver_plan.save(tmp_path / "plan.json")
    plan = tf_memsaver.Plan.load(tmp_path / "plan.json")
    assert plan.request.time_chunks == "auto"
    assert_fit_alike(model, tf_memsaver.apply_plan(model, plan), *samples(model), batch_size=4)


def test_a_network_in_a_loop_of_ones_own_is_cut() -> None:
    network = MODELS["lstm"]()
    optimizer = keras.optimizers.SGD()

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(network(x, training=True)))
        optimizer.apply(tape.gradient(loss, network.trainable_variables), network.trainable_variables)
        return loss

    x = batch_for(network)
    plan = tf_memsaver.search_plan(network, data=x, step=tf.function(step), time_chunks=4, strategy="min_peak")
    assert any(label.endswith("#4:8") for label in plan.labels)


def labels(model: keras.Model, steps: Any = 6) -> list[str]:
    return [call.label for call in program_of(model, "layer", None, steps).sequence.calls]


def test_layers_that_read_each_other_come_chunk_by_chunk() -> None:
    assert labels(MODELS["lstm"]()) == [
        "lstm#split",
        *["lstm#0:6", "lstm_1#0:6", "lstm#6:12", "lstm_1#6:12", "lstm#12:13", "lstm_1#12:13"],
        "dense",
    ]


def test_a_sequence_that_others_read_is_joined() -> None:
    found = labels(residual())
    assert found[1:6] == ["gru#split", "gru#0:6", "gru#6:12", "gru#12:13", "gru#join"]


def test_backward_layers_begin_with_the_last_chunk() -> None:
    assert labels(MODELS["backwards"]())[:4] == ["lstm#split", "lstm#12:13", "gru#12:13", "lstm#6:12"]


def test_auto_takes_the_square_root_of_the_steps() -> None:
    found = labels(stack(layers.LSTM(2), shape=(100, 1)), "auto")
    assert found[1] == "lstm#0:10" and len(found) == 1 + 10 + 1


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (lambda: layers.LSTM(UNITS, unroll=True), "is unrolled"),
        (lambda: layers.LSTM(UNITS, activity_regularizer="l2"), "has a penalty on what it returns"),
        (lambda: type("Own", (layers.LSTM,), {})(UNITS), "is of a class of its own, Own"),
        (lambda: layers.Bidirectional(layers.LSTM(UNITS, unroll=True)), "is unrolled"),
    ],
)
def test_what_stays_whole_is_told(layer: Callable[[], Any], reason: str) -> None:
    plan = tf_memsaver.search_plan(stack(layer()), batch_size=4, time_chunks=4)
    assert plan.note.startswith("not cut along time: '") and plan.note.endswith(reason) and reason in str(plan)
    assert not any("#" in label for label in plan.labels)


def test_open_and_stateful_layers_stay_whole() -> None:
    model = keras.Sequential([keras.Input((None, 2)), layers.LSTM(2)])
    assert program_of(model, "layer", None, 4).sequence.note.endswith("has a number of steps that is open")
    model = keras.Sequential([keras.Input((9, 2), batch_size=2), layers.LSTM(2, stateful=True)])
    assert program_of(model, "layer", None, 4).sequence.note.endswith("is stateful")
    model = keras.Sequential([keras.Input((9, 2)), layers.LSTM(2)])
    assert program_of(model, "layer", None, 9).sequence.note.endswith("has 9 steps, which are one chunk")


def test_where_nothing_can_be_cut_the_plan_says_so() -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    assert "none that is recurrent" in tf_memsaver.search_plan(model, batch_size=4, time_chunks="auto").note
    assert "nothing is cut along time" in program_of(model, "op", None, "auto").sequence.note


def test_a_hint_with_the_name_of_a_layer_means_all_of_its_chunks() -> None:
    model = MODELS["lstm"]()
    plan = tf_memsaver.search_plan(model, batch_size=4, time_chunks=6, strategy="recompute_all", keep="lstm_1")
    assert {label.split("#")[0] for label in plan.recomputed} == {"lstm"}


def test_a_mask_that_the_plan_does_not_know_is_refused() -> None:
    model = MODELS["simple"]()
    model.compile("adam", "mse")
    optimized = in_chunks(model)
    x = batch_for(model)
    with pytest.raises(tf_memsaver.UnsupportedModelError, match="gets a mask that it was not built with"):
        optimized(x, mask=np.ones((4, STEPS), bool), training=True)


def test_memory_grows_as_the_square_root_of_the_steps() -> None:
    def peaks(steps: int) -> tuple[int, int]:
        # What a step makes is large enough for a CPU to count it.
        model = stack(layers.LSTM(256, return_sequences=True), layers.LSTM(256), shape=(steps, 1))
        plan = tf_memsaver.search_plan(model, batch_size=256, time_chunks="auto", strategy="min_peak")
        return tf_memsaver.search_plan(model, batch_size=256, strategy="plain").plain_peak_bytes, plan.peak_bytes

    (plain, chunked), (longer_plain, longer_chunked) = peaks(72), peaks(288)
    assert longer_plain > 3.5 * plain
    assert longer_chunked < 2.5 * chunked < plain


def test_a_layer_that_makes_most_of_the_peak_is_named() -> None:
    model = stack(layers.LSTM(32), shape=(64, 1))
    advice = tf_memsaver.search_plan(model, batch_size=64, strategy="min_peak").advice
    assert "One recurrent layer, 'lstm', keeps" in advice and "time_chunks='auto'" in advice
    in_chunks = tf_memsaver.search_plan(model, batch_size=64, time_chunks="auto", strategy="min_peak")
    assert "time_chunks" not in in_chunks.advice
    with pytest.raises(tf_memsaver.InfeasibleBudgetError, match=r"One recurrent layer, 'lstm', keeps.*time_chunks="):
        tf_memsaver.search_plan(model, batch_size=64, budget=in_chunks.highest_peak_bytes)
