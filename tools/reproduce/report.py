"""The Markdown of the headlines: one table of all, and a table for each part. No TensorFlow here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.reproduce.growth import exponent
from tools.reproduce.plot import drawn
from tools.reproduce.shapes import (
    GB,
    PAPER_BYTES,
    PAPER_PLAIN_BYTES,
    TARGET_BYTES,
    TARGET_NESTED_BYTES,
    TARGET_OPTIMIZE_SECONDS,
    TARGET_TRACE_RATIO,
)

COMMAND = "tools/reproduce_paper"
DEEPEST = "ResNet-1001"
PLANS = {"plain": "plain", "sqrt": "√n", "ours": "ours", "nested": "nested"}
"""The names of plans, in the order of tables and pictures."""

Rows = Mapping[str, Mapping[str, Any]]

INTRODUCTION = f"""\
The headlines of the field: published, predicted, measured. `{COMMAND}` makes all of it, `--parts` some. Bytes of
ResNets are what a step needs beyond the weights and the batch: activations, gradients, scratch. Chen et al. count
activations alone. GB are 10⁹ bytes. Predictions include what the allocator adds. Seconds are CPU time of the process,
but for those of real steps, since the machine did other work meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """A row of the first table; ``target`` is what issue 20 asks for, and what is not known is a dash."""

    what: str
    published: str = "–"
    target: str = "–"
    predicted: str = "–"
    measured: str = "–"
    command: str


def headlines(rows: Mapping[str, Rows]) -> list[Headline]:
    """Return the first table, as far as its rows were made."""
    found: list[Headline] = []
    deepest, step = rows["resnets"].get(DEEPEST), rows["steps"].get(DEEPEST)
    command = f"{COMMAND} --parts=resnets,steps"
    if deepest:
        plans = deepest["plans"]
        found += [
            Headline(
                what="1000 layers, plain",
                published=_gigabytes(PAPER_PLAIN_BYTES),
                predicted=_gigabytes(plans["plain"]["bytes"]),
                measured="cannot run here",
                command=command,
            ),
            Headline(
                what="1000 layers, √n (Chen et al.)",
                published=f"{_gigabytes(PAPER_BYTES)} at +30%",
                predicted=_planned(plans["sqrt"]),
                command=command,
            ),
            Headline(
                what="1000 layers, ours",
                published=f"{_gigabytes(PAPER_BYTES)} at +30%",
                target=f"≤ {_gigabytes(TARGET_BYTES)} at ≤ +30%",
                predicted=_planned(plans["ours"]),
                measured=_gigabytes(step["bytes"]) if step else "–",
                command=command,
            ),
            Headline(
                what="1000 layers, nested",
                target=f"≤ {_gigabytes(TARGET_NESTED_BYTES)} at ≤ {deepest['forward_share']:+.0%}, one extra forward",
                predicted=_planned(plans["nested"]),
                command=command,
            ),
        ]
    if step:
        ratio = step["trace_seconds"] / step["plain_trace_seconds"]
        found += [
            Headline(
                what="1000 layers, `optimize`",
                target=f"≤ {TARGET_OPTIMIZE_SECONDS:.0f} s",
                measured=f"{step['optimize_seconds']:.0f} s",
                command=command,
            ),
            Headline(
                what="1000 layers, tracing",
                target=f"≤ {TARGET_TRACE_RATIO:.1f}× plain's",
                measured=f"{ratio:.2f}×",
                command=command,
            ),
        ]
    for row in rows["depth"].values():
        ours = row["seconds"]
        found.append(
            Headline(
                what=f"{row['count']} {row['kind']}: capture, plan, trace",
                target="trains a step",
                measured=f"{ours['capture']:.0f}, {ours['plan']:.0f}, {ours['trace']:.0f} s; trained",
                command=f"{COMMAND} --parts=depth",
            )
        )
    for kind, its in _by_kind(rows["growth"]).items():
        found.append(
            Headline(
                what=f"planning, {kind}, {its[0]['operations']} to {its[-1]['operations']} operations",
                target="n log n",
                measured=", ".join(f"n^{_exponent(its, limit):.2f} ({limit})" for limit in ("half", "default")),
                command=f"{COMMAND} --parts=growth",
            )
        )
    for row in rows["batches"].values():
        found.append(
            Headline(
                what=f"largest batch, {row['name']}, {row['budget']}",
                predicted=f"plain {row['plain']}, √n {row['sqrt']}, ours {row['ours']}",
                command=f"{COMMAND} --parts=batches",
            )
        )
    for name, row in rows["anchors"].items():
        found.append(
            Headline(
                what=f"largest batch in 16 GB, {name}, Checkmate's cost model",
                published=row["published"],
                predicted=f"{row['ours']:.0f}",
                command="python -m tools.published",
            )
        )
    return found


def markdown(document: Mapping[str, Any]) -> str:
    """Return the whole report; parts without rows are left out."""
    rows: Mapping[str, Rows] = document["rows"]
    lines = [INTRODUCTION, "", f"Machine: `{json.dumps(document['machine'])}`", "", *headline_table(rows), ""]
    if rows["resnets"]:
        lines += ["## Residual networks", "", "Predicted, batch 32, 224² images, with the overhead.", ""]
        lines += [*_resnet_table(rows["resnets"].values()), ""]
    if rows["steps"]:
        lines += ["## Real steps", "", "The first step includes the work of TensorFlow's graph optimizer.", ""]
        lines += [*_step_table(rows["steps"].values()), ""]
    if rows["depth"]:
        lines += ["## Depth", "", DEPTH, "", *_depth_table(rows["depth"].values()), ""]
    if rows["growth"]:
        lines += ["## Planning", "", "Seconds on made-up steps: for half of the plain peak, and by default.", ""]
        lines += [*_growth_table(rows["growth"].values()), ""]
    return "\n".join(lines)


DEPTH = """\
*First step* has TensorFlow's graph optimizer in it, which is off (†) for the deepest
networks: its time grows faster than the graph, for the plain step as for ours."""


def headline_table(rows: Mapping[str, Rows]) -> list[str]:
    """Return the first table as Markdown."""
    cells = [(h.what, h.published, h.target, h.predicted, h.measured, f"`{h.command}`") for h in headlines(rows)]
    return _table(["headline", "published", "target", "predicted", "measured", "command"], cells)


def picture(resnets: Rows) -> str:
    """Return memory against depth, by plan, as an SVG picture."""
    by_depth = sorted((layers(name), row) for name, row in resnets.items())
    lines = {
        shown: [(depth, row["plans"][plan]["bytes"] / GB) for depth, row in by_depth] for plan, shown in PLANS.items()
    }
    return drawn("Predicted memory of a training step beyond weights and batch, batch 32", lines, "layers", "GB")


def layers(name: str) -> int:
    """Return the number in a name such as ``"ResNet-200"``."""
    return int(re.sub(r"\D", "", name))


def _resnet_table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    cells = [
        (
            row["name"],
            f"{row['operations']}",
            *(_planned(row["plans"][plan]) for plan in PLANS),
            f"{row['forward_share']:+.0%}",
            f"{row['capture_seconds']:.0f} s",
            *(f"{row['plans'][plan]['seconds']:.0f} s" for plan in ("ours", "nested")),
        )
        for row in rows
    ]
    return _table(["network", "operations", *PLANS.values(), "one forward", "capture", "planning", "nested"], cells)


def _step_table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    cells = [
        (
            f"{row['name']}, {row['pixels']}², batch {row['batch_size']}",
            _gigabytes(row["predicted_bytes"]),
            _gigabytes(row["bytes"]),
            _gigabytes(row["peak_bytes"]),
            *(f"{row[part]:.0f} s" for part in ("optimize_seconds", "plain_trace_seconds", "trace_seconds")),
            f"{row['step_seconds']:.0f} s",
        )
        for row in rows
    ]
    heads = ["network", "predicted", "measured", "peak", "`optimize`", "plain tracing", "tracing", "first step"]
    return _table(heads, cells)


def _depth_table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    columns = ("build", "capture", "plan", "rewrite", "plain trace", "trace", "plain first step", "first step")
    cells = [
        (
            f"{row['count']} {row['kind']}{'' if row['optimizes_graphs'] else ' †'}",
            f"{row['operations']}",
            *(f"{row['seconds'][column]:.1f}" for column in columns),
            f"{row['overhead']:+.0%}",
        )
        for row in rows
    ]
    return _table(["network", "operations", *columns, "step"], cells)


def _growth_table(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    cells = [
        (row["kind"], f"{row['operations']}", f"{row['seconds']['half']:.1f}", f"{row['seconds']['default']:.1f}")
        for row in rows
    ]
    return _table(["step", "operations", "half", "default"], cells)


def _by_kind(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """Return the rows of kinds that have more than one, by size."""
    kinds = dict.fromkeys(row["kind"] for row in rows.values())
    by_size = sorted(rows.values(), key=lambda row: int(row["operations"]))
    found = {kind: [row for row in by_size if row["kind"] == kind] for kind in kinds}
    return {kind: its for kind, its in found.items() if len(its) > 1}


def _exponent(rows: Sequence[Mapping[str, Any]], limit: str) -> float:
    return exponent([row["operations"] for row in rows], [row["seconds"][limit] for row in rows])


def _planned(plan: Mapping[str, Any]) -> str:
    overhead = f" at {plan['overhead']:+.0%}" if plan["overhead"] else ""
    return f"{_gigabytes(plan['bytes'])}{overhead}"


def _gigabytes(nbytes: float) -> str:
    return f"{nbytes / GB:.3g} GB"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [heads, ["---", *(["---:"] * (len(heads) - 1))], *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
