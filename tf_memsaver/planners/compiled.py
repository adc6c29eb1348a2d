"""A plan for a step that XLA compiles: our search proposes, XLA's compiler says what each of a few takes.

XLA fuses and orders a step by rules of its own, so that the simulator's peaks are not those of a compiled step. What
more recomputation saves there falls along the curve of plans, but not evenly: of several that come to much the same,
the quickest is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tf_memsaver.errors import InfeasibleBudgetError
from tf_memsaver.plan.plan import Plan

Compile = Callable[[Plan], int]
"""Returns what a step by a plan takes at its peak, in bytes, by the compiler."""

MOST_COMPILED = 5
"""So many plans are compiled: each takes as long as the first step of ``fit``."""

AS_GOOD = 0.02
"""Plans whose peaks are within so small a share of the least are as good as it: the quickest is taken."""


def quickest_within(plans: Sequence[Plan], budget: int, compiled: Compile) -> tuple[Plan, int]:
    """Return the quickest plan found whose compiled peak is within a budget, and that peak.

    ``plans`` are in order of rising step times. The slowest is compiled first; if it fits, quicker ones are found by
    halving, else others are tried, spread over all of them.

    Raises:
      InfeasibleBudgetError: none of those compiled fits; it names the least peak of them.
    """
    peaks: list[int] = []

    def fits(plan: Plan) -> bool:
        peaks.append(compiled(plan))
        return peaks[-1] <= budget

    last = next((place for place in _spread(len(plans)) if fits(plans[place])), None)
    if last is None:
        raise InfeasibleBudgetError(budget, min(peaks))
    found, low, high = (plans[last], peaks[-1]), 0, last
    while low < high and len(peaks) < MOST_COMPILED:
        middle = (low + high) // 2
        if fits(plans[middle]):
            found, high = (plans[middle], peaks[-1]), middle
        else:
            low = middle + 1
    return found


def least_of(plans: Sequence[Plan], compiled: Compile) -> tuple[Plan, int]:
    """Return the plan of least compiled peak among some that are spread evenly over ``plans``, and that peak.

    Of plans that are as good (``AS_GOOD``) it is the first, which is the quickest if they are in that order.
    """
    found = [(plans[place], compiled(plans[place])) for place in sorted(_spread(len(plans)))]
    least = min(peak for _, peak in found)
    return next(each for each in found if each[1] <= (1 + AS_GOOD) * least)


def _spread(count: int) -> list[int]:
    """Return at most ``MOST_COMPILED`` places among so many, the last first, spread evenly over them."""
    kept = min(MOST_COMPILED, count)
    return [round(place * (count - 1) / max(1, kept - 1)) for place in reversed(range(kept))]
