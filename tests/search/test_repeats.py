"""Repeated blocks are found, and plans can cut each of them alike."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import Segment, SegmentMode, check_cover
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import solve
from tf_memsaver.search.one_level import THIN_CUTS, OneLevel, candidate_positions
from tf_memsaver.search.repeats import Repeat, repeats, replayed_until, tilings
from tools.shared.nets import Net

BLOCK = 5


def blocks(count: int, widths: tuple[int, int] = (9, 4)) -> Graph:
    """Two layers of their own, blocks of five units that keep some cheap values, and a last layer."""
    net = Net()
    x = net.dense(net.dense(net.input(4), 3), widths[1])
    for _ in range(count):
        wide = net.relu(net.norm(net.dense(x, widths[0])))
        x = net.add(net.dense(wide, widths[1]), x)
    return net.graph(net.dense(x, 2))


def problem_of(graph: Graph, **hints: tuple[str, ...]) -> Problem:
    return Problem.build(graph, Request(**hints))


def shape(segments: tuple[Segment, ...], start: int) -> list[tuple[int, int, SegmentMode]]:
    return [(segment.start - start, segment.stop - start, segment.mode) for segment in segments]


def test_equal_blocks_are_one_repeat():
    # Not the first and the last unit: their gradients are no sums of two.
    assert repeats(problem_of(blocks(8))) == (Repeat(start=2, stop=41, period=BLOCK),)
    assert repeats(problem_of(blocks(3))) == ()


def test_stages_are_repeats_of_their_own():
    net = Net()
    x = net.dense(net.input(4), 5)
    for width in (5, 7):
        x = net.dense(x, width)
        for _ in range(6):
            x = net.add(net.dense(net.relu(x), width), x)
    found = repeats(problem_of(net.graph(x)))
    assert [repeat.period for repeat in found] == [3, 3]
    assert found[0].stop <= found[1].start or found[1].stop <= found[0].start


def test_a_hint_breaks_a_repeat():
    kept = problem_of(blocks(9), keep=("dense_22",))
    assert all(not repeat.start <= 22 < repeat.stop for repeat in repeats(kept))
    everywhere = problem_of(blocks(9), keep=("norm_*",))
    assert repeats(everywhere)[0].period == BLOCK


def random_cover(data: st.DataObject, positions: list[int]) -> list[Segment]:
    inside = data.draw(st.lists(st.sampled_from(positions[1:-1]), unique=True, max_size=8).map(sorted))
    ends = [0, *inside, positions[-1]]
    return [
        Segment(start=start, stop=stop, mode=data.draw(st.sampled_from(SegmentMode)))
        for start, stop in itertools.pairwise(ends)
    ]


@settings(deadline=None, max_examples=100, derandomize=True)
@given(data=st.data())
def test_tilings_are_covers_that_repeat_what_was_given(data: st.DataObject):
    graph = blocks(7)
    problem = problem_of(graph)
    positions = candidate_positions(problem)
    segments = random_cover(data, positions)
    repeat = repeats(problem)[0]
    for tiling in tilings(segments, repeat, positions):
        tiled = tiling.segments
        assert tiling.replayed_until.tolist() == replayed_until(tiled).tolist()
        check_cover(tiled, 0, len(graph.units))
        assert {segment.stop for segment in tiled} <= set(positions)
        starts = {segment.start for segment in tiled}
        # Three blocks at most stand for all.
        assert any(
            all(start in starts for start in range(first, repeat.stop - size + 1, size))
            for size in (BLOCK, 2 * BLOCK, 3 * BLOCK)
            for first in range(repeat.start, repeat.start + size)
        )


def large() -> Problem:
    problem = problem_of(blocks(60))
    assert len(candidate_positions(problem)) > THIN_CUTS
    return problem


def test_the_segments_of_one_block_are_those_of_all():
    problem = large()
    repeat = repeats(problem)[0]
    block = (
        Segment(start=7, stop=10, mode=SegmentMode.RECOMPUTE),
        Segment(start=10, stop=12, mode=SegmentMode.STORE),
    )
    rest = Segment(start=12, stop=len(problem.graph.units), mode=SegmentMode.STORE)
    given = [Segment(start=0, stop=7, mode=SegmentMode.STORE), *block, rest]
    tiled = (tiling.segments for tiling in tilings(given, repeat, candidate_positions(problem)))
    alike = [segments for segments in tiled if len(segments) > 100]
    assert alike
    for start in range(7, repeat.stop - BLOCK, BLOCK):
        its = tuple(segment for segment in alike[0] if start <= segment.start < start + BLOCK)
        assert shape(its, start) == shape(block, 7)


def test_plans_of_large_graphs_cut_blocks_alike_and_keep_their_limits():
    problem = large()
    plans, seconds = OneLevel(problem), 0.1 * problem.plain.step_seconds
    found = plans.within(seconds)
    even = plans.with_equal_blocks(found.segments, seconds)
    assert even is not None
    assert even.replay_seconds <= seconds
    repeat = repeats(problem)[0]
    patterns = {
        tuple(shape(tuple(s for s in even.segments if start <= s.start < start + 6 * BLOCK), start))
        for start in range(repeat.start + 6 * BLOCK, repeat.stop - 6 * BLOCK, 6 * BLOCK)
    }
    assert len(patterns) == 1


def test_budgets_are_kept_and_time_is_not_lost():
    problem = large()
    budget = round(0.6 * problem.plain.peak_bytes)
    found = OneLevel(problem).quickest(budget)
    plan = solve(problem.graph, Request(budget_bytes=budget))
    assert found is not None
    assert plan.peak_bytes <= budget
    assert plan.step_overhead * problem.plain.step_seconds <= found.replay_seconds * (1 + 1e-9)


def test_small_graphs_are_searched_through_anyway():
    problem = problem_of(blocks(8))
    plans = OneLevel(problem)
    assert plans.with_equal_blocks(plans.smallest.segments, 10**9) is None
