"""Segments, the parts of a plan, and the check that they cover the units of a graph."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tf_memsaver.errors import PlanFormatError


class SegmentMode(enum.Enum):
    """What happens to a segment's inner activations after the forward pass: they are stored, or recomputed."""

    STORE = "store"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The units ``start`` to ``stop - 1`` (from 0), which are stored or recomputed together.

    A recompute segment may have child segments that cover it: its recomputation then runs in these segments.
    """

    start: int
    stop: int
    mode: SegmentMode
    children: tuple[Segment, ...] = ()

    def walk(self) -> Iterator[Segment]:
        """Yield the segment and all segments below it."""
        yield self
        for child in self.children:
            yield from child.walk()


def stored(units: int) -> tuple[Segment, ...]:
    """Return the segments of the plain step, of so many units."""
    return (Segment(start=0, stop=units, mode=SegmentMode.STORE),)


def check_cover(segments: Sequence[Segment], start: int, stop: int) -> None:
    """Check that segments are contiguous, not empty, and cover ``(start, stop]``; and so for their children.

    Raises:
      PlanFormatError: it names the first position that is wrong.
    """
    position = start
    for segment in segments:
        span = f"segment ({segment.start}, {segment.stop}]"
        if segment.start != position or segment.stop <= segment.start:
            raise PlanFormatError(f"{span} does not follow position {position}")
        if segment.children:
            if segment.mode is not SegmentMode.RECOMPUTE:
                raise PlanFormatError(f"{span} stores, so it cannot have children")
            check_cover(segment.children, segment.start, segment.stop)
        position = segment.stop
    if position != stop:
        raise PlanFormatError(f"segments end at position {position}, and must cover the units up to {stop}")


def tidied(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Return the segments with neighbouring store segments as one, which is the same plan."""
    tidy: list[Segment] = []
    for segment in segments:
        if tidy and tidy[-1].mode is segment.mode is SegmentMode.STORE:
            tidy[-1] = Segment(start=tidy[-1].start, stop=segment.stop, mode=SegmentMode.STORE)
        else:
            tidy.append(segment)
    return tuple(tidy)
