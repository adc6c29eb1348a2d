"""Peak memory, step time, tracing time and parity of real models: plain, and under several planners.

Usage: python -m tools.bench.models [--models=ResNet50,UNet] [--variants=plain,auto] [--output=FILE.json]

Every variant of a model runs in a process of its own. The processes of one model stay alive and take turns, so that
what the machine does meanwhile falls on all variants alike. Models are not compiled: a step is the forward pass, the
mean square of the outputs, and all gradients. Results go to a JSON file, and as a Markdown table to stdout.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from tf_memsaver.units import format_bytes
from tools.shared.results import RESULTS, ROOT, write_rows

PLAIN = "plain"
VARIANTS = (PLAIN, "chen_sqrt", "min_peak", "auto")
_RESULTS = RESULTS / "bench_models.json"

_MODELS = flags.DEFINE_list("models", [], "names of tools/shared/models/real.py (default: all)")
_VARIANTS = flags.DEFINE_list("variants", list(VARIANTS), "plain and strategies; plain always runs, and first")
_OUTPUT = flags.DEFINE_string("output", str(_RESULTS), "where to write the JSON")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "examples in a batch", lower_bound=1)
_MODE = flags.DEFINE_enum("mode", "graph", ["eager", "graph", "xla"], "how to run the steps")
_STEPS = flags.DEFINE_integer("steps", 2, "timed steps in one turn of a variant", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "turns of each variant", lower_bound=1)
_VERIFY_STEPS = flags.DEFINE_integer("verify_steps", 2, "training steps compared for parity; 0 leaves it out")
_WORKER = flags.DEFINE_string("worker", None, "(for the processes of one variant) JSON of the job")


# A variant's own process ----------------------------------------------------------------------------------------------


def work(job: dict[str, Any]) -> None:
    """Make one variant of a model, then answer requests, one JSON line each, until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not an answer

    def answer(data: dict[str, Any]) -> None:
        print(json.dumps(data), file=answers, flush=True)

    import tf_memsaver
    from tools.shared.models.real import build

    plain = model = build(job["model"])
    about: dict[str, Any] = {}
    if job["variant"] != PLAIN:
        model = tf_memsaver.optimize(plain, batch_size=job["batch_size"], **_wanted(job["variant"]))
        plan = model.memsaver_plan
        about = {
            "predicted_peak_bytes": plan.peak_bytes,
            "predicted_plain_peak_bytes": plan.plain_peak_bytes,
            "predicted_overhead": plan.step_overhead,
            "plan_seconds": plan.plan_seconds,
            "planner": plan.planner,
            "segments": len(plan.segments),
            "recomputed_layers": len(plan.recomputed),
            "layers": len(plan.labels),
        }
    answer(about)
    for line in sys.stdin:
        if line.strip() == "measure":
            settings = {key: job[key] for key in ("batch_size", "mode", "steps")}
            answer(tf_memsaver.measure(model, **settings, isolate=False).to_json())
        else:
            found = tf_memsaver.verify(
                plain, model, batch_size=job["batch_size"], steps=job["verify_steps"], mode=job["mode"]
            )
            answer({**found.to_json(), "relative_difference": found.worst.relative_difference})


def _wanted(variant: str) -> dict[str, Any]:
    """Return the arguments that a variant stands for: a strategy, or a granularity and the overhead allowed."""
    granularity, _, limit = variant.partition(":")
    return {"granularity": granularity, "max_overhead": float(limit)} if limit else {"strategy": variant}


class Worker:
    """A variant's process, seen from here."""

    def __init__(self, job: dict[str, Any], log: Path) -> None:
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tools.bench.models", f"--worker={json.dumps(job)}"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, "TF_FORCE_GPU_ALLOW_GROWTH": "true", "TF_CPP_MIN_LOG_LEVEL": "2"},
            )
        self.about = self._read()

    def ask(self, request: str) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
          RuntimeError: the process ended; the message carries the end of its log.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            tail = " | ".join(self._log.read_text().strip().splitlines()[-5:])
            raise RuntimeError(f"ended with code {code}: {tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


# The benchmark --------------------------------------------------------------------------------------------------------


def bench_model(name: str, variants: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row for each variant of a model; a variant that fails has the field ``error``."""
    job = {"model": name, "batch_size": _BATCH_SIZE.value, "mode": _MODE.value, "steps": _STEPS.value}
    job["verify_steps"] = _VERIFY_STEPS.value
    workers: dict[str, Worker] = {}
    turns: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    parity: dict[str, dict[str, Any]] = {}
    errors: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:

        def attempt(variant: str, what: str) -> None:
            if variant in errors:
                return
            begin = time.perf_counter()
            try:
                if what == "start":
                    workers[variant] = Worker({**job, "variant": variant}, Path(folder) / variant)
                elif what == "measure":
                    turns[variant].append(workers[variant].ask(what))
                else:
                    parity[variant] = workers[variant].ask(what)
            except RuntimeError as error:
                errors[variant] = str(error)
                print(f"{name} {variant}: {error}", file=sys.stderr)
            print(f"{name} {variant}: {what}, {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)

        try:
            for variant in variants:
                attempt(variant, "start")
            for _ in range(_ROUNDS.value):
                for variant in variants:
                    attempt(variant, "measure")
            if _VERIFY_STEPS.value:
                for variant in variants:
                    if variant != PLAIN:
                        attempt(variant, "verify")
        finally:
            for worker in workers.values():
                worker.close()
    rows = []
    for variant in variants:
        row: dict[str, Any] = {"model": name, "variant": variant}
        if variant in workers:
            row |= workers[variant].about
        if turns[variant]:
            row |= _summary(turns[variant])
        if variant in parity:
            row["parity"] = parity[variant]
        if variant in errors:
            row["error"] = errors[variant]
        rows.append(row)
    return _against_plain(rows)


def _summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Return bytes of the first turn (nothing of earlier ones is around) and median times over all turns."""
    first = turns[0]
    return {
        **{key: first[key] for key in ("device", "peak_bytes", "live_bytes", "gradient_bytes", "activation_bytes")},
        "step_seconds": statistics.median(turn["step_seconds"] for turn in turns),
        "trace_seconds": statistics.median(turn["trace_seconds"] for turn in turns),
        "all_step_seconds": [turn["step_seconds"] for turn in turns],
        "all_trace_seconds": [turn["trace_seconds"] for turn in turns],
    }


def _against_plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add what each row is as a share of the plain row, and the plain row's prediction, which plans carry."""
    plain = rows[0]
    predictions = [row["predicted_plain_peak_bytes"] for row in rows if "predicted_plain_peak_bytes" in row]
    if predictions:
        plain["predicted_peak_bytes"] = predictions[0]
    for row in rows:
        if "peak_bytes" not in row or "peak_bytes" not in plain:
            continue
        row["activation_share"] = row["activation_bytes"] / plain["activation_bytes"]
        row["step_ratio"] = row["step_seconds"] / plain["step_seconds"]
        row["trace_ratio"] = row["trace_seconds"] / plain["trace_seconds"] if plain["trace_seconds"] else None
        if "predicted_peak_bytes" in row:
            row["prediction_error"] = row["predicted_peak_bytes"] / row["peak_bytes"] - 1.0
    return rows


# Output -----------------------------------------------------------------------------------------------------------


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    bytes_headings = ["predicted peak", "measured peak", "error", "activations", "of plain"]
    headings = ["model", "variant", *bytes_headings, "step", "tracing", "plan", "parity"]
    lines = ["| " + " | ".join(headings) + " |", "|---|---|" + "---:|" * (len(headings) - 3) + "---|"]
    for row in rows:
        if "peak_bytes" not in row:
            cells = [row["model"], row["variant"], *["–"] * 8, "failed"]
        else:
            cells = [
                row["model"],
                row["variant"],
                format_bytes(row["predicted_peak_bytes"]) if "predicted_peak_bytes" in row else "–",
                format_bytes(row["peak_bytes"]),
                f"{row['prediction_error']:+.1%}" if "prediction_error" in row else "–",
                format_bytes(row["activation_bytes"]),
                f"{row['activation_share']:.0%}" if "activation_share" in row else "–",
                f"{row['step_ratio']:.2f}×" if "step_ratio" in row else "–",
                f"{row['trace_ratio']:.2f}×" if row.get("trace_ratio") else "–",
                f"{row['plan_seconds']:.2f} s" if "plan_seconds" in row else "–",
                _parity(row),
            ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _parity(row: dict[str, Any]) -> str:
    if row["variant"] == PLAIN:
        return "–"
    found = row.get("parity")
    if found is None:
        return "failed" if "error" in row else "not run"
    text = "identical" if found["identical"] else f"differs by {found['relative_difference']:.2g}"
    return f"{text} (deterministic ops)" if found["deterministic_ops"] else text


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return the medians and worst cases over the models, one line each."""
    lines = []
    errors = [abs(row["prediction_error"]) for row in rows if "prediction_error" in row]
    if errors:
        lines.append(
            f"predicted peak: off by {statistics.median(errors):.1%} at the median, {max(errors):.1%} at worst"
        )
    for variant in dict.fromkeys(row["variant"] for row in rows if row["variant"] != PLAIN):
        found = [row for row in rows if row["variant"] == variant and "step_ratio" in row]
        if found:
            shares = [row["activation_share"] for row in found]
            steps = [row["step_ratio"] for row in found]
            same = sum(row.get("parity", {}).get("identical", False) for row in found)
            lines.append(
                f"{variant}: activations {statistics.median(shares):.0%} of plain at the median ({max(shares):.0%} at "
                f"worst), step {statistics.median(steps):.2f}× ({max(steps):.2f}×), identical on {same} of {len(found)}"
            )
    return "\n".join(lines)


def main(_: list[str]) -> int:
    """Run the benchmark, or one variant of it; return 1 when a variant failed or differs."""
    if _WORKER.value:
        work(json.loads(_WORKER.value))
        return 0
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tools.shared.models.real import MODELS

    names = _MODELS.value or list(MODELS)
    unknown = sorted(set(names) - set(MODELS))
    if unknown:
        print(f"no model {', '.join(unknown)}; there are {', '.join(MODELS)}", file=sys.stderr)
        return 2
    variants = (PLAIN, *(variant for variant in _VARIANTS.value if variant != PLAIN))
    begin = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for name in names:
        rows += bench_model(name, variants)
        settings = {flag.name: flag.value for flag in (_BATCH_SIZE, _MODE, _STEPS, _ROUNDS, _VERIFY_STEPS)}
        seconds = round(time.perf_counter() - begin)
        write_rows(_OUTPUT.value, rows, settings=settings, seconds=seconds)
    print(markdown(rows))
    print(f"\n{summary(rows)}")
    bad = [row for row in rows if "error" in row or not row.get("parity", {}).get("passed", True)]
    return 1 if bad else 0


if __name__ == "__main__":
    app.run(main)
