"""Train models in every way that people train them, plain and optimized, and compare what comes out, bit by bit.

Usage: python -m tools.conformance [--groups=modes,precisions] [--models=albert] [--modes=fit] [--output=FILE.json]

A cell is a model, a mode, a precision, a strategy, a granularity and a kind of plan (of least peak, if nothing else is
said). Its two variants, plain and optimized, are trained for five steps in a process each. Losses, gradients (where the
mode shows them), weights, state and optimizer slots are compared: by bits or, where XLA compiles the step, by the
largest difference in units in the last place of a tensor's largest number. There, a third process trains the plain
model without XLA: the optimized model may differ from the plain one by four times what XLA makes of the plain one, a
loss of outputs in half precision by four of their units more.
Where bits differ though nothing was compiled, the plain model is trained again, up to six times beside busy processes:
TensorFlow's own sums of three and more terms start with a term whose buffer is free by then, or add in the order of
arrival, so that some models differ from run to run, and more so on a busy machine. The cell is then identical to one of
the plain runs, or said to vary, by at most four times what the plain runs do.
Results go to a JSON file, row by row, and as Markdown tables to stdout; with --resume, cells that the file has and that
did not fail are not run again. The exit code is 1 if a cell failed.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from absl import app, flags
from rich.progress import track

from tf_memsaver.units import format_bytes
from tools.conformance.cell import TRAINING_MODES, Cell, run_variant
from tools.conformance.models import APPLICATIONS, MODELS, OWN_LAYERS, RAW, SMALL, TASKS
from tools.shared.processes import busy_machine, free_addresses
from tools.shared.records import differences, read
from tools.shared.results import RESULTS, ROOT, write_rows

_RESULTS = RESULTS / "conformance.json"
_OUTPUT = flags.DEFINE_string("output", str(_RESULTS), "where to write the JSON")
_GROUPS = flags.DEFINE_list("groups", [], "parts of the matrix (default: all)")
_MODELS = flags.DEFINE_list("models", [], "names of models (default: all)")
_MODES = flags.DEFINE_list("modes", [], "names of modes (default: all)")
_RESUME = flags.DEFINE_bool("resume", False, "keep the rows in the output file, but for failed ones")
_RUN_AGAIN = ("FAILED", "plain fails")
_JOBS = flags.DEFINE_integer("jobs", 2, "processes at a time", lower_bound=1)

_PROCESSES = multiprocessing.get_context("forkserver")
"""Each process is a copy of one that has imported TensorFlow and done nothing with it."""

_OF_CLASSES = ("sequential", "residual", "text_classifier", "frozen_backbone", "partly_frozen")
"""Models with one class for a sample, which can be weighted."""

_OF_MANY_OUTPUTS = ("dictionaries", "encoder_decoder", "language_model", "own_language_model", "own_messages", "unet")
"""Models whose loss has more than a number for a sample."""

_ALLOWANCE = 4.0
"""Times the difference that XLA makes to the plain model, or another run of it, and units beside."""

_HALF = {"mixed_float16": 2.0**13, "mixed_bfloat16": 2.0**16}
"""By precision, the units of float32 in a unit in the last place of what is computed in it."""

_PLAIN_RUNS = 6
"""Runs more of a plain model that the optimized one differs from."""


_ONLY_FIT = ("evaluate_predict", "sample_weight")
"""Modes of ``fit`` that a ``train_step`` without targets has no use for, beside loops of one's own."""


_OF_TASKS = (("fit",), ("fit", "mixed_float16"), ("fit", "mixed_bfloat16"), ("loop_eager",), ("fit_xla",))
"""Modes and precisions in which the larger models are trained."""


def _trained_by(model: str, mode: str) -> bool:
    if MODELS[model].has_own_loop and (mode.startswith("loop") or mode in _ONLY_FIT):
        return False
    if mode == "fit_raw":
        return False
    if mode == "class_weight":
        return model in _OF_CLASSES
    if (model, mode) == ("layer_policies", "clipping"):
        # Keras adds up norms of several dtypes.
        return False
    return mode != "loop_distributed" and (mode != "sample_weight" or model not in _OF_MANY_OUTPUTS)


def _groups() -> dict[str, list[Cell]]:
    modes = [Cell(model, mode) for model in SMALL for mode in TRAINING_MODES if _trained_by(model, mode)]
    precise = ("loop_function", "fit", "fit_xla")
    precisions = [
        Cell(model, mode, precision)
        for precision in ("mixed_float16", "mixed_bfloat16", "float64")
        for model in SMALL
        for mode in precise
        if model != "layer_policies"
        and _trained_by(model, mode)
        # Its loop does not scale losses.
        and (model, precision) != ("gan", "mixed_float16")
    ]
    return {
        "modes": modes,
        "precisions": precisions,
        "strategies": [
            Cell(model, mode, strategy=name, granularity=granularity)
            for granularity in ("layer", "op")
            for name, mode in (
                ("mirrored", "fit"),
                ("mirrored", "loop_distributed"),
                ("multiworker", "loop_distributed"),
            )
            for model in SMALL
            if mode == "fit" or not SMALL[model].has_own_loop
        ],
        "operations": [
            Cell(model, mode, granularity="op")
            for model in SMALL
            for mode in ("loop_function", "fit")
            if _trained_by(model, mode)
        ],
        "own_layers": [
            *(
                Cell(model, mode, granularity="auto")
                for model in OWN_LAYERS
                for mode in TRAINING_MODES
                # A plan that cuts inside layers is for graphs, and says so in an eager loop.
                if mode != "loop_eager" and _trained_by(model, mode)
            ),
            *(
                Cell(model, mode, precision, granularity="auto")
                for model in OWN_LAYERS
                for mode in ("fit", "loop_function")
                for precision in ("mixed_float16", "mixed_bfloat16", "float64")
            ),
            *(
                Cell(model, mode, granularity=granularity)
                for model in OWN_LAYERS
                for mode in ("fit", "loop_function", "loop_eager")
                for granularity in ("layer", "op")
                if (granularity, mode) != ("op", "loop_eager")
            ),
            *(Cell(model, "fit", strategy="mirrored", granularity="auto") for model in OWN_LAYERS),
            *(Cell(model, "fit", granularity="auto") for model in (*SMALL, *TASKS)),
        ],
        "nested": [
            Cell(model, mode, granularity=granularity, plan="nested")
            for model in SMALL
            for mode, granularity in (("loop_eager", "layer"), ("fit", "layer"), ("fit", "op"), ("loop_function", "op"))
            if _trained_by(model, mode)
        ],
        "tasks": [
            *(Cell(model, *how) for model in TASKS for how in _OF_TASKS),
            *(Cell(model, "fit_raw") for model in RAW),
        ],
        "applications": [Cell(model, "fit") for model in APPLICATIONS],
    }


def cells() -> list[Cell]:
    """Return the cells that were asked for."""
    groups = _groups()
    chosen = [cell for name in (_GROUPS.value or groups) for cell in groups[name]]
    return [
        cell
        for cell in dict.fromkeys(chosen)
        if (not _MODELS.value or cell.model in _MODELS.value) and (not _MODES.value or cell.mode in _MODES.value)
    ]


# Running --------------------------------------------------------------------------------------------------------------


def run(cell: Cell) -> dict[str, Any]:
    """Train both variants of a cell, each in a process of its own; return the row of the table."""
    with tempfile.TemporaryDirectory(prefix="conformance_") as name:
        folder = Path(name)
        variants = ("plain", "optimized") if cell.uncompiled == cell.mode else ("plain", "optimized", "uncompiled")
        facts = {variant: _train(cell, variant, folder) for variant in variants}
        row: dict[str, Any] = {**cell._asdict(), "commit": _commit(), **_outcome(cell, facts, folder)}
        if row["outcome"] == "FAILED" and "units" in row and cell.uncompiled == cell.mode:
            row.update(_against_other_runs(cell, folder))
    return row


@functools.cache
def _commit() -> str:
    """Return the commit that is run, or nothing where there is no repository."""
    command = ["git", "-C", os.fspath(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _train(cell: Cell, variant: str, folder: Path) -> dict[str, Any]:
    workers = free_addresses(2) if cell.strategy == "multiworker" else []
    processes = [
        _PROCESSES.Process(target=run_variant, args=(cell, variant, folder, workers, number))
        for number in range(len(workers) or 1)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    written = folder / f"{variant}.json"
    if not written.exists():
        return {"error": "exit", "message": f"the process ended with code {processes[0].exitcode}"}
    facts: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
    return facts


def _outcome(cell: Cell, facts: dict[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    plain, optimized = facts["plain"], facts["optimized"]
    if "error" in plain:
        return {"outcome": "plain fails", "error": plain["error"], "message": plain["message"]}
    if "error" in optimized:
        refused = optimized["error"].endswith("Error") and optimized["error"] in _REFUSALS
        return {
            "outcome": "refused" if refused else "FAILED",
            "error": optimized["error"],
            "message": optimized["message"],
        }
    compared = differences(_record(folder, "plain"), _record(folder, "optimized"))
    found = {
        "tensors": len(compared),
        "units": max(compared.values()),
        "differing": [name for name, units in compared.items() if units][:3],
        "recomputed": optimized["recomputed"],
        "plain_peak": plain["peak_bytes"],
        "peak": optimized["peak_bytes"],
    }
    agree = not found["units"]
    if cell.uncompiled != cell.mode:
        of_xla = differences(_record(folder, "plain"), _record(folder, "uncompiled"))
        found["units_of_xla"] = max(of_xla.values())
        beyond = [n for n, u in compared.items() if u > _ALLOWANCE * (of_xla[n] + _last_place(cell, n))]
        agree, found["differing"] = not beyond, beyond[:3]
    return {"outcome": ("identical" if not found["units"] else "close") if agree else "FAILED", **found}


def _last_place(cell: Cell, name: str) -> float:
    """Return what rounding alone may change in a tensor, in its units in the last place.

    A loss is a number of float32, made of outputs in half precision: it is off by the last place of these.
    """
    return _HALF.get(cell.precision, 1.0) if "loss" in name.split("/")[-1].split("_") else 1.0


def _against_other_runs(cell: Cell, folder: Path) -> dict[str, Any]:
    """Train the plain model again; return what changes in a row if its runs differ among themselves."""
    plain, optimized = _record(folder, "plain"), _record(folder, "optimized")
    spread = dict.fromkeys(plain, 0.0)
    for number in range(_PLAIN_RUNS):
        with busy_machine():
            _train(cell, "plain", folder)
        again = _record(folder, "plain")
        spread = {name: max(units, spread[name]) for name, units in differences(plain, again).items()}
        if not any(differences(again, optimized).values()):
            return {"outcome": "identical", "units": 0.0, "differing": [], "plain_runs": number + 2}
    beyond = [
        name
        for name, units in differences(plain, optimized).items()
        if units > _ALLOWANCE * (spread.get(name, 0.0) + 1)
    ]
    if not any(spread.values()) or beyond:
        return {}
    return {"outcome": "varies", "units_of_plain": max(spread.values())}


def _record(folder: Path, variant: str) -> dict[str, Any]:
    return read(folder / f"{variant}.npz")


_REFUSALS = ("UnsupportedModelError", "SecondDerivativeError", "InvalidRequestError")


# Reporting ------------------------------------------------------------------------------------------------------------


def table(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield "| model | mode | precision | strategy | granularity | plan | parity | recomputed | plain peak | peak |"
    yield "|---|---|---|---|---|---|---|---:|---:|---:|"
    for row in rows:
        place = " | ".join(str(row[name]) for name in Cell._fields)
        if "units" not in row:
            yield f"| {place} | {row['outcome']}: {row['error']} | | | |"
            continue
        parity = row["outcome"] if row["outcome"] == "identical" else f"{row['outcome']}, {row['units']:.3g} units"
        if "units_of_xla" in row:
            parity += f" (XLA itself {row['units_of_xla']:.3g})"
        if "units_of_plain" in row:
            parity += f" (runs of the plain model {row['units_of_plain']:.3g})"
        if "plain_runs" in row:
            parity += f" to one of {row['plain_runs']} plain runs, which differ"
        peaks = f"{format_bytes(row['plain_peak'])} | {format_bytes(row['peak'])}"
        yield f"| {place} | {parity} | {row['recomputed']} | {peaks} |"


def _rows_before() -> dict[Cell, dict[str, Any]]:
    """Return, by cell, the rows of an earlier run."""
    before = Path(_OUTPUT.value)
    if not _RESUME.value or not before.exists():
        return {}
    rows = json.loads(before.read_text(encoding="utf-8"))["rows"]
    return {Cell(*(row[name] for name in Cell._fields)): row for row in rows}


def _write(rows: list[dict[str, Any]]) -> None:
    failed = sum(row["outcome"] == "FAILED" for row in rows)
    write_rows(_OUTPUT.value, rows, failed=failed)


def main(_: list[str]) -> None:
    """Run the cells and report."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    _PROCESSES.set_forkserver_preload(["tensorflow", "keras", "tf_memsaver", "tools.conformance.cell"])
    chosen, rows = cells(), _rows_before()
    left = [cell for cell in chosen if cell not in rows or rows[cell]["outcome"] in _RUN_AGAIN]
    with concurrent.futures.ThreadPoolExecutor(_JOBS.value) as pool:
        running = {pool.submit(run, cell): cell for cell in left}
        for done in track(concurrent.futures.as_completed(running), description="cells", total=len(left)):
            cell = running[done]
            try:
                rows[cell] = done.result()
            except Exception as error:
                # One cell that cannot be compared is a failed cell, not the end of the run.
                rows[cell] = {**cell._asdict(), "commit": _commit(), "outcome": "FAILED", "message": repr(error)[:200]}
            _write([rows[cell] for cell in {**dict.fromkeys(chosen), **rows} if cell in rows])
    rows = {cell: rows[cell] for cell in chosen}
    failed = [row for row in rows.values() if row["outcome"] == "FAILED"]
    print("\n".join(table(rows.values())))
    for row in failed:
        print(json.dumps(row), file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    app.run(main)
