"""Tables for people, as rich renderables; ``cli`` prints them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.judge.estimate import Estimate
from tf_memsaver.plan.plan import Plan
from tf_memsaver.planners.largest import LargestBatch
from tf_memsaver.units import format_bytes

if TYPE_CHECKING:
    from tf_memsaver.check.measurement import Measurement
    from tf_memsaver.check.verify import Comparison, Verification

_WORST_SHOWN = 10
"""Differing tensors that are listed by name; all of them are in the JSON."""


class _Table(Table):
    """A table that shows texts as they are: names come from models and files, and Rich reads ``[red]`` as markup."""

    def __init__(self, title: str) -> None:
        super().__init__(title=_verbatim(title, "table.title"), title_justify="left", caption_justify="left")

    def add_row(self, *cells: RenderableType | None, style: StyleType | None = None, end_section: bool = False) -> None:
        """Add a row of texts."""
        shown = [_verbatim(cell) if isinstance(cell, str) else cell for cell in cells]
        super().add_row(*shown, style=style, end_section=end_section)

    def set_caption(self, text: str) -> None:
        """Show a text below the table."""
        self.caption = _verbatim(text, "table.caption")


def _verbatim(text: str, style: str = "") -> Text:
    """Return a text without markup, and with what no terminal should be sent written as an escape."""
    plain = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return Text("".join(plain), style=style)


def layers_table(estimate: Estimate) -> Table:
    """Return one row for each layer call: outputs, what is kept of them, weights and work."""
    table = _Table(f"{estimate.model}, batch size {estimate.batch_size}: bytes by layer")
    for heading in ("layer", "kind"):
        table.add_column(heading, overflow="fold")
    for heading in ("output", "kept for backward", "weights", "forward GFLOP"):
        table.add_column(heading, justify="right")
    for unit in estimate.units:
        table.add_row(
            unit.label,
            unit.kind,
            _bytes_or_dash(unit.output_bytes),
            _bytes_or_dash(unit.kept_bytes),
            _bytes_or_dash(unit.parameter_bytes),
            f"{unit.flops / 1e9:.3f}",
        )
    return table


def totals_table(estimate: Estimate) -> Table:
    """Return where the bytes of the step go: what the rule of thumb counts, and the simulated step."""
    table = _Table("one training step")
    table.add_column("what")
    table.add_column("rule of thumb", justify="right")
    table.add_column("simulated", justify="right")
    slots = f"optimizer slots ({estimate.optimizer_slots:.1f} × trained weights)"
    for what, rule, simulated in (
        ("weights and other state", estimate.parameter_bytes, estimate.parameter_bytes),
        ("gradients of the weights", estimate.gradient_bytes, estimate.gradient_bytes),
        (slots, estimate.optimizer_bytes, estimate.optimizer_bytes),
        ("input batch and targets", estimate.input_bytes, estimate.input_bytes),
        ("activations (rule: all outputs, twice)", 2 * estimate.output_bytes, estimate.activation_bytes),
    ):
        table.add_row(what, format_bytes(rule), format_bytes(simulated))
    table.add_section()
    table.add_row(
        "sum, and simulated peak", format_bytes(estimate.rule_of_thumb_bytes), format_bytes(estimate.peak_bytes)
    )
    if estimate.peak_at:
        table.set_caption(f"the simulated peak is reached at {estimate.peak_at}")
    return table


def before_after_table(plan: Plan) -> Table:
    """Return the predicted step without and with the plan."""
    table = _Table(f"predicted training step, batch size {plan.batch_size}")
    table.add_column("model")
    table.add_column("peak", justify="right")
    table.add_column("of plain", justify="right")
    table.add_column("step time", justify="right")
    table.add_column("recomputed layers", justify="right")
    layers = len(plan.labels)
    table.add_row("plain", format_bytes(plan.plain_peak_bytes), "100%", "100%", f"0 of {layers}")
    table.add_row(
        f"optimized ({plan.planner})",
        *_predicted(plan, decimals=0),
    )
    table.set_caption(f"planned in {plan.plan_seconds:.2f} s{_quality(plan)}")
    return table


def curve_table(plans: Sequence[Plan]) -> Table:
    """Return one row for each plan of a curve."""
    table = _Table(f"predicted training steps, batch size {plans[0].batch_size}")
    for heading in ("peak", "of plain", "step time", "recomputed layers"):
        table.add_column(heading, justify="right")
    for plan in plans:
        table.add_row(*_predicted(plan, decimals=1))
    table.set_caption(f"planned in {sum(plan.plan_seconds for plan in plans):.2f} s")
    return table


def segments_table(plan: Plan) -> Table:
    """Return one row for each segment; children of a nested segment are indented below it."""
    table = _Table("segments")
    table.add_column("mode")
    table.add_column("layers", justify="right")
    table.add_column("first", overflow="fold")
    table.add_column("last", overflow="fold")

    def add(segments: Sequence[Segment], depth: int) -> None:
        for segment in segments:
            style = "bold" if segment.mode is SegmentMode.RECOMPUTE else "dim"
            table.add_row(
                "  " * depth + segment.mode.value,
                str(segment.stop - segment.start),
                plan.labels[segment.start],
                plan.labels[segment.stop - 1],
                style=style,
            )
            add(segment.children, depth + 1)

    add(plan.segments, 0)
    return table


def rates_table(found: LargestBatch) -> Table:
    """Return one row for each batch size; the one of most samples a second is marked."""
    table = _Table(f"batch sizes within the budget; the plain step trains up to {found.plain_batch_size}")
    for heading in ("batch", "plain peak", "peak", "step", "samples a second"):
        table.add_column(heading, justify="right")
    quickest = max(rate.samples_per_second for rate in found.rates)
    for rate in found.rates:
        table.add_row(
            str(rate.batch_size),
            format_bytes(rate.plain_peak_bytes),
            format_bytes(rate.peak_bytes),
            f"{1.0 + rate.step_overhead:.1%}",
            _share(rate.samples_per_second, quickest),
            style="bold" if rate.samples_per_second == quickest else None,
        )
    table.set_caption("predicted; samples a second as a share of the most")
    return table


def measurements_table(rows: Sequence[tuple[str, int, Measurement]]) -> Table:
    """Return one row for each (name, predicted peak, measurement); the first is what the others are compared with."""
    first = rows[0][2]
    table = _Table(
        f"measured on {first.device}, {first.mode} mode, batch size {first.batch_size}: largest peak and median time "
        f"of {first.steps} steps"
    )
    table.add_column("model")
    headings = ("predicted peak", "measured peak", "of plain", "activations", "of plain", "step", "of plain", "tracing")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, predicted, measured in rows:
        table.add_row(
            name,
            format_bytes(predicted),
            format_bytes(measured.peak_bytes),
            _share(measured.peak_bytes, first.peak_bytes),
            format_bytes(measured.activation_bytes),
            _share(measured.activation_bytes, first.activation_bytes),
            f"{measured.step_seconds:.3f} s",
            _of_plain_step(measured, first),
            f"{measured.trace_seconds:.1f} s",
        )
    return table


def _of_plain_step(measured: Measurement, first: Measurement) -> str:
    """Return a step's share of a plain one, with the range of rounds of both where there were some."""
    share = _share(measured.step_seconds, measured.plain_step_seconds or first.step_seconds)
    if measured.slowdown_range is None:
        return share
    least, most = measured.slowdown_range
    return f"{share} ({1 + least:.0%} to {1 + most:.0%})"


def verification_table(verification: Verification) -> Table:
    """Return one row for each kind of tensor compared, then the worst of those that differ."""
    table = _Table(f"plain and optimized model compared over {verification.steps} steps")
    table.add_column("compared", overflow="fold")
    for heading in ("identical", "largest difference", "of largest element"):
        table.add_column(heading, justify="right")
    groups: dict[str, list[Comparison]] = {}
    for check in verification.checks:
        groups.setdefault(check.kind, []).append(check)
    for kind, checks in groups.items():
        same = sum(check.identical for check in checks)
        table.add_row(
            kind,
            f"{same} of {len(checks)}",
            f"{max(check.largest_difference for check in checks):.3g}",
            f"{max(check.relative_difference for check in checks):.3g}",
            style=None if same == len(checks) else "bold red",
        )
    differing = [check for check in verification.checks if not check.identical]
    differing.sort(key=lambda check: -check.relative_difference)
    if differing:
        table.add_section()
    for check in differing[:_WORST_SHOWN]:
        name = f"{check.kind} {check.name}, step {check.step}"
        table.add_row(name, "no", f"{check.largest_difference:.3g}", f"{check.relative_difference:.3g}", style="red")
    if verification.deterministic_ops:
        table.set_caption("two runs of the plain model differ by themselves, so this ran with deterministic ops")
    return table


def _quality(plan: Plan) -> str:
    """Return how far the plan may be from the best one, as the end of a sentence; nothing where that is unknown."""
    if plan.gap is None:
        return ""
    if not plan.gap:
        return "; no plan of its kind within the budget is quicker"
    return f"; its step is at most {plan.gap:.1%} longer than that of the quickest of its kind within the budget"


def _predicted(plan: Plan, decimals: int) -> tuple[str, ...]:
    """Return the cells of a plan: peak, its share of the plain step's, step time in per cent, and replayed layers."""
    return (
        format_bytes(plan.peak_bytes),
        _share(plan.peak_bytes, plan.plain_peak_bytes),
        f"{1.0 + plan.step_overhead:.{decimals}%}",
        f"{len(plan.recomputed)} of {len(plan.labels)}",
    )


def _bytes_or_dash(count: int) -> str:
    return format_bytes(count) if count else "–"


def _share(value: float, of: float) -> str:
    return f"{value / of:.0%}" if of else "–"
