"""The headlines: the pure parts, without TensorFlow."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tools.reproduce import report
from tools.reproduce.growth import exponent
from tools.reproduce.plot import drawn, spread, ticks
from tools.reproduce.shapes import SHAPES
from tools.shared.results import RESULTS

NOTHING: dict[str, Any] = {part: {} for part in ("resnets", "steps", "depth", "growth", "batches", "anchors")}


def a_network(name: str, nbytes: int) -> dict[str, Any]:
    plan = {"bytes": nbytes, "overhead": 0.25, "seconds": 1.0}
    return {
        "name": name,
        "operations": 1000,
        "forward_share": 0.33,
        "capture_seconds": 2.0,
        "plans": {**dict.fromkeys(("sqrt", "ours", "nested"), plan), "plain": {**plan, "overhead": 0.0}},
    }


@pytest.mark.parametrize("name", SHAPES)
def test_networks_have_the_layers_that_they_are_named_after(name: str) -> None:
    assert report.layers(name) == 3 * sum(SHAPES[name]) + 2


def test_the_exponent_of_a_power_law() -> None:
    sizes = [10.0, 100.0, 1000.0]
    assert exponent(sizes, [3 * size**1.5 for size in sizes]) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [(3.0, 40.0, [2, 5, 10, 20, 50]), (1.0, 10.0, [1, 2, 5, 10]), (0.7, 0.9, [0.5, 1])],
)
def test_ticks_hold_the_values_between_them(least: float, most: float, expected: list[float]) -> None:
    assert ticks(least, most) == pytest.approx(expected)


def test_names_do_not_cover_each_other() -> None:
    assert spread([100.0, 20.0, 98.0, 95.0], 15) == [100.0, 20.0, 85.0, 70.0]


def test_a_picture_has_every_line_and_stays_within_itself() -> None:
    text = drawn("title", {"plain": [(50, 2.0), (1000, 40.0)], "ours": [(50, 0.7), (1000, 3.5)]}, "layers", "GB")
    assert text.startswith("<svg") and text.endswith("</svg>\n")
    assert re.findall(r'class="name c\d"[^>]*>(\w+)<', text) == ["plain", "ours"]
    centres = [(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', text)]
    assert len(centres) == 4 and all(0 < x < 880 and 0 < y < 420 for x, y in centres)
    # Memory grows downwards in an SVG's coordinates: the plain step's last point is the highest.
    assert min(centres, key=lambda point: point[1]) == centres[1]


def test_headlines_are_those_of_the_rows_that_there_are() -> None:
    assert report.headlines(NOTHING) == []
    found = report.headlines({**NOTHING, "resnets": {report.DEEPEST: a_network(report.DEEPEST, 3 * 10**9)}})
    assert [line.what for line in found][:2] == ["1000 layers, plain", "1000 layers, √n (Chen et al.)"]
    ours = next(line for line in found if line.what == "1000 layers, ours")
    assert (ours.predicted, ours.target, ours.measured) == ("3 GB at +25%", "≤ 4 GB at ≤ +30%", "–")


def test_growth_is_told_of_kinds_with_several_sizes() -> None:
    sizes = {f"chain {n}": {"kind": "chain", "operations": n, "seconds": {"half": n, "default": n}} for n in (10, 1000)}
    one = {"tree 10": {"kind": "tree", "operations": 10, "seconds": {"half": 1, "default": 1}}}
    (line,) = report.headlines({**NOTHING, "growth": {**sizes, **one}})
    assert line.what == "planning, chain, 10 to 1000 operations"
    assert line.measured == "n^1.00 (half), n^1.00 (default)"


def test_tables_have_one_width() -> None:
    rows = {**NOTHING, "resnets": {name: a_network(name, 10**9) for name in SHAPES}}
    table = report.headline_table(rows)
    assert len({line.count("|") for line in table}) == 1
    assert all(name in report.markdown({"rows": rows, "machine": {}}) for name in SHAPES)


def test_the_report_is_that_of_the_rows() -> None:
    path = RESULTS / "reproduce_paper.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    assert path.with_suffix(".md").read_text(encoding="utf-8") == report.markdown(document)
