"""Layers against operations as the units of plans: memory over time, measured, on transformers and two ResNets.

Usage: python -m tools.bench.granularity [--models=BERT-base] [--limits=0.05,0.1] [--batch_size=8] [--output=FILE.json]

All variants of a model take turns in one run, as in models.py, whose flags hold here, too. Results go to a JSON
file, and as a Markdown table to stdout.
"""

from __future__ import annotations

import time
from typing import Any

from absl import app, flags

from tf_memsaver.units import format_bytes
from tools.bench import models as bench_models
from tools.shared.results import RESULTS, write_rows

_RESULTS = RESULTS / "bench_granularity.json"
_NAMES = ("BERT-base", "GPT-2", "ViT-B", "ResNet50", "BERT-24", "ResNet152V2")
_LIMITS = flags.DEFINE_list("limits", ["0.05", "0.1", "0.2"], "longest extra step times, as shares of the plain step")


def held(row: dict[str, Any]) -> int:
    """Return the bytes at the peak that were not live before the step."""
    return int(row["peak_bytes"]) - int(row["live_bytes"])


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table; shares are of the plain row's peak over what was live before."""
    lines = [
        "| model | units | allowed | predicted step | measured | predicted peak | measured | of plain | tracing |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    plain: dict[str, Any] = {}
    for row in rows:
        if "peak_bytes" not in row:
            lines.append(f"| {row['model']} | {row['variant']} | {' | '.join('–' * 6)} | failed |")
            continue
        if row["variant"] == bench_models.PLAIN:
            plain = row
            lines.append(
                f"| {row['model']} | plain | – | – | 1.00× | – | {format_bytes(row['peak_bytes'])} | 100% | 1.00× |"
            )
            continue
        units, _, limit = row["variant"].partition(":")
        lines.append(
            f"| {row['model']} | {units} | {float(limit):+.0%} | {1 + row['predicted_overhead']:.2f}× | "
            f"{row['step_ratio']:.2f}× | {format_bytes(row['predicted_peak_bytes'])} | "
            f"{format_bytes(row['peak_bytes'])} | {held(row) / held(plain):.0%} | {row['trace_ratio']:.2f}× |"
        )
    return "\n".join(lines)


def main(_: list[str]) -> int:
    """Run the benchmark; return 1 when a variant failed."""
    variants = (bench_models.PLAIN, *(f"{units}:{limit}" for limit in _LIMITS.value for units in ("layer", "op")))
    begin = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for name in flags.FLAGS.models or _NAMES:
        rows += bench_models.bench_model(name, variants)
        settings = {name: flags.FLAGS[name].value for name in ("batch_size", "mode", "steps", "rounds")}
        seconds = round(time.perf_counter() - begin)
        write_rows(flags.FLAGS.output, rows, settings=settings, seconds=seconds)
    print(markdown(rows))
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    flags.FLAGS.set_default("output", str(_RESULTS))
    flags.FLAGS.set_default("batch_size", 8)
    flags.FLAGS.set_default("verify_steps", 0)
    flags.FLAGS.set_default("rounds", 1)
    app.run(main)
