"""Examples trained plain and with the one line, in a process each, and compared bit by bit."""

from __future__ import annotations

import importlib
import pkgutil
import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np

import tools.examples
from tf_memsaver.units import format_bytes
from tools.examples.packages import MissingPackageError
from tools.shared.processes import busy_machine, in_own_process, in_workers
from tools.shared.results import error_text

_NO_EXAMPLES = ("__main__", "comparing", "data", "packages", "running")

_WORKERS = {"multi_worker": 2}
"""Processes in which an example runs, if they are several."""

_NOISE = 1.01
"""A peak may lie above plain's by this much: threads race, and a plan that keeps all is the plain model."""

_PLAIN_RUNS = 3
"""Runs more of a plain model that the optimized one differs from."""

_ALLOWANCE = 4.0
"""Times what plain runs differ by."""


def examples() -> list[str]:
    """Return the names of all examples."""
    found = pkgutil.iter_modules(tools.examples.__path__)
    return sorted(module.name for module in found if module.name not in _NO_EXAMPLES)


def train_example(name: str, memsaver: bool) -> Any:
    """Return what comes out of training an example."""
    from tools.examples.running import train

    return train(importlib.import_module(f"tools.examples.{name}").make, memsaver=memsaver)


def compare(name: str) -> dict[str, Any]:
    """Return the row of an example: its two variants, each trained in a process of its own.

    Where they differ, the plain model is trained again: some differ from themselves, by the order in which
    threads add up, and more so on a busy machine. The example is then identical to one of the plain runs, or said to
    vary as the plain one does. One that needs a package that is not installed is skipped.
    """
    try:
        plain, optimized = (_trained(name, memsaver) for memsaver in (False, True))
        runs = [plain]
        while not any(_is_same(run, optimized) for run in runs) and len(runs) <= _PLAIN_RUNS:
            with busy_machine():
                runs.append(_trained(name, False))
    except MissingPackageError as error:
        return {"example": name, "outcome": "skipped", "error": str(error)}
    except Exception as error:
        return {"example": name, "outcome": "failed", "error": error_text(error, 500)}
    return {
        "example": name,
        "outcome": _outcome(runs, optimized),
        "plain_bytes": plain.peak_bytes,
        "optimized_bytes": optimized.peak_bytes,
        "plain_predicted_bytes": optimized.plain_predicted_bytes,
        "predicted_bytes": optimized.predicted_bytes,
        "plain_activations_bytes": plain.peak_bytes - plain.live_bytes,
        "optimized_activations_bytes": optimized.peak_bytes - optimized.live_bytes,
        "plain_step_seconds": plain.step_seconds,
        "optimized_step_seconds": optimized.step_seconds,
        "optimize_seconds": optimized.optimize_seconds,
    }


def _trained(name: str, memsaver: bool) -> Any:
    if name in _WORKERS:
        return in_workers(_WORKERS[name], train_example, name, memsaver)
    return in_own_process(train_example, name, memsaver)


def _is_same(one: Any, other: Any) -> bool:
    return one.losses == other.losses and _difference(one, other) == 0.0


def _outcome(runs: list[Any], optimized: Any) -> str:
    if any(_is_same(run, optimized) for run in runs):
        return "identical"
    noise = max(_difference(run, runs[0]) for run in runs)
    return "varies as plain" if min(_difference(run, optimized) for run in runs) <= _ALLOWANCE * noise else "different"


def _difference(one: Any, other: Any) -> float:
    """Return the largest difference of the variables, in parts of the largest number of each."""
    if len(one.variables) != len(other.variables):
        return float("inf")
    found = [0.0]
    for mine, its in zip(one.variables, other.variables, strict=True):
        if not np.array_equal(mine, its):
            numbers, others = mine.astype(np.float64), its.astype(np.float64)
            found.append(float(np.abs(numbers - others).max() / np.abs(numbers).max()))
    return max(found)


def activations_ratio(row: dict[str, Any]) -> float:
    """Return the activations of the optimized model as a part of the plain one's."""
    return float(row["optimized_activations_bytes"] / row["plain_activations_bytes"])


def is_good(row: dict[str, Any]) -> bool:
    """Return whether an example came out as promised: the same numbers, never in more memory."""
    return row["outcome"] in ("identical", "varies as plain") and row["optimized_bytes"] <= _NOISE * row["plain_bytes"]


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return rows as a table in Markdown."""
    lines = [
        "| example | outcome | peak, plain | optimized | predicted | activations | step | `optimize` |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        if row["outcome"] == "failed":
            lines.append(f"| {row['example']} | {row['error']} | | | | | | |")
            continue
        cells = [
            row["example"],
            row["outcome"],
            *(format_bytes(row[name]) for name in ("plain_bytes", "optimized_bytes", "predicted_bytes")),
            f"{activations_ratio(row):.0%}",
            f"{row['optimized_step_seconds'] / row['plain_step_seconds']:.2f} x",
            f"{row['optimize_seconds']:.0f} s",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(rows: Iterable[dict[str, Any]]) -> str:
    """Return in a line what rows say together."""
    rows = list(rows)
    said = f"{len(rows)} examples, {sum(map(is_good, rows))} the same in no more memory than plain"
    ratios = [activations_ratio(row) for row in rows if row["outcome"] != "failed"]
    return said + (f"; activations {statistics.median(ratios):.0%} of plain at the median" if ratios else "")
