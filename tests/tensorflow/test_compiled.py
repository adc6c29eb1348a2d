"""Plans for steps that XLA compiles, judged by its compiler: what is planned is what a compiled step takes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tf_memsaver.check.compiled import compiled_step_memory
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.program.data import Batch
from tf_memsaver.units import format_bytes

SIZE, WIDTH = 1024, 256
DATA = (tf.TensorSpec((SIZE, WIDTH)), tf.TensorSpec((SIZE, 3)))


def chain(**compiling: Any) -> Any:
    x = inputs = keras.Input((WIDTH,))
    for _ in range(12):
        x = layers.Dense(WIDTH, "tanh")(x)
    model = keras.Model(inputs, layers.Dense(3)(x), name="chain")
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", **compiling)
    return model


@pytest.fixture(scope="module")
def traced() -> Any:
    """Compiled once for each plan, for all tests."""
    return tf_memsaver.trace(chain(jit_compile=True), data=DATA)


def test_a_model_that_fit_compiles_is_planned_by_the_compiler(traced: Any) -> None:
    plan = traced.plan()
    assert plan.request.executor == "xla" and "peak as XLA compiles the step" in str(plan)
    assert not traced.model.optimizer.built, "what was built for the compiler is dropped again"
    optimized = traced.apply(plan)
    assert plan.peak_bytes == compiled_step_memory(optimized, Batch(*DATA)).peak_bytes
    assert plan.plain_peak_bytes == compiled_step_memory(traced.model, Batch(*DATA)).peak_bytes
    resident = 4 * sum(4 * np.prod(v.shape) for v in traced.model.trainable_variables)
    # Weights and momentum, and what becomes of them.
    assert plan.peak_bytes - resident < 0.7 * (plan.plain_peak_bytes - resident)
    assert tf_memsaver.Plan.from_json(plan.to_json()) == plan


def test_budgets_are_kept_by_the_compiler(traced: Any, caplog: Any) -> None:
    plain, least = traced.plan().plain_peak_bytes, traced.plan().peak_bytes
    between = (plain + least) // 2
    plan = traced.plan(budget=between)
    assert plan.recomputed and plan.peak_bytes < plan.highest_peak_bytes <= between
    assert compiled_step_memory(traced.apply(plan), Batch(*DATA)).peak_bytes == plan.peak_bytes
    assert traced.plan(budget=plain).recomputed, "the plain step may take a little more than the compiler says"
    kept = traced.plan(budget=traced.plan(strategy="plain").highest_peak_bytes)
    assert not kept.recomputed and "the plain step" in kept.advice and "already fits" in kept.advice
    with pytest.raises(tf_memsaver.InfeasibleBudgetError) as error:
        traced.plan(budget=plain // 20)
    assert "XLA compiles this step" not in caplog.text, "plans are compiled as what they are to be"
    assert traced.plan(budget=error.value.least_bytes).highest_peak_bytes == error.value.least_bytes
    given = compiled_step_memory(traced.model, Batch(*DATA))
    assert error.value.fixed_bytes == given.argument_bytes + given.output_bytes < error.value.least_bytes
    assert "XLA's CPU compiler" not in str(error.value), "dense layers have no scratch memory"


def test_a_planner_that_is_named_keeps_a_budget(traced: Any) -> None:
    budget = (traced.plan().plain_peak_bytes + traced.plan().peak_bytes) // 2
    for strategy in ("min_time", "nested"):
        plan = traced.plan(budget=budget, strategy=strategy)
        assert plan.strategy == strategy and plan.recomputed and plan.peak_bytes <= budget
    assert (
        traced.plan(budget=budget, strategy="min_time").step_overhead < traced.plan(strategy="min_peak").step_overhead
    )
    with pytest.raises(tf_memsaver.InfeasibleBudgetError):
        traced.plan(budget=budget // 20, strategy="min_time")


def test_hints_hold_where_the_plain_step_fits(traced: Any) -> None:
    names = [unit.label for unit in traced.graph.units if unit.label.startswith("dense")][2:5]
    plan = traced.plan(budget="1TiB", recompute=names)
    assert set(names) <= set(plan.recomputed)
    assert plan.recomputed and "recomputes nothing" not in plan.advice
    with pytest.raises(tf_memsaver.InfeasibleOverheadError):
        traced.plan(budget="1TiB", recompute=names, max_overhead=0.0)
    for hint in ("keep", "recompute", "candidates"):
        with pytest.raises(tf_memsaver.HintError):
            traced.plan(budget="1TiB", **{hint: ["no such layer"]})


def test_what_no_plan_changes_is_named_where_it_limits() -> None:
    pixels, size = 48, 8
    model = keras.Sequential(
        [keras.Input((pixels, pixels, 16)), layers.Conv2D(16, 3, padding="same"), layers.MaxPooling2D(name="pool")]
    )
    model.compile("sgd", "mse", jit_compile=True)
    data = tf.TensorSpec((size, pixels, pixels, 16)), tf.TensorSpec((size, pixels // 2, pixels // 2, 16))
    with pytest.raises(tf_memsaver.InfeasibleBudgetError) as error:
        tf_memsaver.search_plan(model, data=data, budget="1MiB")
    image = 4 * size * pixels * pixels * 16
    given = compiled_step_memory(model, Batch(*data))
    scratch = 4 * image + 5 * image // 4
    assert error.value.fixed_bytes == given.argument_bytes + given.output_bytes + scratch <= error.value.least_bytes
    assert "/pool" in error.value.fixed and "MaxPoolGrad' as XLA's CPU compiler expands it" in str(error.value)
    assert 1.01 * given.peak_bytes < error.value.least_bytes < 1.03 * given.peak_bytes


def test_a_share_is_one_of_the_compiled_plain_step(traced: Any) -> None:
    plan = traced.plan(budget="90%")
    assert plan.request.budget_bytes == int(0.9 * plan.plain_peak_bytes) >= plan.highest_peak_bytes > plan.peak_bytes


def test_what_is_not_compiled_is_planned_for_the_graph() -> None:
    for model in (chain(jit_compile=False), chain(jit_compile=True)):
        executor = tf_memsaver.search_plan(model, data=DATA, strategy="plain").request.executor
        assert executor == ("xla" if model.jit_compile else "graph")
    plan = tf_memsaver.search_plan(chain(jit_compile=True), data=DATA, executor="graph")
    assert plan.request.executor == "graph" and "predicted peak" in str(plan)
    bare = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    with pytest.raises(tf_memsaver.InvalidRequestError, match="needs a compiled model"):
        tf_memsaver.search_plan(bare, batch_size=4, executor="xla")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_plan_of_the_simulator_that_xla_compiles_is_a_warning(compiled: bool, caplog: Any) -> None:
    model = chain(jit_compile=False)
    optimized = tf_memsaver.optimize(model, data=DATA)

    @tf.function(jit_compile=compiled)
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(optimized(x, training=True))
        return tape.gradient(loss, [v.value for v in optimized.trainable_variables])

    with caplog.at_level("WARNING", logger="absl"):
        for size in (4, 6):
            step(tf.zeros((size, WIDTH)))
    said = [each for each in caplog.records if "XLA compiles this step" in each.getMessage()]
    assert len(said) == int(compiled)


def test_an_estimate_has_the_compilers_peak_where_fit_compiles(traced: Any) -> None:
    found = traced.estimate()
    assert found.compiled_peak_bytes == compiled_step_memory(traced.model, Batch(*DATA)).peak_bytes
    assert found.compiled_peak_bytes != found.peak_bytes, "what is live otherwise than TensorFlow's executor has it"
    for text in (str(found), repr(found)):
        assert format_bytes(found.compiled_peak_bytes) in text and "as XLA compiles the step" in text
    document = found.to_json()
    assert document["compiled_peak_bytes"] == found.compiled_peak_bytes
    graph = tf_memsaver.estimate(chain(jit_compile=False), data=DATA)
    assert graph.compiled_peak_bytes is None and "XLA" not in f"{graph}{graph!r}"


def test_a_curve_is_not_asked_of_the_compiler_and_says_so(traced: Any, caplog: Any) -> None:
    with caplog.at_level("WARNING", logger="absl"):
        assert len(traced.curve(points=3)) > 1
        assert "the curve is computed for TensorFlow's own executor" in caplog.text
        caplog.clear()
        tf_memsaver.memory_time_curve(chain(jit_compile=False), data=DATA, points=3)
    assert "computed for" not in caplog.text


def test_the_largest_batch_is_not_asked_of_the_compiler_and_says_so(caplog: Any) -> None:
    model = chain(jit_compile=True)
    with caplog.at_level("WARNING", logger="absl"):
        tf_memsaver.max_batch_size(model, budget="16MiB", batch_size=64, predict_only=True)
    assert "computed for TensorFlow's own executor" in caplog.text


def test_where_nothing_can_be_replayed_the_reason_is_said() -> None:
    model = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(3)])
    model.compile("sgd", "mse", jit_compile=True)
    plan = tf_memsaver.search_plan(model, data=DATA)
    assert not plan.recomputed and plan.request.executor == "xla"
    assert "recomputes nothing, so it saves no memory" in plan.advice and "XLA_FLAGS" not in plan.advice


class OfTexts(layers.Layer):
    """An operation that XLA does not know."""

    def call(self, x: Any) -> Any:
        return x + tf.cast(tf.strings.length(tf.strings.as_string(x)), x.dtype)


def test_a_step_that_xla_cannot_compile_is_an_error_of_one_line() -> None:
    model = keras.Sequential([keras.Input((WIDTH,)), OfTexts(), layers.Dense(3)])
    model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(UnsupportedModelError, match="AsString") as caught:
        tf_memsaver.estimate(model, batch_size=4)
    assert "jit_compile=False" in str(caught.value) and "\n" not in str(caught.value)


class OwnStep(keras.Model):
    """Two networks, one optimizer, a train_step of its own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.encoder = keras.Sequential([layers.Dense(WIDTH, "tanh") for _ in range(6)])
        self.decoder = keras.Sequential([layers.Dense(WIDTH, "tanh") for _ in range(6)])

    def train_step(self, data: Any) -> Any:
        x, _ = data
        with tf.GradientTape() as tape:
            made = self.decoder(self.encoder(x, training=True), training=True)
            loss = tf.reduce_mean((made - x) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_a_step_of_ones_own() -> None:
    model = OwnStep()
    model.compile(keras.optimizers.Adam(), jit_compile=True)
    optimized = tf_memsaver.optimize(model, data=DATA)
    plan = optimized.memsaver_plan
    assert plan.request.executor == "xla" and plan.recomputed and plan.peak_bytes < plan.plain_peak_bytes
