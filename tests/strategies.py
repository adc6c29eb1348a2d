"""Small training steps and requests drawn at random, and every cover of one level, by brute force."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.judge.simulate import Measured
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tf_memsaver.search.one_level import candidate_positions
from tools.shared.nets import Net

KINDS = ("dense", "relu", "norm", "scratch", "dropout", "reshape", "add", "concat")


@st.composite
def graphs(draw: st.DrawFn, max_units: int = 6, pins: bool = True, scales: Sequence[int] = (1, 64)) -> Graph:
    """A training step with branches, skips, views, in-place ops, temporaries, and perhaps pinned and frozen units."""
    net = Net(scale=draw(st.sampled_from(scales)))
    sizes = st.integers(min_value=1, max_value=9)
    made = [net.input(draw(sizes))]
    for _ in range(draw(st.integers(min_value=2, max_value=max_units))):
        # Mostly from the newest value; sometimes a branch off an older one.
        x = made[-1] if draw(st.integers(0, 3)) else made[draw(st.integers(0, len(made) - 1))]
        kind = draw(st.sampled_from(KINDS))
        same = [v for v in made[1:] if v != x and net.bytes_of(v) == net.bytes_of(x)]
        if kind == "add" and same:
            made.append(net.add(x, draw(st.sampled_from(same))))
        elif kind == "concat" and len(made) > 2:
            made.append(net.concat(x, draw(st.sampled_from(made[1:]))))
        elif kind in ("relu", "norm", "dropout", "reshape") and x != made[0]:
            made.append(getattr(net, kind)(x))
        elif kind == "scratch":
            made.append(net.scratch(x, draw(sizes), draw(st.integers(1, 20))))
        else:
            pinned = "draws from hidden state" if pins and draw(st.integers(0, 7)) == 0 else ""
            trained, workspace = bool(draw(st.integers(0, 5))), draw(st.integers(0, 9))
            made.append(net.dense(x, draw(sizes), 1, trained=trained, workspace=workspace, pinned=pinned))
    read = {value for op in net.ops for value in op.inputs}
    ends = [value for value in made[1:] if value not in read]
    return net.graph(*ends, loss_reads=draw(st.booleans()))


@st.composite
def requests(draw: st.DrawFn, graph: Graph, strategy: str) -> Request:
    """Hints that agree with the graph and with each other; no limits."""
    free = [unit.label for unit in graph.units if not unit.pinned]
    keep = [label for label in free if draw(st.integers(0, 7)) == 0]
    recompute = [label for label in free if label not in keep and draw(st.integers(0, 7)) == 0]
    every = [unit.label for unit in graph.units]
    candidates = [label for label in every if draw(st.booleans())] if draw(st.integers(0, 3)) == 0 else []
    return Request(strategy=strategy, keep=tuple(keep), recompute=tuple(recompute), candidates=tuple(candidates))


def within_a_budget(data: st.DataObject, strategy: str) -> tuple[Problem, list[Measured], int]:
    """A problem, the simulator's word on all its covers of one level, and the peak of one of them as a budget."""
    graph = data.draw(graphs())
    problem = Problem.build(graph, data.draw(requests(graph, strategy)))
    plans = brute_force(problem)
    return problem, plans, data.draw(st.sampled_from(sorted({plan.peak_bytes for plan in plans})))


def covers(problem: Problem) -> Iterator[list[Segment]]:
    """Every cover of one level between the candidate positions that keeps the hints."""
    positions = candidate_positions(problem)
    interior = positions[1:-1]
    for chosen in itertools.product((False, True), repeat=len(interior)):
        ends = [0, *itertools.compress(interior, chosen), positions[-1]]
        spans = list(itertools.pairwise(ends))
        for modes in itertools.product(SegmentMode, repeat=len(spans)):
            if all(_allowed(problem, span, mode) for span, mode in zip(spans, modes, strict=True)):
                yield [Segment(start=a, stop=b, mode=mode) for (a, b), mode in zip(spans, modes, strict=True)]


def _allowed(problem: Problem, span: tuple[int, int], mode: SegmentMode) -> bool:
    unwanted = problem.forced if mode is SegmentMode.STORE else problem.pinned
    return not any(unwanted[span[0] : span[1]])


def brute_force(problem: Problem) -> list[Measured]:
    """The simulator's word on every cover of one level."""
    return [problem.simulator.measure(segments) for segments in covers(problem)]
