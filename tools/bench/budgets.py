"""Budgets against what ``fit`` takes: ``python -m tools.bench.budgets [--names=unet,bert] [--loaded]``.

Each of sixteen models is trained by Keras's own ``fit``, twenty steps in a fresh process each: plain, and for budgets
of 90, 70, 50 and 35% of what that took. Where no plan is within a budget, that is a row, too. Last comes the least
budget, as an error names it. Compared is the largest of the steps, with the dataset, which on a CPU lies in the same
allocator. ``--loaded`` keeps as many processes busy beside it as the machine has cores.
``--calibrate`` plans by what real steps take, which is another set of rows, without the least budget. Rows go to
``tools/results/bench_budgets.json``, in which those of other models are kept, and as a table to the ``.md`` beside it.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

from absl import app, flags

from tf_memsaver.units import format_bytes
from tools.bench.trained_cells import Cell, cells, least_budget_of, named, outcome_of
from tools.shared.processes import busy_machine
from tools.shared.results import RESULTS, KeptRows

_NAMES = flags.DEFINE_list("names", [], "cells, or the models that they begin with (default: all sixteen)")
_LOADED = flags.DEFINE_bool("loaded", False, "keep the machine busy meanwhile")
_CALIBRATE = flags.DEFINE_bool("calibrate", False, "plan by what real steps take")
_OUTPUT = flags.DEFINE_string("output", str(RESULTS / "bench_budgets.json"), "where to write the rows")

SHARES = (0.9, 0.7, 0.5, 0.35)
"""Budgets, as shares of the plain step's measured peak."""

LEAST = "least"

KEY = ("cell", "loaded", "calibrated", "budget")

BUDGETS = (*(f"{share:.0%}" for share in SHARES), LEAST)

NAMES = (
    "MobileNetV2/sgd/16",
    "MobileNetV3Small/adamw/64",
    "EfficientNetB0/clipped/32",
    "EfficientNetV2B0/mixed/16",
    "ResNet50/momentum/16",
    "ResNet50V2/lion/32",
    "DenseNet121/sgd/16",
    "InceptionV3/momentum/32",
    "Xception/adam/8",
    "ConvNeXtTiny/momentum/8",
    "bert/adamw/16",
    "gpt2/clipped/16",
    "vit/momentum/8",
    "encoder/mixed/32",
    "unet/adam/8",
    "lstm/adam/32",
)
"""The sixteen: families of applications, transformers, a U-Net and a recurrent model, with all optimizers."""


def rows_of(cell: Cell, *, loaded: bool, calibrated: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each budget of a cell; ``error`` where training fails or no plan is within the budget."""
    plain = outcome_of(cell, False, {})["measured_bytes"]
    budgets = [(f"{share:.0%}", int(share * plain)) for share in SHARES]
    if not calibrated:
        budgets.append((LEAST, least_budget_of(cell)))
    about = {"cell": cell.name, "loaded": loaded, "calibrated": calibrated, "plain_bytes": plain}
    for name, budget in budgets:
        row = {**about, "budget": name, "budget_bytes": budget}
        yield row | outcome_of(cell, True, {"budget": budget, "calibrate": calibrated})


def kind_of(row: dict[str, Any]) -> str:
    """Return how a row was measured, in words."""
    return ("loaded" if row["loaded"] else "idle") + (", calibrated" if row["calibrated"] else "")


def used(row: dict[str, Any]) -> float | None:
    """Return which share of its budget the largest step took, or None if nothing was trained."""
    return float(row["measured_bytes"] / row["budget_bytes"]) if "measured_bytes" in row else None


def summary(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return lines that say how many budgets were kept, and how much of them steps took."""
    rows, lines = list(rows), []
    for kind in dict.fromkeys(map(kind_of, rows)):
        here = [row for row in rows if kind_of(row) == kind]
        shares = [share for row in here for share in [used(row)] if share is not None]
        if not shares:
            continue
        above = [share for row in here if row["budget"] != LEAST for share in [used(row)] if share is not None]
        lines.append(
            f"- {kind}: {sum(share <= 1 for share in shares)} of {len(shares)} kept, at most "
            f"{max(shares):.0%} used; above the least {statistics.median(above):.0%} at the median; "
            f"{sum('least_bytes' in row for row in here)} that no plan is within"
        )
    return lines


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return rows as a table in Markdown."""
    lines = ["| cell | machine | budget | | predicted | measured | used | warns |", "|---|---|---|--:|--:|--:|--:|---|"]
    for row in rows:
        begin = f"| {row['cell']} | {kind_of(row)} | {row['budget']} | "
        begin += f"{format_bytes(row['budget_bytes'])} |"
        share = used(row)
        if share is None:
            least = row.get("least_bytes")
            lines.append(f"{begin} {f'the least is {format_bytes(least)}' if least else row['error']} | | | |")
            continue
        figures = " | ".join(format_bytes(row[name]) for name in ("predicted_bytes", "measured_bytes"))
        lines.append(f"{begin} {figures} | {share:.0%} | {'yes' if row['warns'] else ''} |")
    return "\n".join(lines)


def main(_: list[str]) -> int:
    """Run the models and write the table."""
    kept = KeptRows(_OUTPUT.value, "Budgets against what fit takes", KEY, summary, table)
    for cell in named(_NAMES.value, cells(NAMES)):
        with busy_machine() if _LOADED.value else contextlib.nullcontext():
            made = list(rows_of(cell, loaded=_LOADED.value, calibrated=_CALIBRATE.value))
        kept.add(made, lambda row: (row["cell"], row["calibrated"], row["loaded"], BUDGETS.index(row["budget"])))
    kept.print_summary()
    return 0


if __name__ == "__main__":
    app.run(main)
