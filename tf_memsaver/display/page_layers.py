"""The layers of a report's page: the strip of segments, and the tree of blocks that can be folded."""

from __future__ import annotations

import html
from collections.abc import Sequence

from tf_memsaver.display.layers import Block, Fate, LayerRow, blocks
from tf_memsaver.display.report import Report
from tf_memsaver.display.scales import PLAIN, PLANNED
from tf_memsaver.ir.segments import SegmentMode
from tf_memsaver.units import format_bytes

_OPEN_ROWS = 24
"""Of so few layers, all blocks are open at first."""


def segment_strip(report: Report) -> str:
    """Return all layers from first to last as one strip, coloured by what becomes of them, and its key."""
    spans = list[str]()
    for number, segment in enumerate(report.plan.segments):
        rows = report.layers[segment.start : segment.stop]
        if segment.mode is SegmentMode.RECOMPUTE:
            words = f"segment {number + 1}, recomputed: {rows[0].label} … {rows[-1].label}"
            spans.append(_span(_colour(rows[0]), len(rows), words))
        else:
            spans += [_span(_colour(row), 1, f"{row.fate.value}: {row.label}") for row in rows]
    keys = (
        ("is-recomputed", "recomputed (two colours alternate, one for each segment)"),
        ("is-kept", "kept"),
        ("is-pinned", "pinned: cannot be recomputed"),
    )
    key = "".join(f'<li><i class="{colour}"></i>{text}</li>' for colour, text in keys)
    return f'<div class="strip">{"".join(spans)}</div><ul class="keys">{key}</ul>'


def layers_tree(report: Report) -> str:
    """Return the layers in their blocks, each with what becomes of it and the bytes that it keeps."""
    largest = max((row.plain_bytes for row in report.layers), default=0)
    is_open = len(report.layers) <= _OPEN_ROWS
    inside = "\n".join(_part(part, largest, is_open) for part in blocks(report.layers))
    buttons = "".join(
        f'<button type="button" data-open="{value}">{text}</button>'
        for value, text in (("yes", "Unfold all"), ("no", "Fold all"))
    )
    return (
        f'<div class="buttons">{buttons}</div>'
        f'<p class="soft">Bytes kept for the backward pass: {PLAIN} → {PLANNED}.</p>'
        f'<div class="tree">\n{inside}\n</div>'
    )


def _span(colour: str, width: int, words: str) -> str:
    return f'<span class="{colour}" style="flex:{width} 1 0" title="{html.escape(words)}"></span>'


def _part(part: LayerRow | Block, largest: int, is_open: bool) -> str:
    return _block(part, largest, is_open) if isinstance(part, Block) else _row(part, largest)


def _block(block: Block, largest: int, is_open: bool) -> str:
    rows = tuple(block.rows())
    inside = "\n".join(_part(part, largest, is_open) for part in block.parts)
    fates = "".join(f'<i class="{_colour(row)}"></i>' for row in _turns(rows))
    counts = ", ".join(f"{count} {fate.value}" for fate in Fate if (count := sum(row.fate is fate for row in rows)))
    return (
        f"<details{' open' if is_open else ''}><summary>"
        f'<span class="name">{html.escape(block.name)}</span>'
        f'<span class="chip">{fates}{counts}</span>'
        f'<span class="amount">{_amounts(rows)}</span></summary>'
        f'<div class="inside">\n{inside}\n</div></details>'
    )


def _row(row: LayerRow, largest: int) -> str:
    words = f"{row.fate.value}, segment {row.segment + 1}" if row.fate is Fate.RECOMPUTED else row.fate.value
    why = f'<br><span class="soft">it {html.escape(row.why)}</span>' if row.why else ""
    bars = "".join(
        f'<span class="bar {name}" style="width:{100 * nbytes / largest:.1f}%"></span>'
        for name, nbytes in (("plain", row.plain_bytes), ("planned", row.planned_bytes))
        if nbytes
    )
    return (
        f'<div class="row"><span class="name">{html.escape(row.label)} '
        f'<span class="soft">{html.escape(row.kind)}</span>{why}</span>'
        f'<span class="chip"><i class="{_colour(row)}"></i>{words}</span>'
        f'<span class="amount">{_amounts((row,))}{bars}</span></div>'
    )


def _amounts(rows: Sequence[LayerRow]) -> str:
    plain, planned = sum(row.plain_bytes for row in rows), sum(row.planned_bytes for row in rows)
    if not plain and not planned:
        return "–"
    return format_bytes(plain) if plain == planned else f"{format_bytes(plain)} → {format_bytes(planned)}"


def _turns(rows: Sequence[LayerRow]) -> list[LayerRow]:
    """Return one row for each fate, and for each segment that is recomputed, in order; five at most."""
    found = {(row.fate, row.segment if row.fate is Fate.RECOMPUTED else -1): row for row in rows}
    return list(found.values())[:5]


def _colour(row: LayerRow) -> str:
    """Return the class of a layer's colour; neighbouring recomputed segments differ."""
    return f"is-{row.fate.value}{' odd' if row.fate is Fate.RECOMPUTED and row.segment % 2 else ''}"
