"""Our figures on the GPU of this machine: ``tools/gpu_check [--minutes=8] [--output=FILE.json]``.

ResNet50 (224 pixels, batch 32) and a model of the size of BERT-base (256 tokens, batch 16) are trained by Keras's own
``fit``, twenty steps, in TensorFlow's executor and compiled by XLA: plain, by our plan, by Chen's √n plan, and with
Keras's RematScope. Each is trained in a process of its own, as many at a time as there is room for; all but the first
step of each is timed with no other in its steps. The JSON file has for each what was predicted, what XLA's compiler
told, what the device's allocator counted, the step's time, and how far losses and weights are from the plain model's;
of a plain model that is trained twice one sees how far that is from itself. What fails has its error in the row, and
what the time does not suffice for says so. Without a GPU small models are trained on the CPU, which shows that the
check works and nothing else.

Some kernels of GPUs add up in any order, so that two trainings of one model differ. With ``--deterministic`` TensorFlow
takes others, which are slower: then all figures of the plain model and of an optimized one should be equal.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from absl import app, flags

from tf_memsaver.units import format_bytes
from tools.gpu.trained import MODES, PLAIN, TRAINED, USUAL, VARIANTS, Checked, device, outcome_of
from tools.shared.processes import in_own_process
from tools.shared.records import differences
from tools.shared.results import ROOT, error_text, write_rows

_MINUTES = flags.DEFINE_float("minutes", None, "what all of it may take (default: 8, and 2 for a reduced run)", 0.0)
_REDUCED = flags.DEFINE_bool("reduced", False, "train small models, as on a machine without a GPU")
_MODELS = flags.DEFINE_list("models", list(USUAL), f"models to train, of {', '.join(TRAINED)}")
_MODES = flags.DEFINE_list("modes", list(MODES), "graph, xla or both")
_VARIANTS = flags.DEFINE_list("variants", list(VARIANTS), "which of each to train")
_DETERMINISTIC = flags.DEFINE_bool("deterministic", False, "take kernels that always add up in the same order")
_JOBS = flags.DEFINE_integer("jobs", None, "processes at a time (default: what the GPU and the cores have room for)", 1)
_OUTPUT = flags.DEFINE_string("output", str(ROOT / "out" / "gpu_check.json"), "where to write the JSON")

MINUTES, REDUCED_MINUTES = 8.0, 2.0

CELL_SHARE, CELLS_SHARE = 0.35, 0.8
"""What one process may take of all the time, and if several run at a time: XLA compiles up to six steps for a plan."""

JOB_BYTES, JOB_CORES = 16 << 30, 3
"""The memory of a GPU and the cores that are enough for one process: as many run at a time as there is room for."""

LEAST_SECONDS = 10.0
"""With less time than this left nothing more is begun."""

Run = Callable[[Checked, float], tuple[dict[str, Any], Any]]
"""Trains something within some seconds; returns what ``outcome_of`` does."""


def cells(
    models: Sequence[str],
    modes: Sequence[str],
    variants: Sequence[str],
    *,
    reduced: bool,
    deterministic: bool = False,
) -> list[Checked]:
    """Return what is trained, what tells most first: the plain step and ours, then what others do."""
    wanted = [each for each in VARIANTS if each in variants]
    rounds = [wanted[:2], wanted[2:]]
    return [
        Checked(model, mode, variant, reduced, deterministic)
        for some in rounds
        for mode in MODES
        if mode in modes
        for variant in some
        for model in models
    ]


def rows_of(wanted: Sequence[Checked], seconds: float, run: Run, jobs: int = 1) -> Iterator[dict[str, Any]]:
    """Yield a row for each of what is wanted, as it is trained; after so many seconds the rest is left out.

    A row waits for that of its plain step, which it is compared with.
    """
    end = time.monotonic() + seconds
    most = (CELL_SHARE if jobs == 1 else CELLS_SHARE) * seconds
    plain: dict[tuple[str, str], Any] = {}
    waiting: dict[tuple[str, str], list[tuple[dict[str, Any], Any]]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(_row_of, checked, end, most, run): checked for checked in wanted}
        awaited = {(each.model, each.mode) for each in wanted if each.variant == PLAIN}
        for done in as_completed(running):
            checked = running.pop(done)  # An outcome has all weights: none is kept longer than needed.
            of = checked.model, checked.mode
            if checked.variant == PLAIN:
                awaited.discard(of)
                row, plain[of] = done.result()
                yield row
            else:
                waiting.setdefault(of, []).append(done.result())
            if of not in awaited:
                for row, outcome in waiting.pop(of, ()):
                    if outcome is not None and plain.get(of) is not None:
                        row["parity"] = parity(plain[of], outcome)
                    yield row


def _row_of(checked: Checked, end: float, most: float, run: Run) -> tuple[dict[str, Any], Any]:
    """Return the row of a training that is run before ``end``, in ``most`` seconds, and its outcome, if it has one."""
    row = dict(zip(Checked._fields, checked, strict=True))
    left = end - time.monotonic()
    if left < LEAST_SECONDS:
        return {**row, "error": "not run: the time was over (--minutes)"}, None
    try:
        fields, outcome = run(checked, min(left, most))
    except Exception as error:
        return {**row, "error": error_text(error, 500)}, None
    return {**row, **fields, **({} if outcome is None else _figures(outcome))}, outcome


def _in_own_process(turns: str, checked: Checked, seconds: float) -> tuple[dict[str, Any], Any]:
    fields, outcome = in_own_process(outcome_of, checked, turns, timeout=seconds)
    return fields, outcome


def jobs_on(there: Mapping[str, Any]) -> int:
    """Return how many processes have room on a machine at a time, by its GPU's memory and its cores."""
    return max(1, min(there["bytes_left"] // JOB_BYTES, (os.cpu_count() or 1) // JOB_CORES))


def _figures(outcome: Any) -> dict[str, Any]:
    return {
        # The first step is apart, since it tries algorithms out.
        "measured_bytes": outcome.later_bytes,
        "measured_with_first_step_bytes": outcome.peak_bytes,
        "step_seconds": outcome.step_seconds,
        "losses": outcome.losses["loss"],
    }


def parity(plain: Any, other: Any) -> dict[str, Any]:
    """Return how far the losses and variables of two trainings are apart.

    ``largest_ulps`` is in units in the last place of a variable's largest number, and None where numbers have no
    difference, such as those that are not finite.
    """
    named = [{str(place): value for place, value in enumerate(each.variables)} for each in (plain, other)]
    apart = differences(*named)
    largest = max(apart.values(), default=0.0)
    losses = list(zip(plain.losses["loss"], other.losses["loss"], strict=True))
    return {
        "identical": not any(apart.values()) and all(left == right for left, right in losses),
        "variables": len(apart),
        "variables_identical": sum(not each for each in apart.values()),
        "largest_ulps": largest if largest < float("inf") else None,
        "largest_loss_difference": max((abs(right / left - 1) for left, right in losses if left), default=0.0),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a table in Markdown."""
    lines = [
        "| model | mode | step | predicted | compiled | measured | seconds | variables equal to plain's |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        of = "small model for " if row["reduced"] else ""
        begin = f"| {of}{row['model']} | {row['mode']} | {row['variant']} |"
        if "error" in row:
            lines.append(f"{begin} {row['error'].splitlines()[0][:100]} | | | | |")
            continue
        figures = (row.get(name) for name in ("predicted_bytes", "compiled_bytes", "measured_bytes"))
        same = row.get("parity")
        told = f"{same['variables_identical']} of {same['variables']}" if same else ""
        sizes = " | ".join("" if each is None else format_bytes(each) for each in figures)
        lines.append(f"{begin} {sizes} | {row['step_seconds']:.4f} | {told} |")
    return "\n".join(lines)


def main(_: list[str]) -> int:
    """Train, and write what came out after each process."""
    for flag, known in ((_MODELS, TRAINED), (_MODES, MODES), (_VARIANTS, VARIANTS)):
        if not set(flag.value) <= set(known):
            raise app.UsageError(f"--{flag.name} is of {', '.join(known)}.")
    there = in_own_process(device)
    reduced = _REDUCED.value or not there["gpus"]
    if not there["gpus"]:
        print(
            "There is no GPU that TensorFlow sees: small models are trained on the CPU. No figure says more than that."
        )
    minutes = _MINUTES.value or (REDUCED_MINUTES if reduced else MINUTES)
    jobs = _JOBS.value or jobs_on(there)
    about = {"device": there, "reduced": reduced, "minutes": minutes, "jobs": jobs}
    rows: list[dict[str, Any]] = []
    wanted = cells(_MODELS.value, _MODES.value, _VARIANTS.value, reduced=reduced, deterministic=_DETERMINISTIC.value)
    if jobs > 1:
        os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"  # Or the first process takes all of the GPU.
    with tempfile.NamedTemporaryFile() as turns:
        run = functools.partial(_in_own_process, turns.name)
        for row in rows_of(wanted, 60 * minutes, run, jobs):
            rows.append(row)
            rows.sort(key=lambda row: wanted.index(Checked(*(row[name] for name in Checked._fields))))
            write_rows(_OUTPUT.value, rows, **about)
            print(table([row]).splitlines()[-1], flush=True)
    print(f"\n{table(rows)}\n\nwritten to {Path(_OUTPUT.value)}")
    return 0


if __name__ == "__main__":
    app.run(main)
