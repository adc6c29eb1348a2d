"""A plan that saves little says why, and what to try."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tf_memsaver.ir.graph import Graph
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
    assert f"'dense_0' {RANDOM}" in found and "12 of 24 layers cannot be replayed" in found
    assert "Try granularity='op', which cuts inside all layers, or" in found
    by_layers = advised(deep(pinned=RANDOM), granularity="layer")
    assert "Try granularity='auto', which cuts inside layers, too, or" in by_layers
    noted = advised(replace(deep(pinned=RANDOM), note="by layers alone, since its steps are eager"))
    assert "The plan is by layers alone, since its steps are eager. Try granularity='op'" in noted
    assert "Try granularity='op', which" in advised(deep(pinned=RANDOM), granularity="auto")
    assert "granularity" not in advised(deep(pinned=RANDOM), granularity="op")


def test_weights_that_take_it_all() -> None:
    found = advised(deep(weight=10_000))
    assert "weights, optimizer slots, gradients and the input batch take" in found.lower()
    assert "larger batch" in found


def test_one_operation_at_the_peak() -> None:
    net = Net(scale=1 << 20)
    x = net.dense(net.input(1), 1)
    found = advised(net.graph(net.dense(net.scratch(x, 1, temporary=1000), 1)))
    assert "peak is at one operation (Expand, forward of 'scratch_1')" in found


def test_the_plain_step_is_what_was_asked_for() -> None:
    assert advised(deep(), strategy="plain").endswith("strategy='plain' asks for that")


def test_a_budget_that_the_plain_step_keeps() -> None:
    found = advised(deep(), budget_bytes=1 << 40)
    assert "within the budget of 1.00 TiB as it is" in found


def test_little_time_allowed() -> None:
    found = advised(chain([8] * 12, scale=1 << 20), max_overhead=0.0)
    assert "at most 0% longer" in found and "a larger max_overhead" in found


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
