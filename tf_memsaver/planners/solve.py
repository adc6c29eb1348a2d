"""The one place where a proposal becomes a plan: simulated, checked, certified."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tf_memsaver.errors import InfeasibleBudgetError, InfeasibleOverheadError
from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import Segment
from tf_memsaver.options import OPTIONS, checked
from tf_memsaver.pace import without_collection
from tf_memsaver.plan.advice import advice, smaller_budget_advice
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.registry import Choice, Planner, check_strategy, planner_named, planner_names
from tf_memsaver.plan.request import Request
from tf_memsaver.planners import curves
from tf_memsaver.planners.budget import keeping, proposal
from tf_memsaver.search.bounds import least_seconds
from tf_memsaver.search.one_level import Found

__all__ = ["Plans", "Versions", "check_strategy", "curve", "planner_names", "solve"]

Versions = Mapping[str, str] | Sequence[tuple[str, str]]
"""Name and version of what a plan was made with."""


def solve(graph: Graph, request: Request, *, versions: Versions = ()) -> Plan:
    """Return the plan that the request's planner proposes, certified by the simulator.

    ``versions`` (name and version of what the plan was made with) are written into the plan.

    Raises:
      InvalidRequestError: an unknown strategy, or a limit that has no meaning.
      HintError: a hint matches no layer, or hints contradict each other.
      InfeasibleBudgetError: the plan's simulated peak is above the budget; ``least_bytes`` is one that planners with a
        fallback keep by what a step takes at most.
      InfeasibleOverheadError: the request has a ``max_overhead`` and the plan needs more.
      CertificationError: the proposal is no cover of the units, breaks a hint, or cuts where no segment may end.
    """
    return Plans(graph, versions=versions).plan(request)


def curve(
    graph: Graph, request: Request, points: int = OPTIONS["points"].default, *, versions: Versions = ()
) -> tuple[Plan, ...]:
    """Return certified plans from the plain step to the least peak, of ever less memory and ever longer steps.

    They are ``min_time``'s for limits between the two and, below what one level reaches, some of ``nested``'s, found
    over the same tables, without those that another one beats in both. There may be fewer than ``points`` where fewer
    plans differ. Each takes as ``plan_seconds`` the time since the one before it. Only the hints of ``request`` count.

    Raises:
      InvalidRequestError: fewer than two points, or too many.
      HintError: a hint matches no layer, or hints contradict each other.
    """
    return Plans(graph, versions=versions).curve(request, points)


class Plans:
    """The plans of one graph: what is computed for one of them serves all that differ in nothing but their limits."""

    def __init__(self, graph: Graph, *, versions: Versions = ()) -> None:
        """Prepare to plan ``graph``; ``versions`` as in ``solve``."""
        self.graph, self.versions = graph, versions
        self._problems: dict[tuple[tuple[str, ...], ...], Problem] = {}

    @without_collection()
    def plan(self, request: Request) -> Plan:
        """Return what ``solve`` returns, and raise what it raises."""
        begin = time.perf_counter()
        request = request.checked()
        planner = planner_named(request.strategy)
        problem = self._problem(request)
        request = request.for_peak(problem.plain_reported_peak)
        problem = problem.with_limits(request)
        try:
            choice = _chosen(planner, problem)
        except InfeasibleBudgetError as error:
            remedy = smaller_budget_advice(self.graph, request, error)
            raise InfeasibleBudgetError(
                error.budget_bytes,
                error.least_bytes,
                remedy=remedy,
                predicted_bytes=error.predicted_bytes,
                plain_bytes=problem.plain_reported_peak,
            ) from None
        plan = _plan(problem, choice, begin, self.versions)
        plan = replace(plan, advice=advice(problem.simulator, plan))
        if request.max_overhead is not None and plan.step_overhead > request.max_overhead:
            raise InfeasibleOverheadError(request.max_overhead, plan.step_overhead)
        return plan

    @without_collection()
    def curve(self, request: Request, points: int = OPTIONS["points"].default) -> tuple[Plan, ...]:
        """Return what ``curve`` returns, and raise what it raises."""
        points = checked(points=points)["points"]
        begin = time.perf_counter()
        problem = self._problem(request.checked().without_limits())
        made: dict[tuple[Segment, ...], Plan] = {}
        for choice in curves.proposals(problem, points):
            if choice.segments not in made:
                problem.certify(choice.segments, choice.planner)
                made[choice.segments] = _plan(problem, choice, begin, self.versions)
                begin = time.perf_counter()
        return tuple(curves.pareto(list(made.values())))

    def _problem(self, request: Request) -> Problem:
        hints = (request.keep, request.recompute, request.candidates)
        if hints not in self._problems:
            self._problems[hints] = Problem.build(self.graph, request)
        return self._problems[hints].with_limits(request)


def _plan(
    problem: Problem,
    choice: Choice,
    begin: float,
    versions: Versions,
) -> Plan:
    """Return a certified choice as a plan; ``begin`` is when planning it began (``time.perf_counter``)."""
    graph, request = problem.graph, problem.request
    found = Found(segments=choice.segments, measured=problem.simulator.measure(choice.segments))
    bound = least_seconds(problem, found)
    overhead = problem.overhead(found.replay_seconds)
    return Plan(
        segments=choice.segments,
        batch_size=graph.batch_size,
        strategy=request.strategy,
        planner=choice.planner,
        peak_bytes=problem.simulator.reported_peak(choice.segments),
        highest_peak_bytes=problem.simulator.highest_peak(choice.segments),
        plain_peak_bytes=problem.plain_reported_peak,
        step_overhead=overhead,
        plan_seconds=time.perf_counter() - begin,
        request=replace(request, executor="graph"),  # The simulator has judged it.
        labels=tuple(unit.label for unit in graph.units),
        signatures=graph.signatures,
        versions=tuple(sorted(dict(versions).items())),
        bound_seconds=bound,
        opened=graph.opened,
        note=graph.note,
        data_shapes=graph.data_shapes,
        activation_bytes=problem.kept_bytes,
        reasons=problem.reasons,
        gap=None if bound is None else (1 + overhead) / (1 + problem.overhead(bound)) - 1,
    )


def _chosen(planner: Planner, problem: Problem) -> Choice:
    """Return a certified proposal, within the budget where there is one, and within the overhead where one is found."""
    budget, most = problem.request.budget_bytes, problem.request.max_overhead
    if budget is None:
        return proposal(planner, problem)
    slower = list[tuple[float, Choice]]()
    for choice in keeping(planner, problem, budget):
        overhead = problem.overhead(problem.simulator.replay_seconds(choice.segments))
        slower.append((overhead, choice))
        if most is None or overhead <= most:
            break
    return min(slower, key=lambda each: each[0])[1]
