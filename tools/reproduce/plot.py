"""Memory against depth as an SVG picture, both on logarithmic scales, drawn by hand. No TensorFlow here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from tools.shared.svg import BLUE, GREEN, GREY, RED, coloured, picture

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 880, 420, 70, 46, 110, 44
LINE_HEIGHT = 15

Line = Sequence[tuple[float, float]]
"""Points (x, y), both above 0."""

_STYLE = " .line { stroke-width: 2; fill: none } .name { font-weight: 600 }\n" + "".join(
    coloured(f"path.c{number}", ["stroke"], colour) + coloured(f"circle.c{number}, text.c{number}", ["fill"], colour)
    for number, colour in enumerate((RED, GREY, BLUE, GREEN))
)
_SLACK = 0.01
"""How far a point may lie beyond the last tick, as a share of it: 1001 layers need no tick at 2000."""


def ticks(least: float, most: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten, from the last not above ``least`` to the first not below ``most``.

    A value that is all but at a tick is taken to be there.
    """
    first = math.floor(math.log10(least))
    found = [step * 10.0**power for power in range(first, math.ceil(math.log10(most)) + 1) for step in (1, 2, 5)]
    begin = max(place for place, tick in enumerate(found) if tick <= least)
    end = min(place for place, tick in enumerate(found) if tick * (1 + _SLACK) >= most)
    return found[begin : end + 1]


def spread(heights: Sequence[float], least: float) -> list[float]:
    """Return heights, the upper ones moved up (towards 0) until all are at least so far apart."""
    placed = list(heights)
    order = sorted(range(len(heights)), key=lambda number: -heights[number])
    for lower, upper in itertools.pairwise(order):
        placed[upper] = min(placed[upper], placed[lower] - least)
    return placed


def drawn(title: str, lines: Mapping[str, Line], across: str, unit: str) -> str:
    """Return lines by name as an SVG picture; the names stand where the lines end."""
    points = list(itertools.chain(*lines.values()))
    columns, rows = (ticks(min(each), max(each)) for each in zip(*points, strict=True))

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / columns[0]) / math.log(columns[-1] / columns[0])

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - math.log(value / rows[0]) / math.log(rows[-1] / rows[0]))

    parts = [f'<text class="title" x="{LEFT}" y="20">{title}</text>']
    for tick in rows:
        parts.append(f'<path class="grid" d="M{LEFT},{y(tick):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g} {unit}</text>')
    for tick in columns:
        parts.append(f'<path class="grid" d="M{x(tick):.1f},{TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{x(tick):.1f}" y="{HEIGHT - 24}" text-anchor="middle">{tick:g}</text>')
    heights = spread([y(line[-1][1]) for line in lines.values()], LINE_HEIGHT)
    for number, (name, line) in enumerate(lines.items()):
        path = "L".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line)
        parts.append(f'<path class="line c{number}" d="M{path}"/>')
        parts += [f'<circle class="c{number}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3"/>' for a, b in line]
        place = f'x="{x(line[-1][0]) + 10:.1f}" y="{heights[number] + 4:.1f}"'
        parts.append(f'<text class="name c{number}" {place}>{name}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{across} →</text>')
    return picture(WIDTH, HEIGHT, title, _STYLE, parts)
