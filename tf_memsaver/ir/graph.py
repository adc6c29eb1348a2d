"""The captured training step: values, operations, units and candidate cuts. No TensorFlow here.

A *unit* is the smallest part of a segment: one Keras layer call at layer granularity, a few operations at op
granularity. Units are numbered in forward order. *Position* ``p`` is the place after the first ``p`` units: a segment
``(start, stop]`` has the units ``start .. stop - 1`` (from 0), and cuts are at positions.
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
    DATA = "data"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    WEIGHT_GRADIENT = "weight_gradient"

    @property
    def resident(self) -> bool:
        """Whether the bytes are live before and after the step (so never allocated or freed by it)."""
        return self in (MemoryKind.PARAMETER, MemoryKind.OPTIMIZER, MemoryKind.INPUT, MemoryKind.DATA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor of the step, with its size in bytes. ``alias_of`` is the value whose buffer a view shares.

    A list of tensors has a buffer for each: ``parts`` says how many, all of the same size.
    """

    index: int
    name: str
    nbytes: int
    kind: MemoryKind
    alias_of: int | None = None
    parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An operation: what it reads and writes (indices of values), what it costs, and its unit.

    ``unit`` is the number of the unit, from 0, for its forward operations and for the backward operations of its
    gradient; ``None`` for operations outside all units (input conversion, loss, optimizer). ``overwrites`` are the
    inputs whose buffer an output may use if nothing else reads it. ``after`` are the operations that it waits for, in
    addition to those that make its inputs (through control dependencies, and operations that are too small to be
    listed). For backward operations, ``tape`` numbers the passes of tapes that follow each other: two may go back
    through the same forward operations. ``racing_bytes`` is what an operation works with besides ``workspace_bytes``
    where the step is not held in order: TensorFlow begins several steps of a loop at once. ``replaced_bytes`` is what
    is in memory besides in the plain step, which has other operations in place of it. ``scaled`` are the inputs that it
    reads a copy of in the plain step, which multiplies them with a constant as soon as they are there.
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
    racing_bytes: int = 0
    replaced_bytes: int = 0
    overwrites: tuple[int, ...] = ()
    scaled: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    tape: int = 0


CODE = "Python"
"""The kind of a unit that is Python code of the user's, between layers: it runs as it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A layer call, or a group of operations. ``signature`` contains no names, so it is the same for equal models.

    ``pinned`` is the reason why the unit cannot be recomputed and must stay in a store segment; empty if it can.
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
        """Whether exactly one value crosses: every path from the inputs to the loss goes through it."""
        return len(self.live) == 1


def roots_of(values: Iterable[Value]) -> tuple[int, ...]:
    """Return, for each value, the value that owns its buffer (itself unless it is a view)."""
    roots: list[int] = []
    for value in values:
        roots.append(value.index if value.alias_of is None else roots[value.alias_of])
    return tuple(roots)


@dataclass(frozen=True, kw_only=True, repr=False)
class Graph(Summarized):
    """One training step at a fixed batch size, as ``capture_graph`` returns it.

    ``ops`` are in execution order: forward, backward, update. If the step has several tapes that run one after the
    other, it is a sequence of such passes. ``values`` are the tensors, and ``units`` the layer calls or groups of
    operations. ``cuts`` are the candidate cuts, in order of position. At the positions in ``joined``, no segment may
    end, since a cut there would change the order of a floating-point sum.

    ``outputs`` are the values that are live after the step (the loss; without an optimizer, also the weight gradients).
    ``resident_bytes`` are live before, during and after the step: weights, optimizer slots, other state, the input
    batch, and on a CPU what else the training data holds. ``device`` is the kind of device that sizes and times are
    for. ``opened`` are the layers whose operations are units, and ``note`` says why there could be none.
    ``data_shapes`` are shapes that are known from a batch of the data only.
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
