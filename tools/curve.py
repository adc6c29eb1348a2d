"""Draw what memory costs in time for a model, as the pages on budgets show it.

Usage: python -m tools.curve [docs/curve.svg]

The model is that of docs/notebooks/plan.ipynb: MobileNetV2, batch 32, 96×96 images, Adam. All is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import keras
from absl import app

import tf_memsaver
from tools.shared.svg import BLUE, coloured, picture

_OUTPUT = "docs/curve.svg"

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 280, 64, 48, 40, 44
MIB = 1 << 20

_STYLE = (
    coloured(".line", ["stroke"], BLUE) + coloured(".dot", ["fill"], BLUE) + " .line { stroke-width: 2; fill: none }\n"
)

Point = tuple[float, float]
"""Extra time as a share of the plain step, and the peak in MiB."""


def drawn(title: str, points: Sequence[Point]) -> str:
    """Return a curve as an SVG picture; its first and last point are written out, and the one where it bends most."""
    longest, most = points[-1][0], points[0][1]
    rise = next(step for step in (20, 50, 100, 200, 500, 1000) if most / step <= 5)
    across = next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if longest / step <= 5)
    top = rise * math.ceil(most / rise)

    def x(share: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * share / longest

    def y(peak: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - peak / top)

    parts = [f'<text class="title" x="{LEFT}" y="22">{title}</text>']
    for level in range(0, top + 1, rise):
        parts.append(f'<path class="grid" d="M{LEFT},{y(level):.1f}H{WIDTH - RIGHT}"/>')
        unit = " MiB" if level == top else ""
        parts.append(f'<text x="{LEFT - 8}" y="{y(level) + 4:.1f}" text-anchor="end">{level}{unit}</text>')
    shares = [number * across for number in range(int(longest / across) + 1)]
    parts += [f'<text x="{x(a):.1f}" y="{HEIGHT - 24}" text-anchor="middle">+{a:.0%}</text>' for a in shares]
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">extra step time →</text>')
    parts.append(f'<path class="line" d="M{"L".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)}"/>')
    parts += [f'<circle class="dot" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3.5"/>' for a, b in points]
    for share, peak in said(points):
        place = f'x="{x(share):.1f}" text-anchor="end"' if share == longest else f'x="{x(share) + 6:.1f}"'
        parts.append(f'<text {place} y="{y(peak) - 9:.1f}">{peak:.0f} MiB</text>')
    label = f"{title}: " + ", ".join(f"{peak:.0f} MiB at +{share:.1%}" for share, peak in said(points))
    return picture(WIDTH, HEIGHT, label, _STYLE, parts)


def said(points: Sequence[Point]) -> list[Point]:
    """Return the points that are written out: both ends, and the one farthest below the line between them."""
    (_, first), (longest, last) = points[0], points[-1]
    bend = min(points, key=lambda point: point[1] - first - (last - first) * point[0] / longest)
    return list(dict.fromkeys([points[0], bend, points[-1]]))


def main(arguments: list[str]) -> None:
    """Trace, plan and draw."""
    model = keras.applications.MobileNetV2(weights=None, input_shape=(96, 96, 3), classes=10)
    model.compile("adam", "sparse_categorical_crossentropy")
    plans = tf_memsaver.memory_time_curve(model, batch_size=32, points=8)
    points = [(plan.step_overhead, plan.peak_bytes / MIB) for plan in plans]
    Path([*arguments[1:], _OUTPUT][0]).write_text(
        drawn("MobileNetV2, 96×96, batch 32: predicted peak and extra time", points), encoding="utf-8"
    )


if __name__ == "__main__":
    app.run(main)
