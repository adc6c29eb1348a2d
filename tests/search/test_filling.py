"""What a budget leaves room for is stored."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import graphs
from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import Segment, SegmentMode, check_cover, tidied
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tf_memsaver.search import filling
from tf_memsaver.search.filling import filled
from tools.shared.nets import chain

STORE, RECOMPUTE = SegmentMode.STORE, SegmentMode.RECOMPUTE
PLAN = (
    Segment(start=0, stop=5, mode=RECOMPUTE),
    Segment(start=5, stop=9, mode=RECOMPUTE),
    Segment(start=9, stop=12, mode=STORE),
)


def without(plan: tuple[Segment, ...], place: int) -> tuple[Segment, ...]:
    """Return a plan that stores one of its segments."""
    stored = dataclasses.replace(plan[place], mode=STORE, children=())
    return tidied([*plan[:place], stored, *plan[place + 1 :]])


def test_the_segment_that_takes_longest_comes_first_and_the_budget_is_kept() -> None:
    problem = Problem.build(chain([8] * 12), Request())
    highest = problem.simulator.highest_peak
    least, long, short = highest(PLAN), highest(without(PLAN, 0)), highest(without(PLAN, 1))
    assert least < short < long < highest(problem.store_all)
    assert filled(problem, PLAN, short - 1, short - 1) == PLAN
    assert filled(problem, PLAN, short, short) == without(PLAN, 1)
    assert filled(problem, PLAN, long, long) == without(PLAN, 0)
    assert filled(problem, PLAN, highest(problem.store_all), 2**62) == problem.store_all
    # It is left as it is where it takes enough.
    assert filled(problem, PLAN, long, least) == PLAN


def test_a_hint_and_the_number_of_tries_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain([8] * 12)
    forced = Problem.build(graph, Request(recompute=(graph.units[3].label,)))
    assert filled(forced, PLAN, 2**62, 2**62) == without(PLAN, 1)
    monkeypatch.setattr(filling, "MOST_TRIED", 1)
    assert filled(Problem.build(graph, Request()), PLAN, 2**62, 2**62) == without(PLAN, 0)


@settings(max_examples=100, deadline=None)
@given(graph=graphs(), data=st.data())
def test_plans_get_no_slower_and_are_within_the_budget(graph: Graph, data: st.DataObject) -> None:
    problem = Problem.build(dataclasses.replace(graph, device="CPU"), Request())
    count = len(graph.units)
    cuts = sorted({0, *(cut.position for cut in problem.cuts if data.draw(st.booleans())), count})

    def mode(start: int, stop: int) -> SegmentMode:
        return STORE if any(problem.pinned[start:stop]) else data.draw(st.sampled_from(SegmentMode))

    spans = itertools.pairwise(cuts)
    plan = tidied([Segment(start=start, stop=stop, mode=mode(start, stop)) for start, stop in spans])
    highest = problem.simulator.highest_peak
    budget = int(highest(plan) * data.draw(st.floats(1.0, 2.0)))
    made = filled(problem, plan, budget, budget)
    check_cover(made, 0, count)
    problem.certify(made, "filled")
    assert highest(made) <= budget
    measure = problem.simulator.measure
    assert measure(made).replay_seconds <= measure(plan).replay_seconds
    if made == plan and highest(plan) < budget:
        recomputed = [place for place, segment in enumerate(plan) if segment.mode is RECOMPUTE]
        assert all(highest(without(plan, place)) > budget for place in recomputed)
