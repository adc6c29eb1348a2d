"""Every rule of parity is there for some case: without it, bits are not those of the plain step."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from keras import layers

from tests.tensorflow.plans import optimized_between_cuts, optimized_by_hand, optimized_in_segments, segments_of
from tests.tensorflow.test_in_fit import diffusion
from tests.tensorflow.test_plain_names import factors_of_two_shapes, shared_block
from tf_memsaver.capture.model_step import capture_graph
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.parity.level import EXACT, Parity, Rule, at_level
from tools.shared.records import Record, differing
from tools.shared.training import fit, train

CLASSES = 3


def model_of(inputs: Any, x: Any) -> Any:
    if len(x.shape) > 2:
        x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(CLASSES, name="head")(x))


def approximate_gelu(x: Any) -> Any:
    return keras.activations.gelu(x, approximate=True)


def activated(activation: Any) -> Any:
    x = inputs = keras.Input((8,))
    for number in range(2):
        x = layers.Dense(8, activation=activation, name=f"dense{number}")(x)
    return model_of(inputs, x)


def leaky() -> Any:
    """The remapper gives up at a convolution that a LeakyRelu and somebody else reads: silu is not fused then."""
    x = inputs = keras.Input((6, 6, 8))
    x = layers.Conv2D(8, 3, padding="same", activation="leaky_relu", name="first")(x)
    return model_of(inputs, layers.Conv2D(8, 3, padding="same", activation="silu", name="second")(x))


def sum_after_segments() -> Any:
    """The kernel of a sum begins with a term that nobody else holds: the backward pass needs all of these."""
    x = inputs = keras.Input((8,))
    a = layers.Dense(8, "tanh", name="a")(x)
    b = layers.Activation("sigmoid", name="b")(layers.Dense(8, "sigmoid", name="c")(a))
    return model_of(inputs, layers.Add(name="add")([a, layers.Dense(8, "sigmoid", name="d")(b), b, x]))


def sums_inside() -> Any:
    x = inputs = keras.Input((8,))
    a = layers.Dense(8, "tanh", name="a")(x)
    b = layers.Add(name="z")([x, a, layers.Dense(8, "elu", name="c")(a)])
    d = layers.Average(name="d")([layers.Dense(8, "tanh", name="e")(a), a, b])
    x = layers.Dense(8, "tanh", name="g")(layers.LayerNormalization(name="norm")(d))
    return model_of(inputs, layers.Add(name="f")([x, b]))


def nested_around_sums(model: Any) -> Any:
    names = [unit.label for unit in capture_graph(model, batch_size=4).units]
    return optimized_in_segments(model, segments_of(names, [("a", "norm", [("norm", "norm")])]), 4, "layer")


def argument_in_a_sum() -> Any:
    """An argument that one segment passes on to the next, where it is a term of a sum, by its own name."""
    inputs = keras.Input((32,))
    x = layers.Dense(32, "tanh", name="before")(inputs)
    terms = [layers.Dense(32, name=f"term{number}")(x) for number in range(3)]
    return model_of(inputs, layers.Dense(32, "tanh", name="after")(layers.Add(name="sum")([*terms, inputs])))


def scales() -> Any:
    """The gradient of BatchNorm's gamma is a product, which graph optimisation makes one with the optimizer's."""
    x = inputs = keras.Input((6, 6, 8))
    x = layers.Conv2D(8, 3, padding="same", name="conv")(x)
    return model_of(inputs, layers.Activation("tanh", name="act")(layers.BatchNormalization(name="norm")(x)))


def three_readers() -> Any:
    """The gradient of x is one sum of three terms, from layers one behind another."""
    inputs = keras.Input((8,))
    x = layers.Dense(8, "tanh", name="x")(inputs)
    y = layers.Dense(8, "tanh", name="a")(x)
    for name in "bcd":
        y = layers.Multiply(name=name)([y, x])
    return model_of(inputs, y)


def residual_norms() -> Any:
    x = inputs = keras.Input((6, 6, 8))
    for number in range(2):
        y = layers.Conv2D(8, 3, padding="same", name=f"conv{number}")(x)
        x = layers.Add(name=f"add{number}")([x, layers.BatchNormalization(name=f"norm{number}")(y)])
    return model_of(inputs, x)


def sum_of_sums() -> Any:
    """The sum begins with the second term, whose buffer nobody needs; the first one is read by its gradient."""
    inputs = keras.Input((8,))
    x = layers.Dense(8, "tanh", name="x")(inputs)
    a, b, c = (layers.Dense(8, kind, name=name)(x) for kind, name in (("tanh", "a"), (None, "b"), (None, "c")))
    x = layers.Add(name="all")([layers.Add(name="two")([a, b]), c])
    return model_of(inputs, layers.Dense(8, "tanh", name="after")(x))


def everywhere(model: Any, granularity: str = "layer") -> Any:
    """Return a model whose plan has a segment of each unit that is not pinned, between all cuts."""
    graph = capture_graph(model, batch_size=4, granularity=granularity)
    ends = [0, *sorted(cut.position for cut in graph.cuts), len(graph.units)]
    segments = []
    for start, stop in itertools.pairwise(dict.fromkeys(ends)):
        pinned = any(unit.pinned for unit in graph.units[start:stop])
        segments.append(Segment(start=start, stop=stop, mode=SegmentMode.STORE if pinned else SegmentMode.RECOMPUTE))
    return optimized_in_segments(model, segments, 4, granularity)


def trained_by_fit(model: Any, level: Parity, samples: int = 26) -> Record:
    """Return what ``fit`` leaves; with 26 samples the last batch is smaller, so that no graph knows its size."""
    numbers = np.random.default_rng(0)
    x = numbers.standard_normal((samples, *model.input_shape[1:])).astype("float32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss, jit_compile=False)
    with at_level(level):
        return fit(model, x, numbers.integers(0, CLASSES, samples), batch_size=4)


def trained_by_tape(model: Any, level: Parity, **options: Any) -> Record:
    with at_level(level):
        return train(model, steps=1, **options)


class Case(NamedTuple):
    build: Callable[[], Any]
    optimize: Callable[[Any], Any]
    trained: Callable[[Any, Parity], Record] = trained_by_fit


between_cuts = functools.partial(optimized_between_cuts, length=1)
of_operations = functools.partial(optimized_between_cuts, length=1, granularity="op")

CASES = {
    Rule.INPUT_NAMES: Case(
        argument_in_a_sum,
        lambda model: optimized_by_hand(model, ("before", "before"), ("term0", "after")),
        functools.partial(trained_by_tape, batch_size=256),
    ),
    Rule.ARRIVING_NAMES: Case(diffusion, everywhere, functools.partial(trained_by_tape, free_batch=True)),
    Rule.SQUARES_OF_CUBES: Case(functools.partial(activated, approximate_gelu), between_cuts),
    Rule.RESULTS_AS_TERMS: Case(sum_after_segments, between_cuts),
    Rule.READERS_IN_FIRST_RUN: Case(functools.partial(activated, "gelu"), between_cuts),
    Rule.READERS_IN_REPLAY: Case(functools.partial(activated, "softplus"), between_cuts),
    Rule.CONVOLUTIONS: Case(leaky, everywhere, functools.partial(trained_by_fit, samples=24)),
    Rule.FREE_PRODUCTS: Case(scales, everywhere, functools.partial(trained_by_fit, samples=24)),
    Rule.WHOLE_FUSIONS: Case(residual_norms, of_operations),
    Rule.WHOLE_SUMS: Case(sum_of_sums, between_cuts),
    Rule.WHOLE_PRODUCTS: Case(factors_of_two_shapes, between_cuts, functools.partial(trained_by_tape, free_batch=True)),
    Rule.WHOLE_CONSTANT_CHAINS: Case(functools.partial(activated, approximate_gelu), of_operations),
    Rule.NAMES: Case(
        functools.partial(shared_block, dropout=0.0),
        optimized_between_cuts,
        functools.partial(trained_by_tape, free_batch=True),
    ),
    Rule.WHOLE_GRADIENT_SUMS: Case(three_readers, between_cuts),
    Rule.TERMS_IN_FIRST_RUN: Case(sums_inside, nested_around_sums),
    Rule.TERMS_IN_REPLAY: Case(sums_inside, nested_around_sums),
    Rule.TERMS_AFTER: Case(sum_after_segments, between_cuts),
}


@pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.name)
def test_bits_differ_without_a_rule(rule: Rule) -> None:
    case = CASES[rule]
    model = case.build()
    plain = case.trained(model, EXACT)
    assert not differing(plain, case.trained(case.optimize(model), EXACT))
    with at_level(EXACT.without(rule)):
        optimized = case.optimize(model)
    assert differing(plain, case.trained(optimized, EXACT.without(rule)))
