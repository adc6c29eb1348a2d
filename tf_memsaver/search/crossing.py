"""The values that cross cuts, in slots: by cut, who owns a slot, and from where on a segment needs what is in it.

Crossing values get slots like registers, so that no two values that cross the same cut share one. All tables have one
row a position and one column a slot. What enters one segment follows from them, and is worked out where it is asked
for: a table over all pairs of cuts, by slot, is the one thing that would not fit for graphs of many cuts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tf_memsaver.judge.rows import Ints
from tf_memsaver.search.facts import Buffer, Facts, Floats

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """What crosses each position, by slot.

    ``owner`` is a number of the value in the slot, -1 for none, and ``nbytes`` its bytes. A segment of a mode (the
    first axis of ``needed``: store, recompute) from here on needs the value if it stops at or after ``needed``, more
    than there are units for never. A store segment that ends here keeps the value for itself if the value is made
    after its start: ``kept_after`` is where it is made, or 0 where no backward op up to here reads it. The last op of
    the forward pass that reads it is ``last_forward``, -1 for none.
    """

    positions: Ints
    owner: Ints
    nbytes: Floats
    needed: Ints
    kept_after: Ints
    last_forward: Ints

    def at(self, chosen: Sequence[int]) -> Crossing:
        """Return the rows of some positions (indices)."""
        rows = np.array(chosen)
        return Crossing(
            positions=self.positions[rows],
            owner=self.owner[rows],
            nbytes=self.nbytes[rows],
            needed=self.needed[:, rows],
            kept_after=self.kept_after[rows],
            last_forward=self.last_forward[rows],
        )

    def entering(self, mode: npt.NDArray[np.integer], row: Ints, stop: int) -> Floats:
        """Return, for segments of these modes from these rows to the row ``stop``, the bytes that enter by slot."""
        needed = self.needed[mode, row] <= self.positions[stop]
        return np.where(needed, self.nbytes[row], 0.0)

    def live_in_forward(self, row: Ints, place: Ints) -> Floats:
        """Return, by slot, the bytes of what crosses these rows and is live at these ops of the forward pass."""
        return np.where(self.last_forward[row] >= place[:, None], self.nbytes[row], 0.0)

    def kept_by_store(self, row: Ints, stop: Ints | int) -> Flags:
        """Return, for store segments from these rows to these (either may be one), which slots hold what they keep."""
        return np.asarray(self.positions[row][..., None] < self.kept_after[stop])

    def entering_replay(self, rows: Ints, columns: Ints) -> Floats:
        """Return the bytes that enter recompute segments from each of some rows to each of some rows, of all slots."""
        table = np.zeros((len(rows), len(columns) + 1))
        place = np.searchsorted(self.positions[columns], self.needed[1, rows])
        np.add.at(table, (np.arange(len(rows))[:, None], place), self.nbytes[rows])
        return np.asarray(np.cumsum(table[:, :-1], axis=1))


def crossing(facts: Facts, positions: Sequence[int], unit_count: int) -> Crossing:
    """Give the values that cross ``positions`` slots, and tabulate them."""
    cuts = np.array(positions)
    found: list[tuple[int, int, Buffer]] = []
    for buffer in facts.buffers.values():
        furthest = max([buffer.furthest, *buffer.readers])
        first, end = np.searchsorted(cuts, [buffer.made, furthest]).tolist()
        if first < end and buffer.nbytes:
            found.append((first, end, buffer))
    found.sort(key=lambda item: item[:2])
    slots, count = _slots([item[:2] for item in found])
    shape = len(cuts), count
    owner, nbytes, last_forward = np.full(shape, -1), np.zeros(shape), np.full(shape, -1)
    needed, kept_after = np.full((2, *shape), unit_count + 1), np.zeros(shape, dtype=np.int64)
    for number, ((first, end, buffer), slot) in enumerate(zip(found, slots, strict=True)):
        rows = slice(first, end)
        owner[rows, slot], nbytes[rows, slot] = number, buffer.nbytes
        last_forward[rows, slot] = buffer.last_forward
        for mode, need in enumerate((buffer.read_by(cuts[rows]), buffer.needed_by(cuts[rows]))):
            needed[mode, rows, slot] = np.minimum(need, unit_count + 1)
        if buffer.readers:
            kept_after[rows, slot] = np.where(cuts[rows] >= buffer.readers[0], buffer.made, 0)
    return Crossing(
        positions=cuts,
        owner=owner,
        nbytes=nbytes,
        needed=needed,
        kept_after=kept_after,
        last_forward=last_forward,
    )


def _slots(spans: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Return the lowest free slot for each span (first, end), in order of ``first``, and the number of slots."""
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    slots: list[int] = []
    count = 0
    for first, end in spans:
        while busy and busy[0][0] <= first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            slot = heapq.heappop(free)
        else:
            slot, count = count, count + 1
        heapq.heappush(busy, (end, slot))
        slots.append(slot)
    return slots, max(count, 1)
