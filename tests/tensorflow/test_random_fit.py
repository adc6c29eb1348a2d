"""Random models, optimized, train in Keras's own ``fit`` bit by bit as they do without.

``RANDOM_FIT=60 pytest tests/tensorflow/test_random_fit.py`` tries as many seeds as that, each by all kinds of plans.
"""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import pytest

import tf_memsaver
from tests.tensorflow.plans import optimized_in_segments
from tests.tensorflow.random_fit_models import FitCase, drawn_segments, random_fit_case
from tests.tensorflow.training import Record, differing
from tf_memsaver.capture.keras_model import capture_graph
from tf_memsaver.capture.signature import note_inputs
from tf_memsaver.plan.types import SegmentMode

_MANY = int(os.environ.get("RANDOM_FIT", "0"))

GRANULARITIES = ("layer", "op")
STRATEGIES = ("recompute_all", "nested", "auto", "min_peak")
BY_HAND = ("everywhere", "drawn")
"""Plans that replay something in any case: one with a segment of each unit, and one drawn from the seed."""


def optimized(case: FitCase, granularity: str, how: str, seed: int) -> Any | None:
    """Return the model of a case, optimized by a strategy or by hand; None if nothing would be replayed."""
    if how in STRATEGIES:
        made = tf_memsaver.optimize(
            case.model,
            batch_size=case.batch_size,
            granularity=granularity,
            strategy=how,
            max_overhead=100.0,
            inputs=case.inputs,
        )
        segments = made.memsaver_plan.segments
    else:
        if case.inputs is not None:
            note_inputs(case.model, case.inputs)
        graph = capture_graph(case.model, batch_size=case.batch_size, granularity=granularity)
        segments = drawn_segments(graph, granularity, None if how == "everywhere" else random.Random(seed))
        made = None
    if not any(segment.mode is SegmentMode.RECOMPUTE for segment in segments):
        return None
    return made or optimized_in_segments(case.model, segments, case.batch_size, granularity)


def fitted(case: FitCase, model: Any, values: list[Any]) -> Record:
    """Train from ``values`` of the variables; return every number that ``fit`` leaves, and the losses on the way."""
    for variable, value in zip(case.model.variables, values, strict=True):
        variable.assign(value)
    case.compile(model)
    record: Record = {("loss", number): loss for number, loss in enumerate(case.fit(model))}
    record |= {("variable", place, v.path): v.numpy() for place, v in enumerate(case.model.variables)}
    record |= {("slot", place): v.numpy() for place, v in enumerate(model.optimizer.variables)}
    return record


@pytest.mark.parametrize("seed", range(_MANY or 6))
def test_random_models_fit_alike(seed: int) -> None:
    case = random_fit_case(seed)
    values = [v.numpy() for v in case.model.variables]
    plain = fitted(case, case.model, values)
    if differing(plain, fitted(case, case.model, values)):
        pytest.skip("the plain model differs from itself")
    hows = (*STRATEGIES, *BY_HAND) if _MANY else (STRATEGIES[seed % 4], BY_HAND[seed % 2])
    for granularity, how in itertools.product(GRANULARITIES, hows):
        made = optimized(case, granularity, how, seed)
        if made is not None:
            wrong = differing(plain, fitted(case, made, values))
            assert not wrong, (
                f"{case.description}, {granularity} {how}: {len(wrong)} of {len(plain)} differ, {wrong[0]}"
            )
