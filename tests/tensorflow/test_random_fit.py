"""Random models, optimized, train in Keras's own ``fit`` bit by bit as they do without.

``RANDOM_FIT=60 pytest tests/tensorflow/test_random_fit.py`` tries as many seeds as that, each by all kinds of plans.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import random
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tests.tensorflow.plans import optimized_in_segments
from tests.tensorflow.random_fit_models import CLASSES, FitCase, OfList, OwnCall, Step, drawn_segments, random_fit_case
from tests.tensorflow.training import Record, differing
from tf_memsaver.capture.keras_model import capture_graph
from tf_memsaver.capture.signature import note_inputs
from tf_memsaver.plan.types import SegmentMode

_USUAL = (1, 2, 3, 4, 5, 9)
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


@pytest.mark.parametrize("seed", range(_MANY) if _MANY else _USUAL)
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


def _case(model: Any, shape: tuple[int, ...], labels: tuple[int, ...], optimizer: Any, inputs: Any = None) -> FitCase:
    numbers = np.random.default_rng(0)
    return FitCase(
        model=model,
        x=numbers.standard_normal(shape).astype(np.float32),
        y=numbers.integers(0, CLASSES, labels),
        batch_size=4,
        epochs=2,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=optimizer,
        inputs=inputs,
        description="",
    )


def _assert_fits_alike(case: FitCase, granularity: str, how: str) -> None:
    values = [v.numpy() for v in case.model.variables]
    made = optimized(case, granularity, how, 0)
    assert made is not None
    assert not differing(fitted(case, case.model, values), fitted(case, made, values))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_gradient_of_a_scale_is_joined_with_the_learning_rate(granularity: str) -> None:
    # The gradient of BatchNorm's gamma is a product, which graph optimisation makes one with the optimizer's product.
    x = inputs = keras.Input((6, 6, 8))
    x = layers.Conv2D(8, 3, padding="same", name="conv")(x)
    x = layers.Activation("tanh", name="act")(layers.BatchNormalization(name="norm")(x))
    x = layers.Dense(CLASSES, name="head")(layers.GlobalAveragePooling2D(name="pool")(x))
    case = _case(keras.Model(inputs, x), (24, 6, 6, 8), (24,), lambda: keras.optimizers.SGD(0.02, momentum=0.9))
    _assert_fits_alike(case, granularity, "everywhere")


def test_a_sum_that_a_model_of_its_own_call_splits() -> None:
    # BatchNorm reads its input several times, and the addition reads it, too: nothing can be passed on between them.
    norm, inner, mixing = layers.LayerNormalization(), layers.BatchNormalization(), layers.Dense(8, "silu")
    add, head = OfList(layers.Add()), layers.Dense(CLASSES)
    steps = [Step(norm, (0,)), Step(inner, (1,)), Step(mixing, (2,)), Step(add, (3, 1)), Step(head, (4,))]
    model = OwnCall(steps)
    model(np.zeros((2, 8), np.float32))
    sgd = functools.partial(keras.optimizers.SGD, 0.02, momentum=0.9)
    case = _case(model, (17, 8), (17,), sgd, tf.TensorSpec((None, 8), tf.float32))
    _assert_fits_alike(case, "layer", "recompute_all")


@pytest.mark.parametrize("loss", [keras.losses.BinaryCrossentropy, keras.losses.MeanSquaredError])
def test_logits_that_no_gradient_comes_to(loss: Any) -> None:
    # In bfloat16 a product, its bias and the sigmoid are one op, as nothing else needs the logits.
    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(CLASSES, "sigmoid", name="head")(inputs))
    case = _case(model, (16, 8), (16, CLASSES), functools.partial(keras.optimizers.Adam, 1e-2))
    _assert_fits_alike(dataclasses.replace(case, loss=loss()), "op", "everywhere")
