"""The one place where a proposal becomes a plan: simulated, checked, certified."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from tf_memsaver.errors import (
    CertificationError,
    InfeasibleBudgetError,
    InfeasibleOverheadError,
    InvalidRequestError,
    PlanFormatError,
)
from tf_memsaver.ir.graph import Graph
from tf_memsaver.plan import auto, chen, min_peak, min_time  # noqa: F401  (each enters its planners in the table)
from tf_memsaver.plan.one_level import OneLevel
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.registry import Choice, Planner, planner_named, planner_names, register_planner
from tf_memsaver.plan.types import Plan, Request, Segment, SegmentMode, check_cover

__all__ = ["Choice", "Planner", "planner_names", "register_planner", "solve"]


def solve(graph: Graph, request: Request, *, versions: Mapping[str, str] | Sequence[tuple[str, str]] = ()) -> Plan:
    """Return the plan that the request's planner proposes, certified by the simulator.

    ``versions`` (name and version of what the plan was made with) are written into the plan.

    Raises:
      InvalidRequestError: an unknown strategy, or a limit that has no meaning.
      HintError: a hint matches no layer, or hints contradict each other.
      InfeasibleBudgetError: the plan's simulated peak is above the budget; ``least_bytes`` is one that ``auto`` and
        ``min_time`` keep.
      InfeasibleOverheadError: the request has a ``max_overhead`` and the plan needs more.
      CertificationError: the proposal is no cover of the units, or breaks a hint.
    """
    begin = time.perf_counter()
    planner = planner_named(request.strategy)
    _check_limits(request)
    problem = Problem.build(graph, request)
    proposed = planner(problem)
    name = proposed.planner if isinstance(proposed, Choice) else request.strategy
    segments = tuple(proposed.segments if isinstance(proposed, Choice) else proposed)
    _certify(problem, segments)
    measured = problem.simulator.measure(segments)
    if request.budget_bytes is not None and measured.peak_bytes > request.budget_bytes:
        raise InfeasibleBudgetError(request.budget_bytes, OneLevel(problem).smallest.peak_bytes)
    overhead = problem.overhead(measured.replay_seconds)
    if request.max_overhead is not None and overhead > request.max_overhead:
        raise InfeasibleOverheadError(request.max_overhead, overhead)
    return Plan(
        segments=segments,
        batch_size=graph.batch_size,
        strategy=request.strategy,
        planner=name,
        peak_bytes=measured.peak_bytes,
        plain_peak_bytes=problem.plain.peak_bytes,
        step_overhead=overhead,
        plan_seconds=time.perf_counter() - begin,
        request=request,
        labels=tuple(unit.label for unit in graph.units),
        signatures=graph.signatures,
        versions=tuple(sorted(dict(versions).items())),
    )


def _check_limits(request: Request) -> None:
    if request.budget_bytes is not None and request.budget_bytes <= 0:
        raise InvalidRequestError(f"budget is {request.budget_bytes} bytes; give a positive number, such as '6GiB'.")
    if request.max_overhead is not None and not request.max_overhead >= 0:
        raise InvalidRequestError(
            f"max_overhead is {request.max_overhead}; give the share of a step that may be added, such as 0.3."
        )


def _certify(problem: Problem, segments: Sequence[Segment]) -> None:
    """Check that segments cover the units and that every hint is kept, in segments of all levels."""
    strategy = problem.request.strategy
    try:
        check_cover(segments, 0, len(problem.graph.units))
    except PlanFormatError as error:
        raise CertificationError(strategy, str(error)) from error
    for segment in segments:
        unwanted = problem.pinned if segment.mode is SegmentMode.RECOMPUTE else problem.forced
        for unit in range(segment.start, segment.stop):
            if unwanted[unit]:
                label = problem.graph.units[unit].label
                raise CertificationError(strategy, f"layer '{label}' lies in a {segment.mode.value} segment")
