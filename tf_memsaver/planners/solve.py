"""The one place where a proposal becomes a plan: simulated, checked, certified."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from tf_memsaver.errors import InfeasibleBudgetError, InfeasibleOverheadError
from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import Segment
from tf_memsaver.judge.estimate import units_of
from tf_memsaver.options import OPTIONS, checked
from tf_memsaver.pace import without_collection
from tf_memsaver.plan.advice import advice, smaller_budget_advice
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.registry import Choice, Planner, check_strategy, planner_named, planner_names
from tf_memsaver.plan.request import Request
from tf_memsaver.planners import curves
from tf_memsaver.search.bounds import least_seconds
from tf_memsaver.search.filling import filled
from tf_memsaver.search.one_level import Found

__all__ = ["Plans", "Versions", "check_strategy", "curve", "planner_names", "solve"]

Versions = Mapping[str, str] | Sequence[tuple[str, str]]
"""Name and version of what a plan was made with."""

MOST_BUDGET_ROUNDS = 4
"""How often a planner is asked because what its plan takes is above the budget, or well below it."""

ASKED_BEFORE_GIVING_UP = 3
"""How often a planner is asked before it is worth the time to find out whether any plan can be within the budget."""

BUDGET_PRECISION = 0.01
"""A plan that is below the budget by so small a share of it is taken, and a limit is looked for no closer."""

Judge = Callable[[tuple[Segment, ...]], int]
"""Returns a peak in bytes."""

Ask = Callable[[int], Choice | None]
"""Returns a planner's certified proposal for a limit in bytes, None if it has none."""


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
            choice, peak_bytes = _propose(planner, problem)
        except InfeasibleBudgetError as error:
            remedy = smaller_budget_advice(self.graph, request, error)
            raise InfeasibleBudgetError(
                error.budget_bytes,
                error.least_bytes,
                remedy=remedy,
                predicted_bytes=error.predicted_bytes,
                plain_bytes=problem.plain_reported_peak,
            ) from None
        plan = _plan(problem, choice, peak_bytes, begin, self.versions)
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
                peak = problem.simulator.reported_peak(choice.segments)
                made[choice.segments] = _plan(problem, choice, peak, begin, self.versions)
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
    peak_bytes: int,
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
        peak_bytes=peak_bytes,
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
        activation_bytes=problem.once(_kept_bytes),
        reasons=problem.reasons,
        gap=None if bound is None else (1 + overhead) / (1 + problem.overhead(bound)) - 1,
    )


def _kept_bytes(problem: Problem) -> tuple[int, ...]:
    return tuple(unit.kept_bytes for unit in units_of(problem.graph))


def _propose(planner: Planner, problem: Problem) -> tuple[Choice, int]:
    """Return a certified proposal and its reported peak, within the budget where there is one.

    What the allocator takes on top differs from step to step: a budget is compared with the highest peak and, only
    where no plan of the planner or of those that it falls back to keeps that, with the reported one.
    """
    budget = problem.request.budget_bytes
    if budget is None:
        return _certified(planner, problem)
    most, slower = problem.request.max_overhead, list[tuple[float, Choice]]()
    for kept in _keeping(planner, problem, budget):
        # One that falls back to others is asked for any good plan within the budget, not for its own proposal.
        choice = _filled(problem, kept, budget) if planner.falls_back_to else kept
        overhead = problem.overhead(problem.simulator.measure(choice.segments).replay_seconds)
        slower.append((overhead, choice))
        if most is None or overhead <= most:
            break
    _, quickest = min(slower, key=lambda each: each[0])
    return quickest, problem.simulator.reported_peak(quickest.segments)


def _filled(problem: Problem, choice: Choice, budget: int) -> Choice:
    """Return a certified choice with what the budget leaves room for stored, if its highest peak is within that."""
    if problem.simulator.highest_peak(choice.segments) > budget:
        return choice
    segments = filled(problem, choice.segments, budget, enough=int(budget * (1 - BUDGET_PRECISION)))
    problem.certify(segments, choice.planner)
    return replace(choice, segments=segments)


def _keeping(planner: Planner, problem: Problem, budget: int) -> Iterator[Choice]:
    """Yield certified proposals whose reported peak is within a budget, one at least, the best first.

    Raises:
      InfeasibleBudgetError: there is none.
    """

    @functools.cache
    def ask(limit: int) -> Choice | None:
        try:
            return _certified(planner, problem.with_budget(limit))[0]
        except InfeasibleBudgetError:
            return None

    @functools.cache
    def others() -> list[Choice]:
        fallbacks = map(planner_named, planner.falls_back_to)
        return [_certified(each, problem.with_budget(None, each.name))[0] for each in fallbacks]

    def within(judge: Judge) -> tuple[Choice | None, int]:
        def may_be() -> bool:
            # The others are the plans of least memory: where they take more, so does all else.
            return not others() or min(judge(each.segments) for each in others()) <= budget

        return _within(ask, problem, budget, judge, MOST_BUDGET_ROUNDS if planner.keeps_budget else 1, may_be)

    reported_peak, highest_peak = problem.simulator.reported_peak, problem.simulator.highest_peak
    best, least = within(highest_peak)
    if best is not None:
        yield best
    near = [choice for choice in others() if reported_peak(choice.segments) <= budget]
    yield from sorted(near, key=lambda choice: max(budget, highest_peak(choice.segments)))
    # Where the plans of least memory are above the budget by this judge, too, no other one is asked for.
    last = within(reported_peak)[0] if best is not None or near or not others() else None
    if last is not None:
        yield last
    elif best is None and not near:
        known = [each.segments for each in others()]
        if known and not any(problem.forced):
            known.append(problem.store_all)  # What races takes less where the allocator adds much to what is replayed.
        most, predicted = (min(map(judge, known), default=least) for judge in (highest_peak, reported_peak))
        raise InfeasibleBudgetError(budget, most, predicted_bytes=predicted)


def _within(
    ask: Ask, problem: Problem, budget: int, judge: Judge, rounds: int, may_be: Callable[[], bool]
) -> tuple[Choice | None, int]:
    """Return the quickest answer found whose peak is within the budget by a judge, and the least peak seen.

    Planners count the bytes of tensors. What the allocator is said to take is more (or less, where a CPU's does not
    count small tensors), by an amount that only the finished plan tells: so the planner is asked again for less, or for
    more than what came out too small. ``may_be`` says whether there may be such an answer, where the first ones are
    none.
    """
    best: tuple[float, Choice] | None = None
    resident, counted = problem.graph.resident_bytes, problem.simulator.counted_resident_bytes
    least, near = 0, int(budget * BUDGET_PRECISION)
    most = budget + problem.simulator.uncounted_bytes

    def alike(segments: tuple[Segment, ...]) -> int:
        # What the allocator adds is much the same share of one plan and the next.
        transient = problem.simulator.measure(segments).peak_bytes - resident
        return resident + transient * (budget - counted) // max(judge(segments) - counted, 1)

    low, high, above = resident, most, list[int]()
    limit = most if any(problem.forced) else max(low + near + 1, min(alike(problem.store_all), most))

    def keeps(choice: Choice) -> bool:
        """Take note of an answer, and say whether it is within the budget."""
        nonlocal best, least
        measured, peak = problem.simulator.measure(choice.segments), judge(choice.segments)
        least = min(least or peak, peak)
        if peak > budget:
            above.append(measured.peak_bytes)
            return False
        seconds = measured.replay_seconds
        best = min((seconds, choice), best or (seconds, choice), key=lambda each: each[0])
        return True

    for number in range(2 * rounds):
        if number == ASKED_BEFORE_GIVING_UP and best is None and not may_be():
            break
        # Twice as often while nothing is within the budget: what comes after is a plan of least memory.
        if number >= rounds and (best is not None or rounds == 1):
            break
        choice = ask(limit)
        if choice is None:
            low = limit
        else:
            if keeps(choice):
                low = limit
            else:
                high = min(limit, above[-1])
            if 0 <= budget - judge(choice.segments) <= near:
                break
            limit = alike(choice.segments)
        if high - low <= near:
            break
        if not low + near < limit < high:
            limit = (low + high) // 2
    # What the allocator adds varies from plan to plan: a quicker one, right below one above the budget, may keep it.
    limit = max(above, default=0) - 1
    for _ in range(rounds if rounds > 1 else 0):
        if best is None or budget - judge(best[1].segments) <= near:
            break
        choice = ask(limit)
        if choice is None or keeps(choice):
            break
        limit = above[-1] - 1
    return best and best[1], least


def _certified(planner: Planner, problem: Problem) -> tuple[Choice, int]:
    """Return what the planner proposes, checked, and its reported peak."""
    proposed = planner.propose(problem)
    choice = proposed if isinstance(proposed, Choice) else Choice(planner=planner.name, segments=tuple(proposed))
    problem.certify(choice.segments, planner.name)
    return choice, problem.simulator.reported_peak(choice.segments)
