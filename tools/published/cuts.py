"""Part C: how much of the training memory goes at the overhead of Feng & Huang (CVPR 2021, arXiv:1808.00079).

They train models of torchvision on a GPU; batches and image sizes are those of ``input_sizes`` in their repository's
``net/model_factory.py``. Their NASNet is one for CIFAR-10 that keras.applications lacks: NASNetMobile and NASNetLarge
stand in its place, at their own image sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tf_memsaver.ir.graph import MemoryKind
from tf_memsaver.ir.segments import Segment, tidied
from tf_memsaver.options.table import Granularity
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import solve
from tf_memsaver.search.nested import several_levels
from tf_memsaver.search.one_level import OneLevel

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model of keras.applications as they trained it, and what they report of it."""

    model: str
    pixels: int
    batch_size: int
    cut: float
    overhead: float


CASES = {
    case.model: case
    for case in (
        Case(model="ResNet50", pixels=224, batch_size=64, cut=0.63, overhead=0.31),
        Case(model="ResNet152", pixels=224, batch_size=16, cut=0.81, overhead=0.37),
        Case(model="DenseNet201", pixels=224, batch_size=16, cut=0.85, overhead=0.53),
        Case(model="VGG16", pixels=224, batch_size=64, cut=0.31, overhead=0.32),
        Case(model="InceptionV3", pixels=300, batch_size=32, cut=0.71, overhead=0.29),
        Case(model="NASNetMobile", pixels=224, batch_size=64, cut=0.81, overhead=0.31),
        Case(model="NASNetLarge", pixels=331, batch_size=16, cut=0.81, overhead=0.31),
    )
}
MEASURED = ("VGG16", "ResNet50", "InceptionV3", "NASNetMobile")
MEASURED_BATCH = 8
"""Examples in a measured batch: plain peaks of 1 to 2 GiB."""

TRIED = 8
"""Plans of least simulated peak that are asked for their reported one."""

GRANULARITIES: tuple[Granularity, ...] = ("layer", "op")


def build(case: Case) -> Any:
    """Return the model, not compiled: a step is the forward pass, the mean square of the outputs, all gradients."""
    import keras

    from tools.shared.models.real import application

    keras.utils.set_random_seed(0)
    return application(case.model, case.pixels)


# Predicted ------------------------------------------------------------------------------------------------------------


def cuts(name: str, granularity: Granularity) -> dict[str, Any]:
    """Return a row of the table of predictions, as JSON data: one model, cut by layers or by operations.

    ``asked`` is what ``search_plan(model, batch_size=…, max_overhead=…)`` answers (this is how it comes to its answer);
    ``best`` the least reported peak of that and of plans of one level and of several that keep to the overhead.
    """
    import tf_memsaver

    case = CASES[name]
    graph = tf_memsaver.capture_graph(build(case), batch_size=case.batch_size, granularity=granularity)
    asked = solve(graph, Request(max_overhead=case.overhead))
    problem = Problem.build(graph, Request())
    best = min([asked.segments, *_others(problem, case.overhead)], key=problem.simulator.reported_peak)
    return {
        "model": name,
        "granularity": granularity,
        "batch_size": case.batch_size,
        "pixels": case.pixels,
        "operations": len(graph.ops),
        "units": len(graph.units),
        "plain_bytes": asked.plain_peak_bytes,
        "fixed_bytes": graph.resident_bytes + graph.bytes_of(MemoryKind.WEIGHT_GRADIENT),
        "plan_seconds": asked.plan_seconds,
        "asked": _described(problem, asked.segments),
        "best": _described(problem, best),
    }


def _others(problem: Problem, overhead: float) -> list[tuple[Segment, ...]]:
    """Return the plans of least simulated peak among those of ``min_peak`` and ``nested`` that keep to the overhead."""
    plans = [problem.once(OneLevel).smallest, *problem.once(several_levels)]
    fitting = [found for found in plans if problem.overhead(found.replay_seconds) <= overhead]
    return [tidied(found.segments) for found in sorted(fitting, key=lambda found: found.rank)[:TRIED]]


def _described(problem: Problem, segments: tuple[Segment, ...]) -> dict[str, Any]:
    timeline = problem.simulator.run(segments)
    at = problem.graph.ops[timeline.instants[timeline.peak_at].op]
    peak = problem.simulator.reported_peak(segments)
    return {
        "nested": any(segment.children for segment in segments),
        "peak_bytes": peak,
        "overhead": problem.overhead(timeline.replay_seconds),
        "cut": 1 - peak / problem.plain_reported_peak,
        "tensor_cut": 1 - timeline.peak_bytes / problem.plain.peak_bytes,
        "peak_at": at.name if at.unit is None else problem.graph.units[at.unit].label,
    }


# Measured -------------------------------------------------------------------------------------------------------------


def measured(name: str, planned: bool) -> dict[str, Any]:
    """Return the measured peak and step time of one variant of a model, in graph mode, as JSON data."""
    import tf_memsaver

    case = CASES[name]
    model = build(case)
    predicted: dict[str, Any] = {}
    if planned:
        model = tf_memsaver.optimize(model, batch_size=MEASURED_BATCH, max_overhead=case.overhead)
        plan = model.memsaver_plan
        predicted = {
            "predicted_cut": 1 - plan.peak_bytes / plan.plain_peak_bytes,
            "predicted_overhead": plan.step_overhead,
        }
    found = tf_memsaver.measure(model, batch_size=MEASURED_BATCH, mode="graph", steps=3, isolate=False)
    return {
        "model": name,
        "peak_bytes": found.peak_bytes,
        "fixed_bytes": found.live_bytes + found.gradient_bytes,
        "step_seconds": found.step_seconds,
        **predicted,
    }


# Tables ---------------------------------------------------------------------------------------------------------------


def predicted_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the predictions as Markdown: for each model what its layers and its operations allow."""
    heads = ["model", "batch", "units", "plain", "fixed", "**cut**", "beside fixed", "tensors alone", "at"]
    lines = [f"| {' | '.join(heads)} | best cut | beside fixed | at | peak at | theirs |", "|---|" + "---:|" * 13]
    for row in rows:
        case, asked, best = CASES[row["model"]], row["asked"], row["best"]
        cells = [
            row["model"],
            f"{row['batch_size']} × {row['pixels']}²",
            {"layer": "layers", "op": "operations"}[row["granularity"]],
            f"{row['plain_bytes'] / GIB:.2f} GiB",
            f"{row['fixed_bytes'] / GIB:.2f} GiB",
            f"**{asked['cut']:.0%}**",
            f"{_beside_fixed(row, asked):.0%}",
            f"{asked['tensor_cut']:.0%}",
            f"{asked['overhead']:+.0%}",
            f"{best['cut']:.0%}",
            f"{_beside_fixed(row, best):.0%}",
            f"{best['overhead']:+.0%}{' (nested)' if best['nested'] else ''}",
            best["peak_at"],
            f"{case.cut:.0%} at {case.overhead:+.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _beside_fixed(row: dict[str, Any], plan: dict[str, Any]) -> float:
    """Return what a plan saves as a share of what is not fixed."""
    saved: int = row["plain_bytes"] - plan["peak_bytes"]
    return saved / (row["plain_bytes"] - row["fixed_bytes"])


def measured_table(rows: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Return pairs of plain and planned measurements as Markdown."""
    heads = ["model", "plain peak", "peak", "**cut**", "beside fixed", "step", "predicted cut", "predicted step"]
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * (len(heads) - 1)]
    for plain, planned in rows:
        saved = plain["peak_bytes"] - planned["peak_bytes"]
        cells = [
            plain["model"],
            f"{plain['peak_bytes'] / GIB:.2f} GiB",
            f"{planned['peak_bytes'] / GIB:.2f} GiB",
            f"**{saved / plain['peak_bytes']:.0%}**",
            f"{saved / (plain['peak_bytes'] - plain['fixed_bytes']):.0%}",
            f"{planned['step_seconds'] / plain['step_seconds'] - 1:+.0%}",
            f"{planned['predicted_cut']:.0%}",
            f"{planned['predicted_overhead']:+.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
