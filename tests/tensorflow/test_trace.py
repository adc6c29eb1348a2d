"""A step that is traced once serves every estimate, plan, curve and rewriting of its model."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_memsaver
from tf_memsaver.callbacks import Optimize
from tf_memsaver.capture import model_step
from tf_memsaver.errors import HintError, InvalidRequestError


@pytest.fixture
def steps_traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the models whose steps are traced, as they are."""
    found: list[str] = []
    traced_graph = model_step.traced_graph

    def noted(source: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(source.name)
        return traced_graph(source, *args, **kwargs)

    monkeypatch.setattr(model_step, "traced_graph", noted)
    return found


def chain() -> Any:
    inputs = keras.Input((32,))
    x = inputs
    for _ in range(12):
        x = keras.layers.Dense(32, activation="gelu")(x)
    model = keras.Model(inputs, keras.layers.Dense(1)(x), name="chain")
    model.compile("adam", "mse")
    return model


def data() -> Any:
    return tf.data.Dataset.from_tensor_slices((np.ones((64, 32), "f4"), np.ones((64, 1), "f4"))).batch(16)


def test_one_trace_serves_all(steps_traced: list[str]) -> None:
    model = chain()
    traced = tf_memsaver.trace(model, data=data())
    plain = traced.estimate().peak_bytes
    least = traced.plan(strategy="min_peak").peak_bytes
    plans = [traced.plan(budget=budget) for budget in (plain, (plain + least) // 2, least)]
    assert [plan.peak_bytes <= plan.request.budget_bytes for plan in plans] == [True] * 3
    assert plans[0].peak_bytes > plans[2].peak_bytes
    curve = traced.curve(points=5)
    assert curve[0].peak_bytes == plain and curve[-1].peak_bytes < plain
    assert traced.plan(strategy="min_peak", keep="dense_3").request.keep == ("dense_3",)
    first = traced.apply(plans[1])
    second = traced.apply(curve[-1])
    assert first.memsaver_plan is plans[1] and second.memsaver_plan is curve[-1]
    second.fit(data(), shuffle=False, verbose=0)
    assert steps_traced == ["chain"]
    assert "chain" in repr(traced) and "16" in repr(traced)


@pytest.mark.parametrize("hint", ["keep", "recompute", "candidates"])
@pytest.mark.parametrize(
    "verb", [tf_memsaver.optimize, tf_memsaver.search_plan, tf_memsaver.memory_time_curve, tf_memsaver.max_batch_size]
)
def test_a_name_of_no_layer_is_told_before_the_trace(verb: Any, hint: str, steps_traced: list[str]) -> None:
    name = f"{chain().layers[4].name}x"
    with pytest.raises(HintError, match=f"{hint}='{name}' matches no layer. Did you mean dense"):
        verb(chain(), data=data(), granularity="layer", **{hint: [name]})
    assert not steps_traced


def test_names_of_parts_that_a_trace_tells_are_not_refused_before_it() -> None:
    own = type("Own", (keras.layers.Dense,), {})
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(8), own(8, name="own"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    name = tf_memsaver.capture_graph(model, data=data(), granularity="op").units[1].label
    for options in ({"granularity": "op", "keep": name}, {"keep": "own"}, {"keep": "dense*"}):
        assert tf_memsaver.search_plan(model, data=data(), **options).request.keep
    plan = tf_memsaver.search_plan(tf_memsaver.optimize(chain(), data=data()), data=data(), keep="dense_*")
    assert plan.request.keep == ("dense_*",)


def test_the_verbs_are_short_forms(steps_traced: list[str]) -> None:
    model = chain()
    traced = tf_memsaver.trace(model, data=data())
    kept = steps_traced.copy()
    for made, expected in (
        (tf_memsaver.search_plan(model, data=data(), max_overhead=0.2), traced.plan(max_overhead=0.2)),
        (tf_memsaver.memory_time_curve(model, data=data(), points=3)[-1], traced.curve(points=3)[-1]),
        (tf_memsaver.optimize(model, data=data()).memsaver_plan, traced.plan()),
    ):
        assert (made.segments, made.peak_bytes) == (expected.segments, expected.peak_bytes)
    assert tf_memsaver.estimate(model, data=data()) == traced.estimate()
    # Each verb traces once; optimize does so for the plan and not again to apply it.
    assert len(steps_traced) == len(kept) + 4


def test_a_plan_is_of_the_units_that_were_traced() -> None:
    traced = tf_memsaver.trace(chain(), data=data(), granularity="op")
    assert traced.plan().request.granularity == "op"
    with pytest.raises(TypeError, match="granularity"):
        traced.plan(granularity="layer")
    with pytest.raises(InvalidRequestError, match="budget"):
        traced.plan(budget="much")


def test_an_optimized_model_is_traced_as_the_plain_one_and_gets_another_plan() -> None:
    model = chain()
    first = tf_memsaver.optimize(model, data=data(), max_overhead=0.1)
    again = tf_memsaver.optimize(first, data=data(), strategy="min_peak")
    assert again.memsaver_plan.peak_bytes < first.memsaver_plan.peak_bytes
    assert type(tf_memsaver.strip(again)) is type(model) and again.compiled and again.optimizer is model.optimizer
    again.fit(data(), shuffle=False, verbose=0)


class Blocks(keras.Model):
    """A network with a ``call`` of its own: blocks of layers."""

    def __init__(self) -> None:
        super().__init__(name="blocks")
        self.blocks = [keras.Sequential([keras.layers.Dense(64, "gelu"), keras.layers.Dense(32)]) for _ in range(6)]
        self.last = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.mark.parametrize("make", [chain, Blocks])
def test_every_verb_takes_an_optimized_model_for_the_plain_one(make: Any, steps_traced: list[str]) -> None:
    model = make()
    model.compile("adam", "mse")
    first = tf_memsaver.optimize(model, data=data(), strategy="recompute_all")
    assert first.memsaver_plan.recomputed
    steps_traced.clear()
    again = tf_memsaver.optimize(first, data=data(), strategy="recompute_all")
    assert len(steps_traced) == 1, "the plan is applied to what was traced"
    assert again.memsaver_plan.segments == first.memsaver_plan.segments
    assert tf_memsaver.estimate(first, data=data()) == tf_memsaver.estimate(model, data=data())
    graphs = [tf_memsaver.capture_graph(each, data=data()) for each in (first, model)]
    assert graphs[0].units == graphs[1].units
    how: Any = {"data": data(), "budget": "1MiB", "predict_only": True, "strategy": "recompute_all"}
    found = [tf_memsaver.max_batch_size(each, **how).batch_size for each in (first, model)]
    assert found[0] == found[1]
    callback = Optimize(data=data(), strategy="recompute_all")
    first.fit(data(), shuffle=False, verbose=0, callbacks=[callback])
    assert callback.plan.segments == first.memsaver_plan.segments
