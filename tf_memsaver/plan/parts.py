"""The parts of a plan's JSON: segments and units, written and read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.options import Check, choice, whole
from tf_memsaver.plan.fields import Fields, malformed

MOST_LEVELS = 32
"""Segments within segments that are read from a file. ``nested`` makes 7 for a chain of 128 equal units."""


def units_to_json(
    labels: Sequence[str], signatures: Sequence[str], activation_bytes: Sequence[int], reasons: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the units as plain JSON data; the last two may be empty, and are left out then."""
    units: list[dict[str, Any]] = [{"label": a, "signature": b} for a, b in zip(labels, signatures, strict=True)]
    for name, told in (("activation_bytes", activation_bytes), ("reason", reasons)):
        for unit, each in zip(units, told, strict=False):
            unit[name] = each
    return units


def of_units(units: Sequence[Fields], name: str, check: Check) -> tuple[Any, ...]:
    """Return a field of all units; none at all where an older plan does not have it."""
    return tuple(unit.get(name, check) for unit in units) if all(name in unit for unit in units) else ()


def segment_to_json(segment: Segment) -> dict[str, Any]:
    """Return a segment, and those below it, as plain JSON data."""
    data: dict[str, Any] = {"start": segment.start, "stop": segment.stop, "mode": segment.mode.value}
    if segment.children:
        data["children"] = [segment_to_json(child) for child in segment.children]
    return data


def segments_from_json(fields: Fields, name: str, level: int = 1) -> tuple[Segment, ...]:
    """Return the segments of a field, and those below them.

    Raises:
      PlanFormatError: one is malformed, or lies too deep.
    """
    if level > MOST_LEVELS:
        raise malformed(fields.place, f"lies below {MOST_LEVELS} levels of segments, more than any planner nests")
    return tuple(
        Segment(
            start=each.get("start", whole(0)),
            stop=each.get("stop", whole(1)),
            mode=SegmentMode(each.get("mode", choice(*(mode.value for mode in SegmentMode)))),
            children=segments_from_json(each, "children", level + 1) if "children" in each else (),
        )
        for each in fields.objects(name)
    )
