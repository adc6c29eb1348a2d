"""Segments within segments: less memory than one level can reach, for more time.

A recompute segment whose own backward pass needs too much is replayed in segments again. With K cuts and the memory m
in Q sizes, least times follow the recurrence of Rotor (Beaumont et al. 2019, "Optimal checkpointing for heterogeneous
chains", Inria RR-9302), for a segment (a, c] whose inputs are kept, with m bytes for everything else:

    C(a, c, m) = min( t(a, c) if W(a, c) ≤ m;  min over h of F(a, h) + C(h, c, m − b(a, h)) + C(a, h, m) )

t and W are those of ``tables``, F(a, h) is the time to run forward from a to h, and b(a, h) the bytes that cross h but
not a. On top lies the forward pass itself, which costs nothing more, and where segments may be stored. O(K³·Q).
Bytes are rounded to sizes, up or down: the simulator says what a plan needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tf_memsaver.ir.graph import Phase
from tf_memsaver.ir.segments import Segment, SegmentMode, tidied
from tf_memsaver.judge.rows import Ints
from tf_memsaver.plan.problem import Problem
from tf_memsaver.search.facts import Floats
from tf_memsaver.search.one_level import Found, OneLevel
from tf_memsaver.search.polish import polished

SIZES = 256
"""Sizes of memory that are told apart, up to ``ABOVE`` times the transient bytes of the least peak of one level."""

ABOVE = 1.5
"""Well above 1, since the recurrence counts what enters a segment again where the simulator does not."""

PROPOSED = 8
"""Plans that are proposed for the least peak within a time."""

POLISHED = 4
"""Plans that a local search begins with: the best ones."""

MOST_STEPS = 1000
"""Steps of a local search,"""

STEPS_A_CUT = 32
"""and at most so many for each candidate cut,"""

MOST_OPS = 150_000
"""and for so many ops simulated, each of which takes some microseconds."""


def several_levels(problem: Problem) -> tuple[Found, ...]:
    """Return plans of several levels around the least peak of one, of ever more memory: for ``problem.once``."""
    measure = problem.simulator.measure
    return tuple(Found(segments=segments, measured=measure(segments)) for segments in Nested(problem).all())


def quickest_nested(problem: Problem, budget: int) -> Found:
    """Return the quickest plan whose simulated peak is within ``budget``, or else the one of least peak."""

    def rank(found: Found) -> tuple[bool, float, float]:
        order = found.replay_seconds, found.peak_bytes
        fits = found.peak_bytes <= budget
        return (not fits, *(order if fits else order[::-1]))

    smallest = problem.once(OneLevel).smallest
    best = sorted(problem.once(several_levels), key=rank)[:POLISHED]
    if smallest.peak_bytes <= budget:
        return min([smallest, *best], key=rank)
    steps = min(MOST_STEPS, STEPS_A_CUT * len(problem.cuts), MOST_OPS // len(problem.graph.ops))
    better = [polished(problem, found, rank, steps, seed) for seed, found in enumerate(best)]
    return min([smallest, *better], key=rank)


def least_nested(problem: Problem, seconds: float) -> list[tuple[Segment, ...]]:
    """Return plans of least simulated peak whose replays take at most ``seconds``, not more than ``PROPOSED``."""
    quick = [found for found in problem.once(several_levels) if found.replay_seconds <= seconds]
    return [tidied(found.segments) for found in sorted(quick, key=lambda found: found.rank)[:PROPOSED]]


@dataclass(frozen=True, slots=True)
class _Costs:
    """The tables in sizes of memory: t, F, W and b of recompute segments, W and b of stored ones."""

    replay: Floats
    forward: Floats
    working: Ints
    boundary: Ints
    stored_working: Ints
    stored_boundary: Ints


class Nested:
    """The recurrence for one problem."""

    def __init__(self, problem: Problem) -> None:
        smallest = problem.once(OneLevel).smallest
        self._tables = problem.once(OneLevel).thinned_tables(smallest.segments)
        self._resident = problem.graph.resident_bytes
        self._bytes_a_size = max(1.0, ABOVE * (smallest.peak_bytes - self._resident) / (SIZES - 1))
        self._costs = self._in_sizes(problem)
        count = len(self._tables.positions)
        self._seconds = np.full((count, count, SIZES), np.inf)
        self._split: Ints = np.zeros((count, count, SIZES), dtype=np.int64)
        self._fill()
        self._top, self._next, self._stored = self._over_the_forward_pass()

    def all(self) -> Iterator[tuple[Segment, ...]]:
        """Yield the plan of least time for each size of memory, the smallest size first, without repetition."""
        seen = set()
        for memory in range(SIZES):
            if np.isfinite(self._top[0, memory]):
                segments = self._spelt_out(memory)
                if segments not in seen:
                    seen.add(segments)
                    yield segments

    def _sizes(self, nbytes: Floats) -> Ints:
        """Return bytes as sizes; more than there are for what is not allowed."""
        return np.rint(np.minimum(nbytes / self._bytes_a_size, 2.0 * SIZES)).astype(np.int64)

    def _in_sizes(self, problem: Problem) -> _Costs:
        tables, count = self._tables, len(self._tables.positions)
        new = np.zeros((count, count))
        kept = np.zeros((count, count))
        inside = np.arange(count)
        grid = tables.grid(inside[:-1], inside[1:])
        crossing, owner = tables.crossing.nbytes, tables.crossing.owner
        for start in range(count - 1):
            of_before = (owner[start + 1 :] == owner[start]) & (owner[start] >= 0)
            entering_anew = np.where(of_before, 0.0, crossing[start + 1 :])
            new[start, start + 1 :] = entering_anew.sum(axis=1)
            by_store = tables.crossing.kept_by_store(inside[start], inside[start + 1 :])
            own = grid.stored_bytes[0, start, start:]
            kept[start, start + 1 :] = own + np.where(by_store, 0.0, entering_anew).sum(axis=1)
        seconds = np.zeros(len(problem.graph.units) + 1)
        for op in problem.graph.ops:
            if op.phase is Phase.FORWARD and op.unit is not None:
                seconds[op.unit + 1] += op.seconds
        reached = np.cumsum(seconds)[list(tables.positions)]

        def square(table: Floats, empty: float) -> Floats:
            full = np.full((count, count), empty)
            full[:-1, 1:] = table
            return full

        return _Costs(
            replay=square(grid.replay_seconds[1], np.inf),
            forward=np.maximum(reached[None, :] - reached[:, None], 0.0),
            working=self._sizes(square(grid.working_bytes[1], np.inf) - self._resident),
            boundary=self._sizes(new),
            stored_working=self._sizes(square(grid.working_bytes[0], np.inf) - self._resident),
            stored_boundary=self._sizes(kept),
        )

    def _fill(self) -> None:
        """Fill C(a, c, ·) for all segments, the short ones first."""
        costs, count = self._costs, len(self._tables.positions)
        memory = np.arange(SIZES)
        for length in range(1, count):
            for start in range(count - length):
                stop = start + length
                best = np.where(costs.working[start, stop] <= memory, costs.replay[start, stop], np.inf)
                between = np.arange(start + 1, stop)
                if len(between) and costs.working[start, stop] < 2 * SIZES:
                    left = memory[None, :] - costs.boundary[start, between][:, None]
                    rest = np.where(left >= 0, self._seconds[between[:, None], stop, np.maximum(left, 0)], np.inf)
                    total = costs.forward[start, between][:, None] + rest + self._seconds[start, between]
                    chosen = total.argmin(axis=0)
                    least = total[chosen, memory]
                    self._split[start, stop] = np.where(least < best, between[chosen], 0)
                    best = np.minimum(best, least)
                self._seconds[start, stop] = best

    def _over_the_forward_pass(self) -> tuple[Floats, Ints, npt.NDArray[np.bool_]]:
        """Return the least time from each cut to the loss, by memory; where the next segment ends, and if stored."""
        costs, count = self._costs, len(self._tables.positions)
        memory = np.arange(SIZES)
        top = np.full((count, SIZES), np.inf)
        following: Ints = np.zeros((count, SIZES), dtype=np.int64)
        stored = np.zeros((count, SIZES), dtype=np.bool_)
        least = self._sizes(np.array([self._tables.end_bytes - self._resident]))[0]
        top[-1] = np.where(least <= memory, 0.0, np.inf)
        for start in range(count - 2, -1, -1):
            for keeps, boundary in ((False, costs.boundary), (True, costs.stored_boundary)):
                ends = np.arange(start + 1, count)
                left = memory[None, :] - boundary[start, ends][:, None]
                rest = np.where(left >= 0, top[ends[:, None], np.maximum(left, 0)], np.inf)
                if keeps:
                    fits = costs.stored_working[start, ends][:, None] <= memory[None, :]
                    own = np.where(fits, 0.0, np.inf)
                else:
                    own = self._seconds[start, ends]
                total = own + rest
                chosen = total.argmin(axis=0)
                best = total[chosen, memory]
                better = best < top[start]
                top[start] = np.where(better, best, top[start])
                following[start] = np.where(better, ends[chosen], following[start])
                stored[start] = np.where(better, keeps, stored[start])
        return top, following, stored

    # From sizes to segments ---------------------------------------------------------------------------------------

    def _spelt_out(self, memory: int) -> tuple[Segment, ...]:
        segments, start, last = [], 0, len(self._tables.positions) - 1
        while start < last:
            stop, keeps = int(self._next[start, memory]), bool(self._stored[start, memory])
            segments.append(self._stored_segment(start, stop) if keeps else self._nest(start, stop, memory))
            memory -= int((self._costs.stored_boundary if keeps else self._costs.boundary)[start, stop])
            start = stop
        return tidied(segments)

    def _nest(self, start: int, stop: int, memory: int) -> Segment:
        """Return the recompute segment (start, stop] as C has it for so much memory."""
        children, at, left = [], start, memory
        while split := int(self._split[at, stop, left]):
            children.append(self._nest(at, split, left))
            left -= int(self._costs.boundary[at, split])
            at = split
        if children:
            # It stands when the others have been run again: its backward pass begins at once.
            children.append(self._stored_segment(at, stop))
        positions = self._tables.positions
        return Segment(
            start=positions[start], stop=positions[stop], mode=SegmentMode.RECOMPUTE, children=tuple(children)
        )

    def _stored_segment(self, start: int, stop: int) -> Segment:
        positions = self._tables.positions
        return Segment(start=positions[start], stop=positions[stop], mode=SegmentMode.STORE)
