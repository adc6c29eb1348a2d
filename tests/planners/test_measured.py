"""Plans that real steps judge."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tf_memsaver.errors import InfeasibleBudgetError
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.measured import MOST_RAISES, MOST_USED, Measure, plan_that_keeps, quickest_that_keeps
from tf_memsaver.planners.solve import Plans
from tools.shared.nets import chain

PLANS = Plans(chain([8] * 12))
LEAST = PLANS.plan(Request(strategy="nested")).peak_bytes
BUDGET = 2 * LEAST

LARGE = Plans(chain([8] * 14, scale=2 << 20))
"""A step of which an allocator's figures mean something."""

PLAIN = LARGE.plan(Request(strategy="plain")).peak_bytes
SMALLEST = LARGE.plan(Request(strategy="nested")).peak_bytes


def plan_for(budget: int) -> Plan:
    return PLANS.plan(Request(budget_bytes=budget))


def large_plans(budget: int, share: float) -> tuple[Callable[[int | None], Plan], Measure, list[Plan]]:
    """Return what plans for a budget, what measures a share of what is predicted, and the plans that it has seen."""
    seen = list[Plan]()

    def measure(plan: Plan) -> int:
        seen.append(plan)
        return int(share * plan.peak_bytes)

    return lambda limit: LARGE.plan(Request(budget_bytes=limit or budget)), measure, seen


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


@pytest.mark.parametrize("share", [0.5, 0.7, 0.85, 0.99])
def test_steps_well_below_the_budget_make_room_for_a_quicker_plan(share: float) -> None:
    budget = (PLAIN + SMALLEST) // 2
    plan_for, measure, seen = large_plans(budget, share)
    kept, _ = quickest_that_keeps(plan_for, measure)
    assert kept.measured_peak_bytes == int(share * kept.peak_bytes) <= budget and kept.request.budget_bytes == budget
    assert len(seen) <= 1 + MOST_RAISES and kept.step_overhead == min(plan.step_overhead for plan in seen)
    if share < 0.9:
        assert kept.step_overhead < seen[0].step_overhead
        is_plain = not kept.recomputed_units
        assert is_plain or kept.measured_peak_bytes > 0.8 * budget
        assert ("real steps of the plain model" in kept.advice) == is_plain == (share == 0.5)
    else:
        assert [kept.segments] == [plan.segments for plan in seen]


def test_a_quicker_plan_whose_steps_leave_no_room_is_not_taken() -> None:
    budget = (PLAIN + SMALLEST) // 2
    plan_for, _, seen = large_plans(budget, 1.0)

    def measure(plan: Plan) -> int:
        seen.append(plan)
        return budget // 2 if len(seen) == 1 else int((MOST_USED + 0.01) * budget)

    kept, _ = quickest_that_keeps(plan_for, measure)
    assert kept.segments == seen[0].segments and kept.measured_peak_bytes == budget // 2
    limits = [plan.request.budget_bytes or 0 for plan in seen[1:]]
    assert limits == sorted(limits, reverse=True) and len(limits) <= MOST_RAISES


@pytest.mark.parametrize("share", [0.8, 0.95])
def test_the_plan_of_least_memory_is_run_where_none_is_predicted_to_keep_the_budget(share: float) -> None:
    budget = int(0.9 * SMALLEST)
    plan_for, measure, seen = large_plans(budget, share)
    if share < 0.9:
        kept, _ = quickest_that_keeps(plan_for, measure)
        assert kept.measured_peak_bytes <= budget == kept.request.budget_bytes < kept.peak_bytes
    else:
        with pytest.raises(InfeasibleBudgetError) as caught:
            quickest_that_keeps(plan_for, measure)
        assert caught.value.least_bytes == int(share * SMALLEST) and caught.value.budget_bytes == budget
    assert seen[0].peak_bytes == SMALLEST


def test_no_step_is_run_for_a_budget_that_is_far_below_all_plans() -> None:
    plan_for, measure, seen = large_plans(SMALLEST // 2, 0.4)
    with pytest.raises(InfeasibleBudgetError) as caught:
        quickest_that_keeps(plan_for, measure)
    assert caught.value.least_bytes == SMALLEST and not seen
    assert "calibrate=True" not in str(caught.value)
    with pytest.raises(InfeasibleBudgetError, match="calibrate=True"):
        plan_for(int(0.9 * SMALLEST))
