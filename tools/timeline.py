"""Draw the memory of a training step over its time, plain and planned, as README shows it.

Usage: python -m tools.timeline [--output=docs/timeline.svg]

The step is MobileNetV2's of the table below the picture: batch 32, 128x128 images, Adam. Bytes are those of live
tensors, as the simulator counts them, and times are the cost model's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
from absl import app, flags

import tf_memsaver
from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import stored
from tf_memsaver.judge.simulate import Simulator
from tf_memsaver.units import format_bytes
from tools.shared.svg import BLUE, RED, coloured, picture

_OUTPUT = flags.DEFINE_string("output", "docs/timeline.svg", "the picture to write")

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 880, 320, 70, 46, 24, 40
MIB = 1 << 20

_STYLE = (
    coloured(".plain", ["stroke", "fill"], RED)
    + coloured(".planned", ["stroke", "fill"], BLUE)
    + " path.plain, path.planned { stroke-width: 2; fill-opacity: .12 }\n"
    " text.plain, text.planned { stroke: none; font-weight: 600 }\n"
)

Points = list[tuple[float, int]]
"""Seconds since the step began, and bytes that are live from then on."""


def timeline(graph: Graph, segments: Any) -> Points:
    """Return the live bytes of a step over its time."""
    points, now = [], 0.0
    for instant in Simulator(graph).run(segments).instants:
        points.append((now, instant.live_bytes))
        now += graph.ops[instant.op].seconds
    return [*points, (now, points[-1][1])]


def drawn(plain: Points, planned: Points, title: str) -> str:
    """Return both as an SVG picture."""
    longest, most = max(plain[-1][0], planned[-1][0]), max(nbytes for _, nbytes in plain)
    unit = next(step for step in (50, 100, 200, 500, 1000) if most / (step * MIB) <= 6) * MIB
    top = -(-most // unit) * unit
    across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(seconds: float) -> float:
        return LEFT + across * seconds / longest

    def y(nbytes: float) -> float:
        return TOP + up * (1 - nbytes / top)

    def area(points: Points, name: str) -> str:
        columns: dict[int, int] = {}
        for seconds, nbytes in points:
            columns[round(x(seconds))] = max(nbytes, columns.get(round(x(seconds)), 0))
        steps = [f"H{column}V{y(nbytes):.0f}" for column, nbytes in columns.items()]
        return f'<path class="{name}" d="M{x(0):.0f},{y(0):.0f}{"".join(steps)}V{y(0):.0f}Z"/>'

    def label(points: Points, name: str, text: str) -> str:
        seconds, nbytes = max(points, key=lambda point: point[1])
        return f'<text class="{name}" x="{x(seconds) + 8:.0f}" y="{y(nbytes) - 6:.0f}">{text}</text>'

    peaks = [format_bytes(max(nbytes for _, nbytes in points)) for points in (plain, planned)]
    grid = [
        f'<path class="grid" d="M{LEFT},{y(level):.1f}H{WIDTH - RIGHT}"/>'
        f'<text x="{LEFT - 8}" y="{y(level) + 4:.1f}" text-anchor="end">{level // MIB} MiB</text>'
        for level in range(0, top + 1, unit)
    ]
    parts = [
        f'<text class="title" x="{LEFT}" y="20">{title}</text>',
        *grid,
        area(plain, "plain"),
        area(planned, "planned"),
        label(plain, "plain", f"plain: {peaks[0]}"),
        label(planned, "planned", f"with tf_memsaver: {peaks[1]}"),
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 12}" text-anchor="end">time in the step →</text>',
    ]
    return picture(WIDTH, HEIGHT, title, _STYLE, parts)


def main(_: list[str]) -> None:
    """Trace, plan and draw."""
    model = keras.applications.MobileNetV2(weights=None, input_shape=(128, 128, 3), classes=10)
    model.compile("adam", "sparse_categorical_crossentropy")
    traced = tf_memsaver.trace(model, batch_size=32)
    everything = stored(len(traced.graph.units))
    title = "Predicted memory in one training step of MobileNetV2 (batch 32, 128×128 images)"
    plain, planned = (timeline(traced.graph, cover) for cover in (everything, traced.plan().segments))
    Path(_OUTPUT.value).write_text(drawn(plain, planned, title), encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
