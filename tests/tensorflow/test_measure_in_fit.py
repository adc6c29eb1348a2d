"""``measure`` in Keras's own ``fit``: what runs is what people run, and nothing of it stays."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from keras import layers

import tf_memsaver
from tf_memsaver.api.asked import bytes_of_others
from tf_memsaver.check.measure import measure
from tf_memsaver.check.measurement import Measurement
from tf_memsaver.errors import InvalidRequestError
from tf_memsaver.plan.plan import Plan
from tools.shared.models.small import register

WIDTH, DEPTH, BATCH = 64, 16, 4096
LAYER_BYTES = WIDTH * BATCH * 4


@register
class Seen(layers.Layer):
    """Takes down the batch sizes that it is traced with."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.sizes: list[int | None] = []

    def call(self, x: Any) -> Any:
        self.sizes.append(x.shape[0])
        return x


def deep(depth: int = DEPTH, *, compiled: bool = True, **how: Any) -> Any:
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((WIDTH,))
    x = Seen()(x)
    for _ in range(depth):
        x = layers.Dense(WIDTH, activation="tanh", use_bias=False)(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    if compiled:
        model.compile("adam", "mse", metrics=["mae"], **how)
    return model


def data(*, drop_remainder: bool = False) -> tf.data.Dataset:
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((2 * BATCH, WIDTH)), generator.standard_normal((2 * BATCH, 1))
    return tf.data.Dataset.from_tensor_slices((x.astype("f"), y.astype("f"))).batch(BATCH, drop_remainder)


def test_a_compiled_model_is_measured_in_fit_and_left_as_it_was() -> None:
    model = deep()
    model.fit(data(), shuffle=False, verbose=0)
    history, trained = model.history, model.train_function
    before = [v.numpy().tobytes() for v in (*model.variables, *model.optimizer.variables, *model.metrics_variables)]
    plain = tf_memsaver.measure(model, data=data(), isolate=False)
    assert plain.mode == "fit" and plain.steps == 20 and plain.trace_seconds > 0
    assert DEPTH * LAYER_BYTES <= plain.activation_bytes < (DEPTH + 5) * LAYER_BYTES
    assert 0 < plain.least_peak_bytes <= plain.peak_bytes
    least, most = plain.step_seconds_range
    assert 0 < least <= plain.step_seconds <= most
    after = [v.numpy().tobytes() for v in (*model.variables, *model.optimizer.variables, *model.metrics_variables)]
    assert after == before and model.history is history and model.train_function is trained


def test_an_optimized_model_beside_its_plain_form() -> None:
    # The allocator's steps of 1 MiB are one layer each.
    depth = 2 * DEPTH
    model = deep(depth)
    optimized = tf_memsaver.optimize(model, data=data())
    measured = tf_memsaver.measure(optimized, data=data(), steps=4, beside_plain=True)
    assert measured.activation_bytes < depth / 3 * LAYER_BYTES
    assert measured.plain_step_seconds and measured.slowdown is not None and measured.slowdown_range
    assert measured.slowdown_range[0] <= measured.slowdown_range[1] and "than a plain step" in str(measured)
    assert Measurement.from_json(measured.to_json()) == measured
    with pytest.raises(InvalidRequestError, match="this model is plain"):
        tf_memsaver.measure(model, data=data(), beside_plain=True)


@pytest.mark.parametrize("fixed", [True, False])
def test_the_step_is_traced_for_what_the_data_says_of_its_batches(fixed: bool) -> None:
    model = deep()
    given = data(drop_remainder=fixed)
    before = len(model.layers[1].sizes)
    tf_memsaver.measure(model, data=given, steps=1, isolate=False)
    # Tracing the loss for a trial does not call the model.
    assert set(model.layers[1].sizes[before:]) == {BATCH if fixed else None}


def test_several_steps_in_an_execution_count_one_by_one() -> None:
    measured = tf_memsaver.measure(deep(steps_per_execution=4), data=data(), steps=2, isolate=False)
    alone = tf_memsaver.measure(deep(), data=data(), steps=2, isolate=False)
    assert measured.steps == 2 and measured.step_seconds < 3 * alone.step_seconds
    assert measured.activation_bytes == pytest.approx(alone.activation_bytes, abs=4 * LAYER_BYTES)


def test_a_model_that_fit_cannot_train_is_run_by_a_step_of_our_own() -> None:
    model = deep(compiled=False)
    assert tf_memsaver.measure(model, batch_size=BATCH, steps=1, isolate=False).mode == "graph"
    with pytest.raises(InvalidRequestError, match="Compile it"):
        tf_memsaver.measure(model, batch_size=BATCH, mode="fit", isolate=False)


def test_figures_that_say_little_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *rest: said.append(text % rest))
    model = deep()
    tf_memsaver.measure(model, data=data(), steps=1, isolate=False)
    assert said == []
    tf_memsaver.measure(model, batch_size=16, steps=1, isolate=False)
    assert len(said) == 1 and "more than 16.00 MiB" in said[0]


def test_calibrate_plans_for_less_until_real_steps_keep_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep()
    before = [v.numpy().tobytes() for v in model.variables]
    plain = tf_memsaver.search_plan(model, data=data(), strategy="plain").peak_bytes
    budget = int(0.8 * plain)
    first, peaks = iter([budget + plain // 8]), list[int]()

    def measured(*args: Any, **how: Any) -> Any:
        # In a process of its own: what other tests have left here is nothing of these steps.
        found = measure(*args, **{**how, "isolate": True})
        peaks.append(next(first, found.peak_bytes))
        return replace(found, peak_bytes=peaks[-1])

    monkeypatch.setattr("tf_memsaver.api.measure", measured)
    monkeypatch.setattr("tf_memsaver.api.bytes_of_others", lambda *_: 0)
    optimized = tf_memsaver.optimize(model, data=data(), budget="80%", calibrate=True)
    assert peaks[0] > budget >= peaks[-1]
    assert optimized.memsaver_plan.request.budget_bytes <= budget - (peaks[0] - budget)
    assert [v.numpy().tobytes() for v in model.variables] == before
    assert not model.optimizer.built


def test_calibrate_takes_a_quicker_plan_where_real_steps_leave_room(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deep()
    careful = tf_memsaver.search_plan(model, data=data(), budget="80%")
    budget = careful.request.budget_bytes

    def measured(optimized: Any, **how: Any) -> Any:
        found = measure(optimized, **how)
        return replace(found, peak_bytes=int(0.7 * optimized.memsaver_plan.highest_peak_bytes))

    monkeypatch.setattr("tf_memsaver.api.measure", measured)
    monkeypatch.setattr("tf_memsaver.api.bytes_of_others", lambda *_: 0)
    monkeypatch.setattr("tf_memsaver.planners.measured.LEAST_COUNTED_STEP", 0)
    plan = tf_memsaver.optimize(model, data=data(), budget="80%", calibrate=True).memsaver_plan
    assert plan.step_overhead < careful.step_overhead and plan.highest_peak_bytes > budget
    assert plan.measured_peak_bytes == int(0.7 * plan.highest_peak_bytes) <= budget == plan.request.budget_bytes
    assert "real steps took at most" in repr(plan) and Plan.from_json(plan.to_json()) == plan


def test_calibrate_takes_off_what_the_process_holds_beside_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, peaks = deep(), list[int]()
    gc.collect()
    before, others = bytes_of_others(model), tf.zeros(32 << 20, tf.uint8)
    taken = bytes_of_others(model)
    # The allocator hands out a chunk of up to twice the size, and does not count the model's small weights.
    assert others.shape[0] - (1 << 20) <= taken - before <= 2 * others.shape[0]

    def measured(*args: Any, **how: Any) -> Any:
        found = measure(*args, **how)
        peaks.append(found.peak_bytes)
        return found

    monkeypatch.setattr("tf_memsaver.api.measure", measured)
    plan = tf_memsaver.optimize(model, data=data(), budget="90%", calibrate=True).memsaver_plan
    assert plan.measured_peak_bytes + taken == pytest.approx(peaks[-1], abs=8 << 20)
    assert plan.measured_peak_bytes <= plan.request.budget_bytes < others.shape[0]


def test_what_is_garbage_by_then_is_none_of_the_others() -> None:
    """Slots of steps that were run for another plan were, and were taken off what the next plan's steps took."""
    model = deep()
    before = bytes_of_others(model)
    gc.disable()
    try:
        garbage: list[Any] = [tf.zeros(32 << 20, tf.uint8)]
        garbage.append(garbage)
        del garbage
        assert bytes_of_others(model) - before < 16 << 20
    finally:
        gc.enable()


def test_calibrate_needs_a_budget() -> None:
    with pytest.raises(InvalidRequestError, match="budget='80%'"):
        tf_memsaver.optimize(deep(), data=data(), calibrate=True)
