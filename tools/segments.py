"""Draw what becomes of the activations of nine layers in three segments, as the page on how it works shows it.

Usage: python -m tools.segments [docs/segments.svg]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import app

from tools.shared.svg import BLUE, GREY, RED, coloured, picture

_OUTPUT = "docs/segments.svg"

WIDTH, HEIGHT, LEFT = 760, 300, 120
SIDE, STEP, HIGH = 50, 70, 40
FORWARD, REPLAY, BACKWARD, LEGEND = 40, 140, 220, 274
"""Where the rows begin, from above."""

SEGMENTS = (("recompute", range(1, 4)), ("store", range(4, 7)), ("recompute", range(7, 10)))

LABEL = (
    "Three segments of a model: the forward pass keeps the activations of the stored segment and what enters the "
    "others; the backward pass runs a recomputed segment again, then its gradients"
)

_STYLE = (
    " .middle { text-anchor: middle } .side { font-weight: 600 } .small { font-size: 12px }\n"
    " .kept, .again, .back { fill-opacity: .25 } .free { fill: none; stroke-dasharray: 4 3 } .arrow { fill: none }\n"
    + coloured(".kept", ["fill", "stroke"], RED)
    + coloured(".again", ["fill", "stroke"], BLUE)
    + coloured(".back", ["fill", "stroke"], GREY)
    + coloured(".free, .arrow", ["stroke"], GREY)
    + coloured(".head", ["fill"], GREY)
    + " .arrow { marker-end: url(#a) }\n"
)
_HEAD = (
    '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>'
)


def left_of(layer: int) -> int:
    """Return where the box of a layer begins, from the left; layers count from 1."""
    return LEFT + STEP * (layer - 1)


def middle_of(layer: int) -> int:
    """Return the middle of a layer's box."""
    return left_of(layer) + SIDE // 2


def row(layers: Sequence[int], top: int, kind: str, sign: str = "", back: bool = False) -> Iterator[str]:
    """Yield the boxes of some layers, with arrows from each to the next or, in the backward pass, to the one before."""
    for layer in layers:
        left = left_of(layer)
        yield f'<rect class="{kind}" x="{left}" y="{top}" width="{SIDE}" height="{HIGH}" rx="4"/>'
        yield f'<text class="middle" x="{middle_of(layer)}" y="{top + 24}">{sign}{layer}</text>'
        if layer != layers[0]:
            ends = (left, left - STEP + SIDE + 1) if back else (left - STEP + SIDE, left - 1)
            yield f'<path class="arrow" d="M{ends[0]} {top + HIGH // 2}H{ends[1]}"/>'


def down(layer: int, top: int) -> str:
    """Return the arrow from a layer's activations to its gradients."""
    return f'<path class="arrow" d="M{middle_of(layer)} {top + HIGH + 2}V{BACKWARD - 2}"/>'


def drawn() -> str:
    """Return the picture."""
    parts = [_HEAD]
    for name, top in (("forward", FORWARD), ("replay", REPLAY), ("backward", BACKWARD)):
        parts.append(f'<text class="side" x="8" y="{top + 24}">{name}</text>')
    for number, (mode, layers) in enumerate(SEGMENTS, start=1):
        parts.append(f'<text class="middle" x="{middle_of(layers[1])}" y="24">segment {number}: {mode}</text>')
        if layers[0] > 1:
            # Between segments there is room for what enters the next.
            parts.append(f'<path class="arrow" d="M{left_of(layers[0]) - STEP + SIDE} 60H{left_of(layers[0]) - 1}"/>')
        parts += row(layers, FORWARD, "kept" if mode == "store" else "free")
        if mode == "store":
            parts.append(down(layers[1], FORWARD))
            continue
        enters = left_of(layers[0]) - (STEP - SIDE) // 2 - (4 if number == 1 else 0)
        parts.append(f'<circle class="kept" cx="{enters}" cy="60" r="6"/>')
        parts += row(layers, REPLAY, "again")
        parts.append(f'<path class="arrow" d="M{enters} 68V120Q{enters} 150 {left_of(layers[0]) - 1} 158"/>')
        parts.append(down(layers[1], REPLAY))
    parts += row(range(1, 10), BACKWARD, "back", sign="∂", back=True)
    for left, kind, text in (
        (120, "kept", "kept from the forward pass"),
        (320, "free", "freed at once"),
        (450, "again", "computed again, just before it is needed"),
    ):
        parts.append(f'<rect class="{kind}" x="{left}" y="{LEGEND}" width="14" height="14" rx="2"/>')
        parts.append(f'<text class="small" x="{left + 20}" y="{LEGEND + 12}">{text}</text>')
    return picture(WIDTH, HEIGHT, LABEL, _STYLE, parts)


def main(arguments: list[str]) -> None:
    """Draw."""
    Path([*arguments[1:], _OUTPUT][0]).write_text(drawn(), encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
