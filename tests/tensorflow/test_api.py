"""The verbs, end to end: a budget in, a model out; and what they say to arguments without meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tf_memsaver.errors import (
    HintError,
    InfeasibleBudgetError,
    InvalidRequestError,
    MemsaverError,
    PlanMismatchError,
    UnknownDimensionError,
    UnsupportedModelError,
)
from tools.shared.models import small as models
from tools.shared.training import assert_trains_alike


@pytest.fixture
def model() -> Any:
    x = inputs = keras.Input((64,))
    for number in range(16):
        x = layers.Dense(64, activation="tanh", use_bias=False, name=f"d{number}")(x)
    return keras.Model(inputs, layers.Dense(1, name="head")(x))


@pytest.mark.parametrize("strategy", ["auto", "min_peak", "min_time", "chen_sqrt", "chen_greedy"])
def test_optimize_saves_memory_and_trains_alike(model: Any, strategy: str) -> None:
    options: dict[str, Any] = {"budget": "16MiB"} if strategy == "min_time" else {}
    optimized = tf_memsaver.optimize(model, batch_size=4096, strategy=strategy, **options)
    plan = optimized.memsaver_plan
    assert plan.batch_size == 4096 and plan.strategy == strategy and plan.recomputed
    assert plan.peak_bytes < plan.plain_peak_bytes and 0 < plan.step_overhead < 1 and plan.plan_seconds >= 0
    assert_trains_alike(model, optimized, ("graph", "as_written"))


def test_the_budget_is_kept_in_the_prediction(model: Any) -> None:
    plain = tf_memsaver.search_plan(model, batch_size=4096).plain_peak_bytes
    for share in (0.9, 0.7):
        plan = tf_memsaver.search_plan(model, batch_size=4096, budget=int(share * plain))
        assert plan.peak_bytes <= share * plain and plan.request.budget_bytes == int(share * plain)
    assert not tf_memsaver.search_plan(model, batch_size=4096, budget=2 * plain).recomputed


def test_without_a_budget_the_step_stays_within_the_overhead(model: Any) -> None:
    tight = tf_memsaver.search_plan(model, batch_size=4096, max_overhead=0.1)
    usual = tf_memsaver.search_plan(model, batch_size=4096)
    assert tight.step_overhead <= 0.1 and usual.step_overhead <= 0.3
    assert usual.peak_bytes <= tight.peak_bytes


def test_a_budget_that_cannot_be_met_names_one_that_can(model: Any) -> None:
    with pytest.raises(InfeasibleBudgetError, match="the larger one to leave room") as caught:
        tf_memsaver.optimize(model, batch_size=4096, budget="1MiB")
    least = caught.value.least_bytes
    assert caught.value.budget_bytes == 2**20 and least > 2**20
    assert tf_memsaver.search_plan(model, batch_size=4096, budget=least).peak_bytes <= least


@pytest.mark.parametrize("budget", ["lots", "6 GiX", "-1GiB", 0, -5, "0", True])
def test_budgets_without_meaning(budget: Any) -> None:
    with pytest.raises(InvalidRequestError, match="budget"):
        tf_memsaver.optimize(models.chain(), batch_size=4, budget=budget)


def test_hints(model: Any) -> None:
    plan = tf_memsaver.search_plan(model, batch_size=4096, strategy="min_peak", keep=["d3", "d1?"])
    assert not {"d3", *(f"d{n}" for n in range(10, 16))} & set(plan.recomputed) and plan.recomputed
    plan = tf_memsaver.search_plan(model, batch_size=4096, recompute="d7", max_overhead=1.0)
    assert "d7" in plan.recomputed
    with pytest.raises(HintError, match="nothing"):
        tf_memsaver.search_plan(model, batch_size=4096, keep="nothing")
    with pytest.raises(HintError, match="head"):
        tf_memsaver.search_plan(model, batch_size=4096, recompute="head")


def test_candidates_bound_where_segments_end(model: Any) -> None:
    plan = tf_memsaver.search_plan(model, batch_size=4096, strategy="min_peak", candidates=["d3", "d7", "d11"])
    assert {segment.stop for segment in plan.segments} <= {4, 8, 12, 16, 17}


def test_an_unknown_strategy_names_those_there_are() -> None:
    with pytest.raises(InvalidRequestError, match="min_peak"):
        tf_memsaver.optimize(models.chain(), batch_size=4, strategy="magic")


def test_plan_in_two_steps_through_a_file(model: Any, tmp_path: Path) -> None:
    plan = tf_memsaver.search_plan(model, batch_size=4096, strategy="min_peak")
    plan.save(tmp_path / "plan.json")
    loaded = tf_memsaver.Plan.load(tmp_path / "plan.json")
    assert loaded == plan and {"keras", "tensorflow", "tf_memsaver"} <= set(dict(plan.versions))
    optimized = tf_memsaver.apply_plan(model, loaded)
    assert optimized.memsaver_plan == plan
    assert tf_memsaver.strip(optimized).name == model.name
    with pytest.raises(PlanMismatchError):
        tf_memsaver.apply_plan(models.residual_net(), loaded)


def test_the_same_model_gets_the_same_plan(model: Any) -> None:
    plans = [tf_memsaver.search_plan(model, batch_size=4096).to_json() for _ in range(2)]
    for plan in plans:
        del plan["plan_seconds"]
    assert plans[0] == plans[1]


def test_optimizing_again_plans_anew(model: Any) -> None:
    first = tf_memsaver.optimize(model, batch_size=4096, strategy="min_peak")
    second = tf_memsaver.optimize(first, batch_size=2048, strategy="chen_sqrt")
    assert second.memsaver_plan.strategy == "chen_sqrt" and second.memsaver_plan.batch_size == 2048
    assert first.memsaver_plan.strategy == "min_peak" and type(first) is type(second)


@pytest.mark.parametrize("name", ["residual_net", "unet", "text_attention", "two_by_two", "transfer", "siamese"])
def test_optimize_real_shapes(name: str) -> None:
    model = getattr(models, name)()
    optimized = tf_memsaver.optimize(model, batch_size=256, strategy="min_peak")
    assert_trains_alike(model, optimized, ("as_written",))


def test_optimize_then_fit(model: Any) -> None:
    model.compile("adam", "mse", jit_compile=False)
    optimized = tf_memsaver.optimize(model, batch_size=32, strategy="min_peak")
    x, y = np.ones((64, 64), "float32"), np.zeros((64, 1), "float32")
    losses = optimized.fit(x, y, batch_size=32, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_estimate(model: Any) -> None:
    estimate = tf_memsaver.estimate(model, batch_size=4096)
    plain = tf_memsaver.search_plan(model, batch_size=4096).plain_peak_bytes
    assert estimate.peak_bytes == plain


def test_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.chain()
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(UnsupportedModelError, match="KERAS_BACKEND=tensorflow"):
        tf_memsaver.optimize(model, batch_size=4)


@pytest.mark.parametrize("thing", [None, "model", lambda x: x, object()])
def test_something_that_is_no_model(thing: Any) -> None:
    with pytest.raises(MemsaverError, match=r"keras\.Model"):
        tf_memsaver.optimize(thing, batch_size=4)


@pytest.mark.parametrize("name", ["call", "train_step", "compute_loss"])
def test_a_method_that_was_set_on_the_model(name: str) -> None:
    """The plan would be for the class's own, and the method run all the same: nothing would be recomputed."""
    model = models.chain()
    setattr(model, name, getattr(model, name))
    with pytest.raises(UnsupportedModelError, match=rf"model\.{name} = "):
        tf_memsaver.optimize(model, batch_size=4)


def test_a_call_that_was_set_on_an_inner_model_is_run() -> None:
    inner = models.chain()
    inner.name = "inner"
    plainly = inner.call
    inner.call = lambda x, training=None, mask=None: 2 * plainly(x, training=training)
    inputs = keras.Input(inner.input_shape[1:])
    model = keras.Model(inputs, layers.Dense(2)(layers.Dense(8, "tanh")(inner(layers.Dense(inputs.shape[-1])(inputs)))))
    x = np.ones((4, *inputs.shape[1:]), "float32")
    optimized = tf_memsaver.optimize(model, batch_size=4, strategy="recompute_all")
    assert np.array_equal(model(x, training=True).numpy(), optimized(x, training=True).numpy())


def test_a_call_that_was_set_on_a_layer_stays_there() -> None:
    model = models.chain()
    layer = model.layers[2]
    plainly = layer.call
    layer.call = lambda x, training=None: 2 * plainly(x)
    x = np.ones((4, *model.input_shape[1:]), "float32")
    before = model(x).numpy()
    optimized = tf_memsaver.optimize(model, batch_size=4, strategy="min_peak")
    assert "call" in vars(layer) and np.array_equal(before, optimized(x, training=True).numpy())


def test_an_unbuilt_sequential_model() -> None:
    with pytest.raises(UnsupportedModelError, match="not built"):
        tf_memsaver.optimize(keras.Sequential([layers.Dense(2)]), batch_size=4)


def test_open_dimensions_are_told() -> None:
    inputs = keras.Input((None,), dtype="int32", name="words")
    x = layers.Embedding(9, 16)(inputs)
    for _ in range(4):
        x = layers.Dense(16, activation="gelu")(x)
    model = keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))
    with pytest.raises(UnknownDimensionError, match="inputs="):
        tf_memsaver.optimize(model, batch_size=64)
    with pytest.raises(InvalidRequestError, match="takes"):
        tf_memsaver.optimize(model, batch_size=64, inputs={"words": tf.TensorSpec((None, 12))})
    optimized = tf_memsaver.optimize(model, batch_size=64, strategy="min_peak", inputs=tf.TensorSpec((None, 12)))
    assert optimized.memsaver_plan.recomputed
    assert tf_memsaver.verify(model, optimized, batch_size=4).identical
    assert optimized(tf.ones((2, 5), tf.int32)).shape == (2, 3)


def test_weights_keep_their_order() -> None:
    class HeadFirst(keras.Model):
        """Sets its last layer before the constructor finds the others."""

        def __init__(self) -> None:
            inputs = keras.Input((8,))
            self.head = layers.Dense(2, name="head")
            x = layers.Dense(8, "gelu", name="first")(inputs)
            super().__init__(inputs, self.head(layers.Dense(8, name="second")(x)))

    model = HeadFirst()
    optimized = tf_memsaver.optimize(model, batch_size=4, strategy="min_peak")
    if keras.__version__.startswith("3.15"):  # Keras 3.12 lists it last, like any other.
        assert model.variables[0].path == "head/kernel"
    assert [id(v) for v in optimized.variables] == [id(v) for v in model.variables]


def test_nested_models_of_dicts_are_taken_apart() -> None:
    image, text = keras.Input((8,), name="image"), keras.Input((8,), name="text")
    x = layers.Dense(8, "gelu", name="inside")(layers.Concatenate()([image, text]))
    inner = keras.Model({"image": image, "text": text}, x, name="inner")
    outer = {"image": keras.Input((8,), name="image"), "text": keras.Input((8,), name="text")}
    model = keras.Model(outer, layers.Dense(2)(inner(outer)))
    assert "inner/inside" in [unit.label for unit in tf_memsaver.capture_graph(model, batch_size=4).units]
