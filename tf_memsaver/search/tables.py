"""What a segment costs, for the pairs of candidate cuts that are considered: the tables that the planners search.

In letters: units stand at 1..N, a segment (i, j] holds the units i+1..j, and the cuts lie at positions 0 = P₀ < P₁ < …
< P_K = N. Tables have one entry for each mode, start i and stop j:

* ``replay_seconds`` t(i,j): forward ops u in (i,j] with d(u) ≤ j, where d(u) is the first position whose backward needs
  what u makes. The last convolution of a segment has d(u) > j and is not replayed.
* ``entering`` b(i,j,·): the values made at or before i that the backward of (i,j] needs, by *slot* (``crossing``). They
  are kept from the forward pass on until the first segment (in forward order) that needs them has run backward; a
  segment's replay holds copies.
* ``stored_bytes``: the segment's own values that its backward reads, kept when the segment is stored.
* ``working_bytes`` W(i,j): the most that is live while (i,j] is replayed and runs backward, less what is kept for the
  segments before it. With A(i,q) the values, made in the segment or entering it, that the backward of (i,q] reads, and
  G the gradients, temporaries and workspace of a backward op, which no plan changes: W(i,j) = max over i < q ≤ j of
  A(i,q) + max over the backward ops of unit q of G, where values die, and buffers are taken over, op by op.
* ``inside_bytes``: the same for a store segment when all that enters it is kept already for segments before it.
* ``forward_bytes``: the most that is live while the segment runs forward, at the op ``forward_place``: what is still
  to be read in the forward pass and, of what a store segment keeps for itself, the rest. What was kept before the
  segment, or enters it, comes on top, unless it is still to be read itself.

The peak under a plan is then the largest a_i + W(i,j) over its segments, where a_i sums what the segments before i
keep, or what its forward pass needs where that is more. Left out are forward scratch in a replay and what happens
where only some of the values that enter a store segment are kept already: so W is a bound from below, and ``learn``
puts what the simulator saw in its place. On captured networks the bound is nearly always exact.

Between K cuts lie K² segments. All of them are looked at while K is small; else short ones and those between some cuts
only, so that tables grow with K·(slots + reach).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.judge.rows import Ints
from tf_memsaver.judge.simulate import Measured
from tf_memsaver.plan.problem import Problem
from tf_memsaver.search.costs import Costs, Grid
from tf_memsaver.search.crossing import crossing
from tf_memsaver.search.facts import Facts, Floats

MODES = (SegmentMode.STORE, SegmentMode.RECOMPUTE)
"""The order of the modes along the first axis of every table, and their numbers."""

BLOCK = 256
"""Starts from which the costs of short segments are worked out at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What is kept where a segment starts: the bytes, and the flags of the slots (as bytes, to be a key)."""

    kept: float
    flags: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A cover of the units, with what the tables say of it.

    ``states`` are those at the start of each segment, and at last at the loss.
    """

    segments: tuple[Segment, ...]
    states: tuple[State, ...]
    peak_bytes: float
    replay_seconds: float


@dataclass(frozen=True, slots=True)
class Considered:
    """The segments that a search considers, in order of their stops, modes and starts, and their costs.

    ``row`` is the index of the start. The segments that end at one stop are ``offsets[column]`` to
    ``offsets[column + 1]``, where the column is one below the index of the stop.
    """

    mode: Ints
    row: Ints
    column: Ints
    offsets: Ints
    replay_seconds: Floats
    stored_bytes: Floats
    working_bytes: Floats
    inside_bytes: Floats
    forward_bytes: Floats
    forward_place: Ints


class Tables:
    """The tables of one problem. ``positions`` are 0, the candidate cuts and N.

    Considered are the store segments between neighbouring positions (others are the same as several of these) and all
    recompute segments; tables made from these consider fewer. The costs are worked out when they are first asked for.
    """

    def __init__(self, problem: Problem, positions: Sequence[int]) -> None:
        facts = Facts(problem.simulator.prepared.in_one_pass)
        self.positions = tuple(positions)
        self.crossing = crossing(facts, positions, len(problem.graph.units))
        self.costs = Costs(problem, facts, self.crossing)
        self.least_peak = float(facts.forward_peak)
        self._end_bytes = float(facts.loss_peak), float(facts.settled_loss_peak)
        self._indices = np.arange(len(positions))
        self._raised: dict[Segment, float] = {}
        self._begin(reach=len(positions), among=())

    def _begin(self, reach: int, among: Sequence[int] | Ints) -> None:
        """Consider segments of so many cuts and those between some; nothing is learnt of paths through them."""
        self._reach, self._among = reach, np.array(among, dtype=np.int64)
        self._raised = dict(self._raised)
        self.learnt: dict[int, dict[tuple[int, int, bytes], float]] = {}
        self._learnt_ends: dict[bytes, float] = {}
        self._index = {position: index for index, position in enumerate(self.positions)}
        self._considered: Considered | None = None

    @property
    def considered(self) -> Considered:
        """The segments to search."""
        if self._considered is None:
            self._considered = self._consider()
        return self._considered

    def _consider(self) -> Considered:
        """Work out the costs of all segments to consider."""
        count, reach = len(self.positions), self._reach
        size = BLOCK if reach < count else count
        parts = []
        for begin in range(0, count - 1, size):
            rows = np.arange(begin, min(begin + size, count - 1))
            parts.append(self._part(rows, np.arange(begin + 1, min(begin + size + reach, count)), 1, reach))
        if len(self._among):
            parts.append(self._part(self._among[:-1], self._among[1:], reach + 1, count))
        mode, row, column, *costs = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.lexsort((row, mode, column))
        column = column[order]
        offsets = np.searchsorted(column, np.arange(count))
        return Considered(mode[order], row[order], column, offsets, *(cost[order] for cost in costs))

    def _part(self, rows: Ints, stops: Ints, least: int, most: int) -> list[npt.NDArray[Any]]:
        """Return the segments between some positions that span ``least`` to ``most`` cuts, and their costs."""
        grid = self.grid(rows, stops)
        spans = stops[None, :] - rows[:, None]
        # Store segments one after the other are the same as one.
        wanted = np.stack([(spans == 1) & (least == 1), (least <= spans) & (spans <= most)])
        mode, row, column = np.nonzero(wanted & np.isfinite(grid.working_bytes))
        costs = [getattr(grid, cost.name) for cost in fields(grid)]
        return [mode, rows[row], stops[column] - 1, *(cost[mode, row, column] for cost in costs)]

    def grid(self, rows: Ints, stops: Ints) -> Grid:
        """Return the costs of all segments between some positions (indices), with what was learnt of replays."""
        grid = self.costs.grid(self._indices[rows], self._indices[stops])
        cuts = np.array(self.positions)
        for segment, nbytes in self._raised.items():
            row = np.searchsorted(cuts[rows], segment.start, "right")
            column = np.searchsorted(cuts[stops], segment.stop)
            working = grid.working_bytes[1, :row, column:]
            least = self.costs.least_around(segment, nbytes, cuts[stops[column:]])
            np.maximum(working, least, out=working)
        return grid

    # What the simulator saw ---------------------------------------------------------------------------------------

    def learn(self, proposal: Proposal, measured: Measured) -> bool:
        """Note the simulated peaks of a proposal's segments; return whether anything was not known before.

        A segment's peak less what is kept before it follows from its mode and from the flags of the values that enter
        it, so ``learnt`` has for each stop, by mode, start and flags, the exact number in place of the tables' bound.
        """
        allocates = False
        peaks = zip(measured.forward_peaks, measured.backward_peaks, strict=True)
        for segment, state, (forward, backward) in zip(proposal.segments, proposal.states, peaks, strict=False):
            mode, row, column = MODES.index(segment.mode), self._index[segment.start], self._index[segment.stop] - 1
            key = mode, row, state.flags
            own = max(forward, backward) - state.kept
            allocates |= self.learnt.setdefault(column, {}).get(key) != own
            self.learnt[column][key] = own
            if segment.mode is SegmentMode.RECOMPUTE:
                # A replay reads copies, so that what it needs does not depend on the flags.
                self._raise(segment, backward - state.kept)
        end = proposal.states[-1]
        allocates |= self._learnt_ends.get(end.flags) != measured.other_peak - end.kept
        self._learnt_ends[end.flags] = measured.other_peak - end.kept
        return allocates

    def _raise(self, segment: Segment, nbytes: float) -> None:
        """Note that a recompute segment works with so many bytes at least, and so do all that hold it."""
        self._raised[segment] = max(self._raised.get(segment, nbytes), nbytes)
        considered, row, column = self.considered, self._index[segment.start], self._index[segment.stop] - 1
        begin = considered.offsets[column]
        chosen = begin + np.flatnonzero((considered.mode[begin:] == 1) & (considered.row[begin:] <= row))
        stops = np.array(self.positions)[considered.column[chosen] + 1]
        least = self.costs.least_around(segment, nbytes, stops)
        considered.working_bytes[chosen] = np.maximum(considered.working_bytes[chosen], least)

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

    # Fewer segments -----------------------------------------------------------------------------------------------

    def restricted(self, chosen: Sequence[int]) -> Tables:
        """Return tables with only the ``chosen`` positions (indices; the first and the last among them)."""
        tables = copy.copy(self)
        tables.positions = tuple(self.positions[index] for index in chosen)
        tables.crossing, tables._indices = self.crossing.at(chosen), self._indices[np.array(chosen)]
        tables._begin(reach=len(chosen), among=())
        return tables

    def narrowed(self, chosen: Sequence[int], reach: int) -> Tables:
        """Return tables that consider only recompute segments between ``chosen`` positions or of ``reach`` cuts."""
        tables = copy.copy(self)
        tables._begin(reach, chosen)
        return tables
