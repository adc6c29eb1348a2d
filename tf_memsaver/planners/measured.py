"""A plan that keeps a budget when it is run: real steps judge it, and what takes more is planned again for less."""

from __future__ import annotations

from collections.abc import Callable

from tf_memsaver.errors import InfeasibleBudgetError
from tf_memsaver.plan.plan import Plan

Measure = Callable[[Plan], int]
"""Runs steps by a plan; returns the largest peak in bytes."""

LEAST_MARGIN = 100
"""A budget is lowered by one part in so many at least."""


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
            if error.least_bytes >= plan.highest_peak_bytes:
                raise InfeasibleBudgetError(budget, min(peaks)) from None
            plan, margin = plan_for(error.least_bytes), budget - error.least_bytes
