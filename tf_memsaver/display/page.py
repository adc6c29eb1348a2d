"""A report as one page of HTML that needs nothing else: styles, script and data are in it, and it loads nothing."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable
from typing import Any

from tf_memsaver.display.figures import curve_figure, layers_figure, timeline_figure
from tf_memsaver.display.layers import Fate
from tf_memsaver.display.page_layers import layers_tree, segment_strip
from tf_memsaver.display.page_style import SCRIPT, STYLE
from tf_memsaver.display.report import Report
from tf_memsaver.display.scales import PLAIN, PLANNED, percent
from tf_memsaver.display.steps import KINDS, RECOMPUTED, SCRATCH, Peak, ShownStep
from tf_memsaver.errors import MissingExtraError
from tf_memsaver.files.targets import REPORT_MARK
from tf_memsaver.units import format_bytes

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""The browser itself refuses whatever is not in the page."""

_KIND_COLOURS = dict(
    zip(
        (*KINDS.values(), RECOMPUTED, SCRATCH),
        ("#8a94a6", "#b3bac7", "#6b7280", "#4b5563", "#d9694f", "#e0a92e", "#c5852f", "#3b8fc4", "#9b6bc3"),
        strict=True,
    )
)


def page(report: Report) -> str:
    """Return the page of a report.

    Raises:
      MissingExtraError: plotly is not installed.
    """
    title = f"{report.name}: memory of a training step"
    parts = (
        _answer(report),
        _timeline(report),
        _curve(report),
        _peaks(report),
        _layers(report),
        _made(report),
    )
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{REPORT_MARK}\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n<script>{_plotly_script()}</script>\n</head>\n"
        f"<body><main>\n{body}\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _plotly_script() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingExtraError("plotly", "report") from error
    script: str = get_plotlyjs()
    return script


# The parts, from the top ---------------------------------------------------------------------------------------------


def _answer(report: Report) -> str:
    plan = report.plan
    peak, plain = format_bytes(plan.peak_bytes), format_bytes(plan.plain_peak_bytes)
    is_xla = plan.request.executor == "xla"
    share = percent(abs(report.saved_bytes) / max(plan.plain_peak_bytes, 1))
    if plan.recomputed_units and report.saved_bytes > 0:
        answer = (
            f"A training step takes {peak} instead of {plain}: {share} less memory, for a step that is "
            f"{percent(plan.step_overhead)} longer. The results stay the same{', within rounding' if is_xla else ''}."
        )
    else:
        answer = f"A training step takes {plain}, and this plan does not save memory."
    change = f"{share} {'less' if report.saved_bytes > 0 else 'more'}" if report.saved_bytes else "the same"
    cards = [
        _card("plain", "Peak memory now", plain, "one plain training step"),
        _card("planned", "Peak with the plan", peak, change),
        _card(
            "cost",
            "What it costs",
            percent(plan.step_overhead, sign=True),
            f"step time; {plan.recomputed_in_words} recomputed",
        ),
    ]
    if plan.request.budget_bytes is not None:
        kept = (plan.measured_peak_bytes or plan.peak_bytes) <= plan.request.budget_bytes
        cards.append(_card("", "Budget", format_bytes(plan.request.budget_bytes), "kept" if kept else "NOT kept"))
    but = ", except the two peaks above, which XLA's compiler reports" if is_xla else ""
    notes = [_paragraph(_sentence(text)) for text in (plan.advice, plan.note and f"planned {plan.note}") if text]
    return "\n".join(
        (
            f"<h1>{html.escape(report.name)}, batch size {plan.batch_size}</h1>",
            f'<p class="answer">{html.escape(answer)}</p>',
            f'<div class="cards">{"".join(cards)}</div>',
            *notes,
            f'<p class="soft">All figures are predicted for TensorFlow\'s own executor{but}; no step was run. '
            "<code>tf_memsaver.measure</code> runs real steps.</p>",
        )
    )


def _timeline(report: Report) -> str:
    tensors = f"{format_bytes(report.plain.peak.live_bytes)} and {format_bytes(report.planned.peak.live_bytes)}"
    uncounted = "A CPU does not count tensors below 256 KiB, so these peaks do not include them. "
    return _section(
        "Memory over one training step",
        "The forward pass makes activations, and the backward pass uses and frees them. With the plan, some are "
        "dropped, and recomputed when they are needed. Point at a curve to see which tensors are alive.",
        _figure(
            "timeline",
            timeline_figure,
            report,
            f"Bytes of tensors, at most {tensors}. The peaks above also include the memory that the allocator adds. "
            f"{uncounted if report.uncounted_bytes else ''}Drag to zoom, double-click to go back.",
        ),
    )


def _curve(report: Report) -> str:
    return _section(
        "Memory against time",
        "Each point is another plan for the same step: the further left, the less memory; the higher, the longer the "
        "step. The star is this report's plan.",
        _figure("curve", curve_figure, report, "Choose another point with budget= or max_overhead=."),
    )


def _peaks(report: Report) -> str:
    sides = "".join(
        f"<div><h3>{label.capitalize()}: {format_bytes(step.peak.live_bytes)} of tensors</h3>{_peak(step)}</div>"
        for label, step in ((PLAIN, report.plain), (PLANNED, report.planned))
    )
    return _section(
        "What is alive at the peak",
        "The tensors in memory at the moment of the highest memory use.",
        f'<div class="pair">{sides}</div>',
    )


def _layers(report: Report) -> str:
    plan = report.plan
    kept, recomputed, pinned = (report.rows_of(fate) for fate in (Fate.KEPT, Fate.RECOMPUTED, Fate.PINNED))
    cards = "".join(
        _card(
            fate.value,
            title,
            plan.units_in_words(len(rows)),
            f"{format_bytes(sum(row.planned_bytes for row in rows))} with the plan, "
            f"{format_bytes(sum(row.plain_bytes for row in rows))} plain",
        )
        for fate, title, rows in (
            (Fate.KEPT, "Kept", kept),
            (Fate.RECOMPUTED, "Recomputed", recomputed),
            (Fate.PINNED, "Pinned (must be kept)", pinned),
        )
    )
    return "\n".join(
        (
            _section(
                "What is kept, and what is recomputed",
                "Each layer keeps activations for the backward pass. A recomputed segment keeps only its inputs, and "
                "recomputes the rest. The bytes are those that stay in memory after the forward pass.",
                f'<div class="cards">{cards}</div>{_reasons(report)}',
            ),
            _figure("layers", layers_figure, report, "Bytes that each layer keeps for the backward pass."),
            "<h3>The layers, block by block</h3>",
            segment_strip(report),
            layers_tree(report),
        )
    )


def _made(report: Report) -> str:
    plan = report.plan
    facts = {
        "strategy": f"{plan.strategy} (planner {plan.planner})",
        "planned for": f"{report.device}, batch size {plan.batch_size}",
        "units": {"layer": "layers", "op": "operations"}.get(
            plan.request.granularity, "layers, or operations where that pays"
        ),
        "planned by operations": ", ".join(plan.opened),
        "fingerprint of the model": plan.fingerprint,
        **dict(plan.versions),
    }
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>" for name, text in facts.items() if text
    )
    return _section(
        "How this was made",
        "",
        f"<pre>{html.escape(report.command)}</pre><table>{rows}</table>",
    )


# Pieces --------------------------------------------------------------------------------------------------------------


def _section(title: str, text: str, inside: str) -> str:
    return f"<h2>{html.escape(title)}</h2>\n{_paragraph(text) if text else ''}\n{inside}"


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _card(kind: str, title: str, figure: str, note: str) -> str:
    return f'<div class="card {kind}">{html.escape(title)}<b>{html.escape(figure)}</b>{_soft(note)}</div>'


def _soft(text: str) -> str:
    return f'<span class="soft">{html.escape(text)}</span>'


def _figure(name: str, draw: Callable[[Report], Any], report: Report, caption: str) -> str:
    drawn = draw(report).to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=name,
        default_height="360px",
        config={"displayModeBar": False, "responsive": True},
    )
    return f"<figure>{drawn}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _peak(step: ShownStep) -> str:
    peak = step.peak
    rows = "".join(
        f"<tr><td>{html.escape(each.name)} {_soft(each.kind)}</td>"
        f'<td class="bytes">{format_bytes(each.nbytes)}</td></tr>'
        for each in peak.largest
    )
    count = f"The {len(peak.largest)} largest of {peak.tensor_count} tensors alive"
    return (
        f"{_paragraph(f'In the {peak.running}.')}{_by_kind(peak)}<table><tr><th>{count}</th>"
        f'<th class="bytes">bytes</th></tr>{rows}</table>'
    )


def _by_kind(peak: Peak) -> str:
    whole = max(sum(nbytes for _, nbytes in peak.by_kind), 1)
    shares = "".join(
        f'<span style="width:{100 * nbytes / whole:.2f}%;background:{_KIND_COLOURS[kind]}" '
        f'title="{kind}: {format_bytes(nbytes)}"></span>'
        for kind, nbytes in peak.by_kind
    )
    keys = (
        f'<li><i style="background:{_KIND_COLOURS[kind]}"></i>{kind}: {format_bytes(nbytes)}</li>'
        for kind, nbytes in peak.by_kind
    )
    return f'<div class="stack">{shares}</div><ul class="keys">{"".join(keys)}</ul>'


def _reasons(report: Report) -> str:
    return "".join(
        f'<details class="why"><summary><span class="name">{report.plan.units_in_words(len(rows))} pinned: '
        f"{'it' if len(rows) == 1 else 'each'} {html.escape(why)}</span></summary>"
        f"<p>{_listed(row.label for row in rows)}</p></details>"
        for why, rows in report.reasons().items()
    )


def _listed(names: Iterable[str]) -> str:
    return html.escape(", ".join(names))
