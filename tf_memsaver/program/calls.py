"""What a model consists of, whatever kind it is: a flat list of calls over numbered slots.

A *call* is the smallest thing that a segment is made of. ``layer_calls`` lists those of a Keras model,
``function_calls`` those of a TensorFlow function. ``capture`` makes one unit of each call and ``rewrite`` runs them in
segments, so both see the same positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from tf_memsaver.parity.names import Names


class Reader(NamedTuple):
    """What reads a slot: its name, its kind ("" is unknown) and the slot it fills, if its gradient passes through."""

    name: str
    kind: str
    passes_to: int | None


class Call(Protocol):
    """One call: it reads some slots and fills others."""

    @property
    def operation(self) -> Any:
        """What losses and variables are asked of."""
        ...

    @property
    def label(self) -> str:
        """The name that a person knows it by."""
        ...

    @property
    def kind(self) -> str:
        """The type of what is called."""
        ...

    @property
    def inputs(self) -> tuple[int, ...]:
        """The slots that it reads."""
        ...

    @property
    def outputs(self) -> tuple[int, ...]:
        """The slots that it fills."""
        ...

    @property
    def signature(self) -> str:
        """A description without names: the same for equal calls of equal models."""
        ...

    @property
    def pinned(self) -> str:
        """The reason why it cannot be replayed, or an empty string."""
        ...

    def readers(self, slot: int) -> list[Reader]:
        """Return what reads a slot and sends a gradient to it."""
        ...

    def run(self, slots: Sequence[Any], training: bool | None, names: Names) -> list[Any]:
        """Run on the tensors in ``slots``, under ``names``; return what goes to ``outputs``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSequence:
    """The calls of a model in the order in which they run.

    ``inputs`` are the slots that are filled before the first call, ``outputs`` those that hold the results. Slots in
    ``resident`` (among ``inputs``) are live during the whole step, so that segments read them without a copy; those of
    them in ``weights`` are made of trained variables, and gradients are taken for them; those in ``read_again`` are one
    of several reads of a variable. ``forward_first`` says whether a call of the model as a function of its own sorts
    before the call of its gradient, by name; None if the model runs in the graph of its gradient. ``shapes`` are those
    that a Keras model says its slots have; a first ``None`` is the batch. ``opened`` are
    the layers that were chosen to be taken apart, so that their operations are calls. ``note`` is what a plan tells of
    the calls, such as why no layers are taken apart.
    """

    calls: tuple[Call, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    slot_count: int
    resident: frozenset[int] = frozenset()
    weights: frozenset[int] = frozenset()
    read_again: frozenset[int] = frozenset()
    forward_first: bool | None = None
    shapes: Mapping[int, Sequence[int | None]] = field(default_factory=dict)
    opened: tuple[str, ...] = ()
    note: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the calls."""
        return tuple(call.label for call in self.calls)

    @property
    def signatures(self) -> tuple[str, ...]:
        """The calls' name-free signatures: what a plan's fingerprint is made of."""
        return tuple(call.signature for call in self.calls)
