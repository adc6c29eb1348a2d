"""A plan that keeps a budget when it is run: real steps judge it, in the place of the prediction.

What a step takes at most is predicted with a margin for what TensorFlow's allocator may waste. So most plans take less
than that, a few take more, and a budget that no plan is predicted to keep may be kept by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tf_memsaver.cost.device import LEAST_COUNTED_STEP, MOST_OF_RACING
from tf_memsaver.errors import InfeasibleBudgetError
from tf_memsaver.plan.advice import advice_once_measured, may_be_kept
from tf_memsaver.plan.plan import Plan

Measure = Callable[[Plan], int]
"""Runs steps by a plan; returns the largest peak in bytes."""

LEAST_MARGIN = 100
"""A budget is lowered by one part in so many at least."""

MOST_RAISES = 3
"""How often a plan is looked for that is quicker than one that keeps the budget."""

WELL_USED, AIM, MOST_USED = 0.9, 0.93, 0.95
"""Shares of the budget: a plan that uses the first is as good as any; the second is what to aim at. A plan that is
predicted to take more than the budget may use the third: other steps take a little more than those that were run."""

CHEAP = 0.01
"""Share of the plain step's time that is not worth running another plan's steps for."""


def plan_that_keeps(plan: Plan, plan_for: Callable[[int], Plan], measure: Measure) -> tuple[Plan, int]:
    """Return a plan whose measured peak is within the budget that ``plan`` was made for, and that peak.

    What steps take beyond the budget, and each time at least twice as much as before, is taken off the bytes that
    ``plan_for`` plans for. The plan of least predicted peak is the last to be tried.

    Raises:
      InfeasibleBudgetError: the steps of all plans took more; it names the least that was measured.
    """
    budget, margin, peaks = plan.request.budget_bytes, 0, list[int]()
    assert budget is not None
    while True:
        peaks.append(measure(plan))
        if peaks[-1] <= budget:
            return plan, peaks[-1]
        margin = max(2 * margin, margin + peaks[-1] - budget, budget // LEAST_MARGIN)
        try:
            plan = plan_for(max(1, budget - margin))
        except InfeasibleBudgetError as error:
            least = None if error.least_bytes >= plan.highest_peak_bytes else least_plan(plan_for, error)
            if least is None:
                raise InfeasibleBudgetError(budget, min(peaks)) from None
            plan, margin = least, budget - error.least_bytes


def quickest_that_keeps(plan_for: Callable[[int | None], Plan], measure: Measure) -> tuple[Plan, int]:
    """Return the quickest plan found whose measured peak is within the user's budget, and the budget.

    ``plan_for`` plans for a limit in bytes, or for the budget if there is none. The peak is the plan's
    ``measured_peak_bytes``.

    If the steps of the plan for the budget take more, see ``plan_that_keeps``. If they take well below it, quicker
    plans are tried that are predicted to take more than the budget, and may not. Where all plans are predicted to take
    more, the steps of the one of least predicted peak are run.

    Raises:
      InfeasibleBudgetError: the steps of all plans took more, and it names the least that was measured; or no plan is
        predicted to take anything near the budget.
    """
    try:
        plan = plan_for(None)
    except InfeasibleBudgetError as error:
        least = least_plan(plan_for, error) if may_be_kept(error) else None
        if least is None:
            raise
        budget, plan = error.budget_bytes, least
        peak = measure(plan)
        if peak > budget:
            raise InfeasibleBudgetError(budget, peak) from None
    else:
        first, budget = plan, plan.request.budget_bytes or 0
        plan, peak = plan_that_keeps(first, plan_for, measure)
        if plan is not first:
            return _measured(plan, peak, budget), budget
    return _raised(_measured(plan, peak, budget), budget, plan_for, measure), budget


def least_plan(plan_for: Callable[[int], Plan], refused: InfeasibleBudgetError) -> Plan | None:
    """Return the plan of the least memory that the error for a smaller budget names; None if there is none."""
    try:
        return plan_for(refused.least_bytes) if refused.least_bytes else None
    except InfeasibleBudgetError:
        return None


def _measured(plan: Plan, peak: int, budget: int) -> Plan:
    """Return a plan whose steps have kept a budget, also if it was made for more bytes."""
    planned_for = plan.request.budget_bytes
    is_for_less = planned_for is not None and planned_for <= budget
    request = plan.request if is_for_less else replace(plan.request, budget_bytes=budget)
    return replace(plan, request=request, measured_peak_bytes=peak, advice=advice_once_measured(plan, budget))


def _raised(plan: Plan, budget: int, plan_for: Callable[[int], Plan], measure: Measure) -> Plan:
    """Return a quicker plan for more bytes whose steps keep the budget, or the plan."""
    limit, broken = max(budget, plan.highest_peak_bytes), None
    for _ in range(MOST_RAISES):
        peak = plan.measured_peak_bytes
        if peak > WELL_USED * budget or peak < LEAST_COUNTED_STEP:
            break
        # What is measured is about the same share of what is predicted, for this plan and the next.
        wanted = int(AIM * budget / peak * max(plan.peak_bytes, plan.highest_peak_bytes))
        if broken is not None:
            wanted = min(wanted, (limit + broken) // 2)
        if wanted <= limit + budget // LEAST_MARGIN:
            break
        quicker = plan_for(wanted)
        if quicker.step_overhead > plan.step_overhead - CHEAP:
            break
        took = measure(quicker)
        if took <= _most_used(quicker) * budget:
            plan, limit = _measured(quicker, took, budget), wanted
        else:
            broken = wanted
    return plan


def _most_used(plan: Plan) -> float:
    """Return the share of a budget that the measured steps of a plan may use: less where threads race in them."""
    is_ordered = plan.request.order and bool(plan.recomputed_units)
    return MOST_USED if is_ordered else 1 / MOST_OF_RACING
