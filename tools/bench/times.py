"""Predicted step times against measured ones: by the roofline, and by operations timed on this machine.

``python -m tools.bench.times`` plans each model for two overheads, with and without ``profile=True``, runs the plain
step and the four others in turns, and writes ``tools/results/bench_times.md``. Measured is the median of the ratios to
the plain step of the same round, traced for the batch size that is planned for; *free batch* is the same for steps
traced with an open batch dimension, where graph optimisation knows fewer shapes. Some ten minutes on two cores; other
work on the machine spoils it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags

from tf_memsaver.options.table import Granularity
from tools.shared.processes import in_own_process
from tools.shared.results import RESULTS, machine_line, write_text

_OUTPUT = flags.DEFINE_string("output", str(RESULTS / "bench_times.md"), "where to write the table")
_MODELS = flags.DEFINE_list("models", [], "names of models (default: all)")

LIMITS = (0.05, 0.3)
"""Values of ``max_overhead`` to plan for."""

ROUNDS = 9


def _application(name: str) -> Any:
    from tools.shared.models.real import application

    return application(name, classes=10)


def _bert() -> Any:
    from tools.shared.models.real import bert

    return bert(layers=6, width=256, heads=4, length=64, vocabulary=100)


def _vit() -> Any:
    from tools.shared.models.real import vit

    return vit(layers=4, width=192, heads=3, patch=16)


CASES: dict[str, tuple[Callable[[], Any], int, Granularity]] = {
    "ResNet50": (lambda: _application("ResNet50"), 16, "layer"),
    "MobileNetV2": (lambda: _application("MobileNetV2"), 16, "layer"),
    "DenseNet121": (lambda: _application("DenseNet121"), 8, "layer"),
    "BERT, 6 layers": (_bert, 16, "op"),
    "ViT, 4 layers": (_vit, 8, "op"),
}
"""How to build a model, its batch size, and the granularity of its plans."""


def _rows(name: str) -> list[str]:
    import keras

    import tf_memsaver
    from tf_memsaver.check.training_step import TrainingStep
    from tf_memsaver.program.batch import synthetic_batch

    build, batch_size, granularity = CASES[name]
    keras.utils.set_random_seed(0)
    model = build()
    plans = {
        (profile, limit): tf_memsaver.search_plan(
            model, batch_size=batch_size, max_overhead=limit, granularity=granularity, profile=profile
        )
        for profile in (False, True)
        for limit in LIMITS
    }
    batch = synthetic_batch(model, batch_size)
    models: dict[Any, Any] = {None: model, **{key: tf_memsaver.apply_plan(model, plan) for key, plan in plans.items()}}
    steps = {
        (free, key): TrainingStep(each, "graph", batch, free_batch=free)
        for free in (False, True)
        for key, each in models.items()
    }
    taken: dict[Any, list[float]] = {key: [] for key in steps}
    for number in range(ROUNDS + 2):
        for key, step in steps.items():
            begin = time.perf_counter()
            step.run(batch)
            if number >= 2:
                taken[key].append(time.perf_counter() - begin)
    rows = []
    for (profile, limit), plan in plans.items():
        known, free = (_extra(taken[is_free, (profile, limit)], taken[is_free, None]) for is_free in (False, True))
        rows.append(
            f"| {name} | {batch_size} | {granularity} | {'measured' if profile else 'roofline'} | {limit:.0%} | "
            f"{plan.peak_bytes / plan.plain_peak_bytes:.0%} | {plan.step_overhead:+.1%} | {free:+.1%} | {known:+.1%} | "
            f"{100 * (plan.step_overhead - known):+.1f} |"
        )
    return rows


def _extra(ours: Sequence[float], plain: Sequence[float]) -> float:
    """Return the extra time as a share of the plain step's: the median of the ratios of each round."""
    return statistics.median(one / other for one, other in zip(ours, plain, strict=True)) - 1


def main(_: list[str]) -> int:
    """Run the models, each in a process of its own, and write the table."""
    head = "| model | batch | granularity | times | allowed | peak | predicted | free batch | measured | points off |"
    rows = [head, "|---|---:|---|---|---:|---:|---:|---:|---:|---:|"]
    for name in _MODELS.value or CASES:
        rows += in_own_process(_rows, name)
        print("\n".join(rows[-2 * len(LIMITS) :]), flush=True)
    off = [abs(float(row.split("|")[-2])) for row in rows[2:]]
    summary = f"Off by {statistics.median(off):.1f} points at the median, {max(off):.1f} at worst."
    intro = (
        "Predicted and measured extra time of a step (`tools/bench/times.py`); *times* tells what predictions come "
        "from, *free batch* is measured with an open batch dimension."
    )
    text = [intro, "", machine_line(), "", *rows, "", summary]
    write_text(_OUTPUT.value, "\n".join(text) + "\n")
    return 0


if __name__ == "__main__":
    app.run(main)
