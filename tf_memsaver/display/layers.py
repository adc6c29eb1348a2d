"""The layers of a plan as rows, in blocks that can be folded: what is kept, what is recomputed, what must be kept."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tf_memsaver.display.folding import block_names
from tf_memsaver.ir.graph import Graph
from tf_memsaver.plan.plan import Plan

MOST_LOOSE_ROWS = 12
"""Neighbouring layers without a block that are listed one by one; more are folded by segments."""


class Fate(enum.Enum):
    """What a plan does with a layer's activations (``plan.layers.Decision``)."""

    KEPT = "kept"
    RECOMPUTED = "recomputed"
    PINNED = "pinned"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """One layer call (or group of operations) under a plan.

    ``segment`` is the number of its segment, from 0. ``why`` says why a pinned layer cannot be recomputed. Bytes are
    those that its forward pass leaves for the backward pass, without and with the plan.
    """

    label: str
    kind: str
    fate: Fate
    why: str
    segment: int
    plain_bytes: int
    planned_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Neighbouring layers that belong together by their names, or by their segment."""

    name: str
    parts: tuple[LayerRow | Block, ...]

    def rows(self) -> Iterator[LayerRow]:
        """Yield all layers of the block, in order."""
        for part in self.parts:
            if isinstance(part, Block):
                yield from part.rows()
            else:
                yield part


def layer_rows(
    graph: Graph, plan: Plan, plain_bytes: Sequence[int], planned_bytes: Sequence[int]
) -> tuple[LayerRow, ...]:
    """Return a row for each unit of the graph, in order; bytes as ``LayerRow`` has them are given for each unit."""
    return tuple(
        LayerRow(
            label=unit.label,
            kind=unit.kind,
            fate=Fate(layer.decision),
            why=layer.reason if layer.decision == "pinned" else "",
            segment=layer.segment,
            plain_bytes=plain_bytes[unit.index],
            planned_bytes=planned_bytes[unit.index],
        )
        for unit, layer in zip(graph.units, plan.layers, strict=True)
    )


def blocks(rows: Sequence[LayerRow]) -> tuple[LayerRow | Block, ...]:
    """Return rows in blocks by the parts of their names, such as ``encoder/block_3/attention`` or ``conv2_block1_bn``.

    Where many layers in a row have no block, they are folded by segments.
    """
    found = _blocks(rows, ())
    loose = itertools.groupby(found, key=lambda part: isinstance(part, LayerRow))
    return tuple(part for is_loose, run in loose for part in (_by_segment(list(run)) if is_loose else run))


def _blocks(rows: Sequence[LayerRow], around: tuple[str, ...]) -> tuple[LayerRow | Block, ...]:
    depth, made = len(around), list[LayerRow | Block]()

    def block_at_depth(row: LayerRow) -> str:
        parts = block_names(row.label)
        return parts[depth] if len(parts) > depth else ""

    for name, run in itertools.groupby(rows, key=block_at_depth):
        inside = list(run)
        if not name or len(inside) == 1:
            made.extend(inside)
        else:
            parts = _blocks(inside, (*around, name))
            # A block that holds but one block is that block.
            only = parts[0] if len(parts) == 1 else None
            made.append(only if isinstance(only, Block) else Block(name=name, parts=parts))
    return tuple(made)


def _by_segment(loose: Sequence[LayerRow | Block]) -> Iterator[LayerRow | Block]:
    """Yield layers one by one, or in blocks of one segment each where they are many."""
    if len(loose) <= MOST_LOOSE_ROWS:
        yield from loose
        return
    rows = [part for part in loose if isinstance(part, LayerRow)]
    for _, run in itertools.groupby(rows, key=lambda row: row.segment):
        inside = list(run)
        if len(inside) == 1:
            yield inside[0]
        else:
            yield Block(name=f"{inside[0].label} … {inside[-1].label}", parts=tuple(inside))
