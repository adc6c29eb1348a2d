"""Recurrent layers cut along time: ``python -m tools.bench.recurrence [--steps=100,300] [--paper]``.

Two LSTMs of 128 units read series of one feature, batch 32, and are planned for the least peak at no more than one
extra forward pass (``strategy="min_peak"``): as they are, and with ``time_chunks="auto"``. Steps of both are measured
in Keras's own ``fit``, in fresh processes that count all buffers. The summary fits how activations grow with the steps.

``--paper`` takes the network of Chen et al. (2016, arXiv:1604.06174, section 5.3) instead: four LSTMs of 1024 units,
batch 64, 1000 steps of 50 features, and a softmax of 5000 classes, at the last step and at every one. The plain step is
predicted alone; with ``--run``, one with chunks is run. Rows go to ``tools/results/bench_recurrence.json``, in which
others are kept, and as a table to the ``.md`` beside it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from absl import app, flags

from tf_memsaver.units import format_bytes
from tools.shared.processes import in_own_process
from tools.shared.results import RESULTS, KeptRows

if TYPE_CHECKING:
    import keras

_STEPS = flags.DEFINE_list("steps", ["100", "300", "1000", "3000", "10000"], "numbers of time steps")
_RUN_TO = flags.DEFINE_integer("run_to", 10000, "the most time steps of which steps are run; more are predicted alone")
_PAPER = flags.DEFINE_bool("paper", False, "the paper's network instead")
_RUN = flags.DEFINE_bool("run", False, "with --paper: run steps with chunks where only the last step has a softmax")
_OUTPUT = flags.DEFINE_string("output", str(RESULTS / "bench_recurrence.json"), "where to write the rows")

KEY = ("network", "steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """LSTMs on top of each other, and a softmax at the last step or, ``at_each``, at every one."""

    layers: int
    units: int
    batch: int
    features: int
    classes: int
    at_each: bool = False

    def built(self, steps: int) -> keras.Model:
        """Return the model, compiled."""
        import keras

        keras.utils.set_random_seed(0)
        returns = [True] * (self.layers - 1) + [self.at_each]
        model = keras.Sequential(
            [
                keras.Input((steps, self.features)),
                *[keras.layers.LSTM(self.units, return_sequences=sequences) for sequences in returns],
                keras.layers.Dense(self.classes, activation="softmax"),
            ]
        )
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model


NETWORKS = {
    "two LSTMs of 128": Network(layers=2, units=128, batch=32, features=1, classes=10),
    "paper, last step": Network(layers=4, units=1024, batch=64, features=50, classes=5000),
    "paper, every step": Network(layers=4, units=1024, batch=64, features=50, classes=5000, at_each=True),
}


def predicted(name: str, steps: int) -> dict[str, Any]:
    """Return what is predicted of the plain step, of the least peak without chunks, and with them."""
    import tf_memsaver

    network = NETWORKS[name]
    model = network.built(steps)
    whole = tf_memsaver.search_plan(model, batch_size=network.batch, strategy="min_peak")
    plan = tf_memsaver.search_plan(model, batch_size=network.batch, strategy="min_peak", time_chunks="auto")
    return {
        "weight_bytes": sum(math.prod(each.shape) * 4 for each in model.weights),
        "plain_bytes": whole.plain_peak_bytes,
        "whole_bytes": whole.peak_bytes,
        "chunked_bytes": plan.peak_bytes,
        "step_overhead": plan.step_overhead,
        "plan": plan.to_json(),
    }


def measured(name: str, steps: int, plan: dict[str, Any] | None) -> dict[str, Any]:
    """Return the peak and the time of real steps: of plain ones, or by a plan. On a busy machine times say little."""
    os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"
    import tf_memsaver

    network = NETWORKS[name]
    model = network.built(steps)
    if plan is not None:
        model = tf_memsaver.apply_plan(model, tf_memsaver.Plan.from_json(plan))
    found = tf_memsaver.measure(model, batch_size=network.batch, steps=2 if name.startswith("paper") else 5)
    return {"bytes": found.peak_bytes, "seconds": found.step_seconds}


def row_of(name: str, steps: int, variants: Sequence[str]) -> dict[str, Any]:
    """Return what is predicted, and measured for some of ``"plain"`` and ``"chunked"``."""
    row = {"network": name, "steps": steps, **in_own_process(predicted, name, steps)}
    plan = row.pop("plan")
    for variant in variants:
        found = in_own_process(measured, name, steps, plan if variant == "chunked" else None)
        row |= {f"{variant}_measured_{what}": value for what, value in found.items()}
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a table in Markdown."""
    lines = [
        "| network | steps | plain | whole layers | in chunks | of plain | extra time | plain, measured | in chunks | "
        "of plain |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        cells = [row["network"], str(row["steps"])]
        cells += [format_bytes(row[f"{variant}_bytes"]) for variant in ("plain", "whole", "chunked")]
        cells += [f"1/{row['plain_bytes'] / row['chunked_bytes']:.1f}", f"{row['step_overhead']:+.0%}"]
        plain, chunked = (row.get(f"{variant}_measured_bytes") for variant in ("plain", "chunked"))
        cells += ["" if each is None else format_bytes(each) for each in (plain, chunked)]
        cells.append("" if plain is None or chunked is None else f"1/{plain / chunked:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def exponent(rows: Sequence[dict[str, Any]], name: str) -> float:
    """Return the power of the steps that what a step takes beyond the weights grows with, by least squares."""
    points = [(math.log(row["steps"]), math.log(row[name] - row["weight_bytes"])) for row in rows]
    x, y = (sum(each) / len(points) for each in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return in lines what rows say together."""
    rows = [row for row in rows if not row["network"].startswith("paper")]
    lines = []
    for name in ("plain_bytes", "chunked_bytes", "plain_measured_bytes", "chunked_measured_bytes"):
        known = [row for row in rows if name in row]
        if len(known) > 1:
            words = name.removesuffix("_bytes").replace("plain", "the plain step").replace("chunked", "in chunks")
            power = exponent(known, name)
            lines.append(f"- {words.replace('_', ', ')}: grows as the steps to the power of {power:.2f}")
    return lines


def _order(row: dict[str, Any]) -> Any:
    return -list(NETWORKS).index(row["network"]), row["steps"]


def main(_: list[str]) -> int:
    """Run the networks and write the table."""
    kept = KeptRows(_OUTPUT.value, "Recurrent layers cut along time", KEY, summary, table)
    if _PAPER.value:
        for name in ("paper, last step", "paper, every step"):
            kept.add([row_of(name, 1000, ["chunked"] if _RUN.value and name.endswith("last step") else [])], _order)
    else:
        for steps in map(int, _STEPS.value):
            kept.add(
                [row_of("two LSTMs of 128", steps, ["plain", "chunked"] if steps <= _RUN_TO.value else [])], _order
            )
    kept.print_summary()
    return 0


if __name__ == "__main__":
    app.run(main)
