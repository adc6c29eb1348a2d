"""Steps that XLA compiles, planned by its compiler: ``python -m tools.bench.xla [--models=bert,unet] [--speed]``.

A model is planned as ``fit`` compiles it: without a budget, and for 90, 75, 60 and 45% of the plain step as the
compiler tells it. Each plan is trained by Keras's own ``fit``, twenty steps in a fresh process, whose CPU allocator is
given one region as a GPU's has. What the compiler told is compared with the largest of the steps after the first,
without the dataset. XLA orders for memory, as on GPUs; with ``--speed`` as on CPUs by itself. Rows go to
``tools/results/bench_xla.json``, in which those of other models are kept, and as a table to the ``.md`` beside it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from absl import app, flags

from tf_memsaver.units import format_bytes
from tools.bench.trained_cells import Cell, made
from tools.shared.models.trained import MODELS
from tools.shared.processes import in_own_process
from tools.shared.results import RESULTS, KeptRows, error_text

_MODELS = flags.DEFINE_list("models", [], "models of tools/shared/models/trained.py (default: those below)")
_SPEED = flags.DEFINE_bool("speed", False, "XLA orders for speed, as on CPUs by itself, instead of for memory")
_OUTPUT = flags.DEFINE_string("output", str(RESULTS / "bench_xla.json"), "where to write the rows")

DEFAULT = (
    *("encoder", "bert", "gpt2", "vit", "unet", "lstm"),
    *("MobileNetV2", "MobileNetV3Small", "VGG16", "ResNet50", "EfficientNetB0", "ConvNeXtTiny"),
)
BUDGETS: dict[str, str | None] = {"plain": None, "default": None, **{f"{n}%": f"{n}%" for n in (90, 75, 60, 45)}}
"""What is run, and the budgets of ``optimize``."""

KEY = ("model", "order", "variant")

LIMIT_SECONDS = 7200
"""What planning a model, or training one, may take."""

COUNT_ALL = {"TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPU_ALLOCATOR_USE_BFC": "1"}
"""The environment in which a CPU's allocator counts every buffer. The one that oneDNN brings counts none below 256 KiB:
of a small model that would leave out most weights and slots. Steps that XLA compiles take no kernel of oneDNN's."""

_OF_BUDGET = ("compiled_bytes", "measured_bytes")
_FOR_MEMORY = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


def _made(name: str) -> tuple[Any, Any]:
    return made(Cell(name, "adam", MODELS[name][1][-1]), jit_compile=True)


def plans(name: str, for_memory: bool) -> dict[str, Any]:
    """Return plans of a model as JSON, by budget, and in ``temporaries`` what the compiler makes for the plain step.

    A budget that cannot be met has its error in a plan's place: the least bytes, and the sentence.
    """
    _prepare(for_memory)
    import tf_memsaver
    from tf_memsaver.check.compiled import compiled_step_memory
    from tf_memsaver.program.data import Batch

    model, data = _made(name)
    traced = tf_memsaver.trace(model, data=data)
    found: dict[str, Any] = {"temporaries": compiled_step_memory(model, Batch(*data.element_spec)).temporary_bytes}
    found["plain"] = traced.plan(strategy="plain").to_json()
    for variant, budget in BUDGETS.items():
        if variant != "plain":
            try:
                found[variant] = traced.plan(budget=budget).to_json()
            except tf_memsaver.InfeasibleBudgetError as error:
                found[variant] = {"least_bytes": error.least_bytes, "error": str(error)}
    return found


def step_bytes(name: str, plan: dict[str, Any] | None, for_memory: bool) -> int:
    """Return the bytes of a step by a plan, or of the plain step, as ``fit`` takes them."""
    _prepare(for_memory)
    import tf_memsaver
    from tools.examples.running import train
    from tools.shared.memory import one_region

    one_region()

    def make() -> tuple[Any, Any]:
        model, data = _made(name)
        if plan is not None:
            model = tf_memsaver.apply_plan(model, tf_memsaver.Plan.from_json(plan), data=data)
        return model, data

    return train(make, memsaver=False).later_bytes


def _prepare(for_memory: bool) -> None:
    os.environ["XLA_FLAGS"] = _FOR_MEMORY if for_memory else ""


def rows_of(name: str, for_memory: bool) -> Iterator[dict[str, Any]]:
    """Yield a row for each budget as it is run; what fails is told in ``error``."""
    begin = {"model": name, "order": "memory" if for_memory else "speed"}
    try:
        found = in_own_process(plans, name, for_memory, timeout=LIMIT_SECONDS)
    except Exception as error:
        yield from ({**begin, "variant": variant, "error": error_text(error)} for variant in BUDGETS)
        return
    temporaries = found.pop("temporaries")
    for variant, plan in found.items():
        row = {**begin, "variant": variant}
        yield row | (plan if "error" in plan else _run(name, variant, plan, temporaries, for_memory))


def _run(name: str, variant: str, plan: dict[str, Any], temporaries: int, for_memory: bool) -> dict[str, Any]:
    """Return what a plan is told to take, and what it takes, as the fields of a row."""
    plain = plan["plain_peak_bytes"]
    fields = {
        "compiled_bytes": plan["peak_bytes"],
        "plain_compiled_bytes": plain,
        # Arguments and outputs are the same with every plan.
        "temporary_bytes": plan["peak_bytes"] - plain + temporaries,
        "plain_temporary_bytes": temporaries,
        "step_overhead": plan["step_overhead"],
    }
    if variant.endswith("%"):
        fields["budget_bytes"] = int(float(variant[:-1]) / 100 * plain)
    recomputes = any(segment["mode"] != "store" for segment in plan["segments"])
    try:
        taken = in_own_process(step_bytes, name, plan if recomputes else None, for_memory, timeout=LIMIT_SECONDS)
    except Exception as error:
        return {**fields, "error": error_text(error)}
    return {**fields, "measured_bytes": taken}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a table in Markdown."""
    lines = [
        "| model | XLA orders for | budget | by the compiler | of plain | temporaries of plain's | measured "
        "| of the budget | more compute |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        begin = f"| {row['model']} | {row['order']} | {row['variant']} |"
        if "error" in row:
            least = row.get("least_bytes")
            told = f"none fits; the least compiled: {format_bytes(least)}" if least else row["error"]
            lines.append(f"{begin} {told} | | | | | |")
            continue
        budget = row.get("budget_bytes")
        cells = (
            format_bytes(row["compiled_bytes"]),
            f"{row['compiled_bytes'] / row['plain_compiled_bytes']:.0%}",
            f"{row['temporary_bytes'] / row['plain_temporary_bytes']:.0%}",
            format_bytes(row["measured_bytes"]),
            "" if not budget else f"{row['measured_bytes'] / budget:.0%}",
            f"{row['step_overhead']:+.1%}",
        )
        lines.append(f"{begin} {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return in lines what rows say together."""
    run = [row for row in rows if "measured_bytes" in row]
    free = [row for row in run if row["variant"] == "default"]
    limited = [row for row in run if "budget_bytes" in row]
    none, failed = (sum("error" in row and ("least_bytes" in row) is named for row in rows) for named in (True, False))
    lines = []
    if run:
        errors = [abs(row["compiled_bytes"] / row["measured_bytes"] - 1) for row in run]
        lines.append(f"- the compiler is off by {median(errors):.1%} at the median, {max(errors):.1%} at worst")
    if free:
        shares = [row["temporary_bytes"] / row["plain_temporary_bytes"] for row in free]
        more = [row["step_overhead"] for row in free]
        lines.append(
            f"- without a budget, temporaries are {median(shares):.0%} of the plain step's at the median, "
            f"{max(shares):.0%} at most, for {median(more):.0%} more compute at the median, {max(more):.0%} at most"
        )
    if limited:
        told, used = ([row[name] / row["budget_bytes"] for row in limited] for name in _OF_BUDGET)
        lines.append(
            f"- budgets: by the compiler {sum(share <= 1 for share in told)} of {len(told)} kept, measured "
            f"{sum(share <= 1 for share in used)}, at most {max(used):.0%} used; {none} could not be met"
        )
    return [*lines, f"- {failed} cells failed"] if failed else lines


def main(_: list[str]) -> int:
    """Run the models and write the table."""
    os.environ.update(COUNT_ALL)  # Each process that is started reads it.
    kept = KeptRows(_OUTPUT.value, "Steps that XLA compiles", KEY, summary, table)
    for name in _MODELS.value or DEFAULT:
        for row in rows_of(name, not _SPEED.value):
            kept.add([row])
    kept.print_summary()
    return 0


if __name__ == "__main__":
    app.run(main)
