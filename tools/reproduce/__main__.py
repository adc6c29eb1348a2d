"""The headlines of the field, published, predicted and measured, in one table: ``tools/reproduce_paper``.

Parts (``--parts=…``), each row in a process of its own:

* resnets: plans for residual networks of 50 to 1000 layers (Chen et al. 2016), predicted (``resnets.py``);
* steps: real training steps of these by our plan (``resnets.py``);
* depth: chains of up to 10,000 dense layers and 500 transformer blocks, to a trained step (``depth.py``);
* growth: planning alone, on made-up steps of 10³ to 10⁵ operations (``depth.py``);
* batches: the largest batches in 4 and 16 GiB (``batches.py``);
* anchors: the published networks that ``python -m tools.published`` replays, from its table.

Rows go to ``tools/results/reproduce_paper.json`` as they come, those of parts that were not asked for stay; tables go
beside it, and memory against depth to ``docs/depth.svg``. ``--quick`` runs small rows of each part in about three
minutes, prints the table, and writes nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from absl import app, flags

from tools.reproduce import report
from tools.shared.processes import in_own_process
from tools.shared.results import RESULTS, ROOT, machine, write_rows, write_text

PARTS = ("resnets", "steps", "depth", "growth", "batches", "anchors")

_PARTS = flags.DEFINE_list("parts", list(PARTS), "what to run")
_ONLY = flags.DEFINE_list("only", [], "names of rows (default: all of each part)")
_QUICK = flags.DEFINE_bool("quick", False, "small rows alone, about three minutes; nothing is written")

Rows = dict[str, dict[str, Any]]
Task = tuple[str, str, Callable[..., Any], tuple[Any, ...]]
"""A part, the name of a row, and the call that makes it."""


def tasks(quick: bool) -> list[Task]:
    """Return the rows to make, of all parts."""
    from tools.reproduce import batches, depth, resnets
    from tools.reproduce.shapes import SHAPES

    networks = [("ResNet-50", 64), ("ResNet-101", 64)] if quick else [(name, 224) for name in SHAPES]
    stepped = [("ResNet-101", 64)] if quick else [("ResNet-200", 224), ("ResNet-1001", 224)]
    chains, blocks = ((300,), (20,)) if quick else ((1_000, 3_000, 10_000), (500,))
    sizes = (1_000, 4_000) if quick else (1_000, 3_000, 10_000, 30_000, 100_000)
    kinds = ("ResNet-like",) if quick else tuple(depth.GRAPHS)
    models = [("MobileNet", "4GiB")] if quick else [(n, b) for n in batches.NAMES for b in batches.BUDGETS]
    counts = [("dense layers", n) for n in chains] + [("transformer blocks", n) for n in blocks]
    return [
        *(("resnets", name, resnets.predicted, (name, 32, pixels)) for name, pixels in networks),
        *(("steps", name, resnets.measured, (name, 32, pixels)) for name, pixels in stepped),
        *(("depth", f"{count} {kind}", depth.trained, (kind, count)) for kind, count in counts),
        *(("growth", f"{kind} {n}", depth.planned, (kind, n)) for kind in kinds for n in sizes),
        *(("batches", f"{name} {budget}", batches.largest, (name, budget)) for name, budget in models),
    ]


def anchors() -> dict[str, Any]:
    """Return Checkmate's largest batches and ours, from the table of ``python -m tools.published``."""
    from tools.published.batches import PUBLISHED

    rows = json.loads((RESULTS / "bench_published.json").read_text(encoding="utf-8"))["rows"]["batches"]
    return {
        name: {
            "published": PUBLISHED[name][1],
            "ours": max(int(row["simulated"]["batches"][0]), row["bisected"]["auto"], row["bisected"]["nested"]),
        }
        for name, row in rows.items()
    }


class Results:
    """The rows found so far, by part and name, in the files that they are kept in; in none of them if ``quick``."""

    def __init__(self, quick: bool) -> None:
        self._quick, self._json = quick, RESULTS / "reproduce_paper.json"
        self.rows: Rows = {part: {} for part in PARTS} if quick else self._kept()

    def _kept(self) -> Rows:
        known = json.loads(self._json.read_text(encoding="utf-8"))["rows"] if self._json.exists() else {}
        return {part: known.get(part, {}) for part in PARTS}

    def add(self, part: str, name: str, row: Any) -> None:
        """Take a row, and write it to those that are kept: other parts may have been run meanwhile."""
        if self._quick:
            self.rows[part][name] = row
            return
        self.rows = self._kept()
        self.rows[part][name] = row
        order = {task[1]: number for number, task in enumerate(tasks(quick=False))}
        self.rows[part] = dict(sorted(self.rows[part].items(), key=lambda item: order.get(item[0], -1)))
        write_text(self._json.with_suffix(".md"), report.markdown(write_rows(self._json, self.rows)))
        if len(self.rows["resnets"]) > 1:
            write_text(ROOT / "docs" / "depth.svg", report.picture(self.rows["resnets"]))


def main(_: list[str]) -> int:
    """Run the parts and print the table; return 2 for names that there are none of."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    wanted = [task for task in tasks(_QUICK.value) if task[0] in _PARTS.value]
    unknown = {*_PARTS.value} - {*PARTS} | {*_ONLY.value} - {task[1] for task in wanted}
    if unknown:
        names = ", ".join(task[1] for task in wanted)
        print(f"no {', '.join(sorted(unknown))}; parts: {', '.join(PARTS)}; rows: {names}", file=sys.stderr)
        return 2
    results = Results(_QUICK.value)
    if "anchors" in _PARTS.value:
        for name, row in anchors().items():
            results.add("anchors", name, row)
    for part, name, task, arguments in wanted:
        if _ONLY.value and name not in _ONLY.value:
            continue
        begin = time.perf_counter()
        results.add(part, name, in_own_process(task, *arguments))
        print(f"{part} {name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    print("\n".join(report.headline_table(results.rows)))
    print(f"\nMachine: {json.dumps(machine())}")
    return 0


if __name__ == "__main__":
    app.run(main)
