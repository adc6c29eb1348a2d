"""Part A: the largest batch that trains in 16 GB with at most one extra forward pass, under Checkmate's cost model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tf_memsaver.errors import InfeasibleBudgetError, InfeasibleOverheadError
from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import Segment
from tf_memsaver.judge.simulate import Simulator
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import curve, solve
from tf_memsaver.search.one_level import Found
from tf_memsaver.search.polish import polished
from tools.published.checkmate_graphs import Network, network_of, step_graph
from tools.published.checkmate_judge import CAPACITY, judged, largest_batch, retained_peak, working_set_bytes
from tools.published.checkmate_models import MODELS

PUBLISHED: dict[str, tuple[int | None, str]] = {
    "VGG19": (167, "289"),
    "U-Net": (16, "61"),
    "MobileNet": (217, "1105"),
    "FCN8": (None, "≥ 60"),
    "SegNet": (None, "≥ 62"),
    "ResNet50": (None, "≥ 193"),
}
"""By model: Checkmate's batch without recomputation, where known, and its largest."""

BASELINES = ("chen_sqrt", "chen_greedy", "keep_products", "recompute_all")
OURS = ("auto", "nested")
FIXED_TWICE = 4
"""Copies of the parameters that Checkmate's script of the baselines counts."""

CURVE_POINTS = 96
CLIMB_STEPS = 20_000
ONE_FORWARD = 1 / 3
"""A forward pass as a share of the plain step, since Grads cost twice what their layers do."""


def batches(name: str) -> dict[str, Any]:
    """Return a row of the table, as JSON data; batches that nothing was rounded of are real numbers, as theirs are.

    ``bisected`` has by strategy the largest batch for which ``solve`` has a plan, by our simulator. ``simulated`` and
    ``checkmate`` are the best of all plans made for one example: by our simulator, which counts a copy of what enters a
    replay, and by Checkmate's rules, without. ``climb`` is what a local search makes of the latter.
    """
    network = network_of(MODELS[name]())
    graph = step_graph(network, 1)
    problem = Problem.build(graph, Request())
    bound = working_set_bytes(graph)
    plain = judged(problem, network, "plain", problem.store_all)
    found = [(judged(problem, network, plan.planner, plan.segments), plan) for plan in _plans(graph)]
    found = [(one, plan) for one, plan in found if one.replay_share <= 1.0]
    simulated, plan = min(found, key=lambda pair: pair[0].simulated_bytes)
    _check_at(network, int(largest_batch(network, simulated.simulated_bytes)), plan)
    checkmate, start = min(found, key=lambda pair: (pair[0].checkmate_bytes, pair[0].replay_share))
    climb = judged(problem, network, "climb", _climbed(problem, network, start))
    return {
        "model": name,
        "layers": len(network.nodes),
        "parameter_bytes": network.parameter_bytes,
        "bisected": {s: _bisected(network, s, int(largest_batch(network, bound)) + 1) for s in (*BASELINES, *OURS)},
        "plain": _batches(network, plain.checkmate_bytes),
        "retained": _batches(network, retained_peak(network)),
        "simulated": {**dataclasses.asdict(simulated), "batches": _batches(network, simulated.simulated_bytes)},
        "checkmate": {**dataclasses.asdict(checkmate), "batches": _batches(network, checkmate.checkmate_bytes)},
        "climb": {**dataclasses.asdict(climb), "batches": _batches(network, climb.checkmate_bytes)},
        "bound": _batches(network, bound),
    }


def _batches(network: Network, bytes_an_example: float) -> tuple[float, float]:
    """Return the largest batch with the parameters counted twice, as in the MILP, and four times."""
    return largest_batch(network, bytes_an_example), largest_batch(network, bytes_an_example, FIXED_TWICE)


def _bisected(network: Network, strategy: str, above: int) -> int:
    """Return the largest batch below ``above`` for which a strategy has a plan; 0 where it has none."""
    low, high = 0, above
    while high - low > 1:
        batch = (low + high) // 2
        request = Request(strategy=strategy, budget_bytes=CAPACITY, max_overhead=ONE_FORWARD)
        try:
            solve(step_graph(network, batch), request)
            low = batch
        except (InfeasibleBudgetError, InfeasibleOverheadError):
            high = batch
    return low


def _plans(graph: Graph) -> list[Plan]:
    """Return the plans of the memory-time curve, and that of least peak within a forward pass."""
    return [*curve(graph, Request(), CURVE_POINTS), solve(graph, Request(max_overhead=ONE_FORWARD))]


def _climbed(problem: Problem, network: Network, start: Plan) -> tuple[Segment, ...]:
    """Return the plan of least bytes by Checkmate's rules, of one extra forward pass at most, near a given one."""

    def rank(found: Found) -> tuple[float, ...]:
        one = judged(problem, network, "climb", found.segments)
        return max(one.replay_share, 1.0), one.checkmate_bytes, one.replay_share

    begin = Found(segments=start.segments, measured=problem.simulator.measure(start.segments))
    return polished(problem, begin, rank, CLIMB_STEPS).segments


def _check_at(network: Network, batch: int, plan: Plan) -> None:
    """Check that a plan made for one example fits at this batch, and at no larger one, by our simulator."""
    peaks = [Simulator(step_graph(network, b)).measure(plan.segments).peak_bytes for b in (batch, batch + 1)]
    if not peaks[0] <= CAPACITY < peaks[1]:
        raise AssertionError(f"{network.name}: {peaks} bytes at batches of {batch} and one more")


# Tables ---------------------------------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the largest batches as Markdown."""
    heads = ["model", "plain", *BASELINES, "ours", "**ours, no copies**", "of a forward", "climb", "Checkmate", "bound"]
    lines = [f"| {' | '.join(heads)} | peak at |", "|---|" + "---:|" * (len(heads) - 1) + "---|"]
    for row in rows:
        bisected = row["bisected"]
        ours = max(int(row["simulated"]["batches"][0]), *(bisected[name] for name in OURS))
        cells = [
            row["model"],
            f"{int(row['plain'][0])}",
            *(f"{bisected[name] or '–'}" for name in BASELINES),
            f"{ours}",
            f"**{row['checkmate']['batches'][0]:.2f}** ({row['checkmate']['planner']})",
            f"{row['checkmate']['replay_share']:.0%}",
            f"{row['climb']['batches'][0]:.2f}",
            PUBLISHED[row["model"]][1],
            f"{row['bound'][0]:.2f}",
            row["checkmate"]["peak_at"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def convention_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return as Markdown what the parameters' count, and freeing outputs behind their last reader, make of batches."""
    heads = ["model", "plain ×2", "×4", "nothing freed ×2", "×4", "Checkmate's plain", "ours, no copies ×2", "×4"]
    lines = [f"| {' | '.join(heads)} | bound ×2 | ×4 |", "|---|" + "---:|" * 9]
    for row in rows:
        pairs = [row["plain"], row["retained"], row["checkmate"]["batches"], row["bound"]]
        cells = [" | ".join(f"{batch:.2f}" for batch in pair) for pair in pairs]
        cells.insert(2, str(PUBLISHED[row["model"]][0] or "–"))
        lines.append(f"| {row['model']} | {' | '.join(cells)} |")
    return lines
