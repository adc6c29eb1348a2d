"""The published figures of Checkmate and of Feng & Huang, beside ours: ``python -m tools.published``.

Parts (``--parts=batches,cuts,costs``), each model of each in a process of its own:

* batches: Checkmate's largest-batch table under Checkmate's cost model (``batches.py``);
* cuts: Feng & Huang's cuts of training memory at their overheads, on captured training steps, predicted for all models
  and measured for four (``cuts.py``);
* costs: Checkmate's table of cost over optimal, over the best plan known (``costs.py``).

Rows go to ``tools/results/bench_published.json`` as they come, those of parts and models that were not asked for stay;
the tables made of all of them go beside it, to ``bench_published.md``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import app, flags

from tools.published import batches, costs, cuts, report
from tools.published.checkmate_models import MODELS
from tools.shared.processes import in_own_process
from tools.shared.results import RESULTS, write_rows, write_text

PARTS = ("batches", "cuts", "costs")

_PARTS = flags.DEFINE_list("parts", list(PARTS), "what to run")
_MODELS = flags.DEFINE_list("models", [], "names of models (default: all of each part)")
_MEASURE = flags.DEFINE_bool("measure", True, "measure four models in the part cuts; else predict only")
_ORACLE_SECONDS = flags.DEFINE_float("oracle_seconds", 60.0, "for each budget of the part costs, if there is an oracle")
_OUTPUT = flags.DEFINE_string("output", str(RESULTS / "bench_published"), "where to write, without the ending")

Rows = dict[str, Any]


class Results:
    """The rows found so far, by part and model, in the file that they are kept in."""

    def __init__(self, output: str) -> None:
        self._json, self._markdown = Path(f"{output}.json"), Path(f"{output}.md")
        known = json.loads(self._json.read_text(encoding="utf-8")) if self._json.exists() else {}
        self.rows: Rows = {part: known.get("rows", {}).get(part, {}) for part in (*PARTS, "measured")}

    def run(self, part: str, name: str, task: Callable[..., Any], *arguments: Any) -> None:
        """Run a task in a process of its own, and write all rows with its answer."""
        begin = time.perf_counter()
        self.rows[part][name] = in_own_process(task, *arguments)
        print(f"{part} {name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        write_text(self._markdown, report.markdown(write_rows(self._json, self.rows)))


def main(_: list[str]) -> int:
    """Run the parts; return 2 for names that there are none of."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    names = {*MODELS, *cuts.CASES}
    unknown = sorted({*_PARTS.value} - {*PARTS} | {*_MODELS.value} - names)
    if unknown:
        print(
            f"no {', '.join(unknown)}; parts: {', '.join(PARTS)}; models: {', '.join(sorted(names))}", file=sys.stderr
        )
        return 2
    results = Results(_OUTPUT.value)
    wanted = set(_MODELS.value) or names
    for name in (name for name in MODELS if name in wanted and "batches" in _PARTS.value):
        results.run("batches", name, batches.batches, name)
    for name in (name for name in cuts.CASES if name in wanted and "cuts" in _PARTS.value):
        for granularity in cuts.GRANULARITIES:
            results.run("cuts", f"{name} {granularity}", cuts.cuts, name, granularity)
        if _MEASURE.value and name in cuts.MEASURED:
            for variant in (False, True):
                results.run("measured", f"{name} {'planned' if variant else 'plain'}", cuts.measured, name, variant)
    for name in (name for name in MODELS if name in wanted and "costs" in _PARTS.value):
        results.run("costs", name, costs.costs, name, _ORACLE_SECONDS.value)
    return 0


if __name__ == "__main__":
    app.run(main)
