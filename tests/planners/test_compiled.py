"""Plans for steps that XLA compiles: which of a curve is taken, by made-up compilers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tf_memsaver.errors import InfeasibleBudgetError
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.compiled import AS_GOOD, DOUBT, MOST_COMPILED, least_of, quickest_compiled_within
from tf_memsaver.planners.solve import curve
from tools.shared.nets import chain

PLANS = [plan for plan in curve(chain([64] * 40), Request(), 12) if plan.recomputed]


class Compiler:
    """Says of each plan what a list says, and notes how often it was asked."""

    def __init__(self, peaks: Sequence[int]) -> None:
        self.peaks, self.asked = peaks, 0

    def __call__(self, plan: Plan) -> int:
        self.asked += 1
        return self.peaks[PLANS.index(plan)]


FALLING = Compiler([100 - 5 * place for place in range(len(PLANS))]).peaks


def test_the_plans_are_in_order() -> None:
    overheads = [plan.step_overhead for plan in PLANS]
    assert len(PLANS) >= 8 and overheads == sorted(overheads)


@pytest.mark.parametrize("budget", range(min(FALLING), 101))
def test_the_quickest_within_a_budget(budget: int) -> None:
    compiler = Compiler(FALLING)
    plan, peak = quickest_compiled_within(PLANS, budget, compiler)
    assert peak == FALLING[PLANS.index(plan)] <= budget
    assert compiler.asked <= MOST_COMPILED
    # What was expected is no help here: halving comes near the very one.
    best = next(place for place, each in enumerate(FALLING) if each <= budget)
    assert PLANS.index(plan) - best <= 2


@pytest.mark.parametrize("place", range(1, len(PLANS)))
def test_what_is_expected_finds_the_quickest_at_once(place: int) -> None:
    compiler = Compiler([2 * plan.peak_bytes for plan in PLANS])
    plan, peak = quickest_compiled_within(PLANS, compiler.peaks[place], compiler, known=[PLANS[0]])
    assert (plan, peak) == (PLANS[place], compiler.peaks[place]) and compiler.asked <= 1 + 1


def test_others_show_what_is_possible_where_what_is_expected_is_wrong() -> None:
    compiler = Compiler([100] * (len(PLANS) - 1) + [10])
    assert quickest_compiled_within(PLANS[:-1], 50, compiler, others=PLANS[-1:]) == (PLANS[-1], 10)


def test_what_was_compiled_before_is_taken() -> None:
    compiler = Compiler(FALLING)
    plan, peak = quickest_compiled_within(PLANS[:3], FALLING[-1], compiler, known=[PLANS[-1]])
    assert (plan, peak) == (PLANS[-1], FALLING[-1])


def test_the_slowest_is_not_always_the_least() -> None:
    peaks = [*FALLING[:-1], FALLING[0]]
    plan, peak = quickest_compiled_within(PLANS, FALLING[len(PLANS) // 2], Compiler(peaks))
    assert peak == FALLING[PLANS.index(plan)] <= FALLING[len(PLANS) // 2]


def test_the_least_that_was_compiled_is_named() -> None:
    with pytest.raises(InfeasibleBudgetError) as error:
        quickest_compiled_within(PLANS, 1, Compiler(FALLING))
    assert error.value.least_bytes == min(FALLING)


def test_of_plans_that_are_as_good_the_quickest_is_taken() -> None:
    # None is as expected. Those that may be as good by what was expected are tried from the quickest on.
    most = (1 + AS_GOOD) / (1 - DOUBT) * PLANS[-1].peak_bytes
    near = [place for place, plan in enumerate(PLANS) if plan.peak_bytes <= most]
    level = Compiler([1000, *[505] * (len(PLANS) - 2), 500])
    assert least_of(PLANS, level) == (PLANS[near[0]], 505) and len(near) > 1 and level.asked == 2
    assert least_of(PLANS, Compiler(FALLING)) == (PLANS[-1], FALLING[-1])
    assert least_of(PLANS[:1], Compiler(FALLING)) == (PLANS[0], 100)


def test_no_more_is_compiled_than_may_take_less() -> None:
    expected = [plan.peak_bytes for plan in PLANS]
    exact = Compiler(expected)
    assert least_of(PLANS, exact) == (PLANS[-1], expected[-1]) and exact.asked == 1
    assert least_of(PLANS[:-1], exact, PLANS[-1:])[0] is PLANS[-1]
    worse = Compiler([*expected[:-1], 2 * expected[-1]])
    plan, peak = least_of(PLANS, worse)
    assert peak == plan.peak_bytes == min(expected[:-1]) and worse.asked == 2


def test_others_are_tried_where_what_was_expected_is_wrong() -> None:
    # All of one kind take twice what is expected, and of the other kind the slowest least.
    expected = [plan.peak_bytes for plan in PLANS]
    wrong = Compiler([2 * peak if place % 2 else peak for place, peak in enumerate(expected)])
    usual, others = PLANS[1::2], PLANS[::2]
    plan, peak = least_of(usual, wrong, others)
    assert (plan, peak) == (others[-1], others[-1].peak_bytes) and wrong.asked == 2
    assert least_of([], Compiler(FALLING), PLANS)[0] == PLANS[-1]
    assert least_of(usual, Compiler([2 * each for each in expected]), ()) == (usual[-1], 2 * usual[-1].peak_bytes)
