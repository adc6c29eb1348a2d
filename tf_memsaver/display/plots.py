"""Plots by matplotlib (the extra ``plot``): each draws into axes that are given, or new ones, and returns them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tf_memsaver.display.scales import (
    CHOSEN_COLOUR,
    LIVE_BYTES_AXIS,
    OVERHEAD_AXIS,
    PEAK_AXIS,
    PLAIN,
    PLAIN_COLOUR,
    PLANNED,
    PLANNED_COLOUR,
    TIME_AXIS,
    byte_scale,
    front,
    time_scale,
)
from tf_memsaver.display.steps import ShownStep
from tf_memsaver.errors import MissingExtraError
from tf_memsaver.judge.estimate import Estimate
from tf_memsaver.plan.plan import Plan
from tf_memsaver.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_LAYERS = 30
"""Layers that ``layers`` draws: those that keep most, in the order of the model."""


def timeline(title: str, plain: ShownStep, planned: ShownStep | None, axes: Any = None) -> Axes:
    """Draw the live bytes of a step over its predicted time, plain and, where there is one, planned.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    axes = _axes(axes)
    steps = [(PLAIN, PLAIN_COLOUR, plain)] + ([] if planned is None else [(PLANNED, PLANNED_COLOUR, planned)])
    factor, unit = byte_scale(max(step.peak.live_bytes for _, _, step in steps))
    second, name = time_scale(max(step.step_seconds for _, _, step in steps))
    for label, colour, step in steps:
        times = [*(moment.seconds / second for moment in step.moments), step.step_seconds / second]
        live = [moment.live_bytes / factor for moment in step.moments]
        most = f"{label}: {format_bytes(step.peak.live_bytes)}"
        axes.stairs(live, times, color=colour, fill=True, alpha=0.25)
        axes.stairs(live, times, color=colour, linewidth=1.3, label=most)
    axes.set_ylim(bottom=0)
    return _finished(axes, title, f"{TIME_AXIS} ({name})", f"{LIVE_BYTES_AXIS} ({unit})")


def curve(title: str, plans: Sequence[Plan], chosen: Plan | None, axes: Any = None) -> Axes:
    """Draw predicted peaks against step times of plans, and mark the chosen one.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    axes = _axes(axes)
    axes.margins(0.08)
    peaks, overheads = front(plans)
    factor, unit = byte_scale(max(peaks))
    axes.plot(
        [peak / factor for peak in peaks],
        [100 * overhead for overhead in overheads],
        marker="o",
        markersize=4,
        color=PLANNED_COLOUR,
        label="possible plans",
    )
    axes.plot(plans[0].plain_peak_bytes / factor, 0, "s", color=PLAIN_COLOUR, markersize=9, label=PLAIN)
    if chosen is not None:
        place = chosen.peak_bytes / factor, 100 * chosen.step_overhead
        axes.plot(*place, "*", color=CHOSEN_COLOUR, markersize=15, label="chosen")
    return _finished(axes, title, f"{PEAK_AXIS} ({unit})", f"{OVERHEAD_AXIS} (%)")


def layers(estimate: Estimate, axes: Any = None) -> Axes:
    """Draw the bytes that layers keep for the backward pass: of at most ``MOST_LAYERS``, those that keep most.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    units = estimate.units
    largest = set(sorted(range(len(units)), key=lambda place: -units[place].kept_bytes)[:MOST_LAYERS])
    chosen = [unit for place, unit in enumerate(units) if place in largest]
    axes = _axes(axes, height=1.2 + 0.24 * len(chosen))
    factor, unit_name = byte_scale(max((unit.kept_bytes for unit in chosen), default=0))
    places = range(len(chosen))
    axes.barh(places, [unit.kept_bytes / factor for unit in chosen], color=PLAIN_COLOUR)
    # A name may hold what matplotlib reads as mathematics.
    axes.set_yticks(places, [unit.label.replace("$", r"\$") for unit in chosen])
    axes.invert_yaxis()
    count = "" if len(chosen) == len(units) else f", the {len(chosen)} of {len(units)} layers that keep most"
    axes.set_title(f"{estimate.model}, batch size {estimate.batch_size}{count}".replace("$", r"\$"))
    axes.set_xlabel(f"kept for the backward pass ({unit_name})")
    return axes


def _axes(axes: Any, height: float = 4.0) -> Any:
    """Return axes to draw into: those given, or those of a new figure of so many inches."""
    if axes is not None:
        return axes
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot") from error
    return pyplot.subplots(figsize=(8.0, height), layout="constrained")[1]


def _finished(axes: Any, title: str, across: str, up: str) -> Any:
    axes.set_title(title.replace("$", r"\$"))
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return axes
