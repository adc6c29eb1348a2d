"""Spell a plan out as a schedule, the ops in execution order with the replays in place, and count its live bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tf_memsaver.ir.graph import Op
from tf_memsaver.ir.segments import Segment, SegmentMode

if TYPE_CHECKING:
    from tf_memsaver.judge.simulate import Simulator


class Step(NamedTuple):
    """A scheduled op over buffers. ``op`` is its index, or -1 for an order gate (a copy of one buffer).

    ``touches`` are the buffers read or written that are not resident, ``news`` those it allocates, ``overwrites`` those
    that the first of ``news`` of the same size may take over.
    """

    op: int
    replay: bool
    touches: tuple[int, ...]
    news: tuple[int, ...]
    overwrites: tuple[int, ...]
    workspace: int


class Schedule:
    """The steps of one plan. Buffers are numbered: the graph's own values first, then the copies made for this plan."""

    def __init__(self, nbytes: Sequence[int]) -> None:
        self.steps: list[Step] = []
        self.nbytes = list(nbytes)
        self.origin = list(range(len(nbytes)))
        self.runs: list[tuple[int, int, int]] = []
        self.replays: list[tuple[int, int]] = []
        """First and last place (exclusive) of each replay with its backward ops; inner ones come before outer ones."""

    def copy_of(self, value: int, nbytes: int) -> int:
        """Return a new buffer for a copy of ``value``."""
        self.nbytes.append(nbytes)
        self.origin.append(value)
        return len(self.nbytes) - 1

    def note_run(self, owner: int, start: int) -> None:
        """Note that all steps since ``start`` belong to the top-level segment ``owner`` (-1: to none)."""
        self.runs.append((owner, start, len(self.steps)))


class Ledger(Protocol):
    """Is told of every allocation in order."""

    def allocate(self, buffer: int) -> None:
        """A buffer is made."""

    def take_over(self, buffer: int, heir_of: int) -> None:
        """A buffer takes the place of one that dies."""

    def use_workspace(self, nbytes: int) -> None:
        """All outputs of a step stand; while it runs it needs this many bytes more."""

    def free(self, buffer: int) -> None:
        """A buffer dies."""


def walk(
    steps: Sequence[Step],
    nbytes: Sequence[int],
    outlive: Iterable[int],
    resident_bytes: int,
    ledger: Ledger | None = None,
) -> tuple[list[int], list[int]]:
    """Return the bytes live while each step runs, and the last step that touches each buffer.

    Buffers are allocated at the step that makes them and freed behind the last that touches them; those in ``outlive``
    never. An output takes over the buffer of the same size of an input that dies there, where the op may overwrite it.
    """
    last = [-1] * len(nbytes)
    for place, step in enumerate(steps):
        for buffer in step.touches:
            last[buffer] = place
    for buffer in outlive:
        last[buffer] = len(steps)
    now = resident_bytes
    alive = [False] * len(nbytes)
    live: list[int] = []
    for place, (_, _, touches, news, overwrites, workspace) in enumerate(steps):
        free = [b for b in overwrites if last[b] == place and alive[b]] if overwrites else None
        for buffer in news:
            alive[buffer] = True
            heir = next((b for b in free if nbytes[b] == nbytes[buffer]), None) if free else None
            if heir is None:
                now += nbytes[buffer]
                if ledger is not None:
                    ledger.allocate(buffer)
            else:
                alive[heir] = False
                free = [b for b in free or () if b != heir]
                if ledger is not None:
                    ledger.take_over(buffer, heir)
        live.append(now + workspace)
        if ledger is not None:
            ledger.use_workspace(workspace)
        for buffer in touches:
            if last[buffer] == place and alive[buffer]:
                alive[buffer] = False
                now -= nbytes[buffer]
                if ledger is not None:
                    ledger.free(buffer)
    return live, last


class BackwardWriter:
    """Writes the replays and the backward ops of recompute segments.

    A *view* maps a value to the buffer that a reader must use where that is not the value's own.
    """

    def __init__(self, simulator: Simulator, schedule: Schedule) -> None:
        self._simulator, self._schedule = simulator, schedule

    def recompute(self, segment: Segment, backward: Sequence[Op], outer: dict[int, int]) -> None:
        """Gate the segment's inputs, replay what ``backward`` needs, and run ``backward`` over the replayed values."""
        start = len(self._schedule.steps)
        needed, outside = self._needed(segment, backward)
        view = dict(outer)
        for value in outside:
            self._gate(value, view, outer)
        for op in needed:
            self._replay(op, view)
        children = segment.children
        position = 0
        while position < len(backward):
            op = backward[position]
            child = _child_of(children, op.unit)
            if child is None or child.mode is SegmentMode.STORE:
                self._emit(op, view)
                position += 1
                continue
            stop = position
            while stop < len(backward):
                unit = backward[stop].unit
                if unit is not None and _child_of(children, unit) is not child:
                    break
                stop += 1
            self.recompute(child, backward[position:stop], view)
            position = stop
        self._schedule.replays.append((start, len(self._schedule.steps)))

    def _emit(self, op: Op, view: dict[int, int]) -> None:
        simulator = self._simulator
        static = simulator.static[op.index]
        if not any(value in view for value in op.inputs):
            self._schedule.steps.append(static)
            return
        for value in op.outputs:
            # A backward op may look at a forward value through a view: it then looks at the replayed one.
            alias = simulator.aliases[value]
            if alias is not None and alias in view:
                view[value] = view[alias]
        self._append(op, False, view, static.news)

    def _replay(self, op: Op, view: dict[int, int]) -> None:
        simulator, news = self._simulator, []
        for value in op.outputs:
            alias = simulator.aliases[value]
            if alias is None:
                view[value] = self._schedule.copy_of(value, simulator.nbytes[value])
                news.append(view[value])
            else:
                view[value] = view.get(alias, simulator.roots[alias])
        self._append(op, True, view, tuple(news))

    def _append(self, op: Op, replay: bool, view: dict[int, int], news: tuple[int, ...]) -> None:
        roots, resident = self._simulator.roots, self._simulator.resident
        touches = {view.get(v, roots[v]): None for v in op.inputs if not resident[v]}
        touches.update({view.get(v, roots[v]): None for v in op.outputs if not resident[v]})
        overwrites = {view.get(v, roots[v]): None for v in op.overwrites if not resident[v]}
        self._schedule.steps.append(Step(op.index, replay, tuple(touches), news, tuple(overwrites), op.workspace_bytes))

    def _needed(self, segment: Segment, backward: Sequence[Op]) -> tuple[list[Op], list[int]]:
        """Return the forward ops to replay, in order, and the values from outside that replay or backward read."""
        start, stop, unit_of = segment.start, segment.stop, self._simulator.unit_of
        wanted: set[int] = set()
        outside: dict[int, None] = {}

        def want(values: Iterable[int]) -> None:
            for value in values:
                unit = unit_of[value]
                if start <= unit < stop:
                    wanted.add(value)
                elif unit >= 0:
                    outside[value] = None

        children = segment.children
        for op in backward:
            child = _child_of(children, op.unit)
            if child is None or child.mode is SegmentMode.STORE:
                want(op.inputs)
        for child in children:
            if child.mode is SegmentMode.RECOMPUTE:
                # A child's replay starts from what enters it.
                _, entering = self._needed(child, [op for op in backward if _child_of(children, op.unit) is child])
                want(entering)
        needed: list[Op] = []
        for unit in range(stop - 1, start - 1, -1):
            for op in reversed(self._simulator.unit_forward[unit]):
                if not wanted.isdisjoint(op.outputs):
                    needed.append(op)
                    want(op.inputs)
        needed.reverse()
        return needed, list(outside)

    def _gate(self, value: int, view: dict[int, int], outer: dict[int, int]) -> None:
        simulator = self._simulator
        if simulator.resident[value]:
            return
        source = outer.get(value, simulator.roots[value])
        alias = simulator.aliases[value]
        if alias is not None and alias in view and view[alias] != outer.get(alias, simulator.roots[alias]):
            view[value] = view[alias]
            return
        copy = self._schedule.copy_of(simulator.roots[value], self._schedule.nbytes[source])
        self._schedule.steps.append(Step(-1, True, (source, copy), (copy,), (source,), 0))
        view[value] = copy


def _child_of(children: Sequence[Segment], unit: int | None) -> Segment | None:
    if unit is None:
        return None
    for child in children:
        if child.start <= unit < child.stop:
            return child
    return None
