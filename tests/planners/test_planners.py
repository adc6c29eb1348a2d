"""One suite that every planner in the table passes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.strategies import graphs, requests
from tf_memsaver.errors import InfeasibleBudgetError, InfeasibleOverheadError
from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import SegmentMode, check_cover
from tf_memsaver.options.table import DEFAULT_MAX_OVERHEAD
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import planner_names, solve
from tools.shared.nets import chain

NEEDS_BUDGET = {"min_time"}
examples = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
every_planner = pytest.mark.parametrize("strategy", planner_names())


def ample(graph: Graph, request: Request) -> Request:
    """Give a budget that everything fits to the planners that need one."""
    if request.strategy not in NEEDS_BUDGET:
        return request
    return dataclasses.replace(request, budget_bytes=10 * sum(value.nbytes for value in graph.values))


def solved(graph: Graph, request: Request) -> Plan | None:
    """Return the plan; None where the hints force more recomputation than ``auto`` may spend."""
    try:
        return solve(graph, ample(graph, request))
    except InfeasibleOverheadError:
        assert request.recompute
        return None


def without_seconds(plan: Plan) -> Plan:
    return dataclasses.replace(plan, plan_seconds=0.0)


def test_the_table_has_the_planners_of_the_design():
    assert {"auto", "chen_greedy", "chen_sqrt", "keep_products", "min_peak", "min_time", "nested", "plain"} <= set(
        planner_names()
    )


@every_planner
@examples
@given(data=st.data())
def test_the_plan_is_what_the_simulator_says(strategy: str, data: st.DataObject):
    graph = data.draw(graphs())
    request = data.draw(requests(graph, strategy))
    plan = solved(graph, request)
    if plan is not None:
        check_cover(plan.segments, 0, len(graph.units))
        problem = Problem.build(graph, request)
        timeline = problem.simulator.run(plan.segments)
        assert plan.peak_bytes == timeline.peak_bytes
        assert plan.plain_peak_bytes == problem.plain.peak_bytes
        assert plan.step_overhead == pytest.approx(timeline.step_seconds / graph.step_seconds - 1, abs=1e-12)


@every_planner
@examples
@given(data=st.data())
def test_hints_are_kept(strategy: str, data: st.DataObject):
    graph = data.draw(graphs())
    request = data.draw(requests(graph, strategy))
    plan = solved(graph, request)
    if plan is not None:
        replayed = set(plan.recomputed)
        assert replayed.isdisjoint(request.keep)
        assert replayed.issuperset(request.recompute)
        assert replayed.isdisjoint(unit.label for unit in graph.units if unit.pinned)


@every_planner
@examples
@given(data=st.data())
def test_candidates_are_where_segments_end(strategy: str, data: st.DataObject):
    graph = data.draw(graphs(pins=False))
    chosen = data.draw(st.sampled_from(graph.units))
    plan = solved(graph, Request(strategy=strategy, candidates=(chosen.label,)))
    assert plan is not None
    assert {segment.stop for segment in plan.segments} <= {chosen.index + 1, len(graph.units)}


@every_planner
@examples
@given(graph=graphs())
def test_never_above_plain(strategy: str, graph: Graph):
    plan = solved(graph, Request(strategy=strategy))
    assert plan is not None
    assert plan.peak_bytes <= plan.plain_peak_bytes


@pytest.mark.parametrize("strategy", ["auto", "min_peak"])
@examples
@given(graph=graphs())
def test_a_plan_that_gains_nothing_leaves_the_model_as_it_is(strategy: str, graph: Graph):
    plan = solve(graph, Request(strategy=strategy))
    assert plan.peak_bytes < plan.plain_peak_bytes or not plan.recomputed_units


@every_planner
@examples
@given(data=st.data())
def test_the_same_request_gives_the_same_plan(strategy: str, data: st.DataObject):
    graph = data.draw(graphs())
    request = data.draw(requests(graph, strategy))
    first, second = solved(graph, request), solved(graph, request)
    assert (first is None) == (second is None)
    if first is not None and second is not None:
        assert without_seconds(first) == without_seconds(second)


@pytest.mark.parametrize("strategy", ["auto", "min_time"])
@examples
@given(data=st.data())
def test_a_smaller_budget_never_gives_a_larger_peak_or_less_time(strategy: str, data: st.DataObject):
    graph = data.draw(graphs())
    request = data.draw(requests(graph, strategy))
    least = solve(graph, dataclasses.replace(request, strategy="min_peak")).peak_bytes
    most = max(Problem.build(graph, request).plain.peak_bytes, least)
    budgets = sorted(data.draw(st.lists(st.integers(least, most), min_size=2, max_size=4)))
    plans = [solve(graph, dataclasses.replace(request, budget_bytes=budget)) for budget in budgets]
    assert all(plan.peak_bytes <= budget for plan, budget in zip(plans, budgets, strict=True))
    assert [plan.peak_bytes for plan in plans] == sorted(plan.peak_bytes for plan in plans)
    assert [plan.step_overhead for plan in plans] == sorted((plan.step_overhead for plan in plans), reverse=True)


def _able(strategy: str) -> tuple[str, ...]:
    """Return the planners that reach what the error of ``strategy`` names: one level does not reach what several do."""
    return ("auto", "nested") if strategy in ("auto", "nested") else ("auto", "min_time", "min_peak")


@every_planner
@examples
@given(data=st.data())
def test_the_least_budget_that_an_error_names_works(strategy: str, data: st.DataObject):
    graph = data.draw(graphs())
    request = dataclasses.replace(data.draw(requests(graph, strategy)), budget_bytes=1)
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(graph, request)
    least = caught.value.least_bytes
    for able in _able(strategy):
        plan = solve(graph, dataclasses.replace(request, strategy=able, budget_bytes=least))
        assert plan.peak_bytes <= least
    if strategy in ("auto", "nested", "min_peak", "min_time"):
        with pytest.raises(InfeasibleBudgetError):
            solve(graph, dataclasses.replace(request, budget_bytes=least - 1))


@every_planner
@examples
@given(data=st.data())
def test_the_least_budget_works_where_the_allocator_leaves_holes(strategy: str, data: st.DataObject):
    # From 256 KiB on, buffers come from the CPU allocator's pool: what it reports is above the bytes of the tensors.
    graph = data.draw(graphs(scales=(200_000,)))
    request = dataclasses.replace(data.draw(requests(graph, strategy)), budget_bytes=1)
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(graph, request)
    least = caught.value.least_bytes
    if strategy in ("auto", "min_time") and not request.recompute:
        problem = Problem.build(graph, request)
        assert least <= problem.simulator.highest_peak(problem.store_all)
    for able in _able(strategy):
        unlimited = able in ("min_peak", "nested")
        able_request = dataclasses.replace(request, strategy=able, budget_bytes=None if unlimited else least)
        assert solve(graph, able_request).peak_bytes <= least
    predicted = caught.value.predicted_bytes
    if predicted:
        assert predicted <= least
        assert solve(graph, dataclasses.replace(request, budget_bytes=predicted)).peak_bytes <= predicted


@examples
@given(graph=graphs())
def test_auto_without_a_budget_keeps_to_the_default_overhead(graph: Graph):
    plan = solve(graph, Request())
    assert plan.step_overhead <= DEFAULT_MAX_OVERHEAD
    assert plan.peak_bytes <= plan.plain_peak_bytes


def test_several_levels_need_about_log_n_of_the_memory():
    """Within the memory of one level, and far below on long chains; children only where one level is not enough."""
    peaks = {}
    for count in (16, 64):
        graph = chain([1000] * count)
        one, several = (solve(graph, Request(strategy=name)) for name in ("min_peak", "nested"))
        peaks[count] = several.peak_bytes
        assert several.peak_bytes < one.peak_bytes
        assert any(segment.children for segment in several.segments)
        assert not any(segment.children for segment in solve(graph, Request(budget_bytes=one.peak_bytes)).segments)
        within = solve(graph, Request(budget_bytes=(one.peak_bytes + several.peak_bytes) // 2))
        assert within.planner == "nested" and within.peak_bytes <= within.request.budget_bytes
        assert one.step_overhead < within.step_overhead <= several.step_overhead
    assert peaks[64] < 1.5 * peaks[16]


def test_auto_stores_everything_where_plain_fits():
    graph = chain([8] * 6)
    plan = solve(graph, Request(budget_bytes=60))
    assert (plan.planner, plan.strategy, plan.step_overhead) == ("plain", "auto", 0.0)
    assert [segment.mode for segment in plan.segments] == [SegmentMode.STORE]


def test_chen_sqrt_cuts_a_chain_into_about_sqrt_n_runs():
    plan = solve(chain([8] * 16), Request(strategy="chen_sqrt"))
    assert [segment.stop for segment in plan.segments] == [4, 8, 12, 16]
    assert [segment.mode for segment in plan.segments] == [SegmentMode.RECOMPUTE] * 3 + [SegmentMode.STORE]


def test_a_long_chain_needs_about_sqrt_n_of_the_memory():
    graph = chain([100] * 400)
    plan = solve(graph, Request(strategy="min_peak"))
    resident = 4 + 400 + 400  # input, weights, and their gradients, which stay
    share = (plan.peak_bytes - resident) / (plan.plain_peak_bytes - resident)
    # 400 kept outputs against k kept ones and a segment of 400 / k, least at k = 20; segments that shrink towards the
    # end of the chain, where more is kept already, do better than equal ones: √(2n) ≈ 28 and two gradients.
    assert 25 / 400 < share < 35 / 400
    assert plan.step_overhead < 1 / 3
