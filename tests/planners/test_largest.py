"""The largest batch, against trying them all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from tf_memsaver.errors import InfeasibleBudgetError, InfeasibleOverheadError
from tf_memsaver.ir.graph import Graph
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.largest import PRECISION, largest_batch
from tf_memsaver.planners.solve import solve
from tools.shared.nets import chain

KIB = 1 << 10


def line(size: int) -> Graph:
    return replace(chain([KIB * size + 100] * 5), batch_size=size)


def jumps(size: int) -> Graph:
    """Beyond 20 samples the step takes twice as much."""
    return replace(chain([KIB * size * (2 if size > 20 else 1)] * 5), batch_size=size)


def changes(size: int) -> Graph:
    """A step of another layer from 20 samples on."""
    return replace(chain([KIB * size] * (5 if size < 20 else 6)), batch_size=size)


def worse_and_worse(size: int) -> Graph:
    """What the bytes of a sample grow with the batch: each line is too hopeful."""
    return replace(chain([size**3] * 5), batch_size=size)


def never_alike(size: int) -> Graph:
    """A step of another number of layers at each size."""
    return replace(chain([KIB * size] * (3 + size % 7)), batch_size=size)


def fits(graph: Graph, request: Request) -> bool:
    try:
        return bool(solve(graph, request).segments)
    except (InfeasibleBudgetError, InfeasibleOverheadError):
        return False


@pytest.mark.parametrize(
    ("capture", "start"),
    [*itertools.product([line, jumps, changes], [1, 200]), (worse_and_worse, 20), (never_alike, 20)],
)
@pytest.mark.parametrize("kib", [70, 300])
@pytest.mark.parametrize("overhead", [None, 0.1])
def test_no_larger_batch_fits(capture: Callable[[int], Graph], start: int, kib: int, overhead: float | None) -> None:
    request = Request(budget_bytes=kib * KIB, max_overhead=overhead)
    seen: list[int] = []

    def noted(size: int) -> Graph:
        seen.append(size)
        return capture(size)

    found = largest_batch(noted, request, start)
    assert fits(capture(found.batch_size), request)
    if capture is line:  # Another line is not the truth: it may stop early, but never says what does not fit.
        assert not fits(line(found.batch_size + 1), request) and len(seen) == len(set(seen)) <= 3
    assert found.plan.batch_size == found.batch_size and found.plan.peak_bytes <= kib * KIB
    assert [rate.batch_size for rate in found.rates] == sorted({rate.batch_size for rate in found.rates})
    assert found.rates[-1].batch_size == found.batch_size
    if capture is line:
        plain = found.plain_batch_size
        peaks = [solve(line(size), Request(strategy="plain")).highest_peak_bytes for size in (max(1, plain), plain + 1)]
        assert peaks[0] <= kib * KIB < peaks[1] or plain == found.batch_size
    assert str(found.batch_size) in str(found) and found.to_json()["plan"]["batch_size"] == found.batch_size


def test_large_batches_are_found_to_a_share_of_themselves() -> None:
    request = Request(budget_bytes=10**9)
    found = largest_batch(line, request, 16).batch_size
    assert fits(line(found), request) and not fits(line(found + found // PRECISION + 1), request)


def test_a_budget_that_not_one_sample_keeps() -> None:
    with pytest.raises(InfeasibleBudgetError) as caught:
        largest_batch(line, Request(budget_bytes=KIB), 16)
    assert caught.value.least_bytes > KIB


@pytest.mark.parametrize("limit", [1, 50, 100])
def test_what_takes_more_than_planned_is_planned_for_less(limit: int) -> None:
    request, tried = Request(budget_bytes=300 * KIB), list[int]()

    def measure(plan: Plan) -> int:
        tried.append(plan.batch_size)
        return plan.peak_bytes + 20 * KIB * (plan.batch_size > limit)

    if limit == 1:
        measure = lambda plan: 301 * KIB  # noqa: E731
        with pytest.raises(InfeasibleBudgetError):
            largest_batch(line, request, 16, measure=measure)
        return
    found = largest_batch(line, request, 16, measure=measure)
    assert found.batch_size == tried[-1] and found.measured_peak_bytes is not None
    assert found.measured_peak_bytes <= 300 * KIB and tried == sorted(tried, reverse=True)
    assert found.rates[-1].batch_size == found.batch_size
