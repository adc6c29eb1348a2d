"""The figures of a report's page, by plotly (the extra ``report``). Names are escaped: plotly reads markup in texts."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from tf_memsaver.display.report import Report
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
    plan_in_words,
    time_scale,
)
from tf_memsaver.display.steps import Moment, ShownStep
from tf_memsaver.errors import MissingExtraError
from tf_memsaver.summary import shortened
from tf_memsaver.units import format_bytes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_LONGEST_NAME = 52
"""Characters of a tensor's name in a label: longer ones lose their middle."""

_GREY = "rgba(128,128,128,0.9)"
_GRID = "rgba(128,128,128,0.25)"
"""Stand-ins: the page's style sheet has the colours of texts and lines, for light and for dark."""


def plotly() -> Any:
    """Return plotly's module of figures.

    Raises:
      MissingExtraError: plotly is not installed.
    """
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise MissingExtraError("plotly", "report") from error
    return graph_objects


def timeline_figure(report: Report) -> Figure:
    """Return the live bytes of the step over its time, plain and planned; labels name the tensors alive."""
    go, steps = plotly(), (report.plain, report.planned)
    factor, unit = byte_scale(max(step.peak.live_bytes for step in steps))
    second, name = time_scale(max(step.step_seconds for step in steps))
    figure = _figure(f"{LIVE_BYTES_AXIS} ({unit})", f"{TIME_AXIS} ({name})")
    for step, label, colour in zip(steps, (PLAIN, PLANNED), (PLAIN_COLOUR, PLANNED_COLOUR), strict=True):
        figure.add_trace(
            go.Scatter(
                x=[moment.seconds / second for moment in step.moments] + [step.step_seconds / second],
                y=[moment.live_bytes / factor for moment in step.moments] + [_end(step) / factor],
                name=label,
                mode="lines",
                line={"shape": "hv", "color": colour, "width": 1.5},
                fill="tozeroy",
                hoverinfo="text",
                hovertext=[_alive(moment, label) for moment in step.moments] + [f"{label}: the step is done"],
            )
        )
    figure.update_layout(hovermode="closest", hoverdistance=-1)
    return figure


def curve_figure(report: Report) -> Figure:
    """Return what memory costs in time, with the chosen plan and the budget if there is one."""
    go, plan = plotly(), report.plan
    plans = sorted(report.curve, key=lambda each: -each.peak_bytes)
    factor, unit = byte_scale(max(plan.plain_peak_bytes, *(each.peak_bytes for each in plans)))
    figure = _figure(OVERHEAD_AXIS, f"{PEAK_AXIS} ({unit})")
    figure.add_trace(
        go.Scatter(
            x=[each.peak_bytes / factor for each in plans],
            y=[100 * each.step_overhead for each in plans],
            name="possible plans",
            mode="lines+markers",
            line={"color": PLANNED_COLOUR, "width": 1.5},
            marker={"size": 7},
            hoverinfo="text",
            hovertext=[plan_in_words(each) for each in plans],
        )
    )
    for x, y, name, colour, symbol in (
        (plan.plain_peak_bytes, 0.0, PLAIN, PLAIN_COLOUR, "square"),
        (plan.peak_bytes, plan.step_overhead, "this plan", CHOSEN_COLOUR, "star"),
    ):
        text = f"{PLAIN}: {format_bytes(x)}" if name == PLAIN else f"this plan: {plan_in_words(plan)}"
        figure.add_trace(
            go.Scatter(
                x=[x / factor],
                y=[100 * y],
                name=name,
                mode="markers",
                marker={"size": 15, "color": colour, "symbol": symbol},
                hoverinfo="text",
                hovertext=[text],
            )
        )
    if plan.request.budget_bytes is not None:
        figure.add_vline(x=plan.request.budget_bytes / factor, line={"dash": "dot", "color": _GREY, "width": 1.5})
        figure.add_annotation(
            x=plan.request.budget_bytes / factor, y=1, yref="paper", text="budget", showarrow=False, xanchor="left"
        )
    highest = max(100 * max(each.step_overhead for each in (*plans, plan)), 1.0)
    figure.update_yaxes(range=[-0.05 * highest, 1.12 * highest], tickprefix="+", ticksuffix="%")
    figure.update_layout(hovermode="closest")
    return figure


def layers_figure(report: Report) -> Figure:
    """Return the bytes that each layer leaves for the backward pass, plain and planned, in the order of the layers."""
    go, rows = plotly(), report.layers
    factor, unit = byte_scale(max((row.plain_bytes for row in rows), default=0))
    figure = _figure(f"kept for the backward pass ({unit})", "layers, in the order of the forward pass")
    texts = [
        f"<b>{_short(row.label)}</b> ({html.escape(row.kind)}), {row.fate.value}<br>"
        f"{PLAIN}: {format_bytes(row.plain_bytes)}<br>{PLANNED}: {format_bytes(row.planned_bytes)}"
        for row in rows
    ]
    for label, colour, amounts in (
        (PLAIN, PLAIN_COLOUR, [row.plain_bytes for row in rows]),
        (PLANNED, PLANNED_COLOUR, [row.planned_bytes for row in rows]),
    ):
        figure.add_trace(
            go.Bar(
                x=list(range(1, len(rows) + 1)),
                y=[amount / factor for amount in amounts],
                name=label,
                marker={"color": colour, "line": {"width": 0}},
                hoverinfo="text",
                hovertext=texts,
            )
        )
    figure.update_layout(barmode="overlay", bargap=0.15, hovermode="closest")
    figure.update_traces(opacity=0.9)
    return figure


def _end(step: ShownStep) -> int:
    return step.moments[-1].live_bytes if step.moments else 0


def _figure(up: str, across: str) -> Figure:
    """Return an empty figure in the page's style; ``up`` and ``across`` are the titles of its axes."""
    figure = plotly().Figure()
    axis = {"gridcolor": _GRID, "zeroline": False, "linecolor": _GRID, "fixedrange": False}
    figure.update_layout(
        template="none",
        height=360,
        margin={"l": 72, "r": 12, "t": 34, "b": 48},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13, "color": _GREY},
        legend={"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
        hoverlabel={"align": "left", "namelength": -1},
        xaxis={**axis, "title": {"text": across}, "showgrid": False},
        yaxis={**axis, "title": {"text": up}, "rangemode": "tozero"},
    )
    return figure


def _alive(moment: Moment, label: str) -> str:
    """Return the label of a moment: bytes, what runs, and the largest tensors alive."""
    lines = [f"<b>{label}: {format_bytes(moment.live_bytes)}</b>", _short(moment.running, _LONGEST_NAME + 20)]
    if moment.tensor_count:
        more = "" if moment.tensor_count <= len(moment.largest) else f", the largest of {moment.tensor_count}"
        lines.append(f"tensors alive{more}:")
    lines += [f"  {format_bytes(each.nbytes)}  {_short(each.name)}" for each in moment.largest]
    lines.append(f"and weights, optimizer slots, batch: {format_bytes(moment.resident_bytes)}")
    return "<br>".join(lines)


def _short(name: str, longest: int = _LONGEST_NAME) -> str:
    """Return a name of at most so many characters, escaped."""
    return html.escape(shortened(name, longest))
