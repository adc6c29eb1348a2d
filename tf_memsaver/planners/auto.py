"""``auto``: picks by what the caller asked."""

from __future__ import annotations

from tf_memsaver.errors import InfeasibleBudgetError, InfeasibleOverheadError
from tf_memsaver.ir.segments import tidied
from tf_memsaver.options.table import DEFAULT_MAX_OVERHEAD
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.registry import Choice, register_planner
from tf_memsaver.planners.min_time import choice_of, quickest_within
from tf_memsaver.planners.reported import least_reported
from tf_memsaver.search.nested import least_nested, quickest_nested
from tf_memsaver.search.one_level import OneLevel


@register_planner("auto", falls_back_to=("min_peak", "nested"))
def auto(problem: Problem) -> Choice:
    """Return the quickest plan within the budget; without a budget, that of about the least peak within the overhead.

    Of one level, or of several where no plan of one level is within the budget. Without one, see ``least_reported``.

    The overhead is ``max_overhead``, or ``DEFAULT_MAX_OVERHEAD`` when the request has none; whoever allows more gets
    several levels where these need less. Where a budget is given and the plain step fits, everything is stored.

    Raises:
      InfeasibleBudgetError: the least peak is above the budget.
      InfeasibleOverheadError: the hints force more recomputation than the overhead allows.
    """
    request, plans = problem.request, problem.once(OneLevel)
    if request.budget_bytes is not None:
        try:
            return choice_of(quickest_within(plans, request.budget_bytes))
        except InfeasibleBudgetError:
            found = quickest_nested(problem, request.budget_bytes)
            if found.peak_bytes > request.budget_bytes:
                raise InfeasibleBudgetError(request.budget_bytes, found.peak_bytes) from None
            return Choice(planner="nested", segments=tidied(found.segments))
    overhead = DEFAULT_MAX_OVERHEAD if request.max_overhead is None else request.max_overhead
    seconds = overhead * problem.plain.step_seconds
    deeper = least_nested(problem, seconds) if overhead > DEFAULT_MAX_OVERHEAD else ()
    try:
        segments = least_reported(problem, seconds, deeper)
    except ValueError as error:
        quickest = plans.quickest(2**62)
        least = 0.0 if quickest is None else quickest.replay_seconds / problem.plain.step_seconds
        raise InfeasibleOverheadError(overhead, least) from error
    nests = any(segment.children for segment in segments)
    return Choice(planner="nested" if nests else "min_peak_within", segments=segments)
