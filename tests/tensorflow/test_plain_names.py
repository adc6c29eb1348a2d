"""Names of the plain step in replays: graph optimisation sorts terms and factors by them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

from tests.tensorflow.graphs import model_graph
from tests.tensorflow.plans import (
    optimized_between_cuts,
    optimized_by_hand,
    optimized_in_segments,
    segments_of,
)
from tf_memsaver.capture.model_step import capture_graph
from tf_memsaver.program.kinds import program_of
from tools.shared.models import small as models
from tools.shared.training import assert_trains_alike, batch_for

_ENTERING = frozenset({"Placeholder", "ReadVariableOp", "AssignVariableOp"})
"""Operations that segments have outside: variables are read before them and written behind them."""


def nested_twice() -> Any:
    """A model that is called three times inside a model, with a model inside."""
    x = inputs = keras.Input((6,))
    innermost = keras.Sequential([keras.Input((6,)), layers.Dense(6, "tanh", name="a")], name="zz_innermost")
    inner = keras.Model(inputs, layers.Dense(6, "tanh", name="b")(innermost(x) + innermost(x * 2.0)), name="inner")
    inputs = keras.Input((6,))
    x = layers.Dense(6, "tanh", name="stem")(inputs)
    for _ in range(3):
        x = inner(x) + x
    return keras.Model(inputs, layers.Dense(2, name="head")(x))


def operators() -> Any:
    """Operations on symbolic tensors, which have no scope of their own."""
    x = inputs = keras.Input((6,))
    for number in range(4):
        y = layers.Dense(6, name=f"d{number}")(x)
        x = x + keras.ops.tanh(y) * 0.5 + keras.ops.square(y)
    return keras.Model(inputs, layers.Dense(2, name="head")(x))


def sums() -> Any:
    """Sums of four terms, which come from all over the model and not in the order of their names."""
    x = inputs = keras.Input((6,))
    made = [x]
    for name in ("zm", "yn", "xa", "wb"):
        y = layers.Dense(6, name=name[0])(x)
        x = layers.Add(name=name[1])([x, keras.ops.tanh(y), made[0], made[-1]])
        made.append(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(x))


def names(graph: Any) -> dict[str, str]:
    return {each.name: each.type for each in graph.get_operations()}


@pytest.mark.parametrize(
    "build", [models.shared_block, nested_twice, operators, models.three_deep, models.siamese, models.residual_net]
)
@pytest.mark.parametrize("length", [1, 3])
def test_every_operation_of_the_plain_step_has_its_name(build: Callable[[], Any], length: int) -> None:
    model = build()
    plain, found = names(model_graph(model)), names(model_graph(optimized_between_cuts(model, length=length)))
    missing = [name for name, kind in plain.items() if kind not in _ENTERING and found.get(name) != kind]
    assert not missing


@pytest.mark.parametrize("build", [models.shared_block, nested_twice, operators, sums])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("granularity", ["layer", "op"])
def test_models_whose_names_count_train_alike(build: Callable[[], Any], length: int, granularity: str) -> None:
    model = build()
    optimized = optimized_between_cuts(model, length=length, granularity=granularity)
    assert_trains_alike(model, optimized, ("graph",), free_batch=True)
    if granularity == "layer" and build is not nested_twice:
        assert_trains_alike(model, optimized)


def unproven_shapes() -> Any:
    """Return a sum whose operands are of one shape, which graph optimisation cannot know; one has two more readers."""
    inputs = keras.Input((4, 6))
    y = models.AddsLoss(name="y")(layers.Dense(6, name="down")(inputs))
    x = layers.Add(name="z_add")([layers.Dense(6, activation="gelu", name="inner")(y), y])
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.Dropout(0.2, name="drop")(x)))


@pytest.mark.parametrize("build", [unproven_shapes, models.factors_of_two_shapes])
def test_what_random_models_found(build: Callable[[], Any]) -> None:
    model = build()
    assert_trains_alike(model, optimized_between_cuts(model, length=1), ("graph",), free_batch=True)


def test_no_cut_inside_a_product_of_factors_of_two_shapes() -> None:
    assert 1 not in {cut.position for cut in capture_graph(models.factors_of_two_shapes(), batch_size=4).cuts}


@pytest.mark.xfail(reason="eager terms come in the order of the recorded operations on the way", strict=True)
def test_eager_sums_over_branches() -> None:
    model = nested_twice()
    assert_trains_alike(model, optimized_between_cuts(model), ("eager",))


def test_nested_segments_have_them_too() -> None:
    model = models.shared_block()
    inner = [("attention", "middle0"), ("norm0", "down")]
    optimized = optimized_by_hand(model, ("attention", "norm1#2", [*inner, ("attention#2", "norm0#2")]))
    plain, found = names(model_graph(model)), names(model_graph(optimized))
    assert not [name for name, kind in plain.items() if kind not in _ENTERING and found.get(name) != kind]
    assert_trains_alike(model, optimized, ("graph",))


@pytest.mark.parametrize("free_batch", [True, False])
def test_nested_first_runs_are_fused_as_the_plain_step(free_batch: bool) -> None:
    """A product, its bias and a GELU are made one where nobody reads what lies between: not in the plain step."""
    x = inputs = keras.Input((8,))
    for number in range(5):
        x = layers.Dense(8, activation="gelu", name=f"dense{number}")(x)
    model = keras.Model(inputs, layers.Dense(2)(x))
    optimized = optimized_by_hand(model, ("dense0", "dense4", [("dense0", "dense1", [("dense0", "dense0")])]))
    assert_trains_alike(model, optimized, ("graph",), free_batch=free_batch)


def test_a_second_replay_gets_names_of_its_own() -> None:
    model = models.shared_block()
    optimized = optimized_between_cuts(model)
    x = batch_for(model)

    @tf.function
    def twice(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(tf.square(optimized(x, training=True)))
        kernel = model.get_layer("up").kernel.value
        return tape.gradient(loss, kernel), tape.gradient(loss, kernel)

    first, second = twice(x)
    assert first.numpy().tobytes() == second.numpy().tobytes()


def test_one_model_twice_in_one_step() -> None:
    model = models.shared_block()
    optimized = optimized_between_cuts(model)

    def gradient(each: Any) -> Any:
        @tf.function
        def run(x: Any) -> Any:
            keras.utils.set_random_seed(0)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(each(x, training=True) - each(x * 0.5, training=True)))
            return tape.gradient(loss, [v.value for v in model.trainable_variables])

        return [g.numpy().tobytes() for g in run(batch_for(model))]

    seeds = [v for v in model.non_trainable_variables if "seed" in v.path]
    before = [v.numpy() for v in seeds]
    plain = gradient(model)
    for variable, value in zip(seeds, before, strict=True):
        variable.assign(value)
    assert plain == gradient(optimized)


def test_an_argument_that_one_segment_passes_on_to_the_next() -> None:
    """It is a term of a sum there, by its own name."""
    inputs = keras.Input((32,))
    x = layers.Dense(32, "tanh", name="before")(inputs)
    terms = [layers.Dense(32, name=f"term{number}")(x) for number in range(3)]
    x = layers.Dense(32, "tanh", name="after")(layers.Add(name="sum")([*terms, inputs]))
    model = keras.Model(inputs, layers.Dense(4)(x))
    optimized = optimized_by_hand(model, ("before", "before"), ("term0", "after"))
    assert_trains_alike(model, optimized, ("graph",), batch_size=256)


@pytest.mark.parametrize("blocks", [2, 3])
def test_operations_that_read_a_variable_inside_a_segment_and_outside(blocks: int) -> None:
    """Each read sends it a term, under a name of its own and not that of the first gradient of the segment."""
    model = models.shared_block(calls=4, dropout=0.0)
    calls = [call.label for call in program_of(model, "op").sequence.calls]
    ends = [label for label in calls if re.fullmatch(r"norm1(_\d)?/add_2", label)]
    batch = 64
    optimized = optimized_in_segments(model, segments_of(calls, [(calls[0], ends[blocks - 1])]), batch, "op")
    assert_trains_alike(model, optimized, ("graph",), batch_size=batch, steps=1)
