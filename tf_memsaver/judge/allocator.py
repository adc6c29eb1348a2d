"""TensorFlow's best-fit-with-coalescing allocator, as far as it decides how many bytes a step is said to use.

``BFCAllocator`` (tensorflow/core/common_runtime, TensorFlow 2.21) serves GPUs, and on CPUs with oneDNN all buffers
above 256 KiB; without oneDNN, where it is asked for (``compat/counting.py``), all. It hands out a free chunk whole
unless that is at least twice the bytes asked for (or 128 MiB larger), and ``get_memory_info`` counts the chunk: so the
reported bytes exceed the tensors' bytes by what does not fit.

Memory comes in regions whose chunks never join. A GPU is one region (taken as endless: nothing fails to fit here); a
CPU grows by regions that double in size, from 2 MiB.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

import numpy as np

from tf_memsaver.cost.device import LARGEST_REMAINDER, Device
from tf_memsaver.judge.rows import Ints
from tf_memsaver.judge.walk import Places

FIRST_REGION = 2 << 20
"""Size of the first region where memory grows (``kInitialRegionSize``)."""

MOST_PIECES = 32
"""A list of more tensors is played as one of so many."""

GRANULARITY = 256
"""Bytes are rounded up to a multiple of this (``kMinAllocationSize``)."""


class BestFitAllocator:
    """Chunks of memory: ``allocate`` returns an address, ``used_bytes`` is the sum of the chunks handed out."""

    def __init__(self, *, growing: bool) -> None:
        """Start empty; ``growing`` for a CPU, whose regions double, else one endless region."""
        self.used_bytes = 0
        self._next_region = FIRST_REGION if growing else 1 << 62
        self._end = 0
        self._free: list[tuple[int, int]] = []
        self._free_at: dict[int, int] = {}
        self._free_ending: dict[int, int] = {}
        self._taken: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int:
        """Hand out the smallest free chunk that fits (the lowest of equals), split where the rest is large enough."""
        wanted = -(-nbytes // GRANULARITY) * GRANULARITY
        place = bisect_left(self._free, (wanted, -1))
        if place == len(self._free):
            self._grow(wanted)
            place = bisect_left(self._free, (wanted, -1))
        size, address = self._free[place]
        self._remove_free(address, size)
        if size >= 2 * wanted or size - wanted >= LARGEST_REMAINDER:
            self._add_free(address + wanted, size - wanted)
            size = wanted
        self._taken[address] = size
        self.used_bytes += size
        return address

    def free(self, address: int) -> None:
        """Take a chunk back and join it with free neighbours of its region."""
        size = self._taken.pop(address)
        self.used_bytes -= size
        before = self._free_ending.get(address)
        if before is not None:
            self._remove_free(before, address - before)
            size += address - before
            address = before
        after = self._free_at.get(address + size)
        if after is not None:
            self._remove_free(address + size, after)
            size += after
        self._add_free(address, size)

    def _grow(self, wanted: int) -> None:
        """Add a region that holds ``wanted`` (``BFCAllocator::Extend``); a gap keeps it apart from the one before."""
        if wanted <= self._next_region:
            size = self._next_region
            self._next_region *= 2
        else:
            while self._next_region < wanted:
                self._next_region *= 2
            size = self._next_region
        self._add_free(self._end, size)
        self._end += size + GRANULARITY

    def _add_free(self, address: int, size: int) -> None:
        insort(self._free, (size, address))
        self._free_at[address] = size
        self._free_ending[address + size] = address

    def _remove_free(self, address: int, size: int) -> None:
        del self._free[bisect_left(self._free, (size, address))]
        del self._free_at[address]
        del self._free_ending[address + size]


def pieces_of(nbytes: int, parts: int) -> list[int]:
    """Return the bytes of the buffers that a value lies in, ``parts`` of them; many as fewer, larger ones."""
    count = min(parts, MOST_PIECES)
    return [nbytes // count] * count


class ChunksInOrder:
    """Chunks in use where the steps of a schedule run one after the other, again and again as in training."""

    def __init__(self, resident: Mapping[int, int], *, growing: bool) -> None:
        """Start with the buffers that live all the time: their bytes by number; ``growing`` for a CPU."""
        self._allocator = BestFitAllocator(growing=growing)
        self._resident = {number: [self._allocator.allocate(nbytes)] for number, nbytes in resident.items()}

    def run(self, sizes: Ints, parts: Ints, places: Places, scratch: Ints, becomes: Mapping[int, int]) -> Ints:
        """Return the bytes of the chunks in use in each step.

        Args:
          sizes: the bytes of each place in memory that the steps take, 0 where it does not come from the pool.
          parts: in how many buffers each of them lies.
          places: when they are taken.
          scratch: the scratch memory of each step, 0 for none.
          becomes: the resident buffer that a place becomes when it would be given back: the old one is, instead.
        """
        allocator, resident = self._allocator, self._resident
        taken = np.flatnonzero(sizes).tolist()
        begins, ends = _by_step(taken, places.first), _by_step(taken, places.last)
        used, addresses = np.empty(len(scratch), dtype=np.int64), dict[int, list[int]]()
        now, done = allocator.used_bytes, 0
        for step in sorted({*begins, *ends, *np.flatnonzero(scratch).tolist()}):
            used[done:step] = now
            for place in begins.get(step, ()):
                pieces = pieces_of(int(sizes[place]), int(parts[place]))
                addresses[place] = [allocator.allocate(nbytes) for nbytes in pieces]
            used[step] = allocator.used_bytes
            if scratch[step]:
                borrowed = allocator.allocate(int(scratch[step]))
                used[step] = allocator.used_bytes
                allocator.free(borrowed)
            for place in ends.get(step, ()):
                given_back = addresses.pop(place)
                if place in becomes:
                    resident[becomes[place]], given_back = given_back, resident[becomes[place]]
                for address in given_back:
                    allocator.free(address)
            now, done = allocator.used_bytes, step + 1
        used[done:] = now
        return used


def _by_step(numbers: Sequence[int], steps: Ints) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for number in numbers:
        found.setdefault(int(steps[number]), []).append(number)
    return found


class AllocatorLedger:
    """Books buffers with an allocator and keeps the peak: what ``get_memory_info`` would report for a step.

    Buffers below the device's ``pooled_from`` bytes come from elsewhere. They count as they are, or not at all.
    """

    def __init__(
        self,
        device: Device,
        nbytes: Sequence[int],
        parts: Sequence[int],
        resident: Sequence[int],
        *,
        counts_small: bool,
    ) -> None:
        """Start with buffers of ``resident`` bytes in place.

        ``nbytes`` gives the size of every buffer to come, and ``parts`` says how many it is in truth (``Value.parts``).
        """
        self._allocator = BestFitAllocator(growing=device.pool_grows)
        self._pooled_from, self._share = device.pooled_from, device.pool_share
        self._nbytes, self._parts = nbytes, parts
        self._addresses: dict[int, list[int]] = {}
        self._small, self._counts_small = 0, counts_small
        counted = [size for size in resident if counts_small or size >= self._pooled_from]
        for size in counted:
            if size >= self._pooled_from:
                self._allocator.allocate(size)
            else:
                self._small += size
        # What does not fit among the resident buffers here is none of the step's.
        self._offset = sum(counted) - self._allocator.used_bytes - self._small * counts_small
        self.peak_bytes = self._now()

    def _now(self, scratch: int = 0) -> int:
        """Return what would be reported: the chunks handed out, the pool's share of them, and what else counts."""
        used = self._allocator.used_bytes
        return round(used * (1 + self._share)) + (self._small + scratch) * self._counts_small + self._offset

    def allocate(self, buffer: int) -> None:
        """A buffer is made."""
        size = self._nbytes[buffer]
        if size >= self._pooled_from * self._parts[buffer]:
            pieces = pieces_of(size, self._parts[buffer])
            self._addresses[buffer] = [self._allocator.allocate(nbytes) for nbytes in pieces]
        else:
            self._addresses[buffer] = []
            self._small += size
        self._note_peak()

    def take_over(self, buffer: int, old: int) -> None:
        """A buffer takes the place of one that dies."""
        self._addresses[buffer] = self._addresses.pop(old)

    def take_scratch(self, nbytes: int) -> int | None:
        """A running step takes scratch memory; return what to give back."""
        if not nbytes:
            return None
        if nbytes < self._pooled_from:
            self.peak_bytes = max(self.peak_bytes, self._now(scratch=nbytes))
            return None
        scratch = self._allocator.allocate(nbytes)
        self._note_peak()
        return scratch

    def give_scratch(self, scratch: int | None) -> None:
        """The step is done with its scratch memory."""
        if scratch is not None:
            self._allocator.free(scratch)

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._now())

    def free(self, buffer: int) -> None:
        """A buffer dies."""
        addresses = self._addresses.pop(buffer)
        if not addresses:
            self._small -= self._nbytes[buffer]
        for address in addresses:
            self._allocator.free(address)
