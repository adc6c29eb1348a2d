"""The largest batch that trains within a budget, by planning: a few captures, and a line between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tf_memsaver.errors import InfeasibleBudgetError, InfeasibleOverheadError
from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.scaling import Scaling
from tf_memsaver.options.checks import MOST_BATCH
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import Plans, Versions
from tf_memsaver.units import format_bytes

Capture = Callable[[int], Graph]
"""Traces a training step at a batch size."""

MOST_ANSWERS = 6
"""Captures of answers: each that turns out wrong is a point of the next line, which goes through it."""

PRECISION = 256
"""A batch is found to one part in so many, and to one sample up to this size."""

RATES = 5
"""Batch sizes that are compared by samples a second."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What a batch size comes to under the same limits: predicted peaks in bytes, and predicted samples a second.

    The seconds are the cost model's, whose ratios alone mean something. ``step_overhead`` is a share of the plain step.
    """

    batch_size: int
    peak_bytes: int
    plain_peak_bytes: int
    step_overhead: float
    samples_per_second: float


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """The largest batch within some limits, and its plan.

    ``plain_batch_size`` is the largest that the plain step trains within the budget, 0 if there is none. ``rates`` are
    of some sizes up to the largest, in order: the largest is not always the quickest. ``measured_peak_bytes`` is the
    largest peak of real steps at the largest batch, None where none was run.
    """

    batch_size: int
    plan: Plan
    plain_batch_size: int
    rates: tuple[Rate, ...]
    measured_peak_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON data."""
        return {**dataclasses.asdict(self), "plan": self.plan.to_json()}

    def __str__(self) -> str:
        measured = self.measured_peak_bytes
        real = "" if measured is None else f" ({format_bytes(measured)} measured)"
        return (
            f"largest batch {self.batch_size}, where the plain step trains {self.plain_batch_size}: predicted peak "
            f"{format_bytes(self.plan.peak_bytes)}{real}, step {self.plan.step_overhead:+.1%}"
        )


def largest_batch(capture: Capture, request: Request, start: int, *, versions: Versions = ()) -> LargestBatch:
    """Return the largest batch whose plan keeps the budget and the ``max_overhead`` of a request.

    The step is captured at ``start`` samples and at twice as many. Other sizes are planned for the line through both,
    the answer for a capture of its own.

    Raises:
      InfeasibleBudgetError, InfeasibleOverheadError: not even a batch of one sample trains so.
      HintError: as in ``solve``.
    """
    captures: dict[int, Graph] = {}

    def captured(size: int) -> Graph:
        if size not in captures:
            captures[size] = capture(size)
        return captures[size]

    start = max(2, start)
    line = _line(captured, start, 2 * start)
    most = _most(lambda size: _planned(line(size), request) is not None, start, MOST_BATCH)
    for _ in range(MOST_ANSWERS):
        answer = max(1, most)
        plan = _planned(captured(answer), request, versions)
        if plan is not None or answer == 1:
            break
        line = _line(captured, min(captures), answer)
        most = _most(lambda size: _planned(line(size), request) is not None, answer // 2, answer - 1)  # noqa: B023
    if plan is None:  # It says what is missing.
        plan = Plans(captured(answer), versions=versions).plan(request)
    budget = request.budget_bytes
    assert budget is not None
    plain = _most(lambda size: _plain_peak(line(size)) <= budget, min(start, answer), answer)
    sizes = {answer, plain, *(round(answer * part / RATES) for part in range(1, RATES))} - {0}
    rates = [_rate(captured(size) if size == answer else line(size), request) for size in sorted(sizes)]
    return LargestBatch(answer, plan, plain, tuple(rate for rate in rates if rate is not None))


def _line(captured: Capture, first: int, second: int) -> Capture:
    """Return what tells the step at any size: the line through two captures or, where there is none, captures."""
    try:
        return Scaling(captured(first), captured(second)).at
    except ValueError:
        return captured


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


def _plain_peak(graph: Graph) -> int:
    return Plans(graph).plan(Request(strategy="plain")).peak_bytes


def _rate(graph: Graph, request: Request) -> Rate | None:
    plan = _planned(graph, request)
    if plan is None:
        return None
    seconds = graph.step_seconds * (1 + plan.step_overhead)
    return Rate(
        batch_size=graph.batch_size,
        peak_bytes=plan.peak_bytes,
        plain_peak_bytes=plan.plain_peak_bytes,
        step_overhead=plan.step_overhead,
        samples_per_second=graph.batch_size / seconds if seconds else 0.0,
    )
