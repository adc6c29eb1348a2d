"""Spell a plan out as a schedule: the ops in execution order, with the replays in place.

A forward pass is the same under all plans. In a backward pass each recompute segment's replay stands before the
first backward op of the segment, and the reads of its dropped values are redirected to the replayed ones. Only what a
backward op needs is replayed, because graph mode prunes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from tf_memsaver.ir.graph import Op
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.judge.prepared import Prepared, ScheduledOp
from tf_memsaver.judge.turns import turns_of

Redirects = dict[int, int]
"""The buffer that a reader of a value must use, where that is not the value's own."""


class Schedule:
    """The steps of one plan. Buffers are numbered: the graph's own values first, then the copies made for this plan."""

    def __init__(self, nbytes: Sequence[int]) -> None:
        self.steps: list[ScheduledOp] = []
        self.nbytes = list(nbytes)
        self.runs: list[tuple[int, int, int, bool]] = []
        """The owner of a run of steps, the first and last place (exclusive), and whether they are of a forward pass."""

    def copy(self, nbytes: int) -> int:
        """Return a new buffer, for a copy of a value."""
        self.nbytes.append(nbytes)
        return len(self.nbytes) - 1

    def note_run(self, owner: int, start: int, is_forward: bool) -> None:
        """Note that all steps since ``start`` belong to the top-level segment ``owner`` (-1: to none)."""
        self.runs.append((owner, start, len(self.steps), is_forward))

    @property
    def is_forward(self) -> list[bool]:
        """For each step, whether it is of a forward pass."""
        return [each for _, start, stop, each in self.runs for _ in range(start, stop)]


def scheduled(prepared: Prepared, segments: Sequence[Segment], *, taped: bool = False) -> Schedule:
    """Return the ops in execution order under ``segments``, which cover the units, with the replays in place.

    The backward ops come as they were captured, if they can, which is how searches count, or as a tape adds them.
    """
    schedule, owners = Schedule(prepared.nbytes), _owners(segments)
    writer = _Writer(prepared, schedule, _taped if taped else _captured)
    for is_forward, of_pass in prepared.passes:
        for number, ops in _runs(owners, of_pass) if is_forward else writer.runs(segments, of_pass):
            start = len(schedule.steps)
            if is_forward:
                schedule.steps.extend(prepared.static[op.index] for op in ops)
            else:
                writer.write(segments[number] if number >= 0 else None, ops, {})
            schedule.note_run(number, start, is_forward)
    return schedule


_Run = tuple[int, Sequence[Op]]
_Runs = Callable[[Sequence[Segment], Sequence[Op]], Iterable[_Run]]

Owners = Mapping[int | None, int]
"""The number of the segment that each unit lies in."""


def _owners(segments: Sequence[Segment]) -> Owners:
    return {unit: number for number, segment in enumerate(segments) for unit in range(segment.start, segment.stop)}


def _runs(owners: Owners, ops: Sequence[Op], joins_unowned: bool = False) -> Iterator[_Run]:
    """Yield consecutive ops of one segment each, with the segment's number, or -1 for ops of none.

    With ``joins_unowned``, ops of no unit (sums of gradients) belong to the segment of the op before them.
    """
    start = number = 0
    for place, op in enumerate(ops):
        its = number if joins_unowned and place and op.unit is None else owners.get(op.unit, -1)
        if place and its != number:
            yield number, ops[start:place]
            start = place
        number = its
    if ops:
        yield number, ops[start:]


def _captured(segments: Sequence[Segment], ops: Sequence[Op]) -> Iterable[_Run]:
    """Return backward ops in the order in which they were captured.

    Where several branches took turns in it, as the calls of one network do, it would enter a recompute segment more
    than once. A tape replays each once.
    """
    runs = list(_runs(_owners(segments), ops, joins_unowned=True))
    entered = [number for number, _ in runs if number >= 0 and segments[number].mode is SegmentMode.RECOMPUTE]
    return runs if len(set(entered)) == len(entered) else _taped(segments, ops)


def _taped(segments: Sequence[Segment], ops: Sequence[Op]) -> Iterator[_Run]:
    """Yield backward ops in the order of a tape; a sum of gradients of one segment is of that segment."""
    owners, numbers = _owners(segments), []
    number_of: dict[int, int] = {}
    for op in ops:
        number = owners.get(op.unit, -1)
        if op.unit is None:
            summed = {number_of[value] for value in op.inputs if value in number_of}
            number = summed.pop() if len(summed) == 1 else -1
        numbers.append(number)
        number_of.update(dict.fromkeys(op.outputs, number))
    replayed = {place for place, segment in enumerate(segments) if segment.mode is SegmentMode.RECOMPUTE}
    return ((turn.number, turn.ops) for turn in turns_of(ops, numbers, replayed))


class _Writer:
    """Writes the backward ops of segments, and the replays in front of them."""

    def __init__(self, prepared: Prepared, schedule: Schedule, runs: _Runs) -> None:
        self._prepared, self._schedule, self.runs = prepared, schedule, runs

    def write(self, segment: Segment | None, backward: Sequence[Op], redirects: Redirects) -> None:
        """Write the backward ops of a segment, or of none, that read forward values through ``redirects``."""
        if segment is None:
            self._store(segment, backward, redirects)
        else:
            _WRITERS[segment.mode](self, segment, backward, redirects)

    def _store(self, segment: Segment | None, backward: Sequence[Op], redirects: Redirects) -> None:
        """Run ``backward`` over the values that were kept."""
        del segment
        if redirects:
            for op in backward:
                self._emit(op, redirects)
        else:
            self._schedule.steps.extend(self._prepared.static[op.index] for op in backward)

    def _recompute(self, segment: Segment, backward: Sequence[Op], outer: Redirects) -> None:
        """Gate the segment's inputs, replay what ``backward`` needs, and run ``backward`` over the replayed values."""
        needed, outside = self._needed(segment, backward)
        redirects = dict(outer)
        for value in outside:
            self._gate(value, redirects, outer)
        for op in needed:
            self._replay(op, redirects)
        for number, ops in self.runs(segment.children, backward):
            self.write(segment.children[number] if number >= 0 else None, ops, redirects)

    def _emit(self, op: Op, redirects: Redirects) -> None:
        prepared = self._prepared
        static = prepared.static[op.index]
        if redirects.keys().isdisjoint(op.inputs):
            self._schedule.steps.append(static)
            return
        for value in op.outputs:
            # A backward op may look at a forward value through a view: it then looks at the replayed one.
            alias = prepared.aliases[value]
            if alias is not None and alias in redirects:
                redirects[value] = redirects[alias]
        self._append(op, False, redirects, static.allocates)

    def _replay(self, op: Op, redirects: Redirects) -> None:
        prepared, made = self._prepared, []
        for value in op.outputs:
            alias = prepared.aliases[value]
            if alias is None:
                redirects[value] = self._schedule.copy(prepared.nbytes[value])
                made.append(redirects[value])
            else:
                redirects[value] = redirects.get(alias, prepared.roots[alias])
        self._append(op, True, redirects, tuple(made))

    def _append(self, op: Op, replay: bool, redirects: Redirects, made: tuple[int, ...]) -> None:
        touched, overwritten = self._prepared.buffers[op.index]
        get = redirects.get
        touches = tuple(dict.fromkeys([get(value, root) for value, root in touched]))
        overwrites = tuple(dict.fromkeys([get(value, root) for value, root in overwritten])) if overwritten else ()
        self._schedule.steps.append(ScheduledOp(op.index, replay, touches, made, overwrites, op.workspace_bytes))

    def _needed(self, segment: Segment, backward: Sequence[Op]) -> tuple[list[Op], list[int]]:
        """Return the forward ops to replay, in order, and the values from outside that replay or backward read."""
        unit_of = self._prepared.unit_of
        wanted: set[int] = set()
        outside: dict[int, None] = {}

        def want(values: Iterable[int]) -> None:
            for value in values:
                unit = unit_of[value]
                if segment.start <= unit < segment.stop:
                    wanted.add(value)
                elif unit >= 0:
                    outside[value] = None

        for values in self._read_by_backward(segment.children, backward):
            want(values)
        needed: list[Op] = []
        for unit in range(segment.stop - 1, segment.start - 1, -1):
            for op in reversed(self._prepared.unit_forward[unit]):
                if not wanted.isdisjoint(op.outputs):
                    needed.append(op)
                    want((*op.inputs, *op.shapes))
        needed.reverse()
        return needed, list(outside)

    def _read_by_backward(self, children: Sequence[Segment], backward: Sequence[Op]) -> Iterator[Sequence[int]]:
        """Yield what backward ops read, and what enters the replays of children."""
        owners = _owners(children)
        of_replays: dict[int, list[Op]] = {k: [] for k, c in enumerate(children) if c.mode is SegmentMode.RECOMPUTE}
        for op in backward:
            number = owners.get(op.unit, -1)
            if number in of_replays:
                of_replays[number].append(op)
            else:
                yield op.inputs
        for number, ops in of_replays.items():
            _, entering = self._needed(children[number], ops)
            yield entering

    def _gate(self, value: int, redirects: Redirects, outer: Redirects) -> None:
        prepared = self._prepared
        if prepared.resident[value]:
            return
        source = outer.get(value, prepared.roots[value])
        alias = prepared.aliases[value]
        if alias is not None and alias in redirects and redirects[alias] != outer.get(alias, prepared.roots[alias]):
            redirects[value] = redirects[alias]
            return
        copy = self._schedule.copy(self._schedule.nbytes[source])
        self._schedule.steps.append(ScheduledOp(-1, True, (source, copy), (copy,), (source,), 0))
        redirects[value] = copy


_WRITERS: Mapping[SegmentMode, Callable[[_Writer, Segment, Sequence[Op], Redirects], None]] = {
    SegmentMode.STORE: _Writer._store,
    SegmentMode.RECOMPUTE: _Writer._recompute,
}
"""How the backward pass of a segment is written, by its mode: a further mode is an entry here."""
