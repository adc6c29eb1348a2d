"""A simulated step as a person is shown it: bytes over time, what is alive, and where the peak falls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tf_memsaver.display.parts import DATA_IN_MEMORY
from tf_memsaver.ir.graph import Graph, MemoryKind, Phase
from tf_memsaver.ir.segments import Segment
from tf_memsaver.judge.contents import Contents, Tensor, contents
from tf_memsaver.judge.simulate import Simulator

COLUMNS = 600
"""Moments that a step is thinned to; each is the highest of its share of the time, so that no peak is lost."""

NAMED_AT_A_MOMENT, NAMED_AT_THE_PEAK = 5, 10
"""How many of the tensors that are alive are named, the largest ones."""

RECOMPUTED, SCRATCH = "recomputed activations", "scratch of the operation"
KINDS = {
    MemoryKind.PARAMETER: "weights and other state",
    MemoryKind.OPTIMIZER: "optimizer slots",
    MemoryKind.INPUT: "input batch and targets",
    MemoryKind.DATA: DATA_IN_MEMORY,
    MemoryKind.ACTIVATION: "activations",
    MemoryKind.GRADIENT: "gradients of activations",
    MemoryKind.WEIGHT_GRADIENT: "gradients of weights",
}
"""What the kinds of tensors are called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A tensor that is alive: the layer and the operation that make it, what it is for, and its bytes."""

    layer: str
    operation: str
    kind: str
    nbytes: int

    @property
    def name(self) -> str:
        """Layer and operation."""
        return f"{self.layer}: {self.operation}" if self.operation else self.layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One instant of a step: seconds since its begin, live bytes, what runs, and the largest tensors alive.

    ``tensor_count`` counts those that the step has made; ``resident_bytes`` are of those that live all the time, which
    are not among the named.
    """

    seconds: float
    live_bytes: int
    running: str
    largest: tuple[NamedTensor, ...]
    tensor_count: int
    resident_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The first instant at which a step holds most: what runs, the bytes by kind, and the largest tensors."""

    live_bytes: int
    running: str
    by_kind: tuple[tuple[str, int], ...]
    largest: tuple[NamedTensor, ...]
    tensor_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownStep:
    """A step over its predicted time, in at most ``COLUMNS`` moments; bytes are those of live tensors.

    ``kept_bytes`` has, for each unit, the bytes that its forward pass leaves for the backward pass.
    """

    moments: tuple[Moment, ...]
    step_seconds: float
    peak: Peak
    kept_bytes: tuple[int, ...]

    @classmethod
    def of(cls, simulator: Simulator, segments: Sequence[Segment]) -> ShownStep:
        """Return the step under ``segments``, which cover the units, in order."""
        graph, found = simulator.graph, contents(simulator, segments)
        begins, now = list[float](), 0.0
        for instant in found.timeline.instants:
            begins.append(now)
            now += graph.ops[instant.op].seconds
        chosen = _highest(begins, [instant.live_bytes for instant in found.timeline.instants], now)
        return cls(
            moments=tuple(_moment(graph, found, place, begins[place]) for place in chosen),
            step_seconds=now,
            peak=_peak(graph, found),
            kept_bytes=_kept(graph, found),
        )


def named(graph: Graph, tensor: Tensor) -> NamedTensor:
    """Return a tensor by the names of what makes it."""
    value, producer = graph.values[tensor.value], graph.producers[tensor.value]
    kind = f"{KINDS[value.kind]}{', recomputed' if tensor.again else ''}"
    if producer is None:
        return NamedTensor(layer=value.name, operation="", kind=kind, nbytes=tensor.nbytes)
    op = graph.ops[producer]
    layer = "outside all layers" if op.unit is None else graph.units[op.unit].label
    return NamedTensor(layer=layer, operation=op.type, kind=kind, nbytes=tensor.nbytes)


_PHASES = {Phase.FORWARD: "forward pass", Phase.BACKWARD: "backward pass", Phase.UPDATE: "update"}


def _running(graph: Graph, found: Contents, place: int) -> str:
    instant = found.timeline.instants[place]
    op = graph.ops[instant.op]
    phase = "recomputation" if instant.replay else _PHASES[op.phase]
    layer = "outside all layers" if op.unit is None else f"of {graph.units[op.unit].label}"
    return f"{phase} {layer} ({op.type})"


def _highest(begins: Sequence[float], live: Sequence[int], whole: float) -> list[int]:
    """Return the place of the highest instant of each column of the time, in order."""
    best: dict[int, int] = {}
    for place, begin in enumerate(begins):
        column = min(int(begin / whole * COLUMNS), COLUMNS - 1) if whole > 0 else place
        if column not in best or live[place] > live[best[column]]:
            best[column] = place
    return list(best.values())


def _moment(graph: Graph, found: Contents, place: int, begin: float) -> Moment:
    made = [each for each in found.live_at(place) if not graph.values[each.value].kind.resident]
    return Moment(
        seconds=begin,
        live_bytes=found.timeline.instants[place].live_bytes,
        running=_running(graph, found, place),
        largest=tuple(named(graph, each) for each in made[:NAMED_AT_A_MOMENT] if each.nbytes),
        tensor_count=len(made),
        resident_bytes=graph.resident_bytes,
    )


def _peak(graph: Graph, found: Contents) -> Peak:
    timeline = found.timeline
    if not timeline.instants:
        return Peak(live_bytes=timeline.peak_bytes, running="step", by_kind=(), largest=(), tensor_count=0)
    alive = found.live_at(timeline.peak_at)
    by_kind = dict.fromkeys([*KINDS.values(), RECOMPUTED, SCRATCH], 0)
    for tensor in alive:
        again = tensor.again and graph.values[tensor.value].kind is MemoryKind.ACTIVATION
        by_kind[RECOMPUTED if again else KINDS[graph.values[tensor.value].kind]] += tensor.nbytes
    by_kind[SCRATCH] += graph.ops[timeline.instants[timeline.peak_at].op].workspace_bytes
    return Peak(
        live_bytes=timeline.peak_bytes,
        running=_running(graph, found, timeline.peak_at),
        by_kind=tuple((kind, nbytes) for kind, nbytes in by_kind.items() if nbytes),
        largest=tuple(named(graph, each) for each in alive[:NAMED_AT_THE_PEAK] if each.nbytes),
        tensor_count=len(alive),
    )


def _kept(graph: Graph, found: Contents) -> tuple[int, ...]:
    kept = [0] * len(graph.units)
    for tensor in found.tensors:
        producer = graph.producers[tensor.value]
        unit = None if producer is None else graph.ops[producer].unit
        if tensor.kept and unit is not None:
            kept[unit] += tensor.nbytes
    return tuple(kept)
