"""Part B: what plans cost over the best one known, under Checkmate's cost model, over a range of budgets.

Checkmate's table is over the optimum of its MILP. Where the oracle can run (``oracle/milp.py`` needs HiGHS), costs over
its bound stand beside: no schedule costs less, so that they are never less than those over the optimum. The same
holds for costs over the plain step's, which need no oracle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tf_memsaver.errors import InfeasibleBudgetError
from tf_memsaver.ir.segments import Segment
from tf_memsaver.oracle.milp import is_available, least_replay
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.chen import covered, greedy_cuts, made_by_unit, sqrt_cuts
from tf_memsaver.planners.solve import curve, solve
from tools.published.checkmate_graphs import Network, network_of, step_graph
from tools.published.checkmate_judge import Judged, judged, working_set_bytes
from tools.published.checkmate_models import MODELS

BUDGETS = 10
"""Budgets between the largest working set of one op and the plain peak, evenly spaced, the plain one left out."""

GREEDY_TRIALS = 60
CURVE_POINTS = 96
COLUMNS = ("chen_sqrt", "chen_greedy", "auto", "no copies")
OF_ALL = "best known"
BOUND = "bound"


def least_cost(problem: Problem, budget_bytes: int, seconds: float) -> float | None:
    """Return what every schedule within a budget costs at least, as a share of the plain step; None without an oracle.

    The oracle gets so many seconds; with 0 it is not asked.
    """
    if not seconds or not is_available():
        return None
    found = least_replay(problem.graph, budget_bytes, time_limit=seconds)
    return 1 + found.bound_seconds / problem.plain.step_seconds


def costs(name: str, oracle_seconds: float) -> dict[str, Any]:
    """Return, for a model, the budgets (bytes an example, without the fixed ones) and each one's cost by column.

    A cost is that of the whole step as a share of the plain step's; None where there is no plan within the budget. The
    best known plan is the cheapest of all columns. ``no copies`` takes our plans by Checkmate's rules, the other
    columns by our simulator, which counts a copy of what enters a replay.
    """
    network = network_of(MODELS[name]())
    graph = step_graph(network, 1)
    problem = Problem.build(graph, Request())
    made: dict[str, list[Judged]] = {
        # Section 4.3, also where storing all needs less: the budget decides.
        "chen_sqrt": [judged(problem, network, "chen_sqrt", covered(problem, sqrt_cuts(problem)))],
        "chen_greedy": [judged(problem, network, "chen_greedy", segments) for segments in _greedy(problem)],
        "no copies": [judged(problem, network, p.planner, p.segments) for p in curve(graph, Request(), CURVE_POINTS)],
    }
    least = working_set_bytes(graph)
    most = problem.plain.peak_bytes - network.fixed_bytes
    rows = []
    for step in range(BUDGETS):
        budget = least + (most - least) * step // BUDGETS
        row: dict[str, Any] = {"budget_bytes": budget}
        row["chen_sqrt"] = _cheapest(made["chen_sqrt"], budget, lambda one: one.simulated_bytes)
        row["chen_greedy"] = _cheapest(made["chen_greedy"], budget, lambda one: one.simulated_bytes)
        planned = _planned(problem, network, budget)
        row["auto"] = _cheapest(planned, budget, lambda one: one.simulated_bytes)
        row["no copies"] = _cheapest([*planned, *made["no copies"]], budget, lambda one: one.checkmate_bytes)
        row[OF_ALL] = min((row[column] for column in COLUMNS if row[column] is not None), default=None)
        row[BOUND] = least_cost(problem, budget + network.fixed_bytes, oracle_seconds)
        rows.append(row)
    return {"model": name, "budgets": rows}


def _planned(problem: Problem, network: Network, budget: int) -> list[Judged]:
    """Return what ``auto`` proposes for a budget, if anything."""
    try:
        plan = solve(problem.graph, Request(budget_bytes=budget + network.fixed_bytes))
    except InfeasibleBudgetError:
        return []
    return [judged(problem, network, plan.planner, plan.segments)]


def _cheapest(plans: Sequence[Judged], budget: int, nbytes: Callable[[Judged], int]) -> float | None:
    """Return the least cost of the plans within a budget; replays are shares of a forward pass, a third of a step."""
    return min((1 + one.replay_share / 3 for one in plans if nbytes(one) <= budget), default=None)


def _greedy(problem: Problem) -> Iterator[Sequence[Segment]]:
    """Yield the plans of Chen's algorithm 3 for many values of b, of which Checkmate takes the cheapest that fits."""
    made = made_by_unit(problem)
    for trial in range(1, GREEDY_TRIALS + 1):
        yield covered(problem, greedy_cuts(problem, made, sum(made) * trial / GREEDY_TRIALS))


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return as Markdown, by model, geometric means over the budgets at which a column has a plan, and how many."""
    against = (OF_ALL, BOUND) if any(b[BOUND] for row in rows for b in row["budgets"]) else (OF_ALL,)
    heads = [f"{column} / {base}" for column in COLUMNS for base in against]
    lines = [f"| model | {' | '.join(heads)} | auto / plain, worst |", "|---|" + "---:|" * (len(heads) + 1)]
    for row in rows:
        cells = [_mean(row["budgets"], column, base) for column in COLUMNS for base in against]
        worst = max((b["auto"] for b in row["budgets"] if b["auto"] is not None), default=None)
        cells.append("–" if worst is None else f"{worst:.3f}")
        lines.append(f"| {row['model']} | {' | '.join(cells)} |")
    return lines


def _mean(budgets: Sequence[dict[str, Any]], column: str, base: str) -> str:
    ratios = [b[column] / b[base] for b in budgets if b[column] is not None and b[base] is not None]
    if not ratios:
        return "–"
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{mean:.3f} ({len(ratios)} of {len(budgets)})"
