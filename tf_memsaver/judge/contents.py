"""What a step holds in memory at each moment: the timeline of the simulator, tensor by tensor."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import Segment
from tf_memsaver.judge.schedule import Schedule, scheduled
from tf_memsaver.judge.simulate import Simulator, Timeline
from tf_memsaver.judge.walk import lifetimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A buffer of a simulated step, live from instant ``first`` to instant ``last``, both included.

    ``value`` is the value of the graph that it holds. ``again`` says that a replay made it, or copied it for its own
    use; ``kept`` that the forward pass made it and a later pass reads it. ``nbytes`` is its size.
    """

    value: int
    nbytes: int
    again: bool
    kept: bool
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A simulated step with all of its tensors, the resident ones included.

    At each instant, the bytes of those that are live and the workspace of the op are the instant's ``live_bytes``.
    """

    timeline: Timeline
    tensors: tuple[Tensor, ...]

    def live_at(self, instant: int) -> tuple[Tensor, ...]:
        """Return the tensors that are live at an instant, the largest first."""
        found = [each for each in self.tensors if each.first <= instant <= each.last]
        return tuple(sorted(found, key=lambda each: -each.nbytes))


def contents(simulator: Simulator, segments: Sequence[Segment]) -> Contents:
    """Return what the step under ``segments`` (which cover the units, in order) holds in memory, and when."""
    graph, prepared = simulator.graph, simulator.prepared
    schedule = scheduled(prepared, segments)
    nbytes = schedule.sizes.tolist()
    places = [place for place, step in enumerate(schedule.steps) if step.op >= 0]
    value_of, kept = _values(graph, schedule), _read_later(schedule)
    tensors = [
        Tensor(value=value.index, nbytes=value.nbytes, again=False, kept=False, first=0, last=len(places) - 1)
        for value in graph.values
        if value.kind.resident and value.alias_of is None
    ]
    for buffer, (first, last) in lifetimes(schedule.steps, nbytes, prepared.outlive).items():
        tensors.append(
            Tensor(
                value=value_of[buffer],
                nbytes=nbytes[buffer],
                again=buffer >= len(graph.values),
                kept=buffer in kept,
                # An order gate is no instant: what it copies is there from the next op on.
                first=bisect_left(places, first),
                last=bisect_right(places, last) - 1,
            )
        )
    return Contents(timeline=simulator.run(segments), tensors=tuple(tensors))


def _values(graph: Graph, schedule: Schedule) -> list[int]:
    """Return the value that each buffer holds: copies hold that of what they copy, or replay."""
    value_of = list(range(len(graph.values))) + [-1] * (len(schedule.sizes) - len(graph.values))
    for step in schedule.steps:
        if step.op < 0:
            source, copy = step.touches
            value_of[copy] = value_of[source]
        elif step.replay:
            own = [value for value in graph.ops[step.op].outputs if graph.values[value].alias_of is None]
            for value, buffer in zip(own, step.allocates, strict=True):
                value_of[buffer] = value
    return value_of


def _read_later(schedule: Schedule) -> set[int]:
    """Return the buffers that a forward pass makes, and a replay or a later pass touches."""
    made, read = set[int](), set[int]()
    for step, is_forward in zip(schedule.steps, schedule.is_forward, strict=True):
        if is_forward:
            made.update(step.allocates)
        else:
            read.update(step.touches)
    return made & read
