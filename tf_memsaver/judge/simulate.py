"""Walk a training step under a plan and count bytes: the only judge of a plan.

The plan is first spelt out as a *schedule*: the ops of the plain step in execution order, with each recompute segment's
replay placed before the first backward op of the segment and the reads of its dropped values redirected to the
replayed ones. Only what a backward op needs is replayed, because graph mode prunes the rest. Then one walk allocates
outputs (views share their buffer, elementwise ops may take over an input that nobody else reads), adds workspace, and
frees after the last reader. Two things follow the runtime exactly: a replay reads *copies* of the segment's inputs
(the order gate makes them; it takes the buffer over when it is the last reader), and inside a replay children of the
segment are segments again.

Planners simulate many plans of one graph, so the schedule holds plain tuples of buffer numbers, and what does not
depend on the plan is prepared once.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tf_memsaver.cost.device import LEAST_COUNTED_STEP, MOST_OF_RACING, device_named
from tf_memsaver.ir.graph import Graph, MemoryKind, Phase
from tf_memsaver.ir.segments import Segment, SegmentMode, stored
from tf_memsaver.judge import executor
from tf_memsaver.judge.allocator import AllocatorLedger, ChunksInOrder
from tf_memsaver.judge.prepared import Prepared
from tf_memsaver.judge.rows import Ints, ScheduledOp, StepArrays
from tf_memsaver.judge.schedule import Schedule, Scheduler
from tf_memsaver.judge.walk import Lives


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """One scheduled op: bytes live while it runs (with workspace), and whether it is a replay."""

    op: int
    replay: bool
    live_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The simulated step.

    ``peak_bytes`` counts everything the device's allocator would report for a whole step: resident bytes and
    transients. ``instants[peak_at]`` is the first op at the peak. ``step_seconds`` is the predicted time,
    ``replay_seconds`` the part spent on replays.
    """

    instants: tuple[Instant, ...]
    peak_bytes: int
    resident_bytes: int
    peak_at: int
    step_seconds: float
    replay_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What planners ask of a simulation: the peak, where it comes from, and the time of the replays.

    ``forward_peaks[k]`` and ``backward_peaks[k]`` are the peaks while the forward ops, and while the replay and the
    backward ops, of the k-th segment run; ``other_peak`` is that of the ops outside all segments, such as the loss, but
    not of the updates that the step ends with. All are in bytes, with the resident ones.
    """

    peak_bytes: int
    forward_peaks: tuple[int, ...]
    backward_peaks: tuple[int, ...]
    other_peak: int
    replay_seconds: float


_CHANGES = ("AssignAddVariableOp", "AssignSubVariableOp")
"""Operations that change a variable in place, where nobody else reads it."""

Amounts = Callable[[Ints, Ints | int], npt.NDArray[Any]]
"""What of values is added up, from their bytes and ``Value.parts``."""


def _bytes(nbytes: Ints, parts: Ints | int) -> Ints:
    """Return values' bytes as they are: what ``Amounts`` is where all of them count."""
    return nbytes


_ROUNDS = 3
"""Steps of a plan that are played where variables take over buffers: after these they have moved all they do."""

PLAYS = 5
"""How often the plain step is played for its reported peak."""

_WAITING = 0.5
"""The share of ``Op.racing_bytes`` that plain steps take. They take almost none or all of it, in turn: of small kernels
(an LSTM of 96 units, a GRU of 256) in most steps all, of large ones (an LSTM of 512) in one of twenty, and in all of
them beside busy processes.
"""

_SPREAD = 0.5
"""Standard deviation of the logarithm of an op's time, as kernels and threads vary it."""


class Simulator:
    """Simulates plans of one graph; what does not depend on the plan is prepared once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.prepared = Prepared(graph)
        self._device = device_named(graph.device)
        self._scheduler = Scheduler(self.prepared)
        self._peaks: dict[tuple[Segment, ...], tuple[int, int]] = {}

    def run(self, segments: Sequence[Segment]) -> Timeline:
        """Return the timeline of the step under ``segments`` (which cover the units, in order)."""
        schedule = self._scheduler.schedule(segments)
        live = self._live(schedule).tolist()
        ops = self.graph.ops
        places = [place for place, step in enumerate(schedule.steps) if step.op >= 0]
        resident = self.graph.resident_bytes
        # A gate is followed by an op that runs with no fewer bytes, so the peak is always reached at an op.
        peak = max((live[place] for place in places), default=resident)
        peak_at = next((k for k, place in enumerate(places) if live[place] == peak), 0)
        return Timeline(
            instants=tuple(
                Instant(op=schedule.steps[p].op, replay=schedule.steps[p].replay, live_bytes=live[p]) for p in places
            ),
            peak_bytes=peak,
            resident_bytes=resident,
            peak_at=peak_at,
            step_seconds=sum(ops[step.op].seconds for step in schedule.steps if step.op >= 0),
            replay_seconds=self._replay_seconds(schedule),
        )

    def measure(self, segments: Sequence[Segment]) -> Measured:
        """Return the peaks and the replay time of the step under ``segments``, without a timeline."""
        schedule = self._scheduler.schedule(segments, updates=False)
        resident, live = self.graph.resident_bytes, self._live(schedule, self.prepared.outlive_passes)
        forward, backward, other = [resident] * len(segments), [resident] * len(segments), resident
        for owner, start, stop, is_forward in schedule.runs:
            highest = int(live[start:stop].max())
            peaks = forward if is_forward else backward
            if owner < 0:
                other = max(other, highest)
            else:
                peaks[owner] = max(peaks[owner], highest)
        return Measured(
            peak_bytes=max(self._update_peak, other, *forward, *backward),
            forward_peaks=tuple(forward),
            backward_peaks=tuple(backward),
            other_peak=other,
            replay_seconds=self._replay_seconds(schedule),
        )

    def replay_seconds(self, segments: Sequence[Segment]) -> float:
        """Return ``Measured.replay_seconds`` alone."""
        return self._replay_seconds(self._scheduler.schedule(segments, updates=False))

    @cached_property
    def _update_peak(self) -> int:
        """The most bytes that are live in the updates that the step ends with, which is the same under all plans."""
        live = self._live(self._scheduler.schedule(stored(len(self.graph.units))))
        return int(live[len(live) - len(self.prepared.updates) :].max(initial=self.graph.resident_bytes))

    def ordered_peak(self, segments: Sequence[Segment]) -> int:
        """Return the most bytes that are live in the step as it runs in order, without what the allocator adds."""
        schedule = self._scheduler.schedule(segments, taped=True)
        return int(self._live(schedule).max(initial=self.graph.resident_bytes))

    def _ordered_peaks(self, segments: Sequence[Segment]) -> tuple[int, int]:
        """Return the peaks of the step as it runs in order: what it usually takes, and the most that it may.

        The allocator hands out a chunk for each buffer of its pool. How much more is in use is chance, which evens out
        over many buffers: the most is more by the root of the sum of the squares of their sizes. Resident ones count,
        too, since updates take buffers of their sizes, and nothing waits for them.
        """
        device, schedule = self._device, self._scheduler.schedule(segments, taped=True)
        lives = self._lives(schedule)
        places, scratch = lives.places(), device.pooled(schedule.rows.workspace)
        sizes = device.pooled(schedule.sizes, schedule.parts)[places.buffers]
        parts = schedule.parts[places.buffers]
        replaced = {int(places.of[new]): variable for variable, new in self.replaced_variables}
        memory = ChunksInOrder(self._pooled_residents, growing=device.pool_grows)
        # What variables were made in is left step by step.
        runs = (memory.run(sizes, parts, places, scratch, replaced) for _ in range(_ROUNDS if replaced else 1))
        chunks = functools.reduce(np.maximum, runs)
        sums = self._sums(schedule, lives)
        small = sums(lambda nbytes, parts: self._counted(nbytes, parts) - device.pooled(nbytes, parts))
        squares = sums(lambda nbytes, parts: device.pooled(nbytes, parts).astype(np.float64) ** 2 / parts)
        squares -= scratch.astype(np.float64) ** 2
        usual = (1 + device.pool_share) * chunks + small
        most = usual + np.sqrt(np.maximum(squares, 0.0))
        data, least = self.prepared.data_bytes, self.counted_resident_bytes
        return max(least, round(usual.max(initial=0.0)) + data), max(least, round(most.max(initial=0.0)) + data)

    @property
    def counts_tensors_alone(self) -> bool:
        """Whether a plan that replays takes the bytes of its tensors: on an allocator without holes."""
        return not self._device.threads

    @cached_property
    def counts_small(self) -> bool:
        """Whether buffers that do not come from the allocator's pool count: where the step has little else."""
        return self.measure(stored(len(self.graph.units))).peak_bytes - self.prepared.data_bytes < LEAST_COUNTED_STEP

    @cached_property
    def counted_resident_bytes(self) -> int:
        """The resident bytes that count."""
        return int(self._counted(self._resident_sizes).sum()) + self.prepared.data_bytes

    def most_live_bytes(self, peak: int) -> int:
        """Return about the most bytes that are live in steps that take ``peak`` bytes of the allocator."""
        transient = max(0, peak - self.counted_resident_bytes)
        return self.graph.resident_bytes + int(transient / (1 + self._device.pool_share)) + self.uncounted_bytes

    @cached_property
    def uncounted_bytes(self) -> int:
        """The most bytes of the plain step that are live at a time and do not count."""
        schedule = self._scheduler.schedule(stored(len(self.graph.units)))
        sums = self._sums(schedule, self._lives(schedule))
        return int(sums(lambda nbytes, parts: nbytes - self._counted(nbytes, parts)).max(initial=0))

    def _counted(self, nbytes: Ints, parts: Ints | int = 1) -> Ints:
        """Return values' bytes as ``get_memory_info`` counts them: 0 for those that do not come from the pool."""
        return nbytes if self.counts_small else self._device.pooled(nbytes, parts)

    @cached_property
    def _pooled_residents(self) -> dict[int, int]:
        """The bytes of the step's buffers that live all the time and come from the pool."""
        pooled_from = self._device.pooled_from
        return {value: nbytes for value, nbytes in self.prepared.residents.items() if nbytes >= pooled_from}

    @cached_property
    def replaced_variables(self) -> list[tuple[int, int]]:
        """The variables that take over the buffer of a new value, which the step assigns to them, and that buffer."""
        pairs = []
        for op in self.graph.ops:
            if op.type == "AssignVariableOp" and len(op.inputs) == 2:
                variable, new = (self.prepared.roots[value] for value in op.inputs)
                if variable in self._pooled_residents and self.graph.producers[new] is not None:
                    pairs.append((variable, new))
        return pairs

    @cached_property
    def _resident_sizes(self) -> Ints:
        return np.array([*self.prepared.residents.values()], dtype=np.int64)

    def _lives(self, schedule: Schedule, outlive: Sequence[int] | None = None) -> Lives:
        return Lives(schedule.rows, schedule.sizes, self.prepared.outlive if outlive is None else outlive)

    def _live(self, schedule: Schedule, outlive: Sequence[int] | None = None) -> Ints:
        """Return the bytes that are live in each step of a schedule, with the data."""
        live: Ints = self._sums(schedule, self._lives(schedule, outlive))(_bytes) + self.prepared.data_bytes
        return live

    def _sums(self, schedule: Schedule, lives: Lives) -> Callable[[Amounts], npt.NDArray[Any]]:
        """Return what adds up amounts of the live buffers, workspace included, in each step of a schedule."""

        def sums(amounts: Amounts) -> npt.NDArray[Any]:
            made = amounts(schedule.sizes, schedule.parts)
            total: npt.NDArray[Any] = lives.sums(made) + amounts(schedule.rows.workspace, 1)
            total += amounts(self._resident_sizes, 1).sum()
            return total

        return sums

    def reported_peak(self, segments: Sequence[Segment]) -> int:
        """Return the peak that ``get_memory_info`` would report.

        A plan that replays something runs in order: its peak is that of one walk, and what the device's allocator adds.
        The plain step does not, so TensorFlow's executor is played. Each plan is judged once.
        """
        return self._judged(tuple(segments))[0]

    def highest_peak(self, segments: Sequence[Segment]) -> int:
        """Return the peak that steps stay under, about: what a budget is compared with.

        Where ``reported_peak`` has what the allocator adds as a rule, or the mean of some plays, this has the most.
        """
        return self._judged(tuple(segments))[1]

    def _judged(self, segments: tuple[Segment, ...]) -> tuple[int, int]:
        """Return the reported and the highest peak."""
        if segments not in self._peaks:
            replays = any(segment.mode is SegmentMode.RECOMPUTE for segment in segments)
            if self.counts_tensors_alone:
                peak = self.measure(segments).peak_bytes if replays else self._plain_peak(segments)
                self._peaks[segments] = peak, peak
            elif replays:
                self._peaks[segments] = self._ordered_peaks(segments)
            else:
                played, data = self.played_peak(segments), self.prepared.data_bytes
                most = self.played_peak(segments, waiting=1.0) if self._waits else played
                self._peaks[segments] = played + data, round(most * MOST_OF_RACING) + data
        return self._peaks[segments]

    def _plain_peak(self, segments: Sequence[Segment]) -> int:
        """Return the most bytes that are live in the plain step as it runs in order."""
        nbytes = list(self.prepared.nbytes)
        rows = StepArrays.of(self._with_own_ops(self._scheduler.schedule(segments).steps, nbytes))
        sizes = np.array(nbytes, dtype=np.int64)
        made = Lives(rows, sizes, self.prepared.outlive).sums(sizes) + rows.workspace
        besides = int(self._resident_sizes.sum()) + self.prepared.data_bytes
        return max(besides + int(made.max(initial=0)), self.graph.resident_bytes)

    def played_peak(self, segments: Sequence[Segment], plays: int = PLAYS, waiting: float = _WAITING) -> int:
        """Return the mean peak of steps, without data beside, in which ops run when TensorFlow's executor starts them.

        Buffers count as the device's allocator hands them out. How long each op takes is known roughly only: the first
        of ``plays`` takes the times as they are, the others vary them, always in the same way. ``waiting`` is the share
        of ``Op.racing_bytes`` that is there. ``segments`` replay nothing.
        """
        device = self._device
        racing = self._racing(self._scheduler.schedule(segments).steps, waiting)
        steps, nbytes = self._with_copies_of_variables(self._with_late_updates(racing))
        steps = self._with_own_ops(steps, nbytes)
        dependencies = executor.Dependencies(steps, self.graph, self.prepared.outlive)
        seconds = [self.graph.ops[step.op].seconds for step in steps]
        expensive = [each - device.seconds_per_op > device.cheap_seconds for each in seconds]
        total, residents = 0, [*self.prepared.residents.values()]
        parts = [*self.prepared.parts.tolist(), *(1 for _ in nbytes[len(self.prepared.nbytes) :])]
        for play in range(plays):
            vary = random.Random(play).lognormvariate
            times = [each * vary(0.0, _SPREAD) for each in seconds] if play else seconds
            ledger = AllocatorLedger(device, nbytes, parts, residents, counts_small=self.counts_small)
            executor.run(steps, nbytes, dependencies, times, expensive, ledger, device.threads)
            total += ledger.peak_bytes
        return total // plays

    @cached_property
    def _waits(self) -> bool:
        """Whether ops of the plain step take ``Op.racing_bytes``: where several threads run what is ready."""
        return self._device.threads > 1 and any(op.racing_bytes for op in self.graph.ops)

    def _racing(self, steps: Sequence[ScheduledOp], share: float) -> Sequence[ScheduledOp]:
        """Return the steps of a plain schedule with a share of ``Op.racing_bytes``."""
        if not self._waits:
            return steps
        more = [round(share * self.graph.ops[step.op].racing_bytes) for step in steps]
        return [step._replace(workspace=step.workspace + each) for step, each in zip(steps, more, strict=True)]

    def _with_late_updates(self, steps: Sequence[ScheduledOp]) -> list[ScheduledOp]:
        """Return the steps of a plain schedule with each update after all that it waits for, or is made of."""
        ops, place_of = self.graph.ops, {step.op: place for place, step in enumerate(steps)}
        maker = {value: place for place, step in enumerate(steps) for value in ops[step.op].outputs}
        keys: list[int] = []
        for place, step in enumerate(steps):
            op, key = ops[step.op], place
            if op.phase is Phase.UPDATE:
                before = [place_of[other] for other in op.after]
                before += [maker[value] for value in op.inputs if value in maker]
                key = max([place, *(keys[each] if each < place else each for each in before)])
            keys.append(key)
        last = [ops[step.op].phase is Phase.UPDATE for step in steps]
        return [steps[place] for place in sorted(range(len(steps)), key=lambda each: (keys[each], last[each], each))]

    def _with_own_ops(self, steps: Sequence[ScheduledOp], nbytes: list[int]) -> list[ScheduledOp]:
        """Return steps with what only the plain step makes; ``nbytes`` gets the bytes of these buffers."""
        return self._with_scaled(self._with_replaced(steps, nbytes), nbytes)

    def _with_replaced(self, steps: Sequence[ScheduledOp], nbytes: list[int]) -> list[ScheduledOp]:
        """Return steps with ``Op.replaced_bytes`` as buffers, each as large as a result, which ``nbytes`` gets."""
        found = []
        for step in steps:
            op = self.graph.ops[step.op]
            if op.replaced_bytes:
                size = self.graph.values[op.outputs[0]].nbytes
                made = tuple(range(len(nbytes), len(nbytes) + op.replaced_bytes // size))
                nbytes.extend(size for _ in made)
                step = step._replace(touches=(*step.touches, *made), allocates=(*step.allocates, *made))
            found.append(step)
        return found

    def _with_scaled(self, steps: Sequence[ScheduledOp], nbytes: list[int]) -> list[ScheduledOp]:
        """Return steps in which copies of ``Op.scaled`` are made right after these, and read in place of them."""
        ops, maker = self.graph.ops, {buffer: place for place, step in enumerate(steps) for buffer in step.allocates}
        found, copies = list(steps), dict[int, list[ScheduledOp]]()
        for place, step in enumerate(steps):
            for root in {self.prepared.roots[value] for value in ops[step.op].scaled}:
                if root in maker and ops[steps[maker[root]].op].phase is Phase.FORWARD:
                    copy = len(nbytes)
                    nbytes.append(nbytes[root])
                    touches = tuple(copy if buffer == root else buffer for buffer in found[place].touches)
                    found[place] = found[place]._replace(touches=touches)
                    made = step._replace(touches=(root, copy), allocates=(copy,), overwrites=(root,), workspace=0)
                    copies.setdefault(maker[root], []).append(made)
        return [each for place, step in enumerate(found) for each in (step, *copies.get(place, ()))]

    def _with_copies_of_variables(self, steps: Sequence[ScheduledOp]) -> tuple[list[ScheduledOp], list[int]]:
        """Return steps in which variables are copied that are changed while others read them, and all buffers' bytes.

        An assignment gives a variable a buffer of its own then (``PrepareToUpdateVariable`` in TensorFlow 2.21's
        ``training_op_helpers.h``): a decay of weights, which waits for no gradient, has two of each weight alive.
        Where a step runs in order, it waits.
        """
        nbytes, ops, values, roots = list(self.prepared.nbytes), self.graph.ops, self.graph.values, self.prepared.roots
        readers: dict[int, list[int]] = {}
        for place, step in enumerate(steps):
            if ops[step.op].phase is not Phase.UPDATE:
                for root in {roots[value] for value in ops[step.op].inputs}:
                    if values[root].kind is MemoryKind.PARAMETER:
                        readers.setdefault(root, []).append(place)
        changed = list(steps)
        for place, step in enumerate(steps):
            op = ops[step.op]
            if op.phase is Phase.UPDATE and op.type in _CHANGES and roots[op.inputs[0]] in readers:
                root, copy = roots[op.inputs[0]], len(nbytes)
                nbytes.append(values[root].nbytes)
                changed[place] = step._replace(touches=(*step.touches, copy), copies=(copy,))
                for reader in readers[root]:
                    changed[reader] = changed[reader]._replace(touches=(*changed[reader].touches, copy))
        return changed, nbytes

    def _replay_seconds(self, schedule: Schedule) -> float:
        return sum(self.graph.ops[index].seconds for index in schedule.replayed)
