"""Plans that real steps judge."""

from __future__ import annotations

import pytest

from tf_memsaver.errors import InfeasibleBudgetError
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.measured import plan_that_keeps
from tf_memsaver.planners.solve import Plans
from tools.shared.nets import chain

PLANS = Plans(chain([8] * 12))
LEAST = PLANS.plan(Request(strategy="nested")).peak_bytes
BUDGET = 2 * LEAST


def plan_for(budget: int) -> Plan:
    return PLANS.plan(Request(budget_bytes=budget))


@pytest.mark.parametrize("excess", [0, 1, 5, LEAST // 2, LEAST])
def test_what_steps_take_beyond_the_budget_is_planned_away(excess: int) -> None:
    tried = list[int]()

    def measure(plan: Plan) -> int:
        tried.append(plan.peak_bytes)
        return plan.peak_bytes + excess

    kept, peak = plan_that_keeps(plan_for(BUDGET), plan_for, measure)
    assert peak == kept.peak_bytes + excess <= BUDGET and kept.peak_bytes == tried[-1]
    assert tried == sorted(tried, reverse=True) and len(tried) <= 5
    assert (len(tried) == 1) == (tried[0] + excess <= BUDGET)


def test_steps_that_never_keep_the_budget_name_the_least_that_was_measured() -> None:
    tried = list[int]()

    def measure(plan: Plan) -> int:
        tried.append(plan.peak_bytes)
        return BUDGET + 1 + abs(plan.peak_bytes - LEAST - 8)

    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_that_keeps(plan_for(BUDGET), plan_for, measure)
    assert tried[-1] == LEAST and caught.value.budget_bytes == BUDGET
    assert caught.value.least_bytes == BUDGET + 1 + min(abs(peak - LEAST - 8) for peak in tried)
