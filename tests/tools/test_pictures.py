"""The pictures of the docs: each has a command that draws it, and all that it shows lies within its frame."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools import curve, segments

DOCS = Path(__file__).resolve().parents[2] / "docs"
PICTURES = sorted(DOCS.glob("*.svg"))


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_whole_and_within_its_frame(picture: Path) -> None:
    root = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert root.attrib["aria-label"]
    for element in root.iter():
        for name, most in (("x", width), ("cx", width), ("y", height), ("cy", height)):
            assert 0 <= float(element.attrib.get(name, 0)) <= most


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_a_picture_has_its_command(picture: Path) -> None:
    tools = [*(DOCS.parent / "tools").glob("*.py"), *(DOCS.parent / "tools").glob("reproduce/*.py")]
    assert any(f'"{picture.name}"' in text or f"docs/{picture.name}" in text for text in map(Path.read_text, tools))


def test_the_segments_are_as_they_are_drawn() -> None:
    assert segments.drawn() == (DOCS / "segments.svg").read_text(encoding="utf-8")


def test_a_curve_says_its_ends_and_its_bend() -> None:
    points = [(0.0, 400.0), (0.05, 300.0), (0.1, 200.0), (0.2, 190.0)]
    assert curve.said(points) == [points[0], points[2], points[3]]
    text = curve.drawn("a title", points)
    assert re.findall(r">(\d+) MiB<", text) == ["400", "400", "200", "190"]
    assert len(re.findall("<circle", text)) == len(points)
