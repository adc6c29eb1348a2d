"""How good plans are, and how long planning takes, on made-up steps: no TensorFlow, seconds to minutes.

``python -m tools.bench.planner`` writes ``tools/results/bench_planner.md``, or with ``--sections`` only some of its
sections anew:

* growth: ResNet-like graphs of 10² to 10⁵ operations, planned for half of what the plain step needs beyond its
  weights, each in a process of its own, with the time and memory of planning;
* planners: chains and ResNet-, DenseNet-, U-Net- and transformer-like graphs at 30, 50 and 70% of the plain peak, with
  the extra time of each planner's plan;
* gaps: the same kinds of graphs with 80 to 150 operations, and how far the plans of ``auto`` are from the best of their
  class and from any schedule at all (``oracle/milp.py``; needs ``pip install highspy``).

An operation takes one second a byte forward, and two backward.
"""

from __future__ import annotations

import functools
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from tf_memsaver.errors import InfeasibleBudgetError, MemsaverError
from tf_memsaver.ir.graph import Graph
from tf_memsaver.oracle.milp import Oracle, least_replay
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import solve
from tools.shared.nets import Net, chain
from tools.shared.results import RESULTS, machine_line, write_text

_OUTPUT = flags.DEFINE_string("output", str(RESULTS / "bench_planner.md"), "where to write the tables")
_SIZES = flags.DEFINE_list("sizes", ["100", "1000", "10000", "100000"], "operations of the growing graphs")
_LIMIT = flags.DEFINE_integer("limit", 900, "seconds after which planning is given up")
_SECTIONS = flags.DEFINE_list("sections", ["growth", "planners", "gaps"], "what to run; the rest of the file is kept")
_MILP_LIMIT = flags.DEFINE_float("milp_limit", 120.0, "seconds for the oracle on each graph and budget")

PLANNERS = ("auto", "nested", "chen_sqrt", "chen_greedy", "keep_products", "recompute_all")
SHARES = (0.3, 0.5, 0.7)


# Graphs ---------------------------------------------------------------------------------------------------------------


def residual(blocks: int) -> Graph:
    """Return blocks of two products with normalisation and a residual sum."""
    net = Net(scale=1024)
    x = net.dense(net.input(8), 64)
    for _ in range(blocks):
        y = net.relu(net.norm(net.dense(x, 64, workspace=8)))
        x = net.relu(net.add(x, net.norm(net.dense(y, 64, workspace=8))))
    return net.graph(net.dense(x, 1))


def dense_block(layers: int) -> Graph:
    """Return layers that each read what all before them made."""
    net = Net(scale=1024)
    x = net.dense(net.input(8), 32)
    for _ in range(layers):
        x = net.concat(x, net.dense(net.relu(net.norm(x)), 8))
    return net.graph(net.dense(x, 1))


def unet(depth: int) -> Graph:
    """Return a path down and up again with a skip on each height."""
    net = Net(scale=1024)
    x, skips = net.input(64), []
    for height in range(depth):
        x = net.relu(net.dense(x, 128 >> height))
        skips.append(x)
        x = net.dense(x, 64 >> height)
    for skip in reversed(skips):
        x = net.relu(net.dense(net.concat(skip, net.dense(x, net.bytes_of(skip))), net.bytes_of(skip)))
    return net.graph(net.dense(x, 1))


def transformer(layers: int) -> Graph:
    """Return layers of attention-like and wide parts with residual sums."""
    net = Net(scale=1024)
    x = net.dense(net.input(8), 32)
    for _ in range(layers):
        y = net.norm(x)
        scores = net.dropout(net.relu(net.dense(y, 96)))
        x = net.add(x, net.dropout(net.dense(scores, 32)))
        x = net.add(x, net.dense(net.relu(net.dense(net.norm(x), 128)), 32))
    return net.graph(net.dense(x, 1))


def _graphs(chains: Sequence[int], blocks: int, layers: int, depth: int, deep: int) -> dict[str, Callable[[], Graph]]:
    """Return builders of one graph of each kind, by name, of the given sizes."""
    return {
        **{f"chain of {length}": functools.partial(chain, [8] * length) for length in chains},
        "ResNet-like": lambda: residual(blocks),
        "DenseNet-like": lambda: dense_block(layers),
        "U-Net-like": lambda: unet(depth),
        "transformer-like": lambda: transformer(deep),
    }


GRAPHS = _graphs(chains=(30, 100), blocks=12, layers=16, depth=5, deep=8)
SMALL_GRAPHS = _graphs(chains=(30, 49), blocks=5, layers=9, depth=7, deep=3)
"""Small enough for the oracle."""


# Measuring ------------------------------------------------------------------------------------------------------------


def _budget(graph: Graph, share: float) -> int:
    problem = Problem.build(graph, Request())
    resident = graph.resident_bytes
    return resident + int((problem.plain_reported_peak - resident) * share)


def _plan_once(operations: int, write: Any) -> None:
    graph = residual(max(1, operations // len(residual(1).ops)))
    budget = _budget(graph, 0.5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    plan = solve(graph, Request(budget_bytes=budget))
    seconds = time.perf_counter() - begin
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    write.send([len(graph.ops), len(graph.units), seconds, memory / 1024, plan.planner, plan.step_overhead])


def growth(sizes: Sequence[int], limit: int) -> list[str]:
    """Return a table of planning time and memory by size."""
    rows = ["| operations | units | planning | memory | planner | step |", "|---:|---:|---:|---:|---|---:|"]
    for size in sizes:
        read, write = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(target=_plan_once, args=(size, write))
        process.start()
        write.close()
        try:
            made = read.recv() if read.poll(limit) else None
        except EOFError:
            made = None
        process.kill()
        process.join()
        if made is None:
            rows.append(f"| about {size} | | not within {limit} s | | | |")
        else:
            operations, units, seconds, memory, planner, overhead = made
            rows.append(
                f"| {operations} | {units} | {seconds:.1f} s | {memory:.0f} MiB | {planner} | {overhead:+.1%} |"
            )
        print(rows[-1], flush=True)
    return rows


def compared() -> list[str]:
    """Return a table of the extra time of each planner's plan, where that is within the budget."""
    rows = [f"| graph | operations | budget | {' | '.join(PLANNERS)} |", "|---|---:|---:|" + "---:|" * len(PLANNERS)]
    for name, build in GRAPHS.items():
        graph = build()
        for share in SHARES:
            found = [_extra_time(graph, planner, _budget(graph, share)) for planner in PLANNERS]
            rows.append(f"| {name} | {len(graph.ops)} | {share:.0%} | {' | '.join(found)} |")
            print(rows[-1], flush=True)
    return rows


def _extra_time(graph: Graph, planner: str, budget: int) -> str:
    try:
        return f"{solve(graph, Request(strategy=planner, budget_bytes=budget)).step_overhead:+.1%}"
    except InfeasibleBudgetError:
        return "–"
    except MemsaverError as error:
        return type(error).__name__


def gaps(limit: float) -> list[str]:
    """Return a table of how far the plans of ``auto`` are from what is possible, and what that comes to."""
    columns = ("auto", "class bound", "best schedule", "bound", "solving", "gap", "of class", "of search")
    rows = [f"| graph | operations | budget | {' | '.join(columns)} |", "|---|---:|---:|" + "---:|" * len(columns)]
    found: list[float] = []
    for name, build in SMALL_GRAPHS.items():
        graph = build()
        for share in SHARES:
            budget = _budget(graph, share)
            try:
                plan = solve(graph, Request(budget_bytes=budget))
            except InfeasibleBudgetError:
                plan = None
            begin = time.perf_counter()
            oracle = least_replay(graph, budget, limit, () if plan is None else plan.segments)
            cells = _gap_cells(graph, budget, plan, oracle, time.perf_counter() - begin)
            if plan is not None:
                found.append((1 + plan.step_overhead) / (1 + oracle.bound_seconds / graph.step_seconds) - 1)
            rows.append(f"| {name} | {len(graph.ops)} | {share:.0%} | {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    median, worst = statistics.median(found), max(found)
    said = (
        "Extra step time of `auto`'s plan (n: nested); the bound for plans of one level; the best schedule that",
        "the oracle found (~: its replays need more than the budget while they run); and the oracle's bound for any",
        f"schedule, where that is another (= proven). It had {limit:.0f} s for each and began with our plan. *Gap*",
        "is how far our step is above one with the oracle's bound. *Of class* is the part of it between the oracle's",
        "bound and that of the class, which no search can close; *of search* the part above the latter.",
        f"Over {len(found)} plans the gap is {median:.1%} at the median, {worst:.1%} at worst.",
    )
    return [*said, "", *rows]


def _gap_cells(graph: Graph, budget: int, plan: Plan | None, oracle: Oracle, seconds: float) -> list[str]:
    plain = graph.step_seconds
    bound = oracle.bound_seconds / plain
    if oracle.bound_seconds == float("inf"):
        least = ["none", "="]
    else:
        unsure = "~" if oracle.peak_bytes > budget else ""
        best = "?" if oracle.seconds == float("inf") else f"{unsure}{oracle.seconds / plain:+.1%}"
        least = [best, "=" if oracle.proven else f"{bound:+.1%}"]
    solving = f"{seconds:.0f} s"
    if plan is None or plan.bound_seconds is None:
        return ["–", "", *least, solving, "", "", ""]
    gap = (1 + plan.step_overhead) / (1 + bound) - 1
    if plan.planner == "nested":
        return [f"{plan.step_overhead:+.1%} n", "", *least, solving, f"{gap:.1%}", "", ""]
    its = plan.bound_seconds / plain
    of_class, of_search = (1 + its) / (1 + bound) - 1, (1 + plan.step_overhead) / (1 + its) - 1
    ours = [f"{plan.step_overhead:+.1%}", f"{its:+.1%}"]
    return [*ours, *least, solving, f"{gap:.1%}", f"{of_class:.1%}", f"{of_search:.1%}"]


INTRODUCTION = """Planners on made-up steps (`tools/bench/planner.py`). Budgets are shares of what the plain step needs
beyond its weights; – is no plan within the budget."""


def main(_: list[str]) -> None:
    """Write the tables; sections that are not asked for stay as they are in the file."""
    path = Path(_OUTPUT.value)
    makers: dict[str, tuple[str, Callable[[], list[str]]]] = {
        "growth": ("Growth", lambda: growth([int(size) for size in _SIZES.value], _LIMIT.value)),
        "planners": ("Extra step time", compared),
        "gaps": ("Gaps", lambda: gaps(_MILP_LIMIT.value)),
    }
    if unknown := set(_SECTIONS.value) - set(makers):
        raise app.UsageError(f"no section {', '.join(sorted(unknown))}; there are {', '.join(makers)}")
    old = path.read_text(encoding="utf-8").split("\n## ")[1:] if path.exists() else []
    texts = {title: body.strip() for title, _, body in (part.partition("\n") for part in old)}
    for section, (title, make) in makers.items():
        if section in _SECTIONS.value:
            texts[title] = "\n".join([machine_line(), "", *make()])
    parts = [INTRODUCTION, *(f"## {title}\n\n{texts[title]}" for title, _ in makers.values() if title in texts)]
    write_text(path, "\n\n".join(parts) + "\n")


if __name__ == "__main__":
    app.run(main)
