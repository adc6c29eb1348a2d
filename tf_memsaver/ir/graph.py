"""The captured training step: values, operations, units and candidate cuts. No TensorFlow here.

A *unit* is the smallest thing that a segment can hold: one Keras layer call at layer granularity, one operation at op
granularity. Units are numbered in forward order; *position* ``p`` is the place after the first ``p`` units, so a
segment ``(start, stop]`` holds the units ``start .. stop - 1`` (0-based) and cuts lie at positions.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from tf_memsaver.summary import Rows, Summarized
from tf_memsaver.units import format_bytes


class Phase(enum.Enum):
    """Part of the training step that an operation belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class MemoryKind(enum.Enum):
    """What a value's bytes are for, as shown in timelines and tables."""

    PARAMETER = "parameter"
    OPTIMIZER = "optimizer"
    INPUT = "input"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    WEIGHT_GRADIENT = "weight_gradient"

    @property
    def resident(self) -> bool:
        """Whether the bytes are live before and after the step (so never allocated or freed by it)."""
        return self in (MemoryKind.PARAMETER, MemoryKind.OPTIMIZER, MemoryKind.INPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor of the step. ``alias_of`` is the value whose buffer a view shares; a view has no bytes of its own."""

    index: int
    name: str
    nbytes: int
    kind: MemoryKind
    alias_of: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An operation: what it reads and writes (value indices), what it costs, and the unit that it belongs to.

    ``unit`` is the 0-based unit for forward ops of a unit and for the backward ops that belong to its gradient;
    ``None`` for what lies outside all units (input conversion, loss, optimizer). ``overwrites`` lists the inputs whose
    buffer an output may take over when nobody else reads it; ``after`` the ops that it waits for beside those that make
    its inputs (control dependencies, and ops too small to be listed). ``shapes`` are values that it looks at for their
    shape alone: they are not kept for it, but a replay of it makes them again, since the size of a batch is known only
    as a step runs. ``tape`` numbers the passes of tapes that follow each other, for backward ops: two may go back
    through the same forward ops.
    """

    index: int
    name: str
    type: str
    phase: Phase
    unit: int | None
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flops: int = 0
    bytes_moved: int = 0
    seconds: float = 0.0
    workspace_bytes: int = 0
    overwrites: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    shapes: tuple[int, ...] = ()
    tape: int = 0


CODE = "Python"
"""The kind of a unit that is Python code of the user's, between layers: it runs as it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A layer call (or op). ``signature`` is free of names, so that it is the same for equal models.

    ``pinned`` is empty, or the reason why the unit cannot be replayed and must stay in a store segment.
    """

    index: int
    label: str
    kind: str
    signature: str
    pinned: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A position at which a segment may end, and the values that are live across it in the forward pass."""

    position: int
    label: str
    live: tuple[int, ...]

    @property
    def is_articulation(self) -> bool:
        """Whether exactly one value crosses: every path from the inputs to the loss passes there."""
        return len(self.live) == 1


def roots_of(values: Iterable[Value]) -> tuple[int, ...]:
    """Return, for each value, the value that owns its buffer (itself unless it is a view)."""
    roots: list[int] = []
    for value in values:
        roots.append(value.index if value.alias_of is None else roots[value.alias_of])
    return tuple(roots)


@dataclass(frozen=True, kw_only=True, repr=False)
class Graph(Summarized):
    """One training step at a concrete batch size. Ops stand in execution order: forward, backward, update.

    With several tapes, one after the other, so do the ops of each: the step is a sequence of such passes.

    ``outputs`` are the values that outlive the step (the loss; the weight gradients when there is no optimizer).
    ``cuts`` are the interior candidate cuts in order of position. ``resident_bytes`` are live before, during and after
    the step: weights, optimizer slots, other state and the input batch. At the positions in ``joined`` no segment may
    end: a cut there would change the order of a floating-point sum. ``device`` is the kind that sizes and times are
    for. ``opened`` are the layers that were chosen to be taken apart, so that their operations are units, and ``note``
    says why there are none, if that was no choice. ``data_shapes`` are the shapes that only a batch of the data told.
    """

    name: str
    batch_size: int
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    units: tuple[Unit, ...]
    cuts: tuple[Cut, ...]
    outputs: tuple[int, ...]
    joined: tuple[int, ...] = ()
    device: str = "CPU"
    opened: tuple[str, ...] = ()
    note: str = ""
    data_shapes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for index, value in enumerate(self.values):
            if value.index != index:
                raise ValueError(f"value {value.name} has index {value.index}, stands at {index}")
        for index, op in enumerate(self.ops):
            if op.index != index:
                raise ValueError(f"op {op.name} has index {op.index}, stands at {index}")

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """For each value, the value that owns its buffer (itself unless it is a view)."""
        return roots_of(self.values)

    @cached_property
    def producers(self) -> tuple[int | None, ...]:
        """For each value, the index of the op that writes it; ``None`` for resident values."""
        producers: list[int | None] = [None] * len(self.values)
        for op in self.ops:
            for value in op.outputs:
                producers[value] = op.index
        return tuple(producers)

    @cached_property
    def in_one_pass(self) -> Graph:
        """The same step as one tape has it: all forward ops before the first other one; itself where that is so."""
        order = sorted(range(len(self.ops)), key=lambda index: self.ops[index].phase is not Phase.FORWARD)
        if order == list(range(len(order))) and not any(op.tape for op in self.ops):
            return self
        moved = {index: place for place, index in enumerate(order)}
        ops = (
            dataclasses.replace(
                self.ops[index],
                index=place,
                after=tuple(sorted(map(moved.__getitem__, self.ops[index].after))),
                tape=0,
            )
            for place, index in enumerate(order)
        )
        return dataclasses.replace(self, ops=tuple(ops))

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes live before, during and after the step."""
        return sum(v.nbytes for v in self.values if v.kind.resident and v.alias_of is None)

    def bytes_of(self, kind: MemoryKind) -> int:
        """Sum of the bytes of all buffers of a kind."""
        return sum(v.nbytes for v in self.values if v.kind is kind and v.alias_of is None)

    @cached_property
    def step_seconds(self) -> float:
        """Predicted seconds of the plain step."""
        return sum(op.seconds for op in self.ops)

    def summary(self) -> tuple[str, Rows]:
        """Return what ``repr`` shows."""
        counts = [sum(op.phase is phase for op in self.ops) for phase in Phase]
        phases = ", ".join(f"{count} {phase.value}" for count, phase in zip(counts, Phase, strict=True))
        pinned = sum(bool(unit.pinned) for unit in self.units)
        rows = [
            ("units", f"{len(self.units)}, of which {pinned} cannot be recomputed"),
            ("operations", f"{len(self.ops)}: {phases}"),
            ("values", str(len(self.values))),
            ("cuts", f"{len(self.cuts)} places where a segment may end"),
            ("resident", f"{format_bytes(self.resident_bytes)} of weights, slots and batch"),
            ("device", self.device),
        ]
        if self.opened:
            rows.append(("by operations", ", ".join(self.opened)))
        return f"Graph of a training step of '{self.name}', batch size {self.batch_size}", rows

    @property
    def signatures(self) -> tuple[str, ...]:
        """The units' name-free signatures, in order: what the fingerprint is made of."""
        return tuple(unit.signature for unit in self.units)


def fingerprint(signatures: tuple[str, ...]) -> str:
    """Return the digest by which a plan recognises the model that it was made for."""
    return hashlib.sha256("\n".join(signatures).encode()).hexdigest()[:16]
