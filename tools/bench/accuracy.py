"""Predicted peaks against those of training: ``python -m tools.bench.accuracy [--names=unet] [--quick] [--loaded]``.

Each cell is a model with an optimizer and a batch size. It is trained by Keras's own ``fit``, twenty steps in a fresh
process each: plain, with ``auto``, with ``min_peak`` and for two budgets, 70% and 50% of the plain peak. What was
predicted is compared with the largest of the steps, with the dataset, which on a CPU lies in the same allocator.
``--loaded`` keeps as many processes busy beside it as the machine has cores. Rows go to
``tools/results/bench_accuracy.json``, in which those of other cells are kept, and as a table to the ``.md`` beside it.
``--quick`` takes a few cells of all kinds.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from absl import app, flags

from tf_memsaver.units import format_bytes
from tools.bench.trained_cells import QUICK, Cell, cells, named, outcome_of
from tools.shared.processes import busy_machine
from tools.shared.results import RESULTS, KeptRows

_NAMES = flags.DEFINE_list("names", [], "cells, or the models or kinds that they begin with (default: all)")
_QUICK = flags.DEFINE_bool("quick", False, "a few cells of all kinds")
_LOADED = flags.DEFINE_bool("loaded", False, "keep the machine busy meanwhile")
_VARIANTS = flags.DEFINE_list("variants", [], "variants to run (default: all)")
_OUTPUT = flags.DEFINE_string("output", str(RESULTS / "bench_accuracy.json"), "where to write the rows")

PLAIN = "plain"
VARIANTS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "auto": {},
    "min_peak": {"strategy": "min_peak"},
    "70%": {"share": 0.7},
    "50%": {"share": 0.5},
}
"""Options of ``optimize``; a share of the plain step's peak, as it was measured, becomes a budget."""

KEY = ("cell", "loaded", "variant")

TARGETS = {"optimized": (0.03, 0.08), PLAIN: (0.05, 0.12)}
"""What a prediction may be off at the median, and at worst."""


# The table ------------------------------------------------------------------------------------------------------------


def measured_rows(cell: Cell, wanted: Sequence[str], loaded: bool) -> list[dict[str, Any]]:
    """Return a row for each variant of a cell; one that fails has the field ``error``."""
    plain = outcome_of(cell, False, {})
    rows: list[dict[str, Any]] = []
    for variant in wanted:
        options = dict(VARIANTS[variant])
        if "share" in options and "error" not in plain:
            options = {"budget": int(options["share"] * plain["measured_bytes"])}
        if variant == PLAIN:
            row = plain
        else:
            row = outcome_of(cell, True, options)
            if "budget" in options:
                row["budget_bytes"] = options["budget"]
            plain.setdefault("predicted_bytes", row.get("plain_predicted_bytes"))
        rows.append({"cell": cell.name, "variant": variant, "loaded": loaded, **row})
    for row in rows:
        if row["variant"] == PLAIN and "predicted_bytes" in plain:
            row["predicted_bytes"] = plain["predicted_bytes"]
    return rows


def error_of(row: dict[str, Any]) -> float | None:
    """Return how far a prediction lies above what was measured, as a part of that; None where one is missing."""
    if not row.get("predicted_bytes") or not row.get("measured_bytes"):
        return None
    return float(row["predicted_bytes"] / row["measured_bytes"] - 1)


def summary(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return lines that say how far predictions are off, with the targets, and how many budgets were kept."""
    rows, lines = list(rows), []
    for loaded in (False, True):
        for kind, (median, worst) in TARGETS.items():
            errors = [
                abs(error)
                for row in rows
                if row["loaded"] == loaded and (row["variant"] == PLAIN) == (kind == PLAIN)
                for error in [error_of(row)]
                if error is not None
            ]
            if errors:
                off = f"off by {statistics.median(errors):.1%} at the median, {max(errors):.1%} at worst"
                which = f"{kind}, {'loaded' if loaded else 'idle'}"
                lines.append(f"- {which}: {off}, of {len(errors)} (targets: {median:.0%} and {worst:.0%})")
        used = [
            row["measured_bytes"] / row["budget_bytes"]
            for row in rows
            if row["loaded"] == loaded and "budget_bytes" in row and "measured_bytes" in row
        ]
        if used:
            kept = sum(share <= 1 for share in used)
            most = f"{statistics.median(used):.0%} of the budget at the median, {max(used):.0%} at most"
            lines.append(f"- budgets, {'loaded' if loaded else 'idle'}: {kept} of {len(used)} kept; steps take {most}")
    return lines


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return rows as a table in Markdown."""
    lines = ["| cell | machine | variant | predicted | measured | error | budget |", "|---|---|---|--:|--:|--:|---|"]
    for row in rows:
        begin = f"| {row['cell']} | {'loaded' if row['loaded'] else 'idle'} | {row['variant']} |"
        error = error_of(row)
        if error is None:
            lines.append(f"{begin} | | | {row.get('error', 'not predicted')} |")
            continue
        budget = row.get("budget_bytes")
        kept = "" if not budget else f"{row['measured_bytes'] / budget:.0%} of {format_bytes(budget)}"
        figures = (format_bytes(row[name]) for name in ("predicted_bytes", "measured_bytes"))
        lines.append(f"{begin} {' | '.join(figures)} | {error:+.1%} | {kept} |")
    return "\n".join(lines)


def main(_: list[str]) -> int:
    """Run the cells and write the table."""
    kept = KeptRows(_OUTPUT.value, "Predicted peaks against those of training", KEY, summary, table)
    for cell in named(_NAMES.value, cells(QUICK if _QUICK.value else ())):
        with busy_machine() if _LOADED.value else contextlib.nullcontext():
            made = measured_rows(cell, _VARIANTS.value or list(VARIANTS), _LOADED.value)
        kept.add(made, lambda row: (row["cell"], row["loaded"], list(VARIANTS).index(row["variant"])))
    kept.print_summary()
    return 0


if __name__ == "__main__":
    app.run(main)
