"""Of plans that need about the least bytes in the order in which they run, the quickest.

The exact searches count the bytes of live tensors in the order of capture. Plans run in that of a tape, which differs
where a model has branches. So: propose plans at and a little above the least peak, each of least time and of least kept
bytes, and those of Chen et al., and let the judge walk each in its own order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tf_memsaver.ir.segments import Segment, tidied
from tf_memsaver.plan.problem import Problem
from tf_memsaver.planners.chen import chen_greedy, chen_sqrt
from tf_memsaver.search.labels import INFINITE
from tf_memsaver.search.one_level import Found, OneLevel

LADDER = (1.0, 1.02, 1.06, 1.12, 1.2)
"""Limits to propose plans at, as multiples of the least transient bytes."""

NEAR = 0.02
"""Share of the peak by which a quicker plan may be above the least: predictions are no better than that.

Not where the least peak is wanted at any price.
"""

EVEN = 0.01
"""The same for a plan that cuts equal blocks alike, and so is traced quicker; and the share of the plain step by which
it may take longer."""

Segments = tuple[Segment, ...]


def least_reported(problem: Problem, seconds: float = INFINITE, others: Iterable[Segments] = ()) -> Segments:
    """Return the quickest of the plans of about the least reported peak whose replays take at most ``seconds``.

    Of those that were found: the plan of least simulated peak, the plain step, Chen et al.'s and ``others`` are among
    them, where these keep to ``seconds`` and to the hints.

    Raises:
      ValueError: the hints force more recomputation than that.
    """
    judge = _Judge(problem, seconds)
    judge.consider(tidied(problem.once(OneLevel).within(seconds).segments))
    if not any(problem.forced):
        judge.consider(problem.store_all)
    judge.consider(chen_sqrt(problem))
    judge.consider(chen_greedy(problem))
    for segments in (*_ladder(problem.once(OneLevel), seconds), *others):
        judge.consider(segments)
    chosen = _even(problem, judge.best, seconds)
    reported = problem.simulator.reported_peak
    # What is told of a plan is the reported peak: one that gains nothing by it leaves the model as it is.
    gains_nothing = reported(problem.store_all) <= judge.near * reported(chosen)
    return problem.store_all if gains_nothing and not any(problem.forced) else chosen


class _Judge:
    """Collects plans within a time, and says which is best."""

    def __init__(self, problem: Problem, seconds: float) -> None:
        self._simulator, self._seconds = problem.simulator, seconds
        self.near = 1.0 if seconds == INFINITE else 1.0 + NEAR
        self._seen: set[Segments] = set()
        self._kept: list[tuple[int, Found]] = []

    def consider(self, segments: Segments) -> None:
        """Take note of a plan, unless it takes too long."""
        if segments in self._seen:
            return
        self._seen.add(segments)
        found = Found(segments=segments, measured=self._simulator.measure(segments))
        if found.replay_seconds > self._seconds:
            return
        self._kept.append((self._simulator.reported_peak(segments), found))

    @property
    def _most(self) -> float:
        return self.near * min((peak for peak, _ in self._kept), default=INFINITE)

    @property
    def best(self) -> Found:
        """The quickest of the plans near the least peak; of equal ones that of least peak."""
        near = [(found.replay_seconds, peak, found) for peak, found in self._kept if peak <= self._most]
        return min(near, key=lambda each: each[:2])[2]


def _even(problem: Problem, best: Found, seconds: float) -> Segments:
    """Return a plan that cuts equal blocks alike, if it reports about the peak of the best one or less."""
    share = 0.0 if seconds == INFINITE else EVEN
    reported = problem.simulator.reported_peak
    allowed = best.replay_seconds + share * problem.plain.step_seconds
    even = problem.once(OneLevel).with_equal_blocks(best.segments, min(seconds, allowed) if share else seconds)
    if even is None:
        return best.segments
    most = reported(best.segments) * (1 + share)
    return even.segments if reported(even.segments) <= most else best.segments


def _ladder(plans: OneLevel, seconds: float) -> Iterator[Segments]:
    """Yield plans near the least peak, of least time and of least kept bytes."""
    for factor in LADDER:
        for found in plans.near(factor, seconds):
            yield tidied(found)
