"""What a plan of least memory recomputes is stored again, one segment after the other."""

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


@pytest.mark.parametrize(("early", "late", "first"), [(8, 8, 1), (8, 1, 0)])
def test_what_saves_most_seconds_for_its_bytes_comes_first(early: int, late: int, first: int) -> None:
    # All layers alike: the later ones add fewer bytes for each second. Small later ones: neither adds any.
    problem = Problem.build(chain([early] * 5 + [late] * 7), Request())
    assert filled(problem, PLAN) == [PLAN, without(PLAN, first), problem.store_all]


def test_hints_and_the_number_of_segments_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain([8] * 12)
    forced = Problem.build(graph, Request(recompute=(graph.units[3].label,)))
    assert filled(forced, PLAN) == [PLAN, without(PLAN, 1)]
    monkeypatch.setattr(filling, "MOST_STORED", 1)
    assert filled(Problem.build(graph, Request()), PLAN) == [PLAN, without(PLAN, 0)]


@settings(max_examples=100, deadline=None)
@given(graph=graphs(), data=st.data())
def test_plans_get_no_slower_and_none_is_illegal(graph: Graph, data: st.DataObject) -> None:
    problem = Problem.build(dataclasses.replace(graph, device="CPU"), Request())
    count = len(graph.units)
    cuts = sorted({0, *(cut.position for cut in problem.cuts if data.draw(st.booleans())), count})

    def mode(start: int, stop: int) -> SegmentMode:
        return STORE if any(problem.pinned[start:stop]) else data.draw(st.sampled_from(SegmentMode))

    spans = itertools.pairwise(cuts)
    plan = tidied([Segment(start=start, stop=stop, mode=mode(start, stop)) for start, stop in spans])
    made = filled(problem, plan)
    assert made[0] == plan and made[-1] == problem.store_all
    for each in made:
        check_cover(each, 0, count)
        problem.certify(each, "filled")
    seconds = [problem.simulator.measure(each).replay_seconds for each in made]
    assert seconds == sorted(seconds, reverse=True)
