"""The table of planners. A planner takes a problem and proposes segments; ``solve`` alone certifies them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tf_memsaver.errors import InvalidRequestError
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.types import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a planner that chooses among others answers: the segments, and whose they are."""

    planner: str
    segments: tuple[Segment, ...]


Planner = Callable[[Problem], Sequence[Segment] | Choice]
"""Takes a problem and proposes segments that cover its units, in order."""

_PLANNERS: dict[str, Planner] = {}


Kind = TypeVar("Kind", bound=Planner)


def register_planner(name: str) -> Callable[[Kind], Kind]:
    """Return a decorator that enters a planner in the table under ``name``; a later one of that name replaces it."""

    def enter(planner: Kind) -> Kind:
        _PLANNERS[name] = planner
        return planner

    return enter


def planner_names() -> tuple[str, ...]:
    """Return the names of all planners, in alphabetical order."""
    return tuple(sorted(_PLANNERS))


def planner_named(name: str) -> Planner:
    """Return a planner.

    Raises:
      InvalidRequestError: there is none of that name; the sentence lists all names.
    """
    if name not in _PLANNERS:
        raise InvalidRequestError(f"there is no strategy '{name}'. Choose one of: {', '.join(planner_names())}.")
    return _PLANNERS[name]
