"""Random models, optimized, train in Keras's own ``fit`` bit by bit as they do without.

``RANDOM_FIT=60 pytest tests/tensorflow/test_random_fit.py`` tries as many seeds as that, each by all kinds of plans.
"""

from __future__ import annotations

import os
from typing import Any

import keras
import pytest

import tf_memsaver
from tests.tensorflow.random_fit_models import FitCase, random_fit_case
from tests.tensorflow.training import Record, differing
from tf_memsaver.plan.types import SegmentMode

_MANY = int(os.environ.get("RANDOM_FIT", "0"))

PLANS = [
    (granularity, strategy, options)
    for granularity in ("layer", "op")
    for strategy, options in (
        ("recompute_all", {"max_overhead": 100.0}),
        ("min_peak", {"max_overhead": 100.0}),
        ("nested", {"max_overhead": 100.0}),
        ("auto", {"max_overhead": 100.0}),
    )
]


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
    tried = 0
    for granularity, strategy, options in PLANS if _MANY else (PLANS[seed % 4], PLANS[4 + seed % 4]):
        try:
            made = tf_memsaver.optimize(
                case.model,
                batch_size=case.batch_size,
                granularity=granularity,
                strategy=strategy,
                inputs=case.inputs,
                **options,
            )
        except tf_memsaver.errors.MemsaverError:
            raise
        if any(each.mode is SegmentMode.RECOMPUTE for each in made.memsaver_plan.segments):
            tried += 1
            wrong = differing(plain, fitted(case, made, values))
            assert not wrong, f"{case.description}, {granularity} {strategy}: {len(wrong)} of {len(plain)} differ"
    keras.backend.clear_session()
