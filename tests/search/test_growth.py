"""Large graphs: tables that grow with the cuts, not with their pairs, and searches that look at less lose little."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

import numpy as np
import pytest

from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import Segment
from tf_memsaver.judge.simulate import Measured, Simulator
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tf_memsaver.search import labels as search
from tf_memsaver.search.bounds import of_one_level
from tf_memsaver.search.costs import Grid
from tf_memsaver.search.labels import Search
from tf_memsaver.search.least_peak import least_peak
from tf_memsaver.search.one_level import REACH, THIN_CUTS, OneLevel, candidate_positions
from tf_memsaver.search.tables import Tables
from tools.shared.nets import Net

Entry = tuple[float, ...]


def residual(blocks: int) -> Problem:
    net = Net()
    x = net.dense(net.input(8), 64)
    for _ in range(blocks):
        y = net.relu(net.norm(net.dense(x, 64, workspace=8)))
        x = net.relu(net.add(x, net.norm(net.dense(y, 64, workspace=8))))
    return Problem.build(net.graph(net.dense(x, 1)), Request())


def unet(depth: int) -> Graph:
    """Values of many heights cross the middle, so that patterns of kept ones double with each."""
    net = Net()
    x, skips = net.input(64), []
    for height in range(depth):
        x = net.relu(net.dense(x, 96 - 5 * height))
        skips.append(x)
        x = net.dense(x, 48 - 3 * height)
    for skip in reversed(skips):
        x = net.relu(net.dense(net.concat(skip, x), net.bytes_of(skip)))
    return net.graph(net.dense(x, 1))


def entries(tables: Tables) -> Iterator[tuple[tuple[int, int, int], Entry]]:
    """Yield the considered segments, by mode, start and stop, and what they cost."""
    its = tables.considered
    stops = np.array(tables.positions)[its.column + 1]
    starts = np.array(tables.positions)[its.row]
    costs = np.stack([getattr(its, cost.name) for cost in fields(Grid)], axis=1)
    for mode, start, stop, cost in zip(its.mode.tolist(), starts.tolist(), stops.tolist(), costs.tolist(), strict=True):
        yield (mode, start, stop), tuple(cost)


@pytest.mark.parametrize("block", [7, 256])
def test_tables_of_fewer_segments_say_of_them_what_the_whole_ones_say(block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tf_memsaver.search.tables.BLOCK", block)
    problem = residual(8)
    full = Tables(problem, candidate_positions(problem))
    whole, last = dict(entries(full)), len(full.positions) - 1
    chosen = [0, 3, 4, 17, 30, last]
    near = dict(entries(full.narrowed(chosen, 4)))
    index = {position: place for place, position in enumerate(full.positions)}
    assert set(near) == {
        (mode, start, stop)
        for mode, start, stop in whole
        if mode == 0 or index[stop] - index[start] <= 4 or {index[start], index[stop]} <= set(chosen)
    }
    some = dict(entries(full.restricted(chosen)))
    assert {span for span in some if span[0] == 1} == {
        span for span in whole if span[0] == 1 and {index[span[1]], index[span[2]]} <= set(chosen)
    }
    for part in (near, some):
        shared = [span for span in part if span in whole]
        assert len(shared) > len(chosen)
        for span in shared:
            assert part[span][1:] == whole[span][1:]
            assert part[span][0] == pytest.approx(whole[span][0])


def test_tables_of_many_cuts_grow_with_the_cuts():
    problem = residual(300)
    plans = OneLevel(problem)
    tables = plans.all_tables.narrowed(plans._thinned(()), REACH)
    cuts = len(tables.positions)
    assert cuts > 2000
    # One store segment and ``REACH`` replays from each cut, and the pairs of the chosen ones.
    assert cuts * REACH < len(tables.considered.row) < cuts * (REACH + 1) + THIN_CUTS**2 / 2
    assert tables.crossing.needed.size <= 2 * cuts * 3
    assert plans.smallest.peak_bytes < 0.1 * problem.plain.peak_bytes
    assert plans.all_tables._considered is None


@pytest.mark.parametrize("blocks", [40, 60])
def test_the_least_peak_of_a_large_graph_is_about_that_of_all_segments(blocks: int):
    problem = residual(blocks)
    plans = OneLevel(problem)
    assert len(plans.all_tables.positions) > 2 * THIN_CUTS
    full = least_peak(OneLevel(problem).all_tables)
    resident = problem.graph.resident_bytes
    assert full is not None
    assert plans.all_tables._considered is None
    # Searches of large graphs end at one part in 250.
    assert 0.998 <= (plans.smallest.peak_bytes - resident) / (full.peak_bytes - resident) <= 1.02


def test_bounds_of_too_many_labels_are_not_given(monkeypatch: pytest.MonkeyPatch):
    """Labels that are dropped have no bound: the time of those that are left was given as one."""
    problem = Problem.build(unet(8), Request())
    limit = round(0.55 * problem.plain.peak_bytes)
    best = OneLevel(problem).quickest(limit)
    assert best is not None
    monkeypatch.setattr(search, "MOST_EXTENSIONS", 1)
    assert of_one_level(problem, limit, 2 * best.replay_seconds, front=64) <= best.replay_seconds


def test_labels_that_keep_more_whatever_is_still_needed_are_left_out():
    numbers = np.random.default_rng(0)
    nbytes = numbers.integers(1, 9, 5).astype(np.float64)
    flags = np.unique(numbers.random((40, 5)) < 0.5, axis=0)
    kept = numbers.integers(0, 30, len(flags)) + np.where(flags, nbytes, 0.0).sum(axis=1)

    def beats(one: int, other: int) -> bool:
        return bool(kept[one] + nbytes[flags[other] & ~flags[one]].sum() <= kept[other])

    rows = range(len(flags))
    expected = [not any(beats(one, other) for one in rows if one != other) for other in rows]
    assert search._unbeaten(kept, flags, nbytes).tolist() == expected
    assert 0 < sum(expected) < len(flags)


def test_fewer_labels_lose_little_time(monkeypatch: pytest.MonkeyPatch):
    problem = Problem.build(unet(8), Request())
    tables = OneLevel(problem).all_tables
    limit = round(0.55 * problem.plain.peak_bytes)
    exact = Search(tables, limit, front=64)
    best = exact.run()
    monkeypatch.setattr(search, "MOST_EXTENSIONS", 1)
    bounded = Search(tables, limit, front=64)
    found = bounded.run()
    assert best is not None
    assert found is not None
    most = max(np.diff(bounded._shelf.offsets))
    assert most <= search.LEAST_LABELS < max(np.diff(exact._shelf.offsets))
    assert found.peak_bytes <= limit
    assert best.replay_seconds <= found.replay_seconds <= 1.05 * best.replay_seconds


def skip_sums(depth: int) -> Graph:
    """Every block hands a value to one sum at the end, as a WaveNet does: what is live there no segment can drop."""
    net = Net()
    x, skips = net.dense(net.input(8), 32), []
    for _ in range(depth):
        y = net.relu(net.dense(x, 64))
        skips.append(net.dense(y, 32))
        x = net.relu(net.add(x, net.dense(y, 32)))
    skips = [net.dense(net.dense(skip, 32), 32) for skip in skips]
    total = skips[0]
    for skip in skips[1:]:
        total = net.add(total, skip)
    return net.graph(net.dense(net.relu(total), 1))


@pytest.mark.parametrize("share", [None, 0.55, 0.85])
def test_what_is_live_in_forward_passes_and_replays_is_known_or_learnt_at_once(
    share: float | None, monkeypatch: pytest.MonkeyPatch
):
    """Of eight sums each may be kept or not: refuted one by one, 100 rounds were not enough to find any plan."""
    problem = Problem.build(skip_sums(8), Request())
    plain, rounds = problem.plain.peak_bytes, 0
    measure = Simulator.measure

    def counted(self: Simulator, segments: Sequence[Segment]) -> Measured:
        nonlocal rounds
        rounds += 1
        return measure(self, segments)

    monkeypatch.setattr(Simulator, "measure", counted)
    plans = OneLevel(problem)
    found = plans.smallest if share is None else plans.quickest(int(share * plain))
    assert found is not None and found.peak_bytes <= (share or 0.44) * plain
    assert rounds <= 20
