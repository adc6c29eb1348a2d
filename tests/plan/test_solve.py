"""What ``solve`` refuses, and what it writes into a plan."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.plan.strategies import Net, chain
from tf_memsaver.errors import (
    CertificationError,
    InfeasibleBudgetError,
    InfeasibleOverheadError,
    InvalidRequestError,
)
from tf_memsaver.plan import registry
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.registry import Choice
from tf_memsaver.plan.solve import planner_names, register_planner, solve
from tf_memsaver.plan.types import Plan, Request, Segment, SegmentMode


@pytest.fixture
def scratch_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_PLANNERS", dict(registry._PLANNERS))


def proposing(*segments: tuple[int, int, str]) -> None:
    @register_planner("mine")
    def mine(problem: Problem) -> Sequence[Segment]:
        return [Segment(start=a, stop=b, mode=SegmentMode(mode)) for a, b, mode in segments]


def test_an_unknown_strategy_names_all_planners():
    with pytest.raises(InvalidRequestError, match="'fastest'") as caught:
        solve(chain([8] * 3), Request(strategy="fastest"))
    assert all(name in str(caught.value) for name in planner_names())


@pytest.mark.parametrize("overhead", [-0.1, float("nan")])
def test_a_negative_overhead_is_refused(overhead: float):
    with pytest.raises(InvalidRequestError, match="max_overhead"):
        solve(chain([8] * 3), Request(max_overhead=overhead))


@pytest.mark.parametrize("budget", [0, -5])
def test_a_budget_that_is_not_positive_is_refused(budget: int):
    with pytest.raises(InvalidRequestError, match="budget"):
        solve(chain([8] * 3), Request(budget_bytes=budget))


def test_min_time_needs_a_budget():
    with pytest.raises(InvalidRequestError, match="budget"):
        solve(chain([8] * 3), Request(strategy="min_time"))


def test_an_infeasible_budget_names_the_least():
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(chain([8] * 6), Request(budget_bytes=38))
    assert (caught.value.budget_bytes, caught.value.least_bytes) == (38, 39)


def test_an_explicit_overhead_is_kept_or_refused():
    graph = chain([8] * 6)
    free = solve(graph, Request(strategy="min_peak"))
    with pytest.raises(InfeasibleOverheadError) as caught:
        solve(graph, Request(strategy="min_peak", max_overhead=free.step_overhead / 2))
    assert caught.value.least_overhead == free.step_overhead
    assert solve(graph, Request(strategy="min_peak", max_overhead=free.step_overhead)).peak_bytes == free.peak_bytes
    assert solve(graph, Request(max_overhead=0.0)).peak_bytes == free.plain_peak_bytes


@pytest.mark.usefixtures("scratch_table")
@pytest.mark.parametrize(
    ("segments", "reason"),
    [
        ([(0, 2, "store")], "end at position 2"),
        ([(0, 1, "store"), (2, 3, "store")], "does not follow"),
        ([(0, 3, "recompute")], "'dense_1'"),
        ([], "position 0"),
    ],
)
def test_a_broken_proposal_is_not_certified(segments: list[tuple[int, int, str]], reason: str):
    net = Net()
    x = net.dense(net.dense(net.dense(net.input(4), 8), 8, pinned="draws from hidden state"), 8)
    proposing(*segments)
    with pytest.raises(CertificationError, match=reason) as caught:
        solve(net.graph(x), Request(strategy="mine"))
    assert caught.value.strategy == "mine"


@pytest.mark.usefixtures("scratch_table")
def test_a_proposal_that_breaks_a_hint_is_not_certified():
    proposing((0, 3, "store"))
    with pytest.raises(CertificationError, match="'dense_1' lies in a store segment"):
        solve(chain([8] * 3), Request(strategy="mine", recompute=("dense_1",)))


@pytest.mark.usefixtures("scratch_table")
def test_a_planner_of_ones_own_is_certified_like_the_others():
    proposing((0, 2, "recompute"), (2, 3, "store"))
    plan = solve(chain([8] * 3), Request(strategy="mine"), versions={"keras": "3", "a": "1"})
    assert (plan.strategy, plan.planner) == ("mine", "mine")
    assert (plan.peak_bytes, plan.plain_peak_bytes) == (26, 33)
    assert plan.step_overhead == 8 / (24 + 1 + 16 + 6 + 32)
    assert plan.versions == (("a", "1"), ("keras", "3"))
    assert plan.plan_seconds > 0
    assert plan.recomputed == ("dense_0", "dense_1")


@pytest.mark.usefixtures("scratch_table")
def test_a_planner_that_chooses_names_its_choice():
    @register_planner("chooser")
    def chooser(problem: Problem) -> Choice:
        return Choice(planner="other", segments=(Segment(start=0, stop=3, mode=SegmentMode.STORE),))

    plan: Plan = solve(chain([8] * 3), Request(strategy="chooser"))
    assert (plan.strategy, plan.planner) == ("chooser", "other")
