"""Scales and words that the page's figures and the plots share."""

from __future__ import annotations

from collections.abc import Sequence

from tf_memsaver.plan.plan import Plan
from tf_memsaver.units import format_bytes

PLAIN_COLOUR, PLANNED_COLOUR, CHOSEN_COLOUR = "#d9694f", "#3b8fc4", "#e0a92e"
"""Of the plain step, of the planned one, and of what was chosen; seen on light and on dark."""

PLAIN, PLANNED = "plain", "with the plan"

LIVE_BYTES_AXIS, PEAK_AXIS, OVERHEAD_AXIS, TIME_AXIS = (
    "live tensors",
    "predicted peak memory",
    "longer step",
    "predicted time in the step",
)


def byte_scale(most: float) -> tuple[int, str]:
    """Return the bytes of a unit in which amounts up to ``most`` bytes are read well, and its name."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if most >= 2 * factor:
            return factor, unit
    return 1, "bytes"


def time_scale(longest: float) -> tuple[float, str]:
    """Return the seconds of a unit in which times up to ``longest`` seconds are read well, and its name."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if longest >= factor:
            return factor, unit
    return 1e-6, "µs"


def percent(share: float, *, sign: bool = False) -> str:
    """Return a share as a whole percentage, with one decimal where it is small."""
    decimals = 0 if abs(share) >= 0.1 or not share else 1
    return f"{share:{'+' if sign else ''}.{decimals}%}"


def plan_in_words(plan: Plan) -> str:
    """Return the peak, the step's overhead and what is recomputed, as the points of a curve are told."""
    return (
        f"{format_bytes(plan.peak_bytes)}, step {percent(plan.step_overhead, sign=True)}, "
        f"{plan.recomputed_in_words} recomputed"
    )


def front(plans: Sequence[Plan]) -> tuple[list[int], list[float]]:
    """Return the peaks in bytes and the overheads of plans, by falling peaks."""
    ordered = sorted(plans, key=lambda plan: -plan.peak_bytes)
    return [plan.peak_bytes for plan in ordered], [plan.step_overhead for plan in ordered]
