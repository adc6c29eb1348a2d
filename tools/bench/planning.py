"""How long planning takes for models of ``keras.applications``: ``python -m tools.bench.planning [--names=VGG16]``.

CPU seconds of each model at its own image size, batch 8, Adam, in a process of its own: one trace of Keras's plain
training step, the capture of the step, and planning by default, for the least peak and within 60% of the plain peak,
also where that is refused. Rows go to ``tools/results/bench_planning.json``, in which those of other models are kept,
and as a table to the ``.md`` beside it.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

from absl import app, flags

from tf_memsaver.errors import InfeasibleBudgetError
from tf_memsaver.ir.graph import Graph
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import solve
from tools.shared.processes import in_own_process
from tools.shared.results import RESULTS, KeptRows, error_text

_NAMES = flags.DEFINE_list("names", [], "models (default: all)")
_OUTPUT = flags.DEFINE_string("output", str(RESULTS / "bench_planning.json"), "where to write the rows")

PLANS: dict[str, dict[str, Any]] = {
    "auto": {},
    "min_peak": {"strategy": "min_peak"},
    "60%": {"budget_share": 0.6},
}
"""Fields of the request for each plan."""

PLANNING_TARGET, CAPTURE_TARGET = 2.0, 1.3
"""Seconds of each plan, and the capture as a multiple of one trace of the plain step."""

BATCH_SIZE = 8

OPEN_SIZE = 224
"""Pixels along each side where a model takes images of any size."""


def names() -> list[str]:
    """Return the models of ``keras.applications``."""
    import keras

    return sorted(name for name, made in vars(keras.applications).items() if name[0].isupper() and callable(made))


def seconds_of(name: str) -> dict[str, Any]:
    """Return what each part of planning takes for a model, in CPU seconds of this process."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tf_memsaver.api import trace

    def compiled() -> Any:
        model = getattr(keras.applications, name)(weights=None)
        model.compile("adam", "sparse_categorical_crossentropy", jit_compile=False)
        model.optimizer.build(model.trainable_variables)
        return model

    model = compiled()
    shape = [size or OPEN_SIZE for size in model.input_shape[1:]]
    images, labels = np.zeros((BATCH_SIZE, *shape), np.float32), np.zeros(BATCH_SIZE, np.int64)
    data = tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH_SIZE)
    batch, another = next(iter(data)), compiled()
    row: dict[str, Any] = {}
    row["trace"], _ = _timed(lambda: tf.function(model.train_step).get_concrete_function(batch))
    row["capture"], captured = _timed(lambda: trace(another, data=data))
    row["ops"] = len(captured.graph.ops)
    for plan, fields in PLANS.items():
        row[plan], _ = _timed(functools.partial(_planned, captured.graph, Request(**fields)))
    return row


def _planned(graph: Graph, request: Request) -> Plan | None:
    """Return a plan, or None where none is within the budget: to find that out takes time, too."""
    try:
        return solve(graph, request)
    except InfeasibleBudgetError:
        return None


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.process_time()
    result = run()
    return time.process_time() - begin, result


def row_of(name: str) -> dict[str, Any]:
    """Return the row of a model; ``error`` where it cannot be planned."""
    try:
        return {"model": name, **in_own_process(seconds_of, name)}
    except Exception as error:
        return {"model": name, "error": error_text(error)}


def summary(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return lines that compare with the targets."""
    done = [row for row in rows if "error" not in row]
    lines = []
    for plan in PLANS if done else ():
        seconds = [row[plan] for row in done]
        kept = sum(each <= PLANNING_TARGET for each in seconds)
        figures = f"{statistics.median(seconds):.1f} s at the median, {max(seconds):.1f} s at worst"
        lines.append(f"- {plan}: {figures}; {kept} of {len(done)} within {PLANNING_TARGET:.0f} s")
    if done:
        ratios = [row["capture"] / row["trace"] for row in done]
        figures = f"{statistics.median(ratios):.2f} times one plain trace at the median, {max(ratios):.2f} at worst"
        lines.append(f"- capture: {figures} (target: {CAPTURE_TARGET})")
    return lines


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return rows as a table in Markdown, in seconds."""
    columns = ("trace", "capture", *PLANS)
    lines = [f"| model | operations | {' | '.join(columns)} |", f"|---|{'--:|' * (1 + len(columns))}"]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['model']} | {row['error']} |{' |' * len(columns)}")
        else:
            figures = " | ".join(f"{row[column]:.1f}" for column in columns)
            lines.append(f"| {row['model']} | {row['ops']:,} | {figures} |")
    return "\n".join(lines)


def main(_: list[str]) -> int:
    """Time the models and write the table."""
    kept = KeptRows(_OUTPUT.value, "CPU seconds of planning", ("model",), summary, table)
    for name in _NAMES.value or names():
        kept.add([row_of(name)], lambda row: row["model"])
    kept.print_summary()
    return 0


if __name__ == "__main__":
    app.run(main)
