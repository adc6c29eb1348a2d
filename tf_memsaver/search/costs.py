"""What segments cost, for all pairs of some starts and some stops at once: see ``tables`` for the letters.

A table over the pairs of all cuts grows with their square. So ``Costs`` holds what the tables are made from, in flat
arrays, and fills a ``Grid`` of the pairs that are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tf_memsaver.ir.segments import Segment
from tf_memsaver.judge.rows import Ints
from tf_memsaver.plan.problem import Problem
from tf_memsaver.search.crossing import Crossing
from tf_memsaver.search.facts import NEVER, Facts, Floats, unit_peaks


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The costs of the segments from some positions (rows) to others (columns).

    By mode, store and recompute, along the first axis; where the hints forbid a segment, W is infinite.
    """

    replay_seconds: Floats
    stored_bytes: Floats
    working_bytes: Floats
    inside_bytes: Floats
    forward_bytes: Floats
    forward_place: Ints


class Costs:
    """What the tables of one problem are made from. ``positions`` are 0, the candidate cuts and N."""

    def __init__(self, problem: Problem, facts: Facts, crossing: Crossing) -> None:
        self.unit_count = len(problem.graph.units)
        self._positions, self._crossing = crossing.positions, crossing
        self._resident_bytes = facts.resident_bytes
        self._arriving = np.array(facts.arriving, dtype=np.float64)
        self._forward, self._backward = _Forward(facts), _Backward(facts, self.unit_count)
        self._forbidden = [np.append(0, np.cumsum(other)) for other in (problem.forced, problem.pinned)]
        replays = [entry for entry in facts.replays if entry[2] and entry[1] <= self.unit_count]
        self._replays = _columns(replays, 3)
        self._replay_units = self._replays[0].astype(np.int64) - 1
        stored = [(b.made, b.readers[0], b.nbytes) for b in facts.buffers.values() if b.readers]
        self._stored = _columns(stored, 3)

    def grid(self, rows: Ints, columns: Ints) -> Grid:
        """Return the costs between some positions, given by index in ascending order."""
        starts, stops = self._positions[rows], self._positions[columns]
        nothing = np.zeros((len(rows), len(columns)))
        backward, inside = (self._backward.nbytes(starts, stops, inside) for inside in (False, True))
        arriving = self._crossing.entering_replay(rows, columns) + self._arriving[stops]
        replay = np.where(np.isfinite(backward), arriving, 0.0)
        forward_bytes, forward_place = self._forward.nbytes(starts, stops)
        working = np.maximum(np.stack([backward, np.maximum(backward, replay)]), 0.0) + self._resident_bytes
        return Grid(
            replay_seconds=np.stack([nothing, _dominated(self._replays, starts, stops)]),
            stored_bytes=np.stack([_dominated(self._stored, starts, stops), nothing]),
            working_bytes=np.where(self._allowed(starts, stops), working, NEVER),
            inside_bytes=np.stack([np.maximum(inside, 0.0) + self._resident_bytes, nothing]),
            forward_bytes=forward_bytes,
            forward_place=forward_place,
        )

    def replay_seconds_of(self, until: Ints) -> float:
        """Return what a cover of one level replays, in seconds; see ``repeats.replayed_until``."""
        _, need, seconds = self._replays
        return float(seconds[need <= until[self._replay_units]].sum())

    def least_around(self, segment: Segment, nbytes: float, stops: Ints) -> Floats:
        """Return what recompute segments that hold one need at least, by where they stop, if that one needs ``nbytes``.

        They replay and hold all that it does; only the gradients that arrive may be smaller.
        """
        return np.asarray(nbytes - np.maximum(self._arriving[segment.stop] - self._arriving[stops], 0.0))

    def _allowed(self, starts: Ints, stops: Ints) -> npt.NDArray[np.bool_]:
        """Return which segments, by mode, hold no unit that must be of the other mode."""
        free = [count[stops][None, :] == count[starts][:, None] for count in self._forbidden]
        return np.stack(free) & (starts[:, None] < stops[None, :])


class _Forward:
    """What is live while segments run forward."""

    def __init__(self, facts: Facts) -> None:
        self._peaks = np.array(facts.forward_peaks, dtype=np.float64)
        places = np.minimum.accumulate(self._peaks[::-1, 1])[::-1]
        after = np.searchsorted(places, [b.last_forward for b in facts.buffers.values()], "right").tolist()
        first = [b.readers[0] if b.readers else NEVER for b in facts.buffers.values()]
        passed = zip(facts.buffers.values(), first, after, strict=True)
        self._passed = _columns([(b.made, reader, unit, b.nbytes) for b, reader, unit in passed], 4)

    def nbytes(self, starts: Ints, stops: Ints) -> tuple[Floats, Ints]:
        """Return what is live while (i, j] runs forward, by mode, and at which op.

        Of the ops where a unit needs most, it is that which needs most if all that was made before i is kept.
        """
        low, high = int(starts[0]) + 1, int(stops[-1]) + 1
        units = np.arange(low, high)
        nbytes, place = self._peaks[low:high].T
        made, reader, after, size = self._passed
        kept = _dominated(np.stack([made, np.maximum(reader, after), size]), starts, units)
        live = nbytes + np.stack([kept, np.zeros_like(kept)])
        passed = [_dominated(np.stack([at, after, size]), starts, units) for at in (np.full_like(made, NEVER), made)]
        need = np.where(units > starts[:, None], live + passed[0] - passed[1], 0.0)
        # The unit where the running maximum last rose.
        rises = np.diff(np.maximum.accumulate(need, axis=2), axis=2, prepend=0.0) > 0
        unit = np.maximum.accumulate(np.where(rises, units - low, 0), axis=2)[..., np.maximum(stops - low, 0)]
        return np.take_along_axis(live, unit, axis=2), place[unit].astype(np.int64)


class _Backward:
    """What is live while segments run backward."""

    def __init__(self, facts: Facts, unit_count: int) -> None:
        read = [
            (before, reader, buffer.made, buffer.nbytes)
            for buffer in facts.buffers.values()
            for before, reader in zip([0, *buffer.readers], buffer.readers, strict=False)
        ]
        self._read = _columns(read, 4)
        self._has_backward = np.zeros(unit_count + 2, dtype=np.bool_)
        self._has_backward[[unit for unit in facts.backward_ops if unit <= unit_count]] = True
        self._tops = [
            _columns(
                [
                    (unit, *piece)
                    for unit, ops in facts.backward_ops.items()
                    if unit <= unit_count
                    for piece in unit_peaks(facts, unit, ops, inside)
                ],
                4,
            )
            for inside in (False, True)
        ]

    def nbytes(self, starts: Ints, stops: Ints, inside: bool) -> Floats:
        """Return the most that is live while (i, j] runs backward, of its own; ``inside``: without what enters it."""
        # Units after the first start and up to the last stop count; a column for each, and one for what lies before.
        low, width = int(starts[0]), int(stops[-1]) - int(starts[0]) + 1
        read = np.zeros((len(starts) + 1, width))
        before, reader, made, nbytes = self._read
        until = np.minimum(reader, made) if inside else reader
        _add_to_rows(read, starts, before, until, np.maximum(reader, low) - low, nbytes)
        np.cumsum(read, axis=0, out=read)
        np.cumsum(read, axis=1, out=read)
        top = np.zeros_like(read)
        unit, edge, after, above = self._tops[int(inside)]
        _add_to_rows(top, starts, edge, after, unit - low, above)
        np.cumsum(top, axis=0, out=top)
        peaks = np.asarray(np.add(read, top, out=read)[:-1])
        units = np.arange(low, low + width)
        peaks[:, ~self._has_backward[units]] = -NEVER
        peaks[units[None, :] <= starts[:, None]] = -NEVER
        return np.asarray(np.maximum.accumulate(peaks, axis=1, out=peaks)[:, stops - low])


def _columns(entries: Sequence[tuple[float, ...]], count: int) -> Floats:
    return np.array(entries, dtype=np.float64).reshape(-1, count).T


def _add_to_rows(table: Floats, starts: Ints, low: Floats, high: Floats, column: Floats, amount: Floats) -> None:
    """Add amounts to a column, for all starts in [low, high); running sums down the rows make the table."""
    first, last = np.searchsorted(starts, low), np.searchsorted(starts, high)
    inside = (first < last) & (column < table.shape[1]) & (column >= 0)
    columns = column[inside].astype(np.int64)
    np.add.at(table, (first[inside], columns), amount[inside])
    np.subtract.at(table, (last[inside], columns), amount[inside])


def _dominated(entries: Floats, starts: Ints, stops: Ints) -> Floats:
    """Return, for each start i and stop j, the sum of amounts of entries (at, need, amount) with i < at, need ≤ j."""
    at, need, amount = entries
    row, column = np.searchsorted(starts, at) - 1, np.searchsorted(stops, need)
    inside = (row >= 0) & (column < len(stops))
    table = np.zeros((len(starts), len(stops)))
    np.add.at(table, (row[inside], column[inside]), amount[inside])
    table = np.cumsum(table, axis=1)
    return np.asarray(np.cumsum(table[::-1], axis=0)[::-1])
