"""Predicted peaks against those of training: ``python -m tools.bench.accuracy [--names=unet] [--quick] [--loaded]``.

Each cell is a model with an optimizer and a batch size. It is trained by Keras's own ``fit``, twenty steps in a fresh
process each: plain, with ``auto``, with ``min_peak`` and for two budgets, 70% and 50% of the plain peak. What was
predicted is compared with the largest of the steps, without the dataset, which on a CPU lies in the same allocator.
``--loaded`` keeps as many processes busy beside it as the machine has cores. Rows go to
``tools/results/bench_accuracy.json``, in which those of other cells are kept, and as a table to the ``.md`` beside it.
``--quick`` takes a few cells of all kinds.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import app, flags

from tf_memsaver.units import format_bytes
from tools.examples.comparing import examples
from tools.shared.models.trained import MODELS
from tools.shared.processes import busy_machine, in_own_process
from tools.shared.results import RESULTS, machine_line, write_rows, write_text

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

TARGETS = {"optimized": (0.03, 0.08), PLAIN: (0.05, 0.12)}
"""What a prediction may be off at the median, and at worst."""


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"learning_rate": 0.01}),
    "momentum": ("SGD", {"learning_rate": 0.01, "momentum": 0.9}),
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
    "lion": ("Lion", {"learning_rate": 1e-4}),
    "clipped": ("Adam", {"global_clipnorm": 1.0}),
    "mixed": ("Adam", {}),
}
"""Classes and options; ``mixed`` is for mixed precision."""

QUICK = (
    "MobileNetV2/adam/16",
    "ResNet50/momentum/16",
    "DenseNet121/sgd/16",
    "EfficientNetB0/lion/16",
    "bert/adamw/16",
    "encoder/clipped/32",
    "encoder/mixed/32",
    "unet/adam/8",
    "lstm/adam/32",
    "example/unet",
    "example/siamese",
    "example/swin",
)


class Cell(NamedTuple):
    """What is trained: a model with an optimizer and a batch size, or an example with its own."""

    model: str
    optimizer: str = ""
    batch_size: int = 0

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.model}/{self.optimizer}/{self.batch_size}" if self.optimizer else f"example/{self.model}"


def cells() -> list[Cell]:
    """Return all cells: each model with two optimizers, one for each batch size, in turn; and the examples."""
    found, kinds = [], list(OPTIMIZERS)
    for number, (model, (_, sizes)) in enumerate(MODELS.items()):
        found += [Cell(model, kinds[(2 * number + place) % len(kinds)], size) for place, size in enumerate(sizes)]
    named = [Cell(model, kind, int(size)) for model, kind, size in (n.split("/") for n in QUICK if n.count("/") == 2)]
    return [*dict.fromkeys([*found, *named]), *map(Cell, examples())]


def _made(cell: Cell) -> Any:
    import keras
    import numpy as np
    import tensorflow as tf

    from tools.shared.training import batch_for

    if not cell.optimizer:
        return importlib.import_module(f"tools.examples.{cell.model}").make()
    if cell.optimizer == "mixed":
        keras.mixed_precision.set_global_policy("mixed_float16")
    model = MODELS[cell.model][0]()
    name, options = OPTIMIZERS[cell.optimizer]
    model.compile(getattr(keras.optimizers, name)(**options), "mse", jit_compile=False)
    x = batch_for(model, 4 * cell.batch_size, vocabulary=50)
    shape = (4 * cell.batch_size, *model.outputs[0].shape[1:])
    y = np.random.default_rng(0).random(shape, np.float32)
    return model, tf.data.Dataset.from_tensor_slices((x, y)).shuffle(16).batch(cell.batch_size).prefetch(1)


def train_cell(cell: Cell, memsaver: bool, options: dict[str, Any]) -> Any:
    """Return what comes out of training a cell."""
    from tools.examples.running import train

    return train(lambda: _made(cell), memsaver=memsaver, **options)


# The table ------------------------------------------------------------------------------------------------------------


def measured_rows(cell: Cell, wanted: Sequence[str], loaded: bool) -> list[dict[str, Any]]:
    """Return a row for each variant of a cell; one that fails has the field ``error``."""
    plain = _outcome(cell, PLAIN, False, {})
    rows: list[dict[str, Any]] = []
    for variant in wanted:
        options = dict(VARIANTS[variant])
        if "share" in options and "error" not in plain:
            options = {"budget": int(options["share"] * plain["measured_bytes"])}
        if variant == PLAIN:
            row = plain
        else:
            row = _outcome(cell, variant, True, options)
            if "budget" in options:
                row["budget_bytes"] = options["budget"]
            plain.setdefault("predicted_bytes", row.get("plain_predicted_bytes"))
        rows.append({"cell": cell.name, "variant": variant, "loaded": loaded, **row})
    for row in rows:
        if row["variant"] == PLAIN and "predicted_bytes" in plain:
            row["predicted_bytes"] = plain["predicted_bytes"]
    return rows


def _outcome(cell: Cell, variant: str, memsaver: bool, options: dict[str, Any]) -> dict[str, Any]:
    try:
        outcome = in_own_process(train_cell, cell, memsaver, options)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    row = {"measured_bytes": outcome.step_bytes, "peak_bytes": outcome.peak_bytes}
    if memsaver:
        row |= {"predicted_bytes": outcome.predicted_bytes, "plain_predicted_bytes": outcome.plain_predicted_bytes}
    return row


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
    output = Path(_OUTPUT.value)
    rows: dict[tuple[str, bool, str], dict[str, Any]] = {}
    if output.exists():
        found = json.loads(output.read_text(encoding="utf-8"))["rows"]
        rows = {(row["cell"], row["loaded"], row["variant"]): row for row in found}
    wanted = [cell for cell in cells() if not _QUICK.value or cell.name in QUICK]
    if _NAMES.value:
        wanted = [cell for cell in wanted if any(f"{cell.name}/".startswith(f"{name}/") for name in _NAMES.value)]
    order = {name: place for place, name in enumerate(VARIANTS)}
    for cell in wanted:
        with busy_machine() if _LOADED.value else contextlib.nullcontext():
            made = measured_rows(cell, _VARIANTS.value or list(VARIANTS), _LOADED.value)
        rows.update({(row["cell"], row["loaded"], row["variant"]): row for row in made})
        print("\n".join(table(made).splitlines()[2:]), flush=True)
        kept = [rows[key] for key in sorted(rows, key=lambda key: (key[0], key[1], order[key[2]]))]
        write_rows(output, kept)
        head = [f"# {(__doc__ or '').splitlines()[0].split(':')[0]}", "", machine_line(), "", *summary(kept), ""]
        write_text(output.with_suffix(".md"), "\n".join(head) + "\n" + table(kept) + "\n")
    print("\n".join(summary(rows.values())))
    return 0


if __name__ == "__main__":
    app.run(main)
