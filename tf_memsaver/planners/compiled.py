"""A plan for a step that XLA compiles: our search proposes, XLA's compiler says what each of a few takes.

XLA fuses and orders a step by rules of its own. The plans are searched on a step as it fuses it (``cost.compiled``), so
that what they are expected to take is near what the compiler says, but not the same: of several that come to much the
same, the quickest is taken. The order inside of a segment is XLA's, too, so that plans of more and shorter segments
take less in places than one expects.
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

AS_EXPECTED = 0.1
"""Where peaks are within so large a share of what was expected, what is not expected to fit is not tried."""

DOUBT = 0.2
"""Where a peak was more than expected, one near it may be less than that makes expect, by so large a share."""


def quickest_compiled_within(
    plans: Sequence[Plan], budget: int, compiled: Compile, known: Sequence[Plan] = (), others: Sequence[Plan] = ()
) -> tuple[Plan, int]:
    """Return the quickest plan found whose compiled peak is within a budget, and that peak.

    What ``plans`` were expected to take, scaled by what those compiled before came to, says which is the quickest.
    If that is wrong twice, the slowest of ``others`` and then the plan that is expected to take least show what is
    possible. Between one that fits and one that does not, what is left is halved.

    Args:
      plans: in order of rising step times.
      budget: in bytes.
      compiled: what the compiler says.
      known: plans that were compiled before.
      others: in order of rising step times, too; less is known of what they take.

    Raises:
      InfeasibleBudgetError: none of those compiled fits; it names the least peak of them.
    """
    everything = sorted([*plans, *others], key=lambda plan: plan.step_overhead)
    peaks = {plan.segments: (plan, compiled(plan)) for plan in known}
    count, as_expected = len(peaks), True
    while len(peaks) < count + MOST_COMPILED:
        found = _quickest_of([plan for plan, peak in peaks.values() if peak <= budget])
        left = [plan for plan in everything if plan.segments not in peaks]
        if found is not None:
            left = [plan for plan in left if plan.step_overhead < found.step_overhead]
        guessed = [plan for plan in left if _expected(plan, list(peaks.values())) <= budget]
        tries = len(peaks) - count
        if tries < 2 and guessed:
            plan = guessed[0]
        elif found is not None and as_expected:
            break
        elif found is not None:
            quicker = (p.step_overhead for p, _ in peaks.values() if p.step_overhead < found.step_overhead)
            failed = max(quicker, default=0.0)
            left = [plan for plan in left if plan.step_overhead > failed]
            if not left:
                break
            plan = left[len(left) // 2]
        elif left:
            deep = [plan for plan in others[-1:] if plan.segments not in peaks]
            plan = deep[0] if deep else min(left, key=lambda each: _expected(each, list(peaks.values())))
        else:
            break
        expected, peak = _expected(plan, list(peaks.values())), compiled(plan)
        as_expected = as_expected and abs(peak - expected) <= AS_EXPECTED * expected
        peaks[plan.segments] = plan, peak
    found = _quickest_of([plan for plan, peak in peaks.values() if peak <= budget])
    if found is None:
        raise InfeasibleBudgetError(budget, min(peak for _, peak in peaks.values()))
    return peaks[found.segments]


def _quickest_of(plans: Sequence[Plan]) -> Plan | None:
    return min(plans, key=lambda plan: plan.step_overhead, default=None)


def _expected(plan: Plan, compiled: Sequence[tuple[Plan, int]]) -> float:
    """Return what a plan is expected to come to, by that of the nearest expected peak which was compiled."""
    if not compiled:
        return plan.peak_bytes
    near, peak = min(compiled, key=lambda each: abs(each[0].peak_bytes - plan.peak_bytes))
    return plan.peak_bytes * peak / near.peak_bytes


def least_of(plans: Sequence[Plan], compiled: Compile, others: Sequence[Plan] = ()) -> tuple[Plan, int]:
    """Return a plan of about the least compiled peak, and that peak; of those as good (``AS_GOOD``) the quickest.

    First comes the plan that is expected to take least. If it takes more than that, the slowest of ``others`` is next,
    which is the least that is known of them. Then come those that may still take less or, as good, be quicker, by what
    the nearest of their own kind came to.

    Args:
      plans: in order of rising step times.
      compiled: what the compiler says.
      others: in order of rising step times, too; less is known of what they take.
    """
    kinds = [_Kind(plans, compiled), _Kind(others, compiled)]
    if plans:
        kinds[0].compile(min(plans, key=lambda plan: plan.peak_bytes))
    if others and not (plans and kinds[0].is_as_expected):
        kinds[1].compile(others[-1])
    while True:
        found = [each for kind in kinds for each in kind.found]
        least = min(peak for _, peak in found)
        best = min((each for each in found if each[1] <= (1 + AS_GOOD) * least), key=lambda each: each[0].step_overhead)
        left = [(kind.least_expected(plan, found), kind, plan) for kind in kinds for plan in kind.left]
        less = [each for each in left if each[0] < (1 - AS_GOOD) * least]
        quicker = [e for e in left if e[0] <= (1 + AS_GOOD) * least and e[2].step_overhead < best[0].step_overhead]
        if len(found) == MOST_COMPILED or not (less or quicker):
            return best
        _, kind, plan = (
            min(less, key=lambda each: each[0]) if less else min(quicker, key=lambda each: each[2].step_overhead)
        )
        kind.compile(plan)


class _Kind:
    """Plans of one kind, and those of them that were compiled."""

    def __init__(self, plans: Sequence[Plan], compiled: Compile) -> None:
        self.left, self.found = list(plans), list[tuple[Plan, int]]()
        self._compiled = compiled

    @property
    def is_as_expected(self) -> bool:
        return all(peak <= (1 + AS_EXPECTED) * plan.peak_bytes for plan, peak in self.found)

    def compile(self, plan: Plan) -> None:
        self.left = [each for each in self.left if each is not plan]
        self.found.append((plan, self._compiled(plan)))

    def least_expected(self, plan: Plan, found: Sequence[tuple[Plan, int]]) -> float:
        """Return what a plan may come to, by the nearest of its kind that was compiled, or of any."""
        expected = _expected(plan, self.found or found)
        return expected if expected <= (1 + AS_EXPECTED) * plan.peak_bytes else (1 - DOUBT) * expected
