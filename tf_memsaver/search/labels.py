"""The resource-constrained shortest path over candidate cuts that all exact planners run.

A *label* is a way to cover the units up to a cut: what it keeps (a, in bytes), what it replays (t, in seconds), and
which of the values that cross the cut are kept already for a segment before it (its *flags*). ``Search`` extends labels
cut by cut, drops those whose a + W is above the limit, and keeps the Pareto-optimal ones (Desrochers & Soumis 1988).
With labels of least a alone this answers whether a limit can be met; the least a + W that was rejected says which limit
to try next, so that the least limit is found exactly in a few steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_memsaver.ir.segments import Segment
from tf_memsaver.judge.rows import Ints
from tf_memsaver.search.crossing import Flags
from tf_memsaver.search.facts import Floats
from tf_memsaver.search.tables import MODES, Proposal, State, Tables

INFINITE = float("inf")

MOST_EXTENSIONS = 1 << 22
"""Labels that one search makes, those of a cut by all segments: bounds the labels of a cut. Exact while fewer do.

Where many values cross a cut, as in a deep U-Net, each may be kept or not, and patterns of flags double with each.
"""

LEAST_LABELS = 64
"""Labels that a cut may have at any rate."""

MOST_COMPARED = 1024
"""Labels of several patterns that all others are compared with, where only the bytes that they keep count."""

ROUGH_RANGES = 64
"""Ranges of kept bytes whose quickest labels are compared before any are sorted."""


@dataclass(slots=True)
class _Labels:
    """Labels, one a row: bytes kept, seconds, largest a + W so far, flags, cut; where they come from, and how.

    Few flags differ between the labels of a cut: ``pattern`` is the row of a table of them.
    """

    kept: Floats
    seconds: Floats
    peak: Floats
    pattern: Ints
    node: Ints
    parent: Ints
    mode: Ints

    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        """Return the arrays, in the order of the fields."""
        return (self.kept, self.seconds, self.peak, self.pattern, self.node, self.parent, self.mode)

    def take(self, rows: npt.NDArray[np.intp] | Flags) -> _Labels:
        """Return some of the rows."""
        return _Labels(*(column[rows] for column in self.columns()))


class _Shelf:
    """All labels kept so far, in order of their cuts, and the patterns of their flags, in arrays that grow by doubling.

    ``offsets`` and ``pattern_offsets`` are where the labels and the patterns of each cut begin.
    """

    def __init__(self, slots: int, least_peak: float) -> None:
        self.rows, self.flags = _empty(256), np.zeros((64, slots), dtype=np.bool_)
        self.rows.peak[0] = least_peak
        self.rows.parent[0] = -1
        self.offsets, self.pattern_offsets = [0, 1], [0, 1]

    def add(self, labels: _Labels, flags: Flags) -> None:
        """Put the labels of the next cut on the shelf; their patterns are rows of ``flags``."""
        used, pattern = np.unique(labels.pattern, return_inverse=True)
        begin, end = self.pattern_offsets[-1], self.pattern_offsets[-1] + len(used)
        if end > len(self.flags):
            self.flags = np.concatenate([self.flags[:begin], np.zeros((2 * end - begin, flags.shape[1]), np.bool_)])
        self.flags[begin:end] = flags[used]
        self.pattern_offsets.append(end)
        labels.pattern = begin + pattern
        begin, end = self.offsets[-1], self.offsets[-1] + len(labels.kept)
        if end > len(self.rows.kept):
            larger = _empty(2 * end)
            for new, old in zip(larger.columns(), self.rows.columns(), strict=True):
                new[:begin] = old[:begin]
            self.rows = larger
        for own, added in zip(self.rows.columns(), labels.columns(), strict=True):
            own[begin:end] = added
        self.offsets.append(end)


def _joined(nodes: Ints, offsets: Sequence[int]) -> tuple[Ints, Ints]:
    """Return, for each of some nodes and each row that lies at it, the index of the former and the row."""
    begins = np.array(offsets)
    first, counts = begins[nodes], begins[nodes + 1] - begins[nodes]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(np.arange(len(nodes)), counts), np.repeat(first, counts) + within


def _empty(count: int) -> _Labels:
    floats, ints = np.zeros((3, count)), np.zeros((4, count), dtype=np.int64)
    return _Labels(floats[0], floats[1], floats[2], ints[0], ints[1], ints[2], ints[3])


class Search:
    """Labels from the first cut to the last, under a limit on the peak and perhaps one on the time.

    ``front`` is how many labels a cut keeps for each pattern of flags: 1 keeps those of least kept bytes alone. Where
    there are more, some are dropped; with ``rounds_down`` their time goes to one that keeps less, so that the time of
    the answer is a bound from below on that of all plans in the tables, and its segments may need more. Where there are
    too many of those, ``gave_up`` is true and there is no answer.
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
        self.next_limit, self.gave_up = INFINITE, False
        slots = tables.crossing.nbytes.shape[1]
        self._most = max(front, LEAST_LABELS, MOST_EXTENSIONS // len(tables.considered.row))
        self._shelf = _Shelf(slots, tables.least_peak)
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
            labels, flags = self._extend(column)
            self._shelf.add(self._prune(labels, flags, column + 1), flags)
            if self.gave_up:
                return None
        return self._finish()

    def _reject(self, peaks: Floats) -> None:
        if len(peaks):
            self.next_limit = min(self.next_limit, float(peaks.min()))

    def _extend(self, column: int) -> tuple[_Labels, Flags]:
        """Return all extensions within the limits, by one segment that ends at cut ``column + 1``; their patterns."""
        tables, shelf = self._tables, self._shelf
        considered, rows = tables.considered, shelf.rows
        self._reject(self._rejected[column : column + 1])
        begin, end = considered.offsets[column : column + 2]
        near = begin + np.flatnonzero(self._near[begin:end])
        nodes = considered.row[near]
        pairs = self._pairs(column, near)
        place, parent = _joined(nodes, shelf.offsets)
        segment = near[place]
        pair = pairs.offsets[place] + rows.pattern[parent] - np.array(shelf.pattern_offsets)[nodes][place]
        kept = rows.kept[parent]
        peak = np.maximum(rows.peak[parent], kept - pairs.already[pair] + considered.working_bytes[segment])
        peak = np.maximum(peak, kept + considered.inside_bytes[segment])
        self._raise_forward(peak, kept + pairs.new[pair], pairs, pair, segment)
        known = np.flatnonzero(np.isfinite(pairs.learnt)[pair])
        peak[known] = np.maximum(rows.peak[parent[known]], kept[known] + pairs.learnt[pair[known]])
        seconds = rows.seconds[parent] + considered.replay_seconds[segment]
        fits = peak <= self._limit
        if self._seconds_limit < INFINITE:
            in_time = seconds <= self._seconds_limit
            self._reject(peak[in_time & ~fits])
            fits &= in_time
        else:
            self._reject(peak[~fits])
        kept = kept + pairs.new[pair] + considered.stored_bytes[segment]
        node = np.full(len(parent), column + 1)
        labels = _Labels(kept, seconds, peak, pairs.pattern[pair], node, parent, considered.mode[segment])
        return labels if fits.all() else labels.take(fits), pairs.patterns

    def _pairs(self, column: int, near: npt.NDArray[np.intp]) -> _Pairs:
        """Return what follows from the flags, for segments that end at cut ``column + 1`` and patterns at their start.

        Labels are many more than patterns, and slots need not be looked through for each of them.
        """
        tables, shelf, crossing = self._tables, self._shelf, self._tables.crossing
        modes, nodes = tables.considered.mode[near], tables.considered.row[near]
        place, pattern = _joined(nodes, shelf.pattern_offsets)
        offsets = np.searchsorted(place, np.arange(len(near)))
        mode, node, flags = modes[place], nodes[place], shelf.flags[pattern]
        entering = crossing.entering(modes, nodes, column + 1)[place]
        new = np.where(flags, 0.0, entering).sum(axis=1)
        # A store segment reads what is kept already in place, a replay reads a copy of it. Exact for a store segment of
        # which all or none of the entering values are kept already, else the larger of two bounds from below.
        already = np.where(mode == 0, entering.sum(axis=1) - new, 0.0)
        learnt = np.full(len(place), INFINITE)
        for (its_mode, start, its_flags), own in tables.learnt.get(column, {}).items():
            its = np.flatnonzero((mode == its_mode) & (node == start))
            learnt[its[(flags[its] == np.frombuffer(its_flags, dtype=np.bool_)).all(axis=1)]] = own
        owner = crossing.owner[column + 1]
        same = (crossing.owner[nodes] == owner)[place]
        by_store = (crossing.kept_by_store(nodes, column + 1) & (modes == 0)[:, None])[place]
        held = flags | (entering > 0)
        after = np.where(same, held, by_store) & (owner >= 0)
        packed = np.packbits(after, axis=1)
        _, first, after_pattern = np.unique(
            packed.view(np.dtype((np.void, packed.shape[1])))[:, 0], return_index=True, return_inverse=True
        )
        return _Pairs(offsets, new, already, learnt, held, after_pattern, after[first])

    def _raise_forward(self, peak: Floats, kept: Floats, pairs: _Pairs, pair: Ints, segment: Ints) -> None:
        """Raise peaks to what the segments' forward passes need beside what is kept, where that is more."""
        considered, crossing = self._tables.considered, self._tables.crossing
        nbytes = considered.forward_bytes[segment]
        rows = np.flatnonzero(kept + nbytes > peak)
        its = segment[rows]
        live = crossing.live_in_forward(considered.row[its], considered.forward_place[its])
        twice = np.where(pairs.held[pair[rows]], live, 0.0).sum(axis=1)
        peak[rows] = np.maximum(peak[rows], kept[rows] + nbytes[rows] - twice)

    def _prune(self, labels: _Labels, flags: Flags, node: int) -> _Labels:
        """Keep labels that no other beats in kept bytes and time, whatever is still to be kept for later segments."""
        if len(labels.kept) < 2:
            return labels
        crossing = self._tables.crossing.nbytes[node]
        # What a label keeps more, at worst, when all that crosses here comes to be needed.
        more = np.where(flags, 0.0, crossing).sum(axis=1)
        if self._front == 1:
            least = np.full(len(flags), INFINITE)
            np.minimum.at(least, labels.pattern, labels.kept)
            labels = labels.take(labels.kept <= np.minimum(least, (least + more).min())[labels.pattern])
            order = np.lexsort((labels.seconds, labels.pattern))
            pattern = labels.pattern[order]
            labels = labels.take(order[np.append(True, pattern[1:] != pattern[:-1])])
            return self._fewer(labels.take(_unbeaten(labels.kept, flags[labels.pattern], crossing)), more)
        labels = _staircases(_roughly(labels, len(flags)))
        worst = labels.kept + more[labels.pattern]
        order = np.lexsort((labels.seconds, worst))
        least = np.minimum.accumulate(labels.seconds[order])
        place = np.searchsorted(worst[order], labels.kept, side="left") - 1
        labels = labels.take((place < 0) | (least[np.maximum(place, 0)] > labels.seconds))
        return self._fewer(self._thinned(labels), more)

    def _thinned(self, labels: _Labels) -> _Labels:
        """Return about ``front`` labels of each pattern, given in order of pattern and kept bytes.

        Where there are more, the quickest of each of ``front`` equal ranges of kept bytes, and that which keeps least.
        """
        counts = np.bincount(labels.pattern)
        if counts.max() <= self._front:
            return labels
        ends = np.cumsum(counts)
        begins = ends - counts
        least = labels.kept[np.minimum(begins, len(labels.kept) - 1)]
        width = np.maximum(labels.kept[ends - 1] - least, 1.0) / self._front
        its = labels.pattern
        part = ((labels.kept - least[its]) / width[its]).astype(np.int64)
        border = (its[1:] != its[:-1]) | (part[1:] != part[:-1])
        few = counts[its] <= self._front
        first, last = np.append(True, border) | few, np.append(border, True) | few
        if self._rounds_down:
            labels.seconds[first] = labels.seconds[last]
            return labels.take(first)
        last[begins[counts > 0]] = True
        return labels.take(last)

    def _fewer(self, labels: _Labels, more: Floats) -> _Labels:
        """Return as many labels as there may be: the quickest of each of ``front`` equal ranges of kept bytes.

        What crosses here and is not kept yet counts half: it may come to be needed.
        """
        if len(labels.kept) <= self._most:
            return labels
        self.gave_up = self._rounds_down
        half = labels.kept + more[labels.pattern] / 2
        if self._front == 1:
            return labels.take(np.sort(np.argsort(half, kind="stable")[: self._most]))
        width = max(float(np.ptp(half)), 1.0) / (self._front - 1)
        place = ((half - half.min()) / width).astype(np.int64)
        order = np.lexsort((labels.seconds, place))
        ranges = np.searchsorted(place[order], np.arange(self._front))
        within = np.arange(len(order)) - ranges[place[order]]
        return labels.take(np.sort(order[within < self._most // self._front]))

    def _finish(self) -> Proposal | None:
        """Return the best label at the last cut, spelt out, where the loss is within the limit too."""
        rows, offsets = self._shelf.rows, self._shelf.offsets
        last = np.arange(offsets[-2], offsets[-1])
        flags, kept = self._shelf.flags[rows.pattern[last]], rows.kept[last]
        idle = kept - np.where(flags, self._tables.crossing.nbytes[-1], 0.0).sum(axis=1)
        ends = [self._tables.end_peak(its.tobytes(), *each) for its, *each in zip(flags, kept, idle, strict=True)]
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
        rows = self._shelf.rows
        return State(kept=float(rows.kept[row]), flags=self._shelf.flags[rows.pattern[row]].tobytes())


@dataclass(frozen=True, slots=True)
class _Pairs:
    """What follows from flags alone, for pairs of a segment and a pattern of flags at its start, by segment.

    The pairs of a segment begin at one of ``offsets``. Bytes that enter it: ``new`` of values that are not kept yet,
    ``already`` of those that it reads where they are kept. ``learnt`` is what the simulator saw beside what was kept
    before, infinite where it saw nothing. ``held`` tells the slots whose values are kept once the segment is there,
    ``pattern`` the row of ``patterns`` with the flags at its end.
    """

    offsets: Ints
    new: Floats
    already: Floats
    learnt: Floats
    held: Flags
    pattern: Ints
    patterns: Flags


def _unbeaten(kept: Floats, flags: Flags, nbytes: Floats) -> Flags:
    """Return which of some labels, one of each pattern, may come to keep less than each of the others.

    The least of them are compared with all: what one has kept and the other not, the other may have to keep yet.
    """
    held = np.where(flags, nbytes, 0.0)
    few = np.argsort(kept, kind="stable")[:MOST_COMPARED]
    at_worst = kept[few][:, None] + held.sum(axis=1) - held[few] @ flags.T.astype(np.float64)
    at_worst[np.arange(len(few)), few] = INFINITE
    return np.asarray((at_worst > kept).all(axis=0))


def _roughly(labels: _Labels, patterns: int) -> _Labels:
    """Return labels without most of those that another one of their pattern beats: quickly, with nothing sorted."""
    least = labels.kept.min()
    width = max(float(labels.kept.max() - least), 1.0) / (ROUGH_RANGES - 1)
    part = ((labels.kept - least) / width).astype(np.int64)
    table = np.full((patterns, ROUGH_RANGES + 1), INFINITE)
    np.minimum.at(table.reshape(-1), labels.pattern * (ROUGH_RANGES + 1) + part + 1, labels.seconds)
    below = np.minimum.accumulate(table, axis=1)
    return labels.take(labels.seconds < below[labels.pattern, part])


def _staircases(labels: _Labels) -> _Labels:
    """Return the Pareto-optimal labels of each pattern, in order of pattern and kept bytes."""
    order = np.lexsort((labels.peak, labels.seconds, labels.kept, labels.pattern))
    labels = labels.take(order)
    # Further down by more than all times with each pattern, so that one running minimum serves them all.
    span = 2.0 * float(np.ptp(labels.seconds)) or 1.0
    height = labels.seconds - labels.pattern * span
    return labels.take(np.append(True, height[1:] < np.minimum.accumulate(height)[:-1]))
