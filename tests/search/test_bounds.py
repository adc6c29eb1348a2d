"""Lower bounds on the time of replays, against brute force and against plans that exist."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.strategies import within_a_budget
from tf_memsaver.ir.graph import Graph
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import solve
from tf_memsaver.search.bounds import MOST_CUTS, by_bytes, least_seconds, of_one_level
from tf_memsaver.search.nested import several_levels
from tf_memsaver.search.one_level import THIN_CUTS, OneLevel
from tools.shared.nets import Net, chain

examples = settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow], derandomize=True)

IRREGULAR = [7, 13, 4, 9, 11, 3, 8, 14, 5, 6, 12, 10, 2, 9, 7, 13]


@examples
@given(st.data())
def test_small_plans_are_proven_to_be_the_quickest(data: st.DataObject):
    problem, plans, budget = within_a_budget(data, "min_time")
    plan = solve(problem.graph, replace(problem.request, budget_bytes=budget))
    assert plan.bound_seconds == min(found.replay_seconds for found in plans if found.peak_bytes <= budget)
    assert plan.gap == 0.0


@examples
@given(st.data())
def test_no_plan_is_quicker_than_the_bounds(data: st.DataObject):
    problem, plans, budget = within_a_budget(data, "min_time")
    least = min(plan.replay_seconds for plan in plans if plan.peak_bytes <= budget)
    several = [plan.replay_seconds for plan in problem.once(several_levels) if plan.peak_bytes <= budget]
    assert by_bytes(problem, budget) <= min([least, *several])
    # Whatever is known of other plans, and however few labels there may be.
    for front in (2, 3, 64):
        assert of_one_level(problem, budget, 2 * least + 1, front) <= least
    assert of_one_level(problem, budget, 2 * least + 1) == least


def test_fewer_labels_give_a_weaker_bound():
    graph = chain(IRREGULAR)
    problem = Problem.build(graph, Request())
    smallest, plain = problem.once(OneLevel).smallest.peak_bytes, problem.plain.peak_bytes
    weaker = 0
    for budget in range(smallest, plain, 7):
        found = OneLevel(problem).quickest(budget)
        assert found is not None
        bounds = [of_one_level(problem, budget, 1e9, front) for front in (2, 4, 8, 256)]
        assert bounds[-1] == found.replay_seconds
        assert max(bounds) == bounds[-1]
        weaker += bounds[0] < bounds[-1]
    assert weaker


def test_plans_of_others_have_a_gap():
    graph = chain([8] * 30)
    least = solve(graph, Request(strategy="min_peak")).peak_bytes
    best = solve(graph, Request(strategy="auto", budget_bytes=2 * least))
    other = solve(graph, Request(strategy="chen_greedy", budget_bytes=2 * least))
    assert other.bound_seconds == best.bound_seconds
    assert best.gap == 0.0 and other.gap is not None
    assert (1 + other.gap) * (1 + best.step_overhead) == pytest.approx(1 + other.step_overhead)
    assert other.gap > 0.01


@pytest.mark.parametrize("units", [60, MOST_CUTS + 20])
def test_bounds_of_several_levels_and_of_many_cuts_hold_for_any_schedule(units: int):
    graph = chain([8] * units)
    problem = Problem.build(graph, Request())
    several = min(problem.once(several_levels), key=lambda found: found.peak_bytes)
    budgets = [several.peak_bytes, problem.once(OneLevel).smallest.peak_bytes, problem.plain.peak_bytes * 2 // 3]
    for budget in budgets[: 3 if units > MOST_CUTS else 1]:
        plan = solve(graph, Request(budget_bytes=budget))
        assert plan.bound_seconds == by_bytes(problem, budget) > 0
        assert plan.gap is not None and 0 <= plan.gap < 0.5


def test_plans_from_a_narrowed_search_are_held_against_all_cuts():
    net = Net()
    x = net.dense(net.input(4), 8)
    for _ in range(20):
        y = net.relu(net.norm(net.dense(x, 8)))
        x = net.relu(net.add(x, net.norm(net.dense(y, 8))))
    graph = net.graph(net.dense(x, 1))
    assert THIN_CUTS < len(graph.cuts) <= MOST_CUTS
    problem = Problem.build(graph, Request())
    plan = solve(graph, Request(budget_bytes=problem.plain.peak_bytes * 2 // 5))
    assert plan.bound_seconds is not None and plan.bound_seconds > by_bytes(problem, plan.peak_bytes)
    assert plan.gap is not None and 0 <= plan.gap < 0.02


def test_the_bytes_of_what_is_dropped_on_a_chain():
    """Six layers of 8 bytes, plain 60 bytes at the last weight gradient: see ``test_exact``."""
    problem = Problem.build(chain([8] * 6), Request())
    # 16 bytes less are two of the outputs, 8 s each.
    assert by_bytes(problem, 60) == 0.0
    assert by_bytes(problem, 44) == 16.0
    assert by_bytes(problem, 56) == 4.0


def test_what_must_be_kept_counts_for_nothing():
    net = Net()
    x = net.input(4)
    for _ in range(6):
        x = net.dense(x, 8, pinned="draws from hidden state")
    graph: Graph = net.graph(x)
    problem = Problem.build(graph, Request())
    assert by_bytes(problem, problem.plain.peak_bytes - 8) == 0.0


def test_the_plain_step_cannot_be_beaten_and_without_a_budget_nothing_is_said():
    graph = chain([8] * 6)
    fits = solve(graph, Request(budget_bytes=10**6))
    assert (fits.bound_seconds, fits.gap) == (0.0, 0.0)
    for strategy in ("auto", "min_peak", "nested", "chen_sqrt", "plain"):
        plan = solve(graph, Request(strategy=strategy))
        assert (plan.bound_seconds, plan.gap) == (None, None)
    problem = Problem.build(graph, Request())
    assert least_seconds(problem, problem.once(OneLevel).smallest) is None


def test_plans_without_a_bound_are_readable():
    plan = solve(chain([8] * 6), Request(budget_bytes=44))
    data = json.loads(json.dumps(plan.to_json()))
    assert Plan.from_json(data) == plan and plan.bound_seconds == 16.0
    del data["bound_seconds"], data["gap"]
    assert Plan.from_json(data) == replace(plan, bound_seconds=None, gap=None)
