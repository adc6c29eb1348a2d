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

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tf_memsaver.cost.device import device_named
from tf_memsaver.ir.graph import Graph, Op, Phase
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.judge import executor
from tf_memsaver.judge.allocator import AllocatorLedger
from tf_memsaver.judge.schedule import BackwardWriter, Schedule, Step, walk


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
    transients. ``instants[peak_at]`` is the first op at the peak; ``live_at_peak`` are the values whose buffers are
    live there, largest first. ``step_seconds`` is the predicted time, ``replay_seconds`` the part spent on replays.
    """

    instants: tuple[Instant, ...]
    peak_bytes: int
    resident_bytes: int
    peak_at: int
    live_at_peak: tuple[int, ...]
    step_seconds: float
    replay_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What planners ask of a simulation: the peak, where it comes from, and the time of the replays.

    ``forward_peaks[k]`` and ``backward_peaks[k]`` are the peaks while the forward ops, and while the replay and the
    backward ops, of the k-th segment run; ``other_peak`` is that of the ops outside all segments, such as the loss.
    All are in bytes, with the resident ones.
    """

    peak_bytes: int
    forward_peaks: tuple[int, ...]
    backward_peaks: tuple[int, ...]
    other_peak: int
    replay_seconds: float


PLAYS = 5
"""How often a step is played for its reported peak."""

_SPREAD = 0.5
"""Standard deviation of the logarithm of an op's time, as kernels and threads vary it."""


class Simulator:
    """Simulates plans of one graph; what does not depend on the plan is prepared once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.roots = graph.roots
        self.aliases = [value.alias_of for value in graph.values]
        self.nbytes = [0 if value.alias_of is not None else value.nbytes for value in graph.values]
        self.resident = [graph.values[root].kind.resident for root in self.roots]
        self.unit_of = [-1] * len(graph.values)
        """For each value, the unit whose forward ops make it; -1 for all others."""
        self.unit_forward: list[list[Op]] = [[] for _ in graph.units]
        self._forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
        self._backward = [op for op in graph.ops if op.phase is not Phase.FORWARD]
        for op in self._forward:
            if op.unit is not None:
                self.unit_forward[op.unit].append(op)
                for value in op.outputs:
                    self.unit_of[value] = op.unit
        self.outlive = [self.roots[value] for value in graph.outputs if not self.resident[value]]
        """The buffers that are live when the step ends."""
        self._resident_sizes = [v.nbytes for v in graph.values if v.kind.resident and v.alias_of is None]
        self.static = [self._static_step(op) for op in graph.ops]
        """For each op, its step in the plain schedule."""
        self._reported: dict[tuple[tuple[Segment, ...], int], int] = {}

    def run(self, segments: Sequence[Segment]) -> Timeline:
        """Return the timeline of the step under ``segments`` (which cover the units, in order)."""
        schedule = self.schedule(segments)
        live, last = walk(schedule.steps, schedule.nbytes, self.outlive, self.graph.resident_bytes)
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
            live_at_peak=_live_at(schedule, last, places[peak_at]) if places else (),
            step_seconds=sum(ops[step.op].seconds for step in schedule.steps if step.op >= 0),
            replay_seconds=self._replay_seconds(schedule),
        )

    def measure(self, segments: Sequence[Segment]) -> Measured:
        """Return the peaks and the replay time of the step under ``segments``, without a timeline."""
        schedule = self.schedule(segments)
        resident = self.graph.resident_bytes
        live, _ = walk(schedule.steps, schedule.nbytes, self.outlive, resident)
        forward, backward, other = [resident] * len(segments), [resident] * len(segments), resident
        for owner, start, stop in schedule.runs:
            highest = max(live[start:stop], default=resident)
            peaks = forward if start < len(self._forward) else backward
            if owner < 0:
                other = max(other, highest)
            else:
                peaks[owner] = max(peaks[owner], highest)
        return Measured(
            peak_bytes=max(other, *forward, *backward),
            forward_peaks=tuple(forward),
            backward_peaks=tuple(backward),
            other_peak=other,
            replay_seconds=self._replay_seconds(schedule),
        )

    def packed_peak(self, segments: Sequence[Segment]) -> int:
        """Return the peak with buffers as the allocator hands them out, in the schedule's own order, to rank plans by.

        Where an op needs nothing of the one before, both count as running at once. The plan of least peak is the one
        that this model flatters most; so what is predicted of it comes from another, ``reported_peak``.
        """
        device = device_named(self.graph.device)
        if not device.threads:
            return self.measure(segments).peak_bytes
        schedule = self.schedule(segments)
        ledger = AllocatorLedger(device, schedule.nbytes, self._resident_sizes)
        steps = _with_overlap(schedule, device.pooled_from)
        walk(steps, schedule.nbytes, self.outlive, self.graph.resident_bytes, ledger)
        return ledger.peak_bytes

    def reported_peak(self, segments: Sequence[Segment], plays: int = PLAYS) -> int:
        """Return the peak that ``get_memory_info`` would report.

        Buffers count as the device's allocator hands them out, and ops run when TensorFlow's executor would start them.
        How long each takes is known roughly only: the first of ``plays`` takes the times as they are, the others vary
        them, always in the same way; the mean of their peaks is returned. Each plan is played once.
        """
        asked = tuple(segments), plays
        if asked not in self._reported:
            self._reported[asked] = self._played_peak(*asked)
        return self._reported[asked]

    def _played_peak(self, segments: Sequence[Segment], plays: int) -> int:
        device = device_named(self.graph.device)
        if not device.threads:
            return self.measure(segments).peak_bytes
        schedule = self.schedule(segments)
        dependencies = executor.Dependencies(schedule, self.graph, len(self._forward))
        seconds = [
            self.graph.ops[step.op].seconds
            if step.op >= 0
            else device.seconds(0, 2 * sum(schedule.nbytes[buffer] for buffer in step.news))
            for step in schedule.steps
        ]
        expensive = [each - device.seconds_per_op > device.cheap_seconds for each in seconds]
        outlive, peaks = frozenset(self.outlive), 0
        for play in range(plays):
            generator, spread = random.Random(play), _SPREAD if play else 0.0
            times = [each * generator.lognormvariate(0.0, spread) for each in seconds]
            ledger = AllocatorLedger(device, schedule.nbytes, self._resident_sizes)
            executor.run(schedule, dependencies, times, expensive, outlive, ledger, device.threads)
            peaks += ledger.peak_bytes
        return peaks // plays

    def _replay_seconds(self, schedule: Schedule) -> float:
        ops = self.graph.ops
        return sum(ops[step.op].seconds for step in schedule.steps if step.replay and step.op >= 0)

    # The schedule -------------------------------------------------------------------------------------------------

    def _static_step(self, op: Op) -> Step:
        roots, resident = self.roots, self.resident
        touched = dict.fromkeys(roots[v] for v in (*op.inputs, *op.outputs) if not resident[v])
        return Step(
            op=op.index,
            replay=False,
            touches=tuple(touched),
            news=tuple(v for v in op.outputs if roots[v] == v and not resident[v]),
            overwrites=tuple(dict.fromkeys(roots[v] for v in op.overwrites if not resident[v])),
            workspace=op.workspace_bytes,
        )

    def schedule(self, segments: Sequence[Segment]) -> Schedule:
        """Return the ops in execution order under ``segments``, with the replays in place."""
        schedule = Schedule(self.nbytes)
        owner = [-1] * len(self.graph.units)
        for number, segment in enumerate(segments):
            owner[segment.start : segment.stop] = [number] * (segment.stop - segment.start)
        self._plain_runs(schedule, self._forward, owner)
        writer = BackwardWriter(self, schedule)
        position, order = 0, self._backward
        while position < len(order):
            op, start = order[position], len(schedule.steps)
            number = -1 if op.unit is None else owner[op.unit]
            stop = position + 1
            while stop < len(order) and (order[stop].unit is None or owner[order[stop].unit or 0] == number):
                stop += 1
            if number >= 0 and segments[number].mode is SegmentMode.RECOMPUTE:
                writer.recompute(segments[number], order[position:stop], {})
            else:
                schedule.steps.extend(self.static[op.index] for op in order[position:stop])
            schedule.note_run(number, start)
            position = stop
        return schedule

    def _plain_runs(self, schedule: Schedule, ops: Sequence[Op], owner: Sequence[int]) -> None:
        """Schedule the forward pass, which is the same for all plans, and note which segment each run is of."""
        number, start = -1, 0
        for op in ops:
            its = -1 if op.unit is None else owner[op.unit]
            if its != number:
                schedule.note_run(number, start)
                number, start = its, len(schedule.steps)
            schedule.steps.append(self.static[op.index])
        schedule.note_run(number, start)


def _with_overlap(schedule: Schedule, least_bytes: int) -> list[Step]:
    """Return the steps with the outputs of an independent next step, if they are large, added to the workspace."""
    steps = list(schedule.steps)
    following: Step | None = None
    for place in range(len(steps) - 1, -1, -1):
        step = steps[place]
        if following is not None and set(step.news).isdisjoint(following.touches):
            ahead = max((schedule.nbytes[buffer] for buffer in following.news), default=0)
            steps[place] = step._replace(workspace=max(step.workspace, ahead))
        if sum(schedule.nbytes[buffer] for buffer in step.news) >= least_bytes:
            following = step
    return steps


def _live_at(schedule: Schedule, last: Sequence[int], place: int) -> tuple[int, ...]:
    """Return the values (by index in the graph) whose buffers are live at a step, largest first."""
    live: dict[int, None] = {}
    for step in schedule.steps[: place + 1]:
        for buffer in step.news:
            if last[buffer] >= place:
                live[buffer] = None
    ordered = sorted(live, key=lambda buffer: (-schedule.nbytes[buffer], buffer))
    return tuple(schedule.origin[buffer] for buffer in ordered)
