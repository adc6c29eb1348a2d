"""Tables for people, as rich renderables; ``cli`` prints them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from tf_memsaver.display.parts import BAD, DATA_IN_MEMORY, MINOR, NOW, PLANNED, Name, Rows, bar, share_of, verbatim
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


def layers_table(estimate: Estimate) -> Table:
    """Return one row for each layer call: outputs, what is kept of them, weights and work."""
    table = Rows(f"{estimate.model}, batch size {estimate.batch_size}: bytes by layer")
    table.add_name("layer")
    table.add_column("kind")
    table.add_figures("output", "kept", "weights", "GFLOP")
    for unit in estimate.units:
        table.add_row(
            unit.label,
            Name(unit.kind, MINOR),
            _bytes_or_dash(unit.output_bytes),
            _bytes_or_dash(unit.kept_bytes),
            _bytes_or_dash(unit.parameter_bytes),
            f"{unit.flops / 1e9:.3f}",
        )
    table.set_caption("kept: for the backward pass; GFLOP: of one forward run")
    return table


def totals_table(estimate: Estimate) -> Table:
    """Return where the bytes of the step go: what the rule of thumb counts, and the simulated step."""
    table = Rows("one training step")
    table.add_name("what")
    table.add_figures("rule of thumb", "simulated")
    slots = f"optimizer slots ({estimate.optimizer_slots:.1f} × trained weights)"
    for what, rule, simulated in (
        ("weights and other state", estimate.parameter_bytes, estimate.parameter_bytes),
        ("gradients of the weights", estimate.gradient_bytes, estimate.gradient_bytes),
        (slots, estimate.optimizer_bytes, estimate.optimizer_bytes),
        ("input batch and targets", estimate.input_bytes, estimate.input_bytes),
        ("activations (rule: all outputs, twice)", 2 * estimate.output_bytes, estimate.activation_bytes),
    ):
        table.add_row(what, format_bytes(rule), format_bytes(simulated))
    if estimate.data_bytes:
        table.add_row(DATA_IN_MEMORY, "", format_bytes(estimate.data_bytes))
    by_rule, peak = format_bytes(estimate.rule_of_thumb_bytes), format_bytes(estimate.peak_bytes)
    table.add_row("sum, and simulated peak", by_rule, peak, style="bold")
    return table


def before_after_table(plan: Plan) -> Table:
    """Return the predicted step without and with the plan."""
    table = Rows(f"predicted training step, batch size {plan.batch_size}")
    table.add_name("model")
    table.add_figures("peak", "of plain", "step time", "recomputed")
    table.add_bars()
    now, layers = plan.plain_peak_bytes, len(plan.labels)
    table.add_row("plain", format_bytes(now), "100%", "100%", f"0 of {layers}", bar(now, now, NOW))
    table.add_row("optimized", *_predicted(plan, decimals=0), bar(plan.peak_bytes, now, PLANNED))
    table.set_caption(planned_in(plan))
    return table


def curve_table(plans: Sequence[Plan]) -> Table:
    """Return one row for each plan of a curve."""
    table = Rows(f"predicted training steps, batch size {plans[0].batch_size}")
    table.add_figures("peak", "of plain", "step time", "recomputed")
    table.add_bars()
    for plan in plans:
        style = PLANNED if plan.recomputed_units else NOW
        table.add_row(*map(verbatim, _predicted(plan, decimals=1)), bar(plan.peak_bytes, plan.plain_peak_bytes, style))
    table.set_caption(f"planned in {sum(plan.plan_seconds for plan in plans):.2f} s")
    return table


def segments_table(plan: Plan) -> Table:
    """Return one row for each segment; children of a nested segment are indented below it."""
    table = Rows("segments")
    table.add_column("mode", no_wrap=True)
    table.add_figures("layers" if plan.is_by_layers else "units")
    for heading in ("first", "last"):
        table.add_column(heading)

    def add(segments: Sequence[Segment], depth: int) -> None:
        for segment in segments:
            first, last = plan.labels[segment.start], plan.labels[segment.stop - 1]
            table.add_row(
                verbatim("  " * depth + segment.mode.value),
                str(segment.stop - segment.start),
                Name(first),
                Name(last),
                style=PLANNED if segment.mode is SegmentMode.RECOMPUTE else MINOR,
            )
            add(segment.children, depth + 1)

    add(plan.segments, 0)
    table.set_caption(planned_in(plan))
    return table


def rates_table(found: LargestBatch) -> Table:
    """Return one row for each batch size; the one of most samples a second is marked."""
    table = Rows(f"batch sizes within the budget; the plain step trains up to {found.plain_batch_size}")
    table.add_figures("batch", "plain peak", "peak", "step", "samples a second")
    quickest = max(rate.samples_per_second for rate in found.rates)
    for rate in found.rates:
        share = share_of(rate.samples_per_second, quickest)
        table.add_row(
            verbatim(str(rate.batch_size)),
            format_bytes(rate.plain_peak_bytes),
            format_bytes(rate.peak_bytes),
            f"{1.0 + rate.step_overhead:.1%}",
            share,
            style="bold" if rate.samples_per_second == quickest else None,
        )
    table.set_caption("predicted; samples a second as a share of the fastest batch")
    return table


def measurements_table(plan: Plan, plain: Measurement, optimized: Measurement) -> Table:
    """Return a column for each measured model, with shares of the plain one's figures, and what the plan predicted."""
    table = Rows(f"{plain.steps} steps measured on {plain.device}, {plain.mode} mode, batch size {plain.batch_size}")
    table.add_name("")
    table.add_figures("plain", "optimized", "of plain")

    def add(what: str, of: Callable[[Measurement], int], style: str | None = None) -> None:
        first, second = of(plain), of(optimized)
        table.add_row(what, format_bytes(first), format_bytes(second), share_of(second, first), style=style)

    add("largest peak", lambda measured: measured.peak_bytes, "bold")
    if plan.batch_size == plain.batch_size:
        now, planned = plan.plain_peak_bytes, plan.peak_bytes
        table.add_row("  predicted", format_bytes(now), format_bytes(planned), share_of(planned, now), style=MINOR)
    else:
        table.set_caption(f"nothing is predicted: the plan was made for batch size {plan.batch_size}")
    add("activations", lambda measured: measured.activation_bytes)
    steps = (f"{each.step_seconds:.3f} s" for each in (plain, optimized))
    table.add_row("median step", *steps, _of_plain_step(optimized, plain))
    table.add_row("tracing", *(f"{each.trace_seconds:.1f} s" for each in (plain, optimized)), "")
    return table


def _of_plain_step(measured: Measurement, first: Measurement) -> str:
    """Return a step's share of a plain one, with the range of rounds of both where there were some."""
    share = share_of(measured.step_seconds, measured.plain_step_seconds or first.step_seconds)
    if measured.slowdown_range is None:
        return share
    least, most = measured.slowdown_range
    return f"{share} ({1 + least:.0%} to {1 + most:.0%})"


def verification_table(verification: Verification) -> Table:
    """Return one row for each kind of tensor compared, then the worst of those that differ."""
    table = Rows(f"plain and optimized model compared over {verification.steps} steps")
    table.add_name("compared")
    table.add_figures("identical", "largest difference", "of largest")
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
            style=None if same == len(checks) else BAD,
        )
    differing = [check for check in verification.checks if not check.identical]
    differing.sort(key=lambda check: -check.relative_difference)
    for check in differing[:_WORST_SHOWN]:
        name = f"{check.kind} {check.name}, step {check.step}"
        table.add_row(name, "no", f"{check.largest_difference:.3g}", f"{check.relative_difference:.3g}", style=NOW)
    if verification.deterministic_ops:
        table.set_caption("two runs of the plain model differ by themselves, so this ran with deterministic ops")
    return table


def planned_in(plan: Plan) -> str:
    """Return how long planning took, and how far the plan may be from the best one, where that is known."""
    took = f"planned by {plan.planner} in {plan.plan_seconds:.2f} s"
    if plan.gap is None:
        return took
    if not plan.gap:
        return f"{took}; no plan of its kind within the budget is quicker"
    return f"{took}; its step is at most {plan.gap:.1%} longer than that of the quickest of its kind within the budget"


def _predicted(plan: Plan, decimals: int) -> tuple[str, ...]:
    """Return the cells of a plan: peak, its share of the plain step's, step time in per cent, and replayed layers."""
    return (
        format_bytes(plan.peak_bytes),
        share_of(plan.peak_bytes, plan.plain_peak_bytes),
        f"{1.0 + plan.step_overhead:.{decimals}%}",
        f"{len(plan.recomputed)} of {len(plan.labels)}",
    )


def _bytes_or_dash(count: int) -> str:
    return format_bytes(count) if count else "–"
