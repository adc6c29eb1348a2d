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
from tests.tensorflow.plans import drawn_segments, optimized_in_segments
from tf_memsaver.capture.model_step import capture_graph
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.program.signature import note_inputs
from tools.shared.models.random_fit import (
    CLASSES,
    FitCase,
    LayerScale,
    OfList,
    OwnCall,
    PerChannel,
    Step,
    fitted,
    random_fit_case,
)
from tools.shared.records import differing

_USUAL = (2, 3, 4, 5, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 6, 9, 30)))
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
        count, draw = len(graph.units), random.Random(seed)
        # Segments of operations end at the graph's cuts, those of layers anywhere but where the graph forbids it.
        cuts = [c.position for c in graph.cuts] if granularity == "op" else set(range(count)).difference(graph.joined)
        everywhere, shares = how == "everywhere", {"cut": 0.6, "store": 0.2, "child": 0.5}
        chance = (lambda what: what == "cut") if everywhere else (lambda what: draw.random() < shares[what])
        segments = drawn_segments(graph, cuts, chance)
        made = None
    if not any(segment.mode is SegmentMode.RECOMPUTE for segment in segments):
        return None
    return made or optimized_in_segments(case.model, segments, case.batch_size, granularity)


@pytest.mark.parametrize("seed", range(_MANY) if _MANY else _USUAL)
def test_random_models_fit_alike(seed: int) -> None:
    case = random_fit_case(seed)
    plain = fitted(case, case.model)
    if differing(plain, fitted(case, case.model)):
        pytest.skip("the plain model differs from itself")
    hows = (*STRATEGIES, *BY_HAND) if _MANY else (STRATEGIES[seed % 4], BY_HAND[seed % 2])
    for granularity, how in itertools.product(GRANULARITIES, hows):
        made = optimized(case, granularity, how, seed)
        if made is not None:
            wrong = differing(plain, fitted(case, made))
            assert not wrong, (
                f"{case.description}, {granularity} {how}: {len(wrong)} of {len(plain)} differ, {wrong[0]}"
            )


def _gets_a_step_of_its_own(model: Any, calls: int) -> None:
    """Give a model a ``train_step`` that calls it with the batch, and up to once more with a part of it."""

    class OwnStep(type(model)):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                made = self(x, training=True)
                loss = self.compute_loss(x, y, made)
                if calls == 2:
                    again = self(tf.nest.map_structure(lambda each: 0.5 * each[:1], x), training=True)
                    loss += 0.1 * tf.reduce_mean(tf.cast(made[:1] - again, loss.dtype) ** 2)
                loss = self.optimizer.scale_loss(loss)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    model.__class__ = OwnStep


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("seed", range(_MANY) if _MANY else _USUAL)
def test_random_models_with_a_step_of_their_own_fit_alike(seed: int, calls: int) -> None:
    case = random_fit_case(seed)
    _gets_a_step_of_its_own(case.model, calls)
    plain = fitted(case, case.model)
    if differing(plain, fitted(case, case.model)):
        pytest.skip("the plain model differs from itself")
    for granularity, strategy in itertools.product(("auto", "op"), ("recompute_all", "auto")):
        made = tf_memsaver.optimize(
            case.model,
            data=(case.x, case.y),
            batch_size=case.batch_size,
            granularity=granularity,
            strategy=strategy,
            max_overhead=100.0,
        )
        wrong = differing(plain, fitted(case, made))
        assert not wrong, (
            f"{case.description}, {granularity} {strategy}: {len(wrong)} of {len(plain)} differ, {wrong[0]}"
        )


@pytest.mark.parametrize(
    ("seed", "how"),
    [
        # A segment inside holds a convolution and the square that an RMSNormalization takes of its result.
        (6, "drawn"),
        # One segment inside makes a product, which another one reads.
        (15, "drawn"),
        # A segment inside reads the input of a GroupNormalization, which the segment before it has made and reads, too.
        (28, "nested"),
    ],
)
def test_terms_for_what_a_segment_inside_reads_and_others_after_it(seed: int, how: str) -> None:
    # The gradient of such a tensor is one sum of three terms and more in the plain step.
    case = random_fit_case(seed)
    plain = fitted(case, case.model)
    made = optimized(case, "op", how, seed)
    assert made is not None
    assert not differing(plain, fitted(case, made))


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
    made = optimized(case, granularity, how, 0)
    assert made is not None
    assert not differing(fitted(case, case.model), fitted(case, made))


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


def _functional(inputs: Any, outputs: Any, count: int, optimizer: Any = None) -> FitCase:
    sgd = functools.partial(keras.optimizers.SGD, 0.02, momentum=0.9)
    labels = (count, *outputs.shape[1:-1])
    return _case(keras.Model(inputs, outputs), (count, *inputs.shape[1:]), labels, optimizer or sgd)


@pytest.mark.parametrize("children", [(), (2, 4)])
def test_scales_of_channels_across_the_end_of_a_segment_inside(children: tuple[int, ...]) -> None:
    # Graph optimisation multiplies the scales of two layers first, if nobody else reads what lies between.
    keras.config.set_dtype_policy("mixed_float16")
    x = inputs = keras.Input((4, 8))
    x = PerChannel(name="p1")(layers.Dense(8, "sigmoid", name="d0")(x))
    x = LayerScale(name="s3")(layers.Dense(8, "sigmoid", use_bias=False, name="d2")(x))
    x = layers.Dense(8, "leaky_relu", name="d5")(PerChannel(name="p4")(x))
    case = _functional(inputs, layers.Dense(CLASSES, name="head")(x), 12)
    replayed = functools.partial(Segment, mode=SegmentMode.RECOMPUTE)
    inside = tuple(replayed(start=a, stop=b) for a, b in itertools.pairwise((0, *children, 5))) if children else ()
    segments = [replayed(start=0, stop=5, children=inside), Segment(start=5, stop=7, mode=SegmentMode.STORE)]
    made = optimized_in_segments(case.model, segments, 4, "layer")
    assert not differing(fitted(case, case.model), fitted(case, made))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_terms_of_a_sum_behind_their_segments(granularity: str) -> None:
    # The kernel of a sum begins with a term that nobody else holds: the backward pass needs all of these.
    x = inputs = keras.Input((8,))
    a = layers.Dense(8, "tanh", name="a")(x)
    b = layers.Activation("sigmoid", name="b")(layers.Dense(8, "sigmoid", name="c")(a))
    x = layers.Add(name="add")([a, layers.Dense(8, "sigmoid", name="d")(b), b, x])
    case = _functional(inputs, layers.Dense(CLASSES, name="head")(x), 24)
    _assert_fits_alike(case, granularity, "everywhere")


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_constants_of_gradients_wait_as_in_the_plain_step(granularity: str) -> None:
    # Graph optimisation moves the constant of a square's gradient into another product, unless it waits for something.
    x = inputs = keras.Input((6, 6, 8))
    x = layers.PReLU(shared_axes=[1, 2], name="first")(layers.Conv2D(8, 3, activation="silu", name="conv")(x))
    x = x + keras.ops.tanh(x) * 0.5 + keras.ops.square(x) * 0.1
    x = layers.PReLU(shared_axes=[1, 2], name="second")(x)
    x = layers.Dense(CLASSES, name="head")(layers.GlobalAveragePooling2D(name="pool")(x))
    _assert_fits_alike(_functional(inputs, x, 24), granularity, "everywhere")


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_leaky_relu_behind_a_convolution_stops_no_fusion(granularity: str) -> None:
    # TensorFlow's remapper gives up at a convolution that a LeakyRelu and somebody else reads: silu is not fused then.
    x = inputs = keras.Input((6, 6, 8))
    x = layers.Conv2D(8, 3, padding="same", activation="leaky_relu", name="first")(x)
    x = layers.Conv2D(8, 3, padding="same", activation="silu", name="second")(x)
    x = layers.Dense(CLASSES, name="head")(layers.GlobalAveragePooling2D(name="pool")(x))
    _assert_fits_alike(_functional(inputs, x, 24), granularity, "everywhere")


def test_a_frozen_scale_in_a_model_cut_by_operations() -> None:
    # Nobody wants the gradient of a frozen variable, so that nothing that it is to wait for stays in the graph.
    keras.config.set_dtype_policy("mixed_bfloat16")
    x = inputs = keras.Input((8,))
    x = LayerScale(name="z_first")(layers.Dense(8, "tanh", name="dense")(x))
    y = PerChannel(name="b_channel")(LayerScale(name="x_scale", trainable=False)(x))
    x = layers.Add(name="a_add")([x, y])
    y = PerChannel(name="b_channel2")(LayerScale(name="x_scale2")(x))
    x = layers.Add(name="a_add2")([y, x])
    case = _functional(inputs, layers.Dense(CLASSES, "sigmoid", name="head")(x), 8)
    _assert_fits_alike(dataclasses.replace(case, batch_size=2), "op", "everywhere")


def test_a_replay_holds_terms_that_are_read_behind_it() -> None:
    # What is a term of a sum and a result of the segment is read behind it, but not behind its replay.
    x = inputs = keras.Input((8,))
    a = layers.Dense(8, "tanh", name="a")(x)
    b = layers.Add(name="z")([x, a, layers.Dense(8, "elu", name="c")(a)])
    d = layers.Average(name="d")([layers.Dense(8, "tanh", name="e")(a), a, b])
    x = layers.Dense(8, "tanh", name="g")(layers.LayerNormalization(name="norm")(d))
    x = layers.Add(name="f")([x, b])
    case = _functional(inputs, layers.Dense(CLASSES, name="head")(x), 24)
    replayed = functools.partial(Segment, mode=SegmentMode.RECOMPUTE)
    names = [unit.label for unit in capture_graph(case.model, batch_size=4).units]
    stop = names.index("norm") + 1
    inside = (
        Segment(start=0, stop=stop - 1, mode=SegmentMode.STORE),
        replayed(start=stop - 1, stop=stop),
    )
    segments = [
        replayed(start=0, stop=stop, children=inside),
        Segment(start=stop, stop=len(names), mode=SegmentMode.STORE),
    ]
    made = optimized_in_segments(case.model, segments, 4, "layer")
    assert not differing(fitted(case, case.model), fitted(case, made))
