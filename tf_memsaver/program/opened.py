"""Networks whose calls are opened: what a network calls is units of something larger, which runs its own code.

A ``train_step`` and a model's own ``call`` bring networks together. Each call of one is run by the part of the plan
that is for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tf_memsaver.ir.segments import Segment
from tf_memsaver.parity.names import Names
from tf_memsaver.plan.plan import Plan
from tf_memsaver.program.calls import Call, Reader
from tf_memsaver.program.program import ModelProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedCall:
    """A call of a network: its calls are units ``start`` to ``stop``, its slots those from ``shift`` on."""

    path: str
    network: Any
    program: ModelProgram
    start: int
    shift: int

    @property
    def stop(self) -> int:
        """The unit behind its last."""
        return self.start + len(self.program.sequence.calls)

    @property
    def calls(self) -> list[Call]:
        """Its calls, in the slots of what is around it."""
        return [_Placed(call, f"{self.path}/", self.shift) for call in self.program.sequence.calls]

    def part_of(self, plan: Plan) -> Plan:
        """Return the plan of the network by itself that a plan of what is around it holds."""
        return replace(
            plan,
            segments=tuple(_within(plan.segments, self.start, self.stop)),
            labels=self.program.sequence.labels,
            signatures=self.program.sequence.signatures,
        )


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
    prefix: str
    shift: int

    @property
    def operation(self) -> Any:
        return self.call.operation

    @property
    def label(self) -> str:
        return self.prefix + self.call.label

    @property
    def kind(self) -> str:
        return self.call.kind

    @property
    def inputs(self) -> tuple[int, ...]:
        return tuple(slot + self.shift for slot in self.call.inputs)

    @property
    def outputs(self) -> tuple[int, ...]:
        return tuple(slot + self.shift for slot in self.call.outputs)

    @property
    def signature(self) -> str:
        return self.call.signature

    @property
    def pinned(self) -> str:
        return self.call.pinned

    def readers(self, slot: int) -> list[Reader]:
        return self.call.readers(slot - self.shift)

    def run(self, slots: Sequence[Any], training: bool | None, names: Names) -> list[Any]:
        return self.call.run(slots[self.shift :], training, names)
