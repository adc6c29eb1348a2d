"""What a plan of least memory recomputes is stored again, one segment after the other."""

from __future__ import annotations

import dataclasses
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import graphs
from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import Segment, SegmentMode, check_cover, tidied
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tf_memsaver.search.filling import filled
from tools.shared.nets import Net, chain

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


def test_what_takes_longest_for_its_bytes_comes_first() -> None:
    net = Net()
    x = net.input(8)
    for _ in range(5):
        x = net.dense(x, 8)
    for _ in range(7):
        x = net.relu(x)
    problem = Problem.build(net.graph(x), Request())
    assert filled(problem, PLAN) == [PLAN, without(PLAN, 0), problem.store_all]


def test_of_equal_segments_the_last_comes_first_and_hints_are_kept() -> None:
    graph = chain([8] * 12)
    problem = Problem.build(graph, Request())
    assert filled(problem, PLAN) == [PLAN, without(PLAN, 1), problem.store_all]
    forced = Problem.build(graph, Request(recompute=(graph.units[3].label,)))
    assert filled(forced, PLAN) == [PLAN, without(PLAN, 1)]


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
