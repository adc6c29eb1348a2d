"""Steps that XLA compiles, planned by its compiler: ``python -m tools.bench.xla [--models=bert,unet] [--speed]``.

A model is planned as ``fit`` compiles it: without a budget, and for 80, 60 and 45% of the plain step as the compiler
tells it. Each plan is trained by Keras's own ``fit``, twenty steps in a fresh process, whose CPU allocator is given one
region as a GPU's has. What the compiler told is compared with the largest of the steps after the first, without the
dataset. XLA orders for memory, as on GPUs; with ``--speed`` as on CPUs by itself. Rows go to
``tools/results/bench_xla.json``, in which those of other models are kept, and as a table to the ``.md`` beside it.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from tf_memsaver.units import format_bytes
from tools.bench.trained_cells import Cell, made
from tools.shared.models.trained import MODELS
from tools.shared.processes import in_own_process
from tools.shared.results import RESULTS, KeptRows

_MODELS = flags.DEFINE_list("models", [], "models of tools/shared/models/trained.py (default: those below)")
_SPEED = flags.DEFINE_bool("speed", False, "XLA orders for speed, as on CPUs by itself, instead of for memory")
_OUTPUT = flags.DEFINE_string("output", str(RESULTS / "bench_xla.json"), "where to write the rows")

DEFAULT = ("bert", "gpt2", "encoder", "vit", "unet", "MobileNetV2", "VGG16")
BUDGETS: dict[str, str | None] = {"plain": None, "default": None, "80%": "80%", "60%": "60%", "45%": "45%"}
"""What is run, and the budgets of ``optimize``."""

KEY = ("model", "order", "variant")

_REGION_BYTES = 6 << 30
_FOR_MEMORY = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


def _made(name: str) -> tuple[Any, Any]:
    return made(Cell(name, "adam", MODELS[name][1][-1]), jit_compile=True)


def plans(name: str, for_memory: bool) -> dict[str, Any]:
    """Return plans of a model as JSON, by budget; a budget that cannot be met has the least bytes in their place."""
    _prepare(for_memory)
    import tf_memsaver

    model, data = _made(name)
    traced = tf_memsaver.trace(model, data=data)
    found: dict[str, Any] = {"plain": traced.plan(strategy="plain").to_json()}
    for variant, budget in BUDGETS.items():
        if variant != "plain":
            try:
                found[variant] = traced.plan(budget=budget).to_json()
            except tf_memsaver.InfeasibleBudgetError as error:
                found[variant] = error.least_bytes
    return found


def step_bytes(name: str, plan: dict[str, Any] | None, for_memory: bool) -> int:
    """Return the bytes of a step by a plan, or of the plain step, as ``fit`` takes them."""
    _prepare(for_memory)
    import tensorflow as tf

    import tf_memsaver
    from tools.examples.running import train

    tf.raw_ops.Empty(shape=[_REGION_BYTES >> 20, 1 << 20], dtype=tf.uint8, init=False)

    def make() -> tuple[Any, Any]:
        model, data = _made(name)
        if plan is not None:
            model = tf_memsaver.apply_plan(model, tf_memsaver.Plan.from_json(plan), data=data)
        return model, data

    return train(make, memsaver=False).later_bytes


def _prepare(for_memory: bool) -> None:
    os.environ["XLA_FLAGS"] = _FOR_MEMORY if for_memory else ""


def rows_of(name: str, for_memory: bool) -> list[dict[str, Any]]:
    """Return a row for each budget."""
    rows: list[dict[str, Any]] = []
    found = in_own_process(plans, name, for_memory)
    for variant, plan in found.items():
        row = {"model": name, "order": "memory" if for_memory else "speed", "variant": variant}
        if isinstance(plan, int):
            rows.append({**row, "least_bytes": plan})
            continue
        recomputes = any(segment["mode"] != "store" for segment in plan["segments"])
        row |= {
            "compiled_bytes": plan["peak_bytes"],
            "plain_compiled_bytes": plan["plain_peak_bytes"],
            "step_overhead": plan["step_overhead"],
            "measured_bytes": in_own_process(step_bytes, name, plan if recomputes else None, for_memory),
        }
        if variant.endswith("%"):
            row["budget_bytes"] = int(float(variant[:-1]) / 100 * plan["plain_peak_bytes"])
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a table in Markdown."""
    lines = [
        "| model | XLA orders for | budget | by the compiler | of plain | measured | of the budget | more compute |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        begin = f"| {row['model']} | {row['order']} | {row['variant']} |"
        if "least_bytes" in row:
            lines.append(f"{begin} none fits; the least compiled: {format_bytes(row['least_bytes'])} | | | | |")
            continue
        budget = row.get("budget_bytes")
        cells = (
            format_bytes(row["compiled_bytes"]),
            f"{row['compiled_bytes'] / row['plain_compiled_bytes']:.0%}",
            format_bytes(row["measured_bytes"]),
            "" if not budget else f"{row['measured_bytes'] / budget:.0%}",
            f"{row['step_overhead']:+.1%}",
        )
        lines.append(f"{begin} {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return in lines what rows say together."""
    run = [row for row in rows if "measured_bytes" in row]
    errors = [abs(row["compiled_bytes"] / row["measured_bytes"] - 1) for row in run]
    shares = [row["compiled_bytes"] / row["plain_compiled_bytes"] for row in run if row["variant"] == "default"]
    used = [row["measured_bytes"] / row["budget_bytes"] for row in run if "budget_bytes" in row]
    lines = []
    if errors:
        lines.append(
            f"- the compiler is off by {statistics.median(errors):.1%} at the median, {max(errors):.1%} at worst"
        )
    if shares:
        lines.append(f"- without a budget a step takes {statistics.median(shares):.0%} of the plain one at the median")
    if used:
        kept = sum(share <= 1 for share in used)
        none = sum("least_bytes" in row for row in rows)
        lines.append(f"- budgets: {kept} of {len(used)} kept, at most {max(used):.0%} used; {none} could not be met")
    return lines


def main(_: list[str]) -> int:
    """Run the models and write the table."""
    kept = KeptRows(_OUTPUT.value, "Steps that XLA compiles", KEY, summary, table)
    for name in _MODELS.value or DEFAULT:
        kept.add(rows_of(name, not _SPEED.value))
    kept.print_summary()
    return 0


if __name__ == "__main__":
    app.run(main)
