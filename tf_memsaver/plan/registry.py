"""The table of planners. A planner takes a problem and proposes segments; only ``solve`` certifies them.

Your own planner gets its name by ``register_planner``. An installed package names planners by entry points of the group
``tf_memsaver.planners``, which are loaded when their names are requested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TypeVar

from tf_memsaver.errors import InvalidRequestError
from tf_memsaver.ir.segments import Segment
from tf_memsaver.options.checks import did_you_mean
from tf_memsaver.plan.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The result of a planner that chooses among others: the segments, and the planner that made them."""

    planner: str
    segments: tuple[Segment, ...]


Propose = Callable[[Problem], Sequence[Segment] | Choice]
"""Takes a problem and proposes segments that cover its units, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """A planner in the table, with its traits.

    ``keeps_budget`` says that it uses the request's budget. It is called again with a lower budget if the allocator
    needs more than the bytes of its plan's tensors. ``falls_back_to`` names planners of least memory, so that it keeps
    every budget that they can keep.
    """

    name: str
    propose: Propose
    keeps_budget: bool = True
    falls_back_to: tuple[str, ...] = ()


ENTRY_POINTS = "tf_memsaver.planners"
"""The group of entry points by which packages provide planners."""

_PLANNERS: dict[str, Planner] = {}


Proposer = TypeVar("Proposer", bound=Propose)


def register_planner(
    name: str, *, keeps_budget: bool = True, falls_back_to: Sequence[str] = ()
) -> Callable[[Proposer], Proposer]:
    """Return a decorator that registers a function as the planner ``name``; then ``strategy=name`` uses it.

    The function takes a ``Problem`` and returns segments that cover its units, in order. They are checked like those of
    the built-in planners.

    Args:
      name: the name of the strategy. A planner that is registered later under the same name replaces this one.
      keeps_budget: whether the planner uses the request's budget. It is then called again with a lower budget if the
        allocator needs more than the bytes of its plan's tensors.
      falls_back_to: names of planners of least memory. Their plans are taken where no plan of this one is within the
        budget, or where they are quicker once what the budget leaves room for is stored again.
    """

    def enter(propose: Proposer) -> Proposer:
        _PLANNERS[name] = Planner(
            name=name, propose=propose, keeps_budget=keeps_budget, falls_back_to=tuple(falls_back_to)
        )
        return propose

    return enter


def planner_names() -> tuple[str, ...]:
    """Return the names of all planners, those of installed packages among them, in alphabetical order."""
    return tuple(sorted({*_PLANNERS, *metadata.entry_points(group=ENTRY_POINTS).names}))


def check_strategy(name: str) -> None:
    """Check that there is a planner of that name; one of an installed package is not loaded for it.

    Raises:
      InvalidRequestError: there is none; the sentence lists all names.
    """
    if name not in planner_names():
        known = planner_names()
        raise InvalidRequestError(
            f"there is no strategy '{name}'.{did_you_mean(name, known)} Choose one of: {', '.join(known)}."
        )


def planner_named(name: str) -> Planner:
    """Return a planner.

    Raises:
      InvalidRequestError: there is none of that name (the sentence lists all names), or it cannot be loaded.
    """
    if name in _PLANNERS:
        return _PLANNERS[name]
    check_strategy(name)
    point = next(iter(metadata.entry_points(group=ENTRY_POINTS, name=name)))
    try:
        propose: Propose = point.load()
    except Exception as error:
        raise InvalidRequestError(
            f"strategy '{name}' ('{point.value}') comes from an installed package, and cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
    if name not in _PLANNERS:
        register_planner(name)(propose)
    return _PLANNERS[name]
