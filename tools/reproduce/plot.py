"""Memory against depth as an SVG picture, both on logarithmic scales, drawn by hand. No TensorFlow here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 880, 420, 70, 46, 110, 44
LINE_HEIGHT = 15

Line = Sequence[tuple[float, float]]
"""Points (x, y), both above 0."""

_STYLE = """
 text { font: 13px system-ui, sans-serif; fill: #444 }
 .title { font-size: 15px; font-weight: 600 }
 .grid { stroke: #999; stroke-width: 1; fill: none; opacity: .25 }
 .line { stroke-width: 2; fill: none }
 .name { font-weight: 600 }
 .c0 { stroke: #c8553d } .c1 { stroke: #7a7a7a } .c2 { stroke: #2a6f97 } .c3 { stroke: #2b8a5b }
 text.c0 { fill: #c8553d } text.c1 { fill: #7a7a7a } text.c2 { fill: #2a6f97 } text.c3 { fill: #2b8a5b }
 text.name { stroke: none }
 @media (prefers-color-scheme: dark) { text { fill: #ccc } }
"""


def ticks(least: float, most: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten, from the last not above ``least`` to the first not below ``most``."""
    first = math.floor(math.log10(least))
    found = [step * 10.0**power for power in range(first, math.ceil(math.log10(most)) + 1) for step in (1, 2, 5)]
    begin = max(place for place, tick in enumerate(found) if tick <= least)
    end = min(place for place, tick in enumerate(found) if tick >= most)
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

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">',
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="20">{title}</text>',
    ]
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
    return "\n".join([*parts, "</svg>\n"])
