"""The local search over segments within segments."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import graphs
from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import SegmentMode, check_cover
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.nested import nested
from tf_memsaver.search.nested import several_levels
from tf_memsaver.search.one_level import Found, OneLevel
from tf_memsaver.search.polish import polished
from tools.shared.nets import chain


def test_it_finds_quicker_nested_plans() -> None:
    problem = Problem.build(chain([8] * 30), Request())
    resident = problem.graph.resident_bytes
    budget = resident + int((problem.plain.peak_bytes - resident) * 0.3)
    assert problem.once(OneLevel).smallest.peak_bytes > budget
    begin = min(
        (found for found in problem.once(several_levels) if found.peak_bytes <= budget),
        key=lambda found: found.replay_seconds,
    )
    problem = problem.with_budget(budget)
    plan = nested(problem)
    measured = problem.simulator.measure(plan)
    assert measured.peak_bytes <= budget and measured.replay_seconds < 0.97 * begin.replay_seconds


@settings(max_examples=50, deadline=None)
@given(graph=graphs(), data=st.data())
def test_plans_stay_covers_that_keep_hints_and_never_rank_higher(graph: Graph, data: st.DataObject) -> None:
    labels = [unit.label for unit in graph.units]
    keep = data.draw(st.lists(st.sampled_from(labels), max_size=2, unique=True))
    problem = Problem.build(graph, Request(keep=tuple(keep)))
    begin = Found(segments=problem.store_all, measured=problem.simulator.measure(problem.store_all))

    def rank(found: Found) -> tuple[float, ...]:
        return found.rank

    found = polished(problem, begin, rank, steps=60)
    check_cover(found.segments, 0, len(labels))
    assert rank(found) <= rank(begin) and found == polished(problem, begin, rank, steps=60)
    for segment in found.segments:
        if segment.mode is SegmentMode.RECOMPUTE:
            assert not any(problem.pinned[segment.start : segment.stop])
