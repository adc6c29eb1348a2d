"""``min_time``: the least replay time within a budget."""

from __future__ import annotations

from collections.abc import Sequence

from tf_memsaver.errors import InfeasibleBudgetError, InvalidRequestError
from tf_memsaver.ir.segments import Segment, SegmentMode, tidied
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.registry import Choice, register_planner
from tf_memsaver.search.one_level import Found, OneLevel


@register_planner("min_time", falls_back_to=("min_peak",))
def min_time(problem: Problem) -> Sequence[Segment]:
    """Return the cover of one level of least replay time whose simulated peak is within the budget.

    Raises:
      InvalidRequestError: the request has no budget.
      InfeasibleBudgetError: the least peak is above the budget.
    """
    budget = problem.request.budget_bytes
    if budget is None:
        raise InvalidRequestError(
            "strategy='min_time' needs a budget, such as budget='6GiB'. Without a budget, use strategy='auto'."
        )
    return tidied(quickest_within(problem.once(OneLevel), budget).segments)


def choice_of(found: Found) -> Choice:
    """Return a plan of one level under the planner's name: ``plain`` where nothing is replayed."""
    replays = any(segment.mode is SegmentMode.RECOMPUTE for segment in found.segments)
    return Choice(planner="min_time" if replays else "plain", segments=tidied(found.segments))


def quickest_within(plans: OneLevel, budget: int) -> Found:
    """Return the quickest plan within ``budget`` bytes.

    Raises:
      InfeasibleBudgetError: the least peak is above the budget.
    """
    found = plans.quickest(budget)
    if found is not None:
        return found
    smallest = plans.smallest
    if smallest.peak_bytes > budget:
        raise InfeasibleBudgetError(budget, smallest.peak_bytes)
    return plans.quickest(budget, smallest.segments) or smallest
