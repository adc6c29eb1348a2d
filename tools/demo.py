"""The whole job on ResNet50, for real: plan, rewrite, measure before and after, verify, export, reload and train.

Usage: tools/demo [--budget=BYTES] [--batch_size=N] [--steps=N] [--verify_steps=N]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags, logging
from rich.console import Console
from rich.table import Table

import tf_memsaver
from tf_memsaver.compat.counting import count_memory
from tf_memsaver.display import tables
from tf_memsaver.display.progress import Progress
from tf_memsaver.units import format_bytes
from tools.saved_model_step import gradient_step, one_operation_at_a_time
from tools.shared.models.real import build
from tools.shared.processes import run_module
from tools.shared.records import differing, read

_BUDGET = flags.DEFINE_string("budget", None, "peak memory of a training step (default: smallest within 30% more time)")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "examples in a batch", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 2, "training steps to measure", lower_bound=1)
_VERIFY_STEPS = flags.DEFINE_integer("verify_steps", 1, "training steps to compare", lower_bound=1)


def main(_: list[str]) -> int:
    """Run the demo; return 1 when something that should be identical differs."""
    begin = time.perf_counter()
    # Measuring runs in processes of their own, which need device memory that this process must not take.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    logging.set_verbosity(logging.WARNING)
    one_operation_at_a_time()
    progress, console = Progress(Console(stderr=True)), Console(width=None if sys.stdout.isatty() else 140)
    batch_size, steps = _BATCH_SIZE.value, _STEPS.value

    with progress.stage("building ResNet50 for 128×128 images, compiled with Adam"):
        model = build("ResNet50")
        model.compile("adam", "sparse_categorical_crossentropy")
    with progress.stage("tracing one training step, planning, rewriting"):
        optimized = tf_memsaver.optimize(model, batch_size=batch_size, budget=_BUDGET.value)
    plan = optimized.memsaver_plan
    with progress.stage("measuring the plain model in a process of its own"):
        before = tf_memsaver.measure(model, batch_size=batch_size, steps=steps)
    with progress.stage("measuring the optimized model in a process of its own"):
        after = tf_memsaver.measure(optimized, batch_size=batch_size, steps=steps)
    with progress.stage("training both side by side and comparing"):
        verification = tf_memsaver.verify(model, optimized, batch_size=batch_size, steps=_VERIFY_STEPS.value)
    with tempfile.TemporaryDirectory() as folder:
        reloaded = _export_and_reload(optimized, batch_size, Path(folder), progress)

    console.print(tables.measurements_table(plan, before, after))
    console.print(tables.verification_table(verification))
    console.print(_reload_table(reloaded))
    console.print(
        f"plan: {len(plan.segments)} segments, {plan.recomputed_in_words} recomputed, made in "
        f"{plan.plan_seconds:.2f} s; the demo took {time.perf_counter() - begin:.0f} s",
        highlight=False,
    )
    return 0 if verification.passed and reloaded["identical"] else 1


def _export_and_reload(optimized: Any, batch_size: int, folder: Path, progress: Progress) -> dict[str, Any]:
    """Export, train one step on the SavedModel in a fresh process, and compare with the same step in this one."""
    random = np.random.default_rng(0)
    x = random.standard_normal((batch_size, *optimized.input_shape[1:])).astype(np.float32)
    y = random.integers(0, optimized.output_shape[-1], batch_size)
    np.savez(folder / "batch.npz", x=x, y=y)
    with progress.stage("exporting a SavedModel"):
        tf_memsaver.export_saved_model(optimized, folder / "saved_model")
    names = ("saved_model", "batch.npz", "result.npz")
    with progress.stage("loading it with TensorFlow alone, in a fresh process, and training one step"):
        count_memory()  # Its process does without tf_memsaver, and counts what it takes.
        done = run_module("tools.saved_model_step", *(folder / name for name in names))
    if done.returncode:
        raise SystemExit(f"the step on the SavedModel failed with code {done.returncode}:\n{done.stderr}")
    with progress.stage("the same step on the optimized model"):
        loss, gradients = gradient_step(
            lambda images: optimized(images, training=True), optimized.trainable_variables, x, y
        )
    found = read(folder / "result.npz")
    ours = {f"gradient{number}": gradient.numpy() for number, gradient in enumerate(gradients)}
    theirs = {name: found[name] for name in ours}
    same = len(ours) - len(differing(theirs, ours))
    return {
        "loss": (float(found["loss"]), float(loss)),
        "gradients": (same, len(ours)),
        "difference": max(float(np.max(np.abs(theirs[name] - ours[name]))) for name in ours),
        "activation_bytes": int(found["peak_bytes"] - found["live_bytes"] - found["gradient_bytes"]),
        "peak_bytes": int(found["peak_bytes"]),
        "identical": same == len(ours) and float(found["loss"]) == float(loss),
    }


def _reload_table(reloaded: dict[str, Any]) -> Table:
    table = Table(title="the SavedModel, trained one step in a fresh process by TensorFlow alone", title_justify="left")
    table.add_column("what")
    table.add_column("found", justify="right")
    theirs, ours = reloaded["loss"]
    same, count = reloaded["gradients"]
    table.add_row("loss there, and here", f"{theirs!r}, {ours!r}")
    table.add_row("identical gradients", f"{same} of {count} (largest difference {reloaded['difference']:.3g})")
    table.add_row("measured peak, without optimizer", format_bytes(reloaded["peak_bytes"]))
    table.add_row("of it activations", format_bytes(reloaded["activation_bytes"]))
    return table


if __name__ == "__main__":
    app.run(main)
