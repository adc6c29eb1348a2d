"""A plan that saves little says why, and what to try."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tf_memsaver.errors import InfeasibleBudgetError
from tf_memsaver.ir.graph import CODE, Graph, MemoryKind
from tf_memsaver.judge.simulate import Simulator
from tf_memsaver.plan.advice import advice
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import solve
from tools.shared.nets import Net, chain

RANDOM = "runs RandomUniform, whose hidden state cannot be replayed"


def advised(graph: Graph, **request: object) -> str:
    return solve(graph, Request(**request)).advice  # type: ignore[arg-type]


def deep(pinned: str = "", weight: int = 1) -> Graph:
    net = Net(scale=1 << 20)
    x = net.input(1)
    for _ in range(12):
        x = net.relu(net.dense(x, 8, weight=weight, pinned=pinned))
    return net.graph(x)


def test_a_plan_that_saves_has_no_advice() -> None:
    assert advised(deep(), strategy="min_peak") == ""


def test_what_is_pinned_is_named_with_its_reason() -> None:
    found = advised(deep(pinned=RANDOM))
    assert "recomputes nothing, so it saves no memory" in found
    assert f"'dense_0' {RANDOM}" in found and "12 of 24 layers cannot be recomputed" in found
    assert "Try granularity='op', which plans inside all layers, or" in found
    by_layers = advised(deep(pinned=RANDOM), granularity="layer")
    assert "Try granularity='auto', which also plans inside layers, or" in by_layers
    noted = advised(replace(deep(pinned=RANDOM), note="by layers alone, since its steps are eager"))
    assert "The plan is by layers alone, since its steps are eager. Try granularity='op'" in noted
    ends = advised(replace(deep(pinned=RANDOM), note="by layers alone: write the loop in Python."))
    assert "The plan is by layers alone: write the loop in Python. Try" in ends
    assert "Try granularity='op', which" in advised(deep(pinned=RANDOM), granularity="auto")
    assert "granularity" not in advised(deep(pinned=RANDOM), granularity="op")


def test_much_that_a_cpu_does_not_count_is_told() -> None:
    graph = replace(chain([8] * 12, scale=1 << 20), device="CPU")
    assert "below 256 KiB" not in advised(graph)
    # Each activation is now a list of ten thousand.
    lists = (replace(value, parts=10_000) if value.kind is MemoryKind.ACTIVATION else value for value in graph.values)
    values = tuple(lists)
    assert "in tensors below 256 KiB, such as those of single time steps" in advised(replace(graph, values=values))


def test_code_between_layers_is_no_layer_that_cannot_be_replayed() -> None:
    graph = deep()
    code = {"kind": CODE, "pinned": "is Python code between networks, which runs once"}
    units = tuple(replace(unit, **code) if unit.index % 2 else unit for unit in graph.units)
    found = advised(replace(graph, units=units))
    assert "are made by code between layers" in found and "Try layers (keras.layers.Layer) for it" in found
    assert "layers cannot be replayed" not in found


def test_weights_that_take_it_all() -> None:
    found = advised(deep(weight=10_000))
    assert "weights, optimizer slots, gradients and the input batch take" in found.lower()
    assert "larger batch" in found


def test_one_operation_at_the_peak() -> None:
    net = Net(scale=1 << 20)
    x = net.dense(net.input(1), 1)
    found = advised(net.graph(net.dense(net.scratch(x, 1, temporary=1000), 1)))
    assert "peak is at one operation (Expand, forward of 'scratch_1')" in found


def slices(count: int) -> Graph:
    """Layers that each take a small part of one large tensor: the gradient of each part is as large as the whole."""
    net = Net(scale=1 << 20)
    whole = net.dense(net.input(1), 100)
    total = net.dense(whole, 1)
    for _ in range(count - 1):
        total = net.add(total, net.dense(whole, 1))
    return net.graph(total)


def test_gradients_at_the_peak_are_named_with_the_layer_that_makes_them() -> None:
    found = advised(slices(10), granularity="op")
    assert "are gradients of intermediate results, which are needed whatever is recomputed" in found
    assert "are 9 results of MatMulGrad" in found and "in the backward pass of 'dense_" in found
    assert "a smaller batch" in found and "granularity" not in found
    assert "gradients of intermediate" not in advised(deep(), max_overhead=0.0)


@pytest.mark.parametrize("granularity", ["auto", "op"])
def test_gradients_of_slices_are_one_in_plans_by_operations(granularity: str) -> None:
    graph = slices(10)
    renamed = (replace(op, type=op.type.replace("MatMulGrad", "StridedSliceGrad")) for op in graph.ops)
    found = advised(replace(graph, ops=tuple(renamed)), granularity=granularity)
    assert "results of StridedSliceGrad" in found
    assert ("Try granularity='op', where all slices" in found) is (granularity == "auto")


def test_the_plain_step_is_what_was_asked_for() -> None:
    assert advised(deep(), strategy="plain").endswith("strategy='plain' asks for that")


def test_a_budget_that_the_plain_step_keeps() -> None:
    found = advised(deep(), budget_bytes=1 << 40)
    assert "already fits the budget of 1.00 TiB" in found


def test_a_budget_that_no_plan_keeps_by_layers_may_have_one_inside_them() -> None:
    net = Net(scale=1 << 20)
    x = net.input(1)
    for _ in range(12):
        x = net.norm(net.dense(x, 8))
    for granularity, says in (("layer", "Try granularity='auto'"), ("auto", "Try granularity='op'"), ("op", "")):
        with pytest.raises(InfeasibleBudgetError) as caught:
            advised(net.graph(x), granularity=granularity, budget_bytes=1 << 20)
        assert says in caught.value.remedy and bool(caught.value.remedy) == bool(says)
    with pytest.raises(InfeasibleBudgetError) as caught:
        advised(deep(), granularity="layer", budget_bytes=1 << 20)
    assert not caught.value.remedy


def test_little_time_allowed() -> None:
    found = advised(chain([8] * 12, scale=1 << 20), max_overhead=0.0)
    assert "at most 0% longer" in found and "a larger max_overhead" in found


def skips(count: int, joined: bool) -> Graph:
    """Layers in a row whose results are added up, with no place to cut inside them but at one end."""
    net = Net(scale=1 << 20)
    x, total = net.input(1), -1
    for _ in range(count):
        x = net.relu(net.dense(x, 8))
        total = x if total < 0 else net.add(total, x)
    graph = net.graph(net.dense(total, 8))
    return replace(graph, joined=tuple(range(2, len(graph.units))) if joined else ())


def with_figures(plan: Plan, saved: float, overhead: float) -> Plan:
    return replace(plan, peak_bytes=round((1 - saved) * plan.plain_peak_bytes), step_overhead=overhead)


@pytest.mark.parametrize(("saved", "overhead", "says"), [(0.1, 0.29, True), (0.1, 0.08, False), (0.5, 0.9, False)])
def test_a_plan_that_costs_more_than_it_saves_says_so(saved: float, overhead: float, says: bool) -> None:
    simulator = Simulator(skips(6, joined=True))
    plan = with_figures(solve(skips(6, joined=False), Request()), saved, overhead)
    found = advice(simulator, plan)
    assert bool(found) == says
    if says:
        assert "saves 10.0% of the peak, for a step that takes 29% longer" in found
        assert "may end at 1 of 17 places" in found and "since 6 tensors are added" in found
        assert "an activation after each term" in found


@pytest.mark.parametrize("asked", [{"budget_bytes": 70 << 20}, {"strategy": "min_peak"}])
def test_a_budget_or_a_strategy_tells_what_is_to_be_saved_whatever_it_costs(asked: dict[str, Any]) -> None:
    simulator = Simulator(skips(6, joined=True))
    plan = replace(solve(skips(6, joined=False), Request()), request=Request(**asked), highest_peak_bytes=0)
    assert advice(simulator, with_figures(plan, 0.1, 0.29)) == ""


def test_advice_travels_with_the_plan() -> None:
    plan = solve(deep(pinned=RANDOM), Request())
    assert plan.advice and Plan.from_json(plan.to_json()) == plan
    older = plan.to_json()
    del older["advice"]
    assert Plan.from_json(older).advice == ""


@pytest.mark.parametrize("granularity", ["layer", "op"])
def test_the_summary_is_one_line(granularity: str) -> None:
    text = str(solve(deep(), Request(strategy="min_peak", granularity=granularity)))
    assert "\n" not in text and "predicted peak" in text and "of 24" in text
