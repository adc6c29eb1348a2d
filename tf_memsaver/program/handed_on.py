"""Calls whose results are read by code that is not among them, as where a network is part of a model's own ``call``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tf_memsaver.ir.graph import CODE
from tf_memsaver.parity.names import Names
from tf_memsaver.program.calls import CallSequence, Reader


def handed_on(sequence: CallSequence) -> CallSequence:
    """Return calls with one after them that stands for the code that reads what they return.

    What that is, is not known; it is no loss that looks through a result to what it was made of. So the call that makes
    a result may be replayed, too.
    """
    made = sequence.outputs
    passed = tuple(range(sequence.slot_count, sequence.slot_count + len(made)))
    return replace(
        sequence,
        calls=(*sequence.calls, _CodeAfter(made, passed)),
        outputs=passed,
        slot_count=sequence.slot_count + len(passed),
    )


class _CodeAfter:
    """A call that stands for the code after others, and changes nothing."""

    operation: Any = None
    kind = signature = CODE
    label = "python"
    pinned = "stands for the code that reads the results, which runs once"

    def __init__(self, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        self.inputs, self.outputs = inputs, outputs

    def readers(self, slot: int) -> list[Reader]:
        return [Reader("", "", None)] if slot in self.inputs else []

    def run(self, slots: Sequence[Any], training: bool | None, names: Names) -> list[Any]:
        del training, names
        return [slots[slot] for slot in self.inputs]
