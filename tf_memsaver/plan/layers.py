"""What a plan does with each layer, as rows of a table; and whether its units are layers, in words."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tf_memsaver.ir.segments import SegmentMode
from tf_memsaver.options.table import Granularity

Decision = Literal["recomputed", "kept", "pinned"]
"""What a plan does with a layer. ``pinned`` layers are kept because they must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayer:
    """What a plan does with one layer call, and why: a row of ``Plan.layers``.

    ``activation_bytes`` are the bytes that the layer makes and that the plain step keeps for the backward pass (None in
    older plan files). Under the plan, a recomputed layer keeps only what later segments read. ``segment`` is the number
    of the segment that contains the layer, from 0. ``reason`` says why the layer must be kept or recomputed, or names
    the planner that chose.
    """

    layer: str
    decision: Decision
    activation_bytes: int | None
    segment: int
    reason: str


def decision_of(mode: SegmentMode, reason: str) -> Decision:
    """Return what becomes of a layer in a segment of a mode; ``reason`` says why it must be so, if it must."""
    if mode is SegmentMode.RECOMPUTE:
        return "recomputed"
    return "pinned" if reason else "kept"


def is_by_layers(granularity: Granularity, opened: Sequence[str]) -> bool:
    """Return whether all units are whole layers; ``opened`` are the layers that were planned by operations."""
    return granularity == "layer" or (granularity == "auto" and not opened)


def units_in_words(count: int, granularity: Granularity, opened: Sequence[str]) -> str:
    """Return a number of units with the noun for them: layers, groups of operations, or some of both."""
    if is_by_layers(granularity, opened):
        return f"{count} {'layer' if count == 1 else 'layers'}"
    if opened:
        return f"{count} {'layer or group' if count == 1 else 'layers and groups'} of operations"
    return f"{count} {'group' if count == 1 else 'groups'} of operations"


def recomputed_runs(layers: Sequence[PlannedLayer], in_words: Callable[[int], str]) -> list[str]:
    """Return a line for each segment that is recomputed: its first and last unit, and how many there are, in words."""
    runs = (list(run) for _, run in itertools.groupby(layers, key=lambda layer: layer.segment))
    return [
        f"{run[0].layer} … {run[-1].layer} ({in_words(len(run))})" if len(run) > 1 else run[0].layer
        for run in runs
        if run[0].decision == "recomputed"
    ]
