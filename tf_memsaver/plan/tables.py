"""What a segment costs, for all pairs of candidate cuts at once: the tables that the planners search.

The letters of the design (section 3). Units stand at 1..N, a segment (i, j] holds the units i+1..j, and the cuts lie at
positions 0 = P₀ < P₁ < … < P_K = N. Tables have one entry for each mode, start i and stop j:

* ``replay_seconds`` t(i,j): forward ops u in (i,j] with d(u) ≤ j, where d(u) is the first position whose backward needs
  what u makes. The last convolution of a segment has d(u) > j and is not replayed.
* ``entering`` b(i,j,·): the values made at or before i that the backward of (i,j] needs, by *slot*. Crossing values get
  slots like registers, so that no two values that cross the same cut share one. They are kept from the forward pass on
  until the first segment (in forward order) that needs them has run backward; a segment's replay holds copies.
* ``stored_bytes``: the segment's own values that its backward reads, kept when the segment is stored.
* ``working_bytes`` W(i,j): the most that is live while (i,j] is replayed and runs backward, less what is kept for the
  segments before it. With A(i,q) the values, made in the segment or entering it, that the backward of (i,q] reads, and
  G the gradients, temporaries and workspace of a backward op, which no plan changes: W(i,j) = max over i < q ≤ j of
  A(i,q) + max over the backward ops of unit q of G, where values die, and buffers are taken over, op by op.
* ``settled_bytes``: the same for a store segment when all that enters it is kept already for segments before it.

The peak under a plan is then the largest a_i + W(i,j) over its segments, where a_i sums what the segments before i
keep. Left out are forward scratch in a replay, what the forward pass needs beyond ``least_peak``, and what happens
where only some of the values that enter a store segment are kept already: so W is a bound from below, and ``learn``
puts what the simulator saw in its place. On captured networks the bound is nearly always exact. O(E + K·N + K²·slots).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tf_memsaver.plan.facts import NEVER, Buffer, Facts, unit_peaks
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.simulate import Measured
from tf_memsaver.plan.types import Segment, SegmentMode

if TYPE_CHECKING:
    from tf_memsaver.plan.search import Proposal

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

MODES = (SegmentMode.STORE, SegmentMode.RECOMPUTE)
"""The order of the modes along the first axis of every table."""


class Tables:
    """The tables of one problem. ``positions`` are 0, the candidate cuts and N."""

    def __init__(self, problem: Problem, positions: Sequence[int]) -> None:
        self.positions = tuple(positions)
        self.unit_count = len(problem.graph.units)
        facts = Facts(problem.graph, problem.simulator)
        self._starts = np.array(self.positions[:-1])
        self._stops = np.array(self.positions[1:])
        self.least_peak = float(facts.forward_peak)
        self._end_bytes = float(facts.loss_peak), float(facts.settled_loss_peak)
        self.learnt: dict[int, dict[tuple[int, int, bytes], float]] = {}
        self._learnt_ends: dict[bytes, float] = {}
        nothing = np.zeros((len(self._starts), len(self._stops)))
        self.replay_seconds: Floats = np.stack([nothing, self._replay_seconds(facts)])
        self.stored_bytes: Floats = np.stack([self._stored_bytes(facts), nothing])
        self._slots(facts)
        arriving = np.array(facts.arriving, dtype=np.float64)
        backward, settled = self._backward_bytes(facts, inside=False), self._backward_bytes(facts, inside=True)
        replay = np.where(np.isfinite(backward), self.entering[1].sum(axis=2) + arriving[self._stops], 0.0)
        working = np.maximum(np.stack([backward, np.maximum(backward, replay)]), 0.0) + facts.resident_bytes
        self.working_bytes: Floats = np.where(self._allowed(problem), working, NEVER)
        self.settled_bytes: Floats = np.stack([np.maximum(settled, 0.0) + facts.resident_bytes, nothing])
        # Store segments one after the other are the same as one, so that those between neighbouring cuts are enough.
        adjacent = np.eye(len(self._starts), dtype=np.bool_)
        self.considered: Flags = np.stack([adjacent, np.triu(np.ones_like(adjacent))])
        self._index = {position: index for index, position in enumerate(self.positions)}

    def _allowed(self, problem: Problem) -> Flags:
        """Return which segments, by mode, hold no unit that must be of the other mode."""
        allowed = []
        for other in (problem.forced, problem.pinned):
            count = np.concatenate([[0], np.cumsum(other)])
            allowed.append(count[self._stops][None, :] == count[self._starts][:, None])
        return np.stack(allowed) & (self._starts[:, None] < self._stops[None, :])

    def replay_seconds_of(self, segments: Sequence[Segment]) -> float:
        """Return what segments of one level between the positions replay, in seconds."""
        return sum(
            float(self.replay_seconds[1, self._index[segment.start], self._index[segment.stop] - 1])
            for segment in segments
            if segment.mode is SegmentMode.RECOMPUTE
        )

    # One table a method -------------------------------------------------------------------------------------------

    def _replay_seconds(self, facts: Facts) -> Floats:
        starts, stops = self._starts, self._stops
        table = np.zeros((len(starts), len(stops)))
        for at, need, seconds in facts.replays:
            if seconds and need <= self.unit_count:
                # Counts for every start before its unit and every stop at or after its need.
                row = int(np.searchsorted(starts, at)) - 1
                table[row, int(np.searchsorted(stops, need))] += seconds
        return _sums_from_below(np.cumsum(table, axis=1))

    def _stored_bytes(self, facts: Facts) -> Floats:
        starts, stops = self._starts, self._stops
        table = np.zeros((len(starts), len(stops)))
        for buffer in facts.buffers.values():
            if buffer.readers:
                row = int(np.searchsorted(starts, buffer.made)) - 1
                table[row, int(np.searchsorted(stops, buffer.readers[0]))] += buffer.nbytes
        return _sums_from_below(np.cumsum(table, axis=1))

    def _slots(self, facts: Facts) -> None:
        """Give crossing values slots, and tabulate which segment needs the value in which slot."""
        starts, stops = self._starts, self._stops
        crossing: list[tuple[int, int, Buffer]] = []
        for buffer in facts.buffers.values():
            furthest = max([buffer.furthest, *buffer.readers])
            first, behind = np.searchsorted(self.positions, [buffer.made, furthest]).tolist()
            if first < behind and buffer.nbytes:
                crossing.append((first, behind, buffer))
        crossing.sort(key=lambda item: item[:2])
        free_at: list[int] = []
        slots: list[int] = []
        for first, behind, _ in crossing:
            slot = next((s for s, free in enumerate(free_at) if free <= first), len(free_at))
            free_at[slot : slot + 1] = [behind]
            slots.append(slot)
        shape = (len(MODES), len(starts), len(stops), max(len(free_at), 1))
        self.entering: Floats = np.zeros(shape)
        self.kept_by_store: Flags = np.zeros(shape, dtype=np.bool_)
        self.owner = np.full((len(starts) + 1, shape[3]), -1)
        self.crossing_bytes: Floats = np.zeros((len(starts) + 1, shape[3]))
        for number, ((first, behind, buffer), slot) in enumerate(zip(crossing, slots, strict=True)):
            self.owner[first:behind, slot] = number
            self.crossing_bytes[first:behind, slot] = buffer.nbytes
            for row in range(first, min(behind, len(starts))):
                start = int(starts[row])
                for mode, need in enumerate((buffer.read_by(start), buffer.needed_by(start))):
                    if need <= self.unit_count:
                        self.entering[mode, row, int(np.searchsorted(stops, need)) :, slot] = buffer.nbytes
            if buffer.readers:
                made_in = int(np.searchsorted(starts, buffer.made))
                column = int(np.searchsorted(stops, buffer.readers[0]))
                # Stop index c is cut index c + 1; the value must cross that cut to have a slot there.
                self.kept_by_store[0, :made_in, max(column, first - 1) : behind - 1, slot] = True

    def _backward_bytes(self, facts: Facts, inside: bool) -> Floats:
        """Return the most that is live while (i, j] runs backward, of its own; ``inside``: without what enters it."""
        starts, units = self._starts, self.unit_count
        read = np.zeros((len(starts) + 1, units + 2))
        for buffer in facts.buffers.values():
            before = 0
            for reader in buffer.readers:
                behind = buffer.made if inside else reader
                first, last = np.searchsorted(starts, [before, min(reader, behind)]).tolist()
                if first < last:
                    read[first, reader] += buffer.nbytes
                    read[last, reader] -= buffer.nbytes
                before = reader
        read = np.cumsum(np.cumsum(read, axis=0), axis=1)[:-1, : units + 1]
        peaks = np.full(read.shape, -NEVER)
        for unit, ops in facts.backward_ops.items():
            if unit <= units:
                for first, last, top in unit_peaks(facts, unit, ops, starts, inside):
                    peaks[first:last, unit] = read[first:last, unit] + top
        peaks[np.arange(units + 1)[None, :] <= starts[:, None]] = -NEVER
        return np.asarray(np.maximum.accumulate(peaks, axis=1)[:, self._stops])

    # What the simulator saw ---------------------------------------------------------------------------------------

    def learn(self, proposal: Proposal, measured: Measured) -> bool:
        """Note the simulated peaks of a proposal's segments; return whether anything was not known before.

        A segment's peak less what is kept before it follows from its mode and from the flags of the values that enter
        it, so ``learnt`` has for each stop, by mode, start and flags, the exact number in place of the tables' bound.
        """
        news = False
        peaks = zip(measured.forward_peaks, measured.backward_peaks, strict=True)
        for segment, state, (forward, backward) in zip(proposal.segments, proposal.states, peaks, strict=False):
            mode, row, column = MODES.index(segment.mode), self._index[segment.start], self._index[segment.stop] - 1
            key = mode, row, state.flags
            own = max(forward, backward) - state.kept
            news |= self.learnt.setdefault(column, {}).get(key) != own
            self.learnt[column][key] = own
            if segment.mode is SegmentMode.RECOMPUTE:
                # A replay reads copies, so that what it needs does not depend on the flags.
                cell = mode, row, column
                self.working_bytes[cell] = max(self.working_bytes[cell], backward - state.kept)
        end = proposal.states[-1]
        news |= self._learnt_ends.get(end.flags) != measured.other_peak - end.kept
        self._learnt_ends[end.flags] = measured.other_peak - end.kept
        return news

    def end_peak(self, flags: bytes, kept: float, idle: float) -> float:
        """Return the peak at the loss, where ``kept`` bytes are kept, ``idle`` of them of values that it does not read.

        ``flags`` tell which of the values that it reads are kept already: with all or none of them exact, else the
        larger of two bounds from below, until it was learnt.
        """
        if flags in self._learnt_ends:
            return max(self.least_peak, kept + self._learnt_ends[flags])
        return max(self.least_peak, idle + self._end_bytes[0], kept + self._end_bytes[1])

    @property
    def end_bytes(self) -> float:
        """What the loss needs at least, with all that it reads kept already."""
        return max(self.least_peak, self._end_bytes[1])

    def restricted(self, chosen: Sequence[int]) -> Tables:
        """Return a copy with only the ``chosen`` positions (indices; the first and the last among them)."""
        tables = copy.copy(self)
        rows, columns = np.array(chosen[:-1]), np.array(chosen[1:]) - 1
        tables.positions = tuple(self.positions[index] for index in chosen)
        tables._index = {position: index for index, position in enumerate(tables.positions)}
        tables._starts, tables._stops = self._starts[rows], self._stops[columns]
        modes = np.arange(len(MODES))
        grid = np.ix_(modes, rows, columns)
        tables.replay_seconds, tables.stored_bytes = self.replay_seconds[grid], self.stored_bytes[grid]
        tables.working_bytes, tables.settled_bytes = self.working_bytes[grid], self.settled_bytes[grid]
        tables.considered = self.considered[grid]
        tables.considered[0] = np.eye(len(rows), dtype=np.bool_)
        tables.learnt, tables._learnt_ends = {}, {}
        tables.entering, tables.kept_by_store = self.entering[grid], self.kept_by_store[grid]
        tables.owner, tables.crossing_bytes = self.owner[list(chosen)], self.crossing_bytes[list(chosen)]
        return tables

    def copy(self) -> Tables:
        """Return a copy that learns on its own."""
        tables = copy.copy(self)
        tables.working_bytes = self.working_bytes.copy()
        tables.learnt, tables._learnt_ends = {}, {}
        return tables

    def narrowed(self, chosen: Sequence[int], reach: int) -> Tables:
        """Return a copy that considers only recompute segments between ``chosen`` positions or of ``reach`` cuts."""
        tables = self.copy()
        index = np.arange(len(self._starts))
        near = index[None, :] - index[:, None] < reach
        among = np.isin(index, chosen)[:, None] & np.isin(index + 1, chosen)[None, :]
        tables.considered = self.considered.copy()
        tables.considered[1] &= near | among
        return tables


def _sums_from_below(table: Floats) -> Floats:
    """Return, for each row, the sum of it and of all rows below it."""
    return np.asarray(np.cumsum(table[::-1], axis=0)[::-1], dtype=np.float64)
