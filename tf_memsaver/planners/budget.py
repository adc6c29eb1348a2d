"""The quickest plan whose peak is within a budget, as the device's allocator takes it.

Planners count the bytes of tensors. What the allocator is said to take is more (or less, where a CPU's does not count
small tensors), and only the finished plan tells how much: from one plan to the next it may fall where the tensors grow.
So planners are asked for limits of a scale that is the same for every budget, from above: a larger budget begins above
a smaller one, keeps what that keeps, and so never gets a slower plan, as far as planners find the quickest.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tf_memsaver.errors import InfeasibleBudgetError
from tf_memsaver.ir.segments import Segment
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.registry import Choice, Planner, planner_named
from tf_memsaver.planners.reported import NEAR
from tf_memsaver.search.filling import filled
from tf_memsaver.search.one_level import OneLevel

SCALE = sorted({int(1.01**place) for place in range(4096)})
"""The limits that planners are asked for, in bytes beyond the resident ones: up to far more than any device has."""

WELL_USED = 0.99
"""A plan that uses so much of the budget is good enough: nothing is looked for between it and the next one above."""

STRIDE = 4
"""Of so many limits, or ready plans, one is tried at first; then those between the first that keeps the budget and the
one tried before it."""

Judge = Callable[[tuple[Segment, ...]], int]
"""Returns a peak in bytes."""

Ask = Callable[[int], Choice | None]
"""Returns a planner's certified proposal for a limit in bytes, None if it has none."""


def proposal(planner: Planner, problem: Problem) -> Choice:
    """Return what a planner proposes, checked.

    Raises:
      CertificationError: it is no cover of the units, breaks a hint, or cuts where no segment may end.
    """
    proposed = planner.propose(problem)
    choice = proposed if isinstance(proposed, Choice) else Choice(planner=planner.name, segments=tuple(proposed))
    problem.certify(choice.segments, planner.name)
    return choice


def keeping(planner: Planner, problem: Problem, budget: int) -> Iterator[Choice]:
    """Yield certified proposals whose reported peak is within a budget, one at least, the best first.

    What the allocator takes on top differs from step to step: a budget is compared with the highest peak and, only
    where no plan of the planner or of those that it falls back to keeps that, with the reported one.

    Raises:
      InfeasibleBudgetError: there is none.
    """

    @functools.cache
    def ask(limit: int) -> Choice | None:
        try:
            return proposal(planner, problem.with_budget(limit))
        except InfeasibleBudgetError:
            return None

    @functools.cache
    def others() -> list[Choice]:
        """Plans of least memory."""
        fallbacks = map(planner_named, planner.falls_back_to)
        return [proposal(each, problem.with_budget(None, each.name)) for each in fallbacks]

    def seconds(choice: Choice) -> float:
        return problem.simulator.replay_seconds(choice.segments)

    @functools.cache
    def quicker() -> list[Choice]:
        """Plans made from those, the quickest first."""
        made = [replace(each, segments=plan) for each in others() for plan in filled(problem, each.segments)]
        return sorted(made, key=seconds)

    def within(judge: Judge) -> tuple[Choice | None, int]:
        """Return the quickest plan found whose peak is within the budget by a judge, and the least peak seen."""
        search = _Search(ask, problem, budget, judge)
        if (choice := search.plain()) is not None:
            return choice, 0
        if others() and min(judge(each.segments) for each in others()) > (1 + NEAR) * budget:
            return None, 0
        made, most = _first(quicker(), lambda choice: judge(choice.segments) <= budget), math.inf
        if made is not None:
            problem.certify(made.segments, made.planner)
            most = seconds(made)
        asked = search.quickest(most, is_asked_once=not planner.keeps_budget)
        return made if asked is None else _even(problem, asked, budget, judge), search.least

    reported_peak, highest_peak = problem.simulator.reported_peak, problem.simulator.highest_peak
    best, least = within(highest_peak)
    if best is not None:
        yield best
    near = [choice for choice in others() if reported_peak(choice.segments) <= budget]
    if near:
        most = (1 + NEAR) * min(max(budget, highest_peak(choice.segments)) for choice in near)
        yield min((choice for choice in near if highest_peak(choice.segments) <= most), key=seconds)
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


def _first(choices: Sequence[Choice], keeps: Callable[[Choice], bool]) -> Choice | None:
    """Return about the first choice that keeps a budget: the same or an earlier one for a larger budget."""
    last = len(choices) - 1
    for place in (*range(0, last, STRIDE), last) if choices else ():
        if keeps(choices[place]):
            return next(filter(keeps, choices[max(0, place - STRIDE + 1) : place]), choices[place])
    return None


def _even(problem: Problem, choice: Choice, budget: int, judge: Judge) -> Choice:
    """Return a choice that cuts equal blocks alike, and so is traced quicker, where it keeps a budget as one does."""
    if any(segment.children for segment in choice.segments):
        return choice
    seconds = problem.simulator.replay_seconds(choice.segments)
    plans = problem.once(OneLevel)
    even = plans.with_equal_blocks(choice.segments, seconds, rank=lambda plan: (plan.replay_seconds, *plan.rank))
    if even is None or judge(even.segments) > budget:
        return choice
    problem.certify(even.segments, choice.planner)
    return replace(choice, segments=even.segments)


class _Search:
    """A search for the largest limit whose plan keeps a budget by a judge."""

    def __init__(self, ask: Ask, problem: Problem, budget: int, judge: Judge) -> None:
        self._ask, self._problem, self._budget, self._judge = ask, problem, budget, judge
        self._resident = problem.graph.resident_bytes
        self._most = problem.simulator.most_live_bytes(budget)
        self._above = self._most + 1
        self.least = 0
        """The least peak that was seen, in bytes."""

    def plain(self) -> Choice | None:
        """Return the planner's plan for what the plain step takes, if that is within the budget."""
        plain = self._problem.store_all
        if any(self._problem.forced) or self._judge(plain) > self._budget:
            return None
        return self._kept(self._problem.simulator.measure(plain).peak_bytes)

    def quickest(self, seconds: float, *, is_asked_once: bool) -> Choice | None:
        """Return the quickest plan found whose replays take less than some seconds, None if there is none.

        For the budget alone where the planner ``is_asked_once``.
        """
        if is_asked_once or self._problem.simulator.counts_tensors_alone:
            choice = self._kept(self._most)
            if choice is not None or is_asked_once:
                return choice
        while (place := self._place_below(self._above) // STRIDE * STRIDE) >= 0:
            above, choice = self._above, self._kept(self._limit(place), seconds)
            if choice is not None:
                is_enough = self._judge(choice.segments) >= WELL_USED * self._budget
                between = range(place if is_enough else min(place + STRIDE - 1, self._place_below(above)), place, -1)
                return next(filter(None, (self._kept(self._limit(each)) for each in between)), choice)
            if self._above == above:
                break
        return None

    def _limit(self, place: int) -> int:
        return self._resident + SCALE[place]

    def _place_below(self, limit: int) -> int:
        """Return the place of the largest limit of the scale below one, -1 if there is none."""
        return bisect.bisect_left(SCALE, limit - self._resident) - 1

    def _kept(self, limit: int, seconds: float = math.inf) -> Choice | None:
        """Return the plan for a limit if it keeps the budget, and its replays take less than some seconds.

        If it only takes too much, the next one has to take less: the plan for any limit between is this one. If it
        takes too long, so do those for smaller limits.
        """
        choice = self._ask(limit)
        if choice is None:
            return None
        peak, measured = self._judge(choice.segments), self._problem.simulator.measure(choice.segments)
        self.least = min(self.least or peak, peak)
        if measured.replay_seconds >= seconds:
            return None
        if peak <= self._budget:
            return choice
        if measured.peak_bytes <= limit:
            self._above = min(self._above, measured.peak_bytes)
        return None
