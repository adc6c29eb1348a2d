"""More budget never gives a slower plan, though what the allocator adds rises and falls from plan to plan."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from tf_memsaver.errors import InfeasibleBudgetError
from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.judge.simulate import Simulator
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.registry import planner_named, register_planner
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import Plans, solve
from tools.shared.nets import chain


def on_a_cpu(sizes: Sequence[int]) -> Graph:
    return dataclasses.replace(chain(sizes, scale=2**20), device="CPU")


def of_chance(seed: int) -> Graph:
    chance = random.Random(seed)
    return on_a_cpu([chance.randint(3, 14) for _ in range(chance.choice([6, 8, 10, 14]))])


def plans_for_ever_more(graph: Graph, strategy: str, step: int) -> list[Plan]:
    """Return plans for budgets from the least peak to the plain step's, without those that are above their budget."""
    plans = Plans(graph)
    least = plans.plan(Request(strategy="min_peak")).peak_bytes
    most = plans.plan(Request(strategy="plain")).highest_peak_bytes
    budgets = range(least, most + step, step)
    made = [plans.plan(Request(strategy=strategy, budget_bytes=budget)) for budget in budgets]
    assert all(plan.peak_bytes <= budget for plan, budget in zip(made, budgets, strict=True))
    assert made[-1].step_overhead == 0
    return [plan for plan, budget in zip(made, budgets, strict=True) if plan.highest_peak_bytes <= budget]


@pytest.mark.parametrize("strategy", ["auto", "min_time"])
@pytest.mark.parametrize("seed", [3, 6])
def test_more_budget_never_gives_a_slower_plan(seed: int, strategy: str) -> None:
    overheads = [plan.step_overhead for plan in plans_for_ever_more(of_chance(seed), strategy, 7 * 2**20)]
    assert overheads == sorted(overheads, reverse=True) and len(set(overheads)) > 4


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5, 6, 7, 8])
def test_more_budget_never_gives_a_slower_plan_however_little_more(seed: int) -> None:
    overheads = [plan.step_overhead for plan in plans_for_ever_more(of_chance(seed), "auto", 2**20)]
    assert overheads == sorted(overheads, reverse=True)


@pytest.mark.usefixtures("scratch_table")
def test_a_planner_is_not_asked_often() -> None:
    graph, asked = on_a_cpu([8, 12, 5, 9, 7, 11, 6, 10]), list[int]()

    @register_planner("mine", falls_back_to=("min_peak",))
    def mine(problem: Problem) -> object:
        asked.append(problem.request.budget_bytes or 0)
        return planner_named("min_time").propose(problem)

    plain, least = (solve(graph, Request(strategy=name)).highest_peak_bytes for name in ("plain", "min_peak"))
    for share in (0.95, 0.8, 0.6, 0.5):
        asked.clear()
        solve(graph, Request(strategy="mine", budget_bytes=least + int(share * (plain - least))))
        assert len(asked) < 12
    asked.clear()
    # What takes the least takes more: no limit needs to be asked for.
    with pytest.raises(InfeasibleBudgetError):
        solve(graph, Request(strategy="mine", budget_bytes=least // 2))
    assert not asked


@pytest.mark.usefixtures("scratch_table")
def test_a_plan_of_least_memory_is_stored_again_where_the_planner_finds_nothing_quicker() -> None:
    graph = on_a_cpu([8, 12, 5, 9, 7, 11, 6, 10])
    count = len(graph.units)

    @register_planner("mine", falls_back_to=("min_peak",))
    def mine(problem: Problem) -> Sequence[Segment]:
        return [
            Segment(start=0, stop=count - 1, mode=SegmentMode.RECOMPUTE),
            Segment(start=count - 1, stop=count, mode=SegmentMode.STORE),
        ]

    least = solve(graph, Request(strategy="min_peak"))
    budget = (least.highest_peak_bytes + Simulator(graph).highest_peak(Problem.build(graph, Request()).store_all)) // 2
    plan = solve(graph, Request(strategy="mine", budget_bytes=budget))
    assert plan.planner == "min_peak" and plan.highest_peak_bytes <= budget
    assert 0 < plan.step_overhead < least.step_overhead
