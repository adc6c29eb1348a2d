"""The largest batch that trains within a budget, by planning: a few captures, and a line between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tf_memsaver.errors import InfeasibleBudgetError, InfeasibleOverheadError
from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.scaling import Scaling
from tf_memsaver.options.checks import MOST_BATCH
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.measured import Measure, plan_that_keeps
from tf_memsaver.planners.solve import Plans, Versions
from tf_memsaver.summary import Rows, Summarized
from tf_memsaver.units import format_bytes

Capture = Callable[[int], Graph]
"""Traces a training step at a batch size."""

PRECISION = 256
"""A batch is found to one part in so many, and to one sample up to this size."""

RATES = 5
"""The number of batch sizes whose speed is compared."""


@dataclass(frozen=True, slots=True)
class Rate:
    """A batch size under the limits of ``max_batch_size``: predicted peaks in bytes, and predicted speed.

    ``samples_per_second`` is meant for comparing batch sizes; only ratios of predicted times are reliable.
    ``step_overhead`` is the extra time as a share of the plain step's time.
    """

    batch_size: int
    peak_bytes: int
    plain_peak_bytes: int
    step_overhead: float
    samples_per_second: float


@dataclass(frozen=True, slots=True, repr=False)
class LargestBatch(Summarized):
    """The result of ``max_batch_size``: the largest batch within the limits, and its plan.

    ``plain_batch_size`` is the largest batch that the plain step trains within the budget (0 if none fits). ``rates``
    has the speed of some batch sizes up to the largest, in order; the largest batch is not always the quickest.
    ``measured_peak_bytes`` is the largest peak of real steps at the largest batch, or None if none was run.
    """

    batch_size: int
    plan: Plan
    plain_batch_size: int
    rates: tuple[Rate, ...]
    measured_peak_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON data."""
        return {**dataclasses.asdict(self), "plan": self.plan.to_json()}

    def summary(self) -> tuple[str, Rows]:
        """Return what ``repr`` shows."""
        measured, plan = self.measured_peak_bytes, self.plan
        rows = (
            ("plain", f"trains batches of up to {self.plain_batch_size}"),
            ("peak", f"{format_bytes(plan.peak_bytes)}, predicted"),
            ("measured", "no real steps were run" if measured is None else format_bytes(measured)),
            ("step", f"{plan.step_overhead:+.1%}"),
            ("recomputed", plan.recomputed_in_words),
            *([("advice", plan.advice)] if plan.advice and measured is None else []),
        )
        return f"LargestBatch: {self.batch_size}", rows

    def __str__(self) -> str:
        measured = self.measured_peak_bytes
        real = "" if measured is None else f" ({format_bytes(measured)} measured)"
        return (
            f"largest batch {self.batch_size} (plain step: {self.plain_batch_size}): predicted peak "
            f"{format_bytes(self.plan.peak_bytes)}{real}, step {self.plan.step_overhead:+.1%}"
        )


def largest_batch(
    capture: Capture, request: Request, start: int, *, versions: Versions = (), measure: Measure | None = None
) -> LargestBatch:
    """Return the largest batch whose plan keeps the budget and the ``max_overhead`` of a request.

    The step is captured at ``start`` samples and at twice as many. Other sizes are planned for the line through both,
    the answer for a capture of its own. What ``measure`` finds above the budget is planned again for less.

    Raises:
      InfeasibleBudgetError, InfeasibleOverheadError: not even a batch of one sample trains so.
      HintError: as in ``solve``.
    """
    steps, budget, peak = _Steps(capture, max(2, start)), request.budget_bytes, None
    assert budget is not None

    def plan_for(limit: int) -> Plan:
        return steps.largest(replace(request, budget_bytes=limit), versions)

    plan = plan_for(budget)
    if measure is not None:
        plan, peak = plan_that_keeps(plan, plan_for, measure)
    answer, request = plan.batch_size, plan.request
    plain = _most(lambda size: _highest_of_plain(steps.at(size)) <= budget, min(start, answer), answer)
    sizes = {plain, *(round(answer * part / RATES) for part in range(1, RATES))} - {0, answer}
    plans = [(steps.at(size), _planned(steps.at(size), request)) for size in sorted(sizes)]
    rates = [_rate(graph, each) for graph, each in [*plans, (steps.captured(answer), plan)] if each is not None]
    return LargestBatch(answer, plan, plain, tuple(rates), peak)


class _Steps:
    """The training step at any batch size: captured, or by the line through two captures, if there is one."""

    def __init__(self, capture: Capture, start: int) -> None:
        self._capture, self._captures = capture, dict[int, Graph]()
        self._start = start
        self._draw(start, 2 * start)

    def captured(self, size: int) -> Graph:
        if size not in self._captures:
            self._captures[size] = self._capture(size)
        return self._captures[size]

    def largest(self, request: Request, versions: Versions) -> Plan:
        """Return the plan of the largest batch within the limits of a request.

        A wrong answer is a point of the next line. Each lowers the limit by twice as much as the last, so that an end
        comes also where no line is right.
        """
        limit, step = MOST_BATCH, 1
        while True:
            answer = max(1, _most(lambda size: _planned(self.at(size), request) is not None, self._start, limit))
            if answer == 1:  # If there is no plan, it says what is missing.
                return Plans(self.captured(1), versions=versions).plan(request)
            plan = _planned(self.captured(answer), request, versions)
            if plan is not None:
                return plan
            others = self._captures.keys() - {answer}
            self._draw(min(others, key=lambda size: (size > answer, abs(size - answer))), answer)
            limit, step = max(1, answer - step), 2 * step

    def _draw(self, first: int, second: int) -> None:
        """Have ``at`` return the step by the line through two captures or, where there is none, captures."""
        captured = self.captured(first), self.captured(second)
        try:
            self.at: Capture = Scaling(*captured).at
        except ValueError:
            self.at = self.captured


def _most(fits: Callable[[int], bool], start: int, limit: int) -> int:
    """Return the largest size up to a limit that fits, 0 if none does; a smaller one fits if a larger one does."""
    low, high = 0, min(max(1, start), limit)
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > max(1, low // PRECISION):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _planned(graph: Graph, request: Request, versions: Versions = ()) -> Plan | None:
    try:
        return Plans(graph, versions=versions).plan(request)
    except (InfeasibleBudgetError, InfeasibleOverheadError):
        return None


def _highest_of_plain(graph: Graph) -> int:
    """Return what a budget must allow so that nothing is recomputed."""
    return Plans(graph).plan(Request(strategy="plain")).highest_peak_bytes


def _rate(graph: Graph, plan: Plan) -> Rate:
    seconds = graph.step_seconds * (1 + plan.step_overhead)
    return Rate(
        batch_size=graph.batch_size,
        peak_bytes=plan.peak_bytes,
        plain_peak_bytes=plan.plain_peak_bytes,
        step_overhead=plan.step_overhead,
        samples_per_second=graph.batch_size / seconds if seconds else 0.0,
    )
