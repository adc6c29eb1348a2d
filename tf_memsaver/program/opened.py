"""Networks whose calls are opened: what a network calls is units of something larger, which runs its own code.

A ``train_step`` and a model's own ``call`` bring networks together. Each call of one is run by the part of the plan
that is for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tf_memsaver.compat import keras_calls
from tf_memsaver.ir.graph import CODE
from tf_memsaver.ir.segments import Segment
from tf_memsaver.parity.names import Names
from tf_memsaver.plan.plan import Plan
from tf_memsaver.program.calls import Call, Reader
from tf_memsaver.program.program import ModelProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedCall:
    """A call of a network: its calls are units ``start`` to ``stop``, its slots those from ``shift`` on.

    ``training`` is what it is always called with, or None.
    """

    path: str
    network: Any
    program: ModelProgram
    start: int
    shift: int
    training: bool | None = None

    @property
    def stop(self) -> int:
        """The unit after its last."""
        return self.start + len(self.program.sequence.calls)

    @property
    def calls(self) -> list[Call]:
        """Its calls, in the slots of what is around it."""
        return [_Placed(call, self) for call in self.program.sequence.calls]

    @property
    def inputs(self) -> tuple[int, ...]:
        """The slots of its inputs, in those of what is around it."""
        return self.placed(self.program.sequence.inputs)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The slots of its results, in those of what is around it."""
        return self.placed(self.program.sequence.outputs)

    def placed(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Return slots of its own in those of what is around it."""
        return tuple(slot + self.shift for slot in slots)

    def part_of(self, plan: Plan) -> Plan:
        """Return the plan of the network by itself that a plan of what is around it holds."""
        return replace(
            plan,
            segments=tuple(_within(plan.segments, self.start, self.stop)),
            labels=self.program.sequence.labels,
            signatures=self.program.sequence.signatures,
            opened=self.program.sequence.opened,
        )


def taken_over(
    program: ModelProgram, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any, run: Callable[..., Any]
) -> Any:
    """Return what the call of a layer returns if ``run(layer, args, kwargs)`` makes that of which it is a program.

    ``call`` is what the layer would do (see ``keras_calls.layer_calls_go_to``).
    """
    with keras_calls.layer_calls_go_to(None):
        if program.replaces_whole_call:
            return run(layer, args, kwargs)
        with keras_calls.next_call_runs(layer, run):
            return call(*args, **kwargs)


def _within(segments: Sequence[Segment], start: int, stop: int) -> Iterator[Segment]:
    """Yield what lies of segments between two positions, as seen from the first of them."""
    for segment in segments:
        first, last = max(segment.start, start), min(segment.stop, stop)
        if first < last:
            children = tuple(_within(segment.children, start, stop))
            yield replace(segment, start=first - start, stop=last - start, children=children)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A network's call among others (see ``calls.Call``)."""

    call: Call
    of: OpenedCall

    @property
    def operation(self) -> Any:
        return self.call.operation

    @property
    def label(self) -> str:
        return f"{self.of.path}/{self.call.label}".rstrip("/")

    @property
    def kind(self) -> str:
        return self.call.kind

    @property
    def inputs(self) -> tuple[int, ...]:
        return self.of.placed(self.call.inputs)

    @property
    def outputs(self) -> tuple[int, ...]:
        return self.of.placed(self.call.outputs)

    @property
    def signature(self) -> str:
        return self.call.signature

    @property
    def pinned(self) -> str:
        sequence = self.of.program.sequence
        if self.call.pinned:
            return self.call.pinned
        if not set(sequence.outputs).isdisjoint(self.call.outputs):
            return "makes a result of a network, which code around it reads"
        return ""

    def readers(self, slot: int) -> list[Reader]:
        return self.call.readers(slot - self.of.shift)

    def run(self, slots: Sequence[Any], training: bool | None, names: Names) -> list[Any]:
        if self.of.training is not None:
            training = self.of.training
        return self.call.run(slots[self.of.shift :], training, names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The way into an opened call, or out of it: ``made`` makes tensors for some slots of those in others."""

    label: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    made: Callable[[Sequence[Any]], list[Any]]

    operation: Any = None
    kind: str = CODE
    signature: str = CODE
    pinned: str = "is Python code around a network, which runs once"

    def readers(self, slot: int) -> list[Reader]:
        """Return what reads a slot: something."""
        return [Reader("", "", None)] if slot in self.inputs else []

    def run(self, slots: Sequence[Any], training: bool | None, names: Names) -> list[Any]:
        """Pass the tensors on."""
        del training, names
        return self.made([slots[slot] for slot in self.inputs])
