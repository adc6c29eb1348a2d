"""Spell a plan out as a schedule: the ops in execution order, with the replays in place.

A forward pass is the same under all plans. In a backward pass each recompute segment's replay stands before the
first backward op of the segment, and the reads of its dropped values are redirected to the replayed ones. Only what a
backward op needs is replayed, because graph mode prunes the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tf_memsaver.ir.graph import Op
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.judge.prepared import Prepared
from tf_memsaver.judge.rows import Ints, ScheduledOp, StepArrays
from tf_memsaver.judge.turns import turns_of

MOST_STEPS = 300_000
"""Steps after which a scheduler forgets what it has written."""

Redirects = dict[int, int]
"""The buffer that a reader of a value must use, where that is not the value's own."""


Pass = tuple[bool, list[Op]]
"""Whether it is a forward pass, and its ops."""


class Piece(NamedTuple):
    """Consecutive steps of a schedule. Copies of values are numbered from the number of the graph's values on."""

    steps: list[ScheduledOp]
    rows: StepArrays
    copies: Ints
    """The value that each copy is one of."""
    replayed: Sequence[int]
    """The ops that run again, in order."""


class Schedule:
    """The steps of one plan. Buffers are numbered: the graph's own values first, then the copies made for this plan."""

    def __init__(self, prepared: Prepared, pieces: Sequence[Piece], runs: Sequence[tuple[int, int, int, bool]]) -> None:
        self._prepared, self._pieces = prepared, pieces
        self.runs = runs
        """The owner of a run of steps (a top-level segment, -1 for none), the first and last place (exclusive), and
        whether they are of a forward pass."""

    @cached_property
    def _placed(self) -> list[tuple[Piece, int]]:
        """The pieces, each with the number of copies before it."""
        before = itertools.accumulate((len(piece.copies) for piece in self._pieces), initial=0)
        return list(zip(self._pieces, before, strict=False))

    @cached_property
    def rows(self) -> StepArrays:
        """The steps as arrays."""
        first = len(self._prepared.nbytes)
        return StepArrays.joined([piece.rows.moved(first, by) if by else piece.rows for piece, by in self._placed])

    @cached_property
    def _values(self) -> Ints:
        """The value that each buffer has."""
        return np.concatenate([np.arange(len(self._prepared.nbytes)), *(piece.copies for piece in self._pieces)])

    @cached_property
    def sizes(self) -> Ints:
        """The bytes of each buffer."""
        return self._prepared.sizes[self._values]

    @cached_property
    def parts(self) -> Ints:
        """``Value.parts`` of each buffer."""
        return self._prepared.parts[self._values]

    @cached_property
    def steps(self) -> list[ScheduledOp]:
        """The steps, one by one."""
        first = len(self._prepared.nbytes)
        return [_moved(step, first, by) if by else step for piece, by in self._placed for step in piece.steps]

    @property
    def replayed(self) -> list[int]:
        """The ops that run again, in order."""
        return [op for piece in self._pieces for op in piece.replayed]

    @property
    def is_forward(self) -> list[bool]:
        """For each step, whether it is of a forward pass."""
        return [each for _, start, stop, each in self.runs for _ in range(start, stop)]


def _moved(step: ScheduledOp, first: int, by: int) -> ScheduledOp:
    touches, allocates, overwrites = (
        tuple(buffer + by if buffer >= first else buffer for buffer in buffers)
        for buffers in (step.touches, step.allocates, step.overwrites)
    )
    return step._replace(touches=touches, allocates=allocates, overwrites=overwrites)


class Scheduler:
    """Spells out plans of one graph. What a segment adds to a backward pass is written once, for all plans."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._pieces: dict[tuple[Segment, _Runs, tuple[int, ...]], Piece] = {}
        self._steps = 0

    def schedule(self, segments: Sequence[Segment], *, taped: bool = False, updates: bool = True) -> Schedule:
        """Return the ops in execution order under ``segments``, which cover the units, with the replays in place.

        The backward ops come as they were captured, if they can, which is how searches count, or as a tape adds them.
        Then the updates that the step ends with come last, or are left out; a tape runs each as soon as it can.
        """
        prepared, runs_of, owners = self._prepared, _taped if taped else _captured, _owners(segments)
        passes, last = prepared.passes, prepared.updates if updates else []
        if taped and last:
            passes, last = _with_updates(passes, last), []
        pieces: list[Piece] = []
        runs: list[tuple[int, int, int, bool]] = []
        plain: list[Op] = []
        stop = 0
        for is_forward, of_pass in passes:
            for number, ops in _runs(owners, of_pass) if is_forward else runs_of(prepared, segments, of_pass, False):
                start = stop
                if is_forward or number < 0 or segments[number].mode is SegmentMode.STORE:
                    plain += ops
                    stop += len(ops)
                else:
                    piece = self._piece(segments[number], ops, runs_of)
                    pieces += [*self._plain(plain), piece]
                    plain = []
                    stop += len(piece.steps)
                runs.append((number, start, stop, is_forward))
        if last:
            plain += last
            runs.append((-1, stop, stop + len(last), False))
        return Schedule(prepared, [*pieces, *self._plain(plain)], runs)

    def _plain(self, ops: Sequence[Op]) -> list[Piece]:
        """Return ops as in the plain step, all as one piece, if there are any."""
        if not ops:
            return []
        static, places = self._prepared.static, [op.index for op in ops]
        rows = self._prepared.rows.take(np.array(places))
        return [Piece([static[place] for place in places], rows, np.zeros(0, dtype=np.int64), ())]

    def _piece(self, segment: Segment, backward: Sequence[Op], runs_of: _Runs) -> Piece:
        """Return the replay and the backward ops of a segment."""
        key = segment, runs_of, tuple([op.index for op in backward])
        if key not in self._pieces:
            if self._steps > MOST_STEPS:
                self._pieces.clear()
                self._steps = 0
            writer = _Writer(self._prepared, runs_of)
            writer.write(segment, backward, {})
            steps, copies = writer.steps, np.array(writer.copies, dtype=np.int64)
            replayed = [step.op for step in steps if step.replay and step.op >= 0]
            self._pieces[key] = Piece(steps, StepArrays.of(steps), copies, replayed)
            self._steps += len(steps)
        return self._pieces[key]


def scheduled(prepared: Prepared, segments: Sequence[Segment], *, taped: bool = False) -> Schedule:
    """Return the schedule of a single plan (see ``Scheduler.schedule``)."""
    return Scheduler(prepared).schedule(segments, taped=taped)


def _with_updates(passes: Sequence[Pass], updates: Sequence[Op]) -> list[Pass]:
    """Return passes of which the last backward pass has the updates after it, too."""
    *before, (is_forward, ops) = passes or [(False, [])]
    return [*before, (True, ops), (False, [*updates])] if is_forward else [*before, (False, [*ops, *updates])]


_Run = tuple[int, Sequence[Op]]
_Runs = Callable[[Prepared, Sequence[Segment], Sequence[Op], bool], Iterable[_Run]]
"""What puts backward ops in order, by the segments that they lie in; the last is whether all lie in one already."""

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


def _captured(prepared: Prepared, segments: Sequence[Segment], ops: Sequence[Op], is_inside: bool) -> Iterable[_Run]:
    """Return backward ops in the order in which they were captured.

    Where several branches took turns in it, as the calls of one network do, it would enter a recompute segment more
    than once. A tape replays each once.
    """
    runs = list(_runs(_owners(segments), ops, joins_unowned=True))
    entered = [number for number, _ in runs if number >= 0 and segments[number].mode is SegmentMode.RECOMPUTE]
    return runs if len(set(entered)) == len(entered) else _taped(prepared, segments, ops, is_inside)


def _taped(prepared: Prepared, segments: Sequence[Segment], ops: Sequence[Op], is_inside: bool) -> Iterator[_Run]:
    """Yield backward ops in the order of a tape."""
    numbers = _numbers(prepared, _owners(segments), ops)
    replayed = {place for place, segment in enumerate(segments) if segment.mode is SegmentMode.RECOMPUTE}
    is_gradient = prepared.is_gradient if is_inside else ()
    return ((turn.number, turn.ops) for turn in turns_of(ops, numbers, replayed, is_gradient, prepared.update_groups))


def _numbers(prepared: Prepared, owners: Owners, ops: Sequence[Op]) -> list[int]:
    """Return the number of the segment that each backward op runs with, -1 for none.

    A sum of gradients is of the segment that all of them come from, or that sends one of them and gets the sum: what a
    segment makes and reads itself is added up in its replay, and the others' terms arrive there. Updates are of the
    segment that all gradients of their group come from.
    """
    readers: dict[int, set[int]] = {}
    for op in ops:
        if op.unit in owners:
            for value in op.inputs:
                readers.setdefault(value, set()).add(owners[op.unit])
    numbers: list[int] = []
    number_of: dict[int, int] = {}
    of_groups: dict[int, set[int]] = {}
    groups = [prepared.update_groups.get(op.index) if op.unit is None else None for op in ops]
    for op, group in zip(ops, groups, strict=True):
        number = owners.get(op.unit, -1)
        if op.unit is None:
            arriving = {number_of[value] for value in op.inputs if value in number_of}
            if group is not None:
                of_groups.setdefault(group, set()).update(arriving)
            elif len(arriving) > 1:
                arriving &= {reader for value in op.outputs for reader in readers.get(value, ())}
            number = arriving.pop() if len(arriving) == 1 else -1
        numbers.append(number)
        if group is None:
            number_of.update(dict.fromkeys(op.outputs, number))
    number_of_group = {group: its.pop() if len(its) == 1 else -1 for group, its in of_groups.items()}
    return [number if group is None else number_of_group[group] for number, group in zip(numbers, groups, strict=True)]


class _Writer:
    """Writes the backward ops of segments, and the replays in front of them."""

    def __init__(self, prepared: Prepared, runs: _Runs) -> None:
        self._prepared, self._runs = prepared, runs
        self.steps: list[ScheduledOp] = []
        self.copies: list[int] = []
        """The value that each copy is one of."""

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
            self.steps.extend(self._prepared.static[op.index] for op in backward)

    def _recompute(self, segment: Segment, backward: Sequence[Op], outer: Redirects) -> None:
        """Gate the segment's inputs, replay what ``backward`` needs, and run ``backward`` over the replayed values."""
        needed, outside = self._needed(segment, backward)
        redirects = dict(outer)
        for value in outside:
            self._gate(value, redirects, outer)
        for op in needed:
            self._replay(op, redirects)
        for number, ops in self._runs(self._prepared, segment.children, backward, True):
            self.write(segment.children[number] if number >= 0 else None, ops, redirects)

    def _copy(self, value: int) -> int:
        """Return a new buffer, for a copy of a value."""
        self.copies.append(value)
        return len(self._prepared.nbytes) + len(self.copies) - 1

    def _emit(self, op: Op, redirects: Redirects) -> None:
        prepared = self._prepared
        static = prepared.static[op.index]
        if redirects.keys().isdisjoint(op.inputs):
            self.steps.append(static)
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
                redirects[value] = self._copy(value)
                made.append(redirects[value])
            else:
                redirects[value] = redirects.get(alias, prepared.roots[alias])
        self._append(op, True, redirects, tuple(made))

    def _append(self, op: Op, replay: bool, redirects: Redirects, made: tuple[int, ...]) -> None:
        touched, overwritten = self._prepared.buffers[op.index]
        get = redirects.get
        touches = tuple(dict.fromkeys([get(value, root) for value, root in touched]))
        overwrites = tuple(dict.fromkeys([get(value, root) for value, root in overwritten])) if overwritten else ()
        self.steps.append(ScheduledOp(op.index, replay, touches, made, overwrites, op.workspace_bytes))

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
                    want(op.inputs)
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
        known = len(prepared.nbytes)
        copy = self._copy(source if source < known else self.copies[source - known])
        self.steps.append(ScheduledOp(-1, True, (source, copy), (copy,), (source,), 0))
        redirects[value] = copy


_WRITERS: Mapping[SegmentMode, Callable[[_Writer, Segment, Sequence[Op], Redirects], None]] = {
    SegmentMode.STORE: _Writer._store,
    SegmentMode.RECOMPUTE: _Writer._recompute,
}
"""How the backward pass of a segment is written, by its mode: a further mode is an entry here."""
