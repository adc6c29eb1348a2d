"""What the planners' tables are made from: one sweep over the graph, O(E).

Who makes, reads and needs each value, in positions (1-based units), and the bytes that no plan changes. Readers are
units: *forward* readers by what their ops read, *backward* readers by the unit that a backward op belongs to.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tf_memsaver.ir.graph import Phase
from tf_memsaver.judge.prepared import Prepared
from tf_memsaver.judge.rows import Ints, ScheduledOp
from tf_memsaver.judge.walk import walk

NEVER = float("inf")

Floats = npt.NDArray[np.float64]


@dataclass(slots=True, kw_only=True)
class Buffer:
    """A value made by a unit, with all its views: where it is made, and who needs it when.

    ``last_op`` is the last backward op that reads it, by unit, and ``last_forward`` the last op of the forward pass.
    """

    nbytes: int
    made: int
    demands: list[tuple[int, float]] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)
    last_op: dict[int, int] = field(default_factory=dict)
    furthest: int = 0
    last_forward: int = -1

    def read_by(self, starts: Ints) -> Floats:
        """Return, for each start i, the least j for which a backward op of (i, j] reads the value."""
        following = np.searchsorted(self.readers, starts, side="right")
        return np.asarray(np.append(self.readers, NEVER)[following])

    def needed_by(self, starts: Ints) -> Floats:
        """Return the least j for which a recompute segment (i, j] needs the value from outside or for backward."""
        at, needs = np.array(sorted(self.demands)).reshape(-1, 2).T
        least = np.append(np.minimum.accumulate(needs[::-1])[::-1], NEVER)
        return np.asarray(np.minimum(least[np.searchsorted(at, starts, side="right")], self.read_by(starts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardOp:
    """A backward op: plan-independent live bytes while it runs, and what could take over an activation's buffer."""

    place: int
    live: int
    fresh: tuple[int, ...]
    overwrites: tuple[int, ...]


class Facts:
    """One sweep over the graph: who makes, reads and needs what, and the bytes that no plan changes."""

    def __init__(self, prepared: Prepared) -> None:
        self._graph, self._prepared = prepared.graph, prepared
        graph = prepared.graph
        self.resident_bytes = graph.resident_bytes
        self.buffers: dict[int, Buffer] = {}
        for root, nbytes in enumerate(prepared.nbytes):
            if prepared.roots[root] == root and prepared.unit_of[root] >= 0 and not prepared.resident[root]:
                self.buffers[root] = Buffer(nbytes=nbytes, made=prepared.unit_of[root] + 1)
        self.read_in: dict[int, dict[int, None]] = {}
        self.backward_ops: dict[int, list[BackwardOp]] = {}
        self._find_readers()
        self._find_demands()
        self._walk_backward()
        self._find_loss_peaks()
        self._walk_forward()

    def _find_readers(self) -> None:
        """Note which units' backward ops read which buffers, ``readers`` ascending, and the last such op of each."""
        graph, roots = self._graph, self._prepared.roots
        self._unit_at: list[int] = []
        unit = len(graph.units) + 1
        for op in graph.ops:
            if op.phase is Phase.FORWARD or (unit > len(graph.units) and op.unit is None):
                # A reader in a unit, or in the loss or its gradient.
                for value in op.inputs:
                    buffer = self.buffers.get(roots[value])
                    if buffer is not None:
                        buffer.furthest = max(buffer.furthest, unit if op.unit is None else op.unit + 1)
            if op.phase is not Phase.FORWARD:
                unit = unit if op.unit is None else op.unit + 1
                if unit > len(graph.units):
                    self._unit_at.append(unit)
                    continue
                for value in op.inputs:
                    buffer = self.buffers.get(roots[value])
                    if buffer is not None:
                        buffer.last_op[unit] = op.index
                        self.read_in.setdefault(unit, {})[roots[value]] = None
            self._unit_at.append(unit)
        for buffer in self.buffers.values():
            buffer.readers = sorted(buffer.last_op)

    def _find_demands(self) -> None:
        """Find d(u) of every forward op, and with it which units' replay needs a buffer and when."""
        graph, roots = self._graph, self._prepared.roots
        need: list[float] = [NEVER] * len(graph.values)
        for op in graph.ops:
            if op.phase is not Phase.FORWARD and self._unit_at[op.index] <= len(graph.units):
                for value in op.inputs:
                    need[value] = min(need[value], self._unit_at[op.index])
        self.replays: list[tuple[int, float, float]] = []
        for op in reversed(graph.ops):
            if op.unit is None or op.phase is not Phase.FORWARD:
                continue
            its = min((need[value] for value in op.outputs), default=NEVER)
            self.replays.append((op.unit + 1, its, op.seconds))
            for value in op.inputs:
                need[value] = min(need[value], its)
                buffer = self.buffers.get(roots[value])
                if buffer is not None and its < NEVER:
                    buffer.demands.append((op.unit + 1, its))

    def _walk_backward(self) -> None:
        """Count, op by op, the live bytes of everything but what units make in the forward pass: G, and at the loss."""
        prepared, units = self._prepared, len(self._graph.units)
        steps = [self._without_buffers(step) for step in prepared.static]
        outlive = (root for root in prepared.outlive if root not in self.buffers)
        live, last = walk(steps, prepared.nbytes, outlive, 0)
        of_units = (op.index for op in prepared.forward if op.unit is not None)
        last_unit_op = max(of_units, default=-1)
        loss: list[BackwardOp] = []
        seen = units + 1
        self.arriving = [0] * (units + 2)
        for place, unit in enumerate(self._unit_at):
            fresh = _fresh(steps[place], prepared.nbytes, last, place)
            overwrites = tuple(root for root in prepared.static[place].overwrites if root in self.buffers)
            made = BackwardOp(place=place, live=live[place], fresh=fresh, overwrites=overwrites)
            if unit > units:
                if place > last_unit_op:
                    loss.append(made)
                continue
            if unit < seen:
                self.arriving[unit:seen] = [live[place] - steps[place].workspace - sum(fresh)] * (seen - unit)
                seen = unit
            self.backward_ops.setdefault(unit, []).append(made)
        self.loss_ops = tuple(loss)
        """The ops between the last forward op of a unit and the first backward op of one."""

    def _without_buffers(self, step: ScheduledOp) -> ScheduledOp:
        """Return a step without what units make in the forward pass."""
        touches, allocates, overwrites = (
            tuple(root for root in roots if root not in self.buffers)
            for roots in (step.touches, step.allocates, step.overwrites)
        )
        return step._replace(touches=touches, allocates=allocates, overwrites=overwrites)

    def _find_loss_peaks(self) -> None:
        """Find the peak between the forward and the backward pass, without and with what is read there."""
        ends: dict[int, int] = {}
        for made in self.loss_ops:
            ends.update(
                (root, made.place) for root in self._prepared.static[made.place].touches if root in self.buffers
            )
        read = sum(self.buffers[root].nbytes for root in ends)
        self.settled_loss_peak = max((made.live for made in self.loss_ops), default=0) + self.resident_bytes
        unsettled = max((read + held_above(self, made, ends) for made in self.loss_ops), default=0)
        self.loss_peak = unsettled + self.resident_bytes

    def _walk_forward(self) -> None:
        """Find the least that is live in the forward pass, every activation freed after its last forward reader.

        ``forward_peaks`` has for each unit the most bytes and the op, by its place in the forward pass; a unit of no
        ops stands at the end.
        """
        forward = self._prepared.forward
        steps = [self._prepared.static[op.index] for op in forward]
        live, last = walk(steps, self._prepared.nbytes, (), self.resident_bytes)
        self.forward_peak = max(live, default=self.resident_bytes)
        self.forward_peaks = [(self.resident_bytes, len(forward))] * (len(self._graph.units) + 1)
        for place, (op, nbytes) in enumerate(zip(forward, live, strict=True)):
            if op.unit is not None and nbytes > self.forward_peaks[op.unit + 1][0]:
                self.forward_peaks[op.unit + 1] = nbytes, place
        for root, buffer in self.buffers.items():
            buffer.last_forward = last[root]


def _fresh(step: ScheduledOp, nbytes: Sequence[int], last: Sequence[int], place: int) -> tuple[int, ...]:
    """Return the bytes of each new buffer that takes over none of those that die at this step."""
    free = [nbytes[root] for root in step.overwrites if last[root] == place]
    fresh = []
    for root in step.allocates:
        if nbytes[root] in free:
            free.remove(nbytes[root])
        else:
            fresh.append(nbytes[root])
    return tuple(fresh)


def unit_peaks(facts: Facts, unit: int, ops: Sequence[BackwardOp], inside: bool) -> Iterator[tuple[int, int, int]]:
    """Yield, for ranges of starts i (the second exclusive), the most that a unit's backward ops hold above A(i, unit).

    A value whose next reader below ``unit`` lies at or before i dies within the unit, at its last reading op; its
    buffer may be taken over there. For which starts that is so depends on where that reader lies, and with ``inside``
    on where the value is made.
    """
    dying: list[tuple[int, int, int]] = []
    for root in facts.read_in.get(unit, ()):
        buffer = facts.buffers[root]
        below = buffer.readers[bisect_left(buffer.readers, unit) - 1] if buffer.readers[0] < unit else 0
        dying.append((below, buffer.made if inside else unit, root))
    edges = sorted({0, unit, *(edge for first, end, _ in dying for edge in (first, end) if edge < unit)})
    for edge, after in itertools.pairwise(edges):
        ends = {root: facts.buffers[root].last_op[unit] for a, b, root in dying if a <= edge < b}
        yield edge, after, max(held_above(facts, op, ends) for op in ops)


def held_above(facts: Facts, op: BackwardOp, ends: Mapping[int, int]) -> int:
    """Return the live bytes at a backward op above A; the buffers in ``ends`` die at the given ops of its unit."""
    held = op.live - sum(facts.buffers[root].nbytes for root, place in ends.items() if place < op.place)
    free = [facts.buffers[root].nbytes for root in op.overwrites if ends.get(root) == op.place]
    for nbytes in op.fresh:
        if nbytes in free:
            free.remove(nbytes)
            held -= nbytes
    return held
