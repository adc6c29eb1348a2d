"""The resource-constrained shortest path over candidate cuts that all exact planners run.

A *label* is a way to cover the units up to a cut: what it keeps (a, in bytes), what it replays (t, in seconds), and
which of the values that cross the cut are kept already for a segment before it (its *flags*). ``Search`` extends labels
cut by cut, drops those whose a + W is above the limit, and keeps the Pareto-optimal ones (Desrochers & Soumis 1988).
With labels of least a alone this answers whether a limit can be met; the least a + W that was rejected says which limit
to try next, so that the least limit is found exactly in a few steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tf_memsaver.ir.segments import Segment
from tf_memsaver.judge.rows import Ints
from tf_memsaver.search.crossing import Flags
from tf_memsaver.search.facts import Floats
from tf_memsaver.search.tables import MODES, Proposal, State, Tables

INFINITE = float("inf")

MOST_FLAGS = 1 << 28
"""Flags that one search looks at, labels by segments by slots: bounds the labels of a cut. Exact while fewer do.

Where many values cross a cut, as in a deep U-Net, each may be kept or not, and patterns of flags double with each.
"""

LEAST_LABELS = 64
"""Labels that a cut may have at any rate."""


@dataclass(slots=True)
class _Labels:
    """Labels, one a row: bytes kept, seconds, largest a + W so far, flags by slot, cut; where they come from, and how.

    ``idle`` is what of the kept bytes does not cross the cut.
    """

    kept: Floats
    seconds: Floats
    peak: Floats
    flags: Flags
    node: Ints
    parent: Ints
    mode: Ints
    idle: Floats

    def columns(self) -> tuple[npt.NDArray[np.generic], ...]:
        """Return the arrays, in the order of the fields."""
        floats = (self.kept, self.seconds, self.peak, self.idle)
        return (*floats, self.flags, self.node, self.parent, self.mode)

    def take(self, rows: npt.NDArray[np.intp] | Flags) -> _Labels:
        """Return some of the rows."""
        return _Labels(
            self.kept[rows],
            self.seconds[rows],
            self.peak[rows],
            self.flags[rows],
            self.node[rows],
            self.parent[rows],
            self.mode[rows],
            self.idle[rows],
        )


class _Shelf:
    """All labels kept so far, in order of their cuts, in arrays that grow by doubling."""

    def __init__(self, slots: int, least_peak: float) -> None:
        self.rows = _empty(256, slots)
        self.rows.peak[0] = least_peak
        self.rows.parent[0] = -1
        self.offsets = [0, 1]

    def add(self, labels: _Labels) -> None:
        """Put the labels of the next cut on the shelf."""
        begin, end = self.offsets[-1], self.offsets[-1] + len(labels.kept)
        if end > len(self.rows.kept):
            larger = _empty(2 * end, self.rows.flags.shape[1])
            for new, old in zip(larger.columns(), self.rows.columns(), strict=True):
                new[:begin] = old[:begin]
            self.rows = larger
        for own, added in zip(self.rows.columns(), labels.columns(), strict=True):
            own[begin:end] = added
        self.offsets.append(end)

    def joined(self, segments: npt.NDArray[np.intp], nodes: Ints) -> tuple[Ints, Ints]:
        """Return, for each segment and each label at the node where it starts, the segment and the label's row."""
        offsets = np.array(self.offsets)
        first, counts = offsets[nodes], offsets[nodes + 1] - offsets[nodes]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(segments, counts), np.repeat(first, counts) + within


def _empty(count: int, slots: int) -> _Labels:
    floats, ints = np.zeros((4, count)), np.zeros((3, count), dtype=np.int64)
    flags = np.zeros((count, slots), dtype=np.bool_)
    return _Labels(floats[0], floats[1], floats[2], flags, ints[0], ints[1], ints[2], floats[3])


class Search:
    """Labels from the first cut to the last, under a limit on the peak and perhaps one on the time.

    ``front`` is how many labels a cut keeps for each pattern of flags: 1 keeps those of least kept bytes alone. Where
    there are more, some are dropped; with ``rounds_down`` their time goes to one that keeps less, so that the time of
    the answer is a bound from below on that of all plans in the tables, and its segments may need more.
    ``next_limit`` is, after a search that found nothing, a limit below which no other search finds anything; infinite
    when no limit helps.
    """

    def __init__(
        self,
        tables: Tables,
        limit: float,
        front: int,
        seconds_limit: float = INFINITE,
        rounds_down: bool = False,
    ) -> None:
        # Segments that hints forbid have infinite W, and no limit lets them in.
        self._tables, self._limit = tables, min(limit, np.finfo(np.float64).max)
        self._front, self._seconds_limit, self._rounds_down = front, seconds_limit, rounds_down
        self.next_limit = INFINITE
        slots = tables.crossing.nbytes.shape[1]
        self._most = max(front, LEAST_LABELS, MOST_FLAGS // (slots * len(tables.considered.row)))
        self._shelf = _Shelf(slots, tables.least_peak)
        # Patterns of flags as numbers: exact up to 62 slots; beyond, sums modulo 2⁶⁴ that hardly ever meet.
        factor = 2 if slots <= 62 else 0x9E3779B97F4A7C15
        self._weights = np.cumprod(np.full(slots, factor, dtype=np.uint64))
        self._set_windows()

    def _set_windows(self) -> None:
        """Find which segments alone are within the limits, and what the least of the others needs, by stop."""
        considered = self._tables.considered
        in_time = considered.replay_seconds <= self._seconds_limit
        self._near = in_time & (considered.working_bytes <= self._limit)
        self._rejected = np.full(len(self._tables.positions), INFINITE)
        others = in_time & ~self._near
        np.minimum.at(self._rejected, considered.column[others], considered.working_bytes[others])

    def run(self) -> Proposal | None:
        """Return the proposal of least replay time (with ``front`` 1: of least kept bytes), or None."""
        if self._tables.least_peak > self._limit:
            self.next_limit = self._tables.least_peak
            return None
        for column in range(len(self._tables.positions) - 1):
            self._shelf.add(self._prune(self._extend(column), column + 1))
        return self._finish()

    def _reject(self, peaks: Floats) -> None:
        if len(peaks):
            self.next_limit = min(self.next_limit, float(peaks.min()))

    def _extend(self, column: int) -> _Labels:
        """Return all extensions within the limits, by one segment that ends at cut ``column + 1``."""
        tables, rows = self._tables, self._shelf.rows
        considered, crossing = tables.considered, tables.crossing
        self._reject(self._rejected[column : column + 1])
        begin, end = considered.offsets[column : column + 2]
        near = begin + np.flatnonzero(self._near[begin:end])
        segment, parent = self._shelf.joined(near, considered.row[near])
        mode, node = considered.mode[segment], considered.row[segment]
        flags = rows.flags[parent]
        entering = crossing.entering(mode, node, column + 1)
        new = np.where(flags, 0.0, entering).sum(axis=1)
        kept = rows.kept[parent]
        # A store segment reads what is kept already in place, a replay reads a copy of it. Exact for a store segment of
        # which all or none of the entering values are kept already, else the larger of two bounds from below.
        already = np.where(mode == 0, entering.sum(axis=1) - new, 0.0)
        peak = np.maximum(rows.peak[parent], kept - already + considered.working_bytes[segment])
        peak = np.maximum(peak, kept + considered.inside_bytes[segment])
        self._raise_forward(peak, kept + new, flags | (entering > 0), segment)
        for (its_mode, start, its_flags), own in tables.learnt.get(column, {}).items():
            known = (mode == its_mode) & (node == start)
            if known.any():
                known &= (flags == np.frombuffer(its_flags, dtype=np.bool_)).all(axis=1)
                peak[known] = np.maximum(rows.peak[parent[known]], kept[known] + own)
        seconds = rows.seconds[parent] + considered.replay_seconds[segment]
        fits = peak <= self._limit
        if self._seconds_limit < INFINITE:
            in_time = seconds <= self._seconds_limit
            self._reject(peak[in_time & ~fits])
            fits &= in_time
        else:
            self._reject(peak[~fits])
        kept = kept + new + considered.stored_bytes[segment]
        owner = crossing.owner[column + 1]
        same = crossing.owner[node] == owner
        by_store = crossing.kept_by_store(node, column + 1) & (mode == 0)[:, None]
        flags = np.where(same, flags | (entering > 0), by_store) & (owner >= 0)
        idle = kept - np.where(flags, crossing.nbytes[column + 1], 0.0).sum(axis=1)
        labels = _Labels(kept, seconds, peak, flags, np.full(len(parent), column + 1), parent, mode, idle)
        return labels if fits.all() else labels.take(fits)

    def _raise_forward(self, peak: Floats, kept: Floats, flags: Flags, segment: Ints) -> None:
        """Raise peaks to what the segments' forward passes need beside what is kept, where that is more."""
        considered, crossing = self._tables.considered, self._tables.crossing
        nbytes = considered.forward_bytes[segment]
        rows = np.flatnonzero(kept + nbytes > peak)
        its = segment[rows]
        live = crossing.live_in_forward(considered.row[its], considered.forward_place[its])
        twice = np.where(flags[rows], live, 0.0).sum(axis=1)
        peak[rows] = np.maximum(peak[rows], kept[rows] + nbytes[rows] - twice)

    def _prune(self, labels: _Labels, node: int) -> _Labels:
        """Keep labels that no other beats in kept bytes and time, whatever is still to be kept for later segments."""
        if len(labels.kept) < 2:
            return labels
        # What a label keeps at worst when all that crosses here comes to be needed.
        worst = labels.idle + float(self._tables.crossing.nbytes[node].sum())
        if self._front == 1:
            labels = labels.take(labels.kept <= worst.min())
            if len(labels.kept) == 1:
                return labels
            pattern = labels.flags @ self._weights
            order = np.lexsort((labels.seconds, labels.kept, pattern))
            first = np.append(True, pattern[order][1:] != pattern[order][:-1])
            return self._fewer(labels.take(order[first]), node)
        order = np.lexsort((labels.seconds, worst))
        least = np.minimum.accumulate(labels.seconds[order])
        place = np.searchsorted(worst[order], labels.kept, side="left") - 1
        labels = labels.take((place < 0) | (least[np.maximum(place, 0)] > labels.seconds))
        pattern = labels.flags @ self._weights
        order = np.lexsort((labels.peak, labels.seconds, labels.kept, pattern))
        borders = np.flatnonzero(pattern[order][1:] != pattern[order][:-1]) + 1
        rows = np.concatenate([self._staircase(labels, rows) for rows in np.split(order, borders)])
        return self._fewer(labels.take(rows), node)

    def _fewer(self, labels: _Labels, node: int) -> _Labels:
        """Return as many labels as there may be: in each of ``front`` equal ranges of time, those that keep least.

        What crosses here and is not kept yet counts half: it may come to be needed.
        """
        if len(labels.kept) <= self._most:
            return labels
        half = labels.kept + labels.idle + float(self._tables.crossing.nbytes[node].sum())
        place = np.zeros(len(half), dtype=np.int64)
        width = np.ptp(labels.seconds) if self._front > 1 else 0.0
        if width:
            place = ((labels.seconds - labels.seconds.min()) * ((self._front - 1) / width)).astype(np.int64)
        order = np.lexsort((half, place))
        ranges = np.searchsorted(place[order], np.arange(self._front))
        within = np.arange(len(order)) - ranges[place[order]]
        return labels.take(np.sort(order[within < self._most // self._front]))

    def _staircase(self, labels: _Labels, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return the Pareto-optimal rows of one pattern, given in order of kept bytes; at most about ``front``.

        Where there are more, the quickest of each of ``front`` equal ranges of kept bytes, and that which keeps least.
        """
        seconds = labels.seconds[rows]
        rows = rows[np.append(True, seconds[1:] < np.minimum.accumulate(seconds)[:-1])]
        if len(rows) <= self._front:
            return rows
        kept = labels.kept[rows]
        slot = ((kept - kept[0]) * (self._front / (kept[-1] - kept[0]))).astype(np.int64)
        borders = slot[1:] != slot[:-1]
        if self._rounds_down:
            first, last = rows[np.append(True, borders)], rows[np.append(borders, True)]
            labels.seconds[first] = labels.seconds[last]
            return np.asarray(first)
        chosen = np.append(borders, True)
        chosen[0] = True
        return np.asarray(rows[chosen])

    def _finish(self) -> Proposal | None:
        """Return the best label at the last cut, spelt out, where the loss is within the limit too."""
        rows, offsets = self._shelf.rows, self._shelf.offsets
        last = np.arange(offsets[-2], offsets[-1])
        ends = [
            self._tables.end_peak(flags.tobytes(), kept, idle)
            for flags, kept, idle in zip(rows.flags[last], rows.kept[last], rows.idle[last], strict=True)
        ]
        peak = np.maximum(rows.peak[last], np.array(ends))
        self._reject(peak[peak > self._limit])
        last, peak = last[peak <= self._limit], peak[peak <= self._limit]
        if not len(last):
            return None
        best = int(np.lexsort((peak, rows.seconds[last]))[0])
        row = int(last[best])
        states, segments = [self._state(row)], []
        seconds = float(rows.seconds[row])
        positions = self._tables.positions
        while rows.parent[row] >= 0:
            parent = int(rows.parent[row])
            start, stop = positions[int(rows.node[parent])], positions[int(rows.node[row])]
            segments.append(Segment(start=start, stop=stop, mode=MODES[int(rows.mode[row])]))
            states.append(self._state(parent))
            row = parent
        return Proposal(
            segments=tuple(reversed(segments)),
            states=tuple(reversed(states)),
            peak_bytes=float(peak[best]),
            replay_seconds=seconds,
        )

    def _state(self, row: int) -> State:
        return State(kept=float(self._shelf.rows.kept[row]), flags=self._shelf.rows.flags[row].tobytes())
