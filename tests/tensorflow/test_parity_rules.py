"""Every rule of parity is there for some case: without it, bits are not those of the plain step, or graphs are not."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tests.tensorflow.graphs import model_graph
from tests.tensorflow.plans import (
    drawn_segments,
    optimized_between_cuts,
    optimized_by_hand,
    optimized_in_segments,
    segments_of,
)
from tf_memsaver.capture.model_step import capture_graph
from tf_memsaver.compat.onednn import takes_onednn
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.parity import sums
from tf_memsaver.parity.gradients import before_additions, maker_of, of_shape
from tf_memsaver.parity.grappler import KEPT_IDENTITY, TAPE_SCOPE
from tf_memsaver.parity.level import EXACT, ROUNDING, Parity, Rule, at_level, level_here
from tf_memsaver.parity.readers import EXTRA_READERS
from tools.shared.models.formulas import formula_model
from tools.shared.models.random_fit import fitted, random_fit_case
from tools.shared.models.small import factors_of_two_shapes, shared_block, two_resolutions
from tools.shared.records import Record, differing
from tools.shared.training import fit, no_graph_rewriting, train

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


def hard_swishes() -> Any:
    """x · relu6(x + 3) / 6: the gradients of the first, a Dense gives shapes that graph optimisation does not know."""
    x = inputs = keras.Input((6, 8))
    x = layers.Activation("hard_silu", name="first")(layers.Conv1D(8, 3, padding="same", name="conv")(x))
    x = layers.Dense(8, "relu", name="dense")(x)
    x = layers.Activation("hard_silu", name="second")(layers.Conv1D(8, 3, padding="same", name="last")(x))
    return model_of(inputs, layers.GlobalAveragePooling1D(name="pool")(x))


def test_a_sum_of_gradients_has_the_sizes_of_any_of_its_terms() -> None:
    # One of them comes of a Dense on sequences, whose gradient has a size of its own, the other passes an addition.
    x = inputs = keras.Input((6, 8))
    x = layers.Activation("hard_silu", name="swish")(layers.Dense(8, name="front")(x))
    x = layers.Add(name="add")([x, layers.Dense(8, name="inner")(layers.LayerNormalization(name="norm")(x))])
    model = model_of(inputs, layers.Dense(8, "relu", name="behind")(layers.GlobalAveragePooling1D(name="pool")(x)))
    optimized = optimized_by_hand(model, ("front", "swish"), ("norm", "inner"))
    assert not differing(trained_by_fit(model, EXACT), trained_by_fit(optimized, EXACT))


def test_a_gradient_of_which_no_shape_is_known_is_its_own() -> None:
    """As that of a ``keras.ops.associative_scan`` over pairs (Mamba, S5)."""
    with tf.Graph().as_default():
        given, size = tf.compat.v1.placeholder(tf.float32, (None, 8)), tf.compat.v1.placeholder(tf.int32, None)
        gradient = tf.reshape(tf.raw_ops.Sum(input=given, axis=size), size)
        assert gradient.shape.rank is None
        assert before_additions(gradient) is gradient and maker_of(gradient) is gradient.op


def swishes() -> Any:
    """Two of them are the first, on two branches."""
    inputs = keras.Input((6, 6, 8))
    branches = [
        layers.Conv2D(8, size, padding="same", activation="silu", name=f"branch{size}")(inputs) for size in (1, 3)
    ]
    x = layers.Concatenate(name="joined")(branches)
    x = layers.BatchNormalization(name="norm")(layers.Conv2D(8, 3, name="middle")(x))
    return model_of(inputs, layers.Activation("silu", name="later")(x))


def sum_after_segments() -> Any:
    """A sum of what a segment returns and of another term, whose name is between those of the two results."""
    x = inputs = keras.Input((8,))
    z = layers.Dense(8, "tanh", name="z")(x)
    b = layers.Dense(8, "sigmoid", name="b")(z)
    return model_of(inputs, layers.Add(name="add")([z, b, layers.Dense(8, "sigmoid", name="m")(b)]))


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


def sums_of_three() -> Any:
    """Of three terms of a gradient, one passes a sum of three: by name it is the last, by that of the sum the first."""
    inputs = keras.Input((8,))
    x = layers.Dense(8, "tanh", name="first")(inputs)
    for number in range(2):
        a, b = (layers.Dense(8, "tanh", name=f"{name}{number}")(x) for name in "mp")
        x = layers.Add(name=f"add{number}")([layers.Dense(8, "tanh", name=f"n{number}")(a), x, b])
        x = layers.Dense(8, "tanh", name=f"z{number}")(x)
    return model_of(inputs, x)


def sums_of_four() -> Any:
    """Layers and sums of up to four terms read the first layer's result: graph optimisation resolves them late."""
    inputs = keras.Input((8,))
    made = [layers.Dense(8, "tanh", name="first")(inputs)]
    for name in "abcd":
        made.append(layers.Dense(8, "gelu", name=name)(sum(made[1:], made[0])))
    return model_of(inputs, layers.Multiply(name="times")([made[0], made[-1]]))


def loss_of_a_term() -> Any:
    """An eager tape adds the gradient of the loss that a layer adds first, then those of the layer's readers."""
    inputs = keras.Input((8,))
    a = layers.Dense(8, "tanh", activity_regularizer="l2", name="a")(inputs)
    b, c = layers.Dense(8, "tanh", name="b")(a), layers.Dense(8, "tanh", name="c")(a)
    return model_of(inputs, layers.Multiply(name="times")([layers.Add(name="add")([a, b]), c]))


def residual_norms() -> Any:
    x = inputs = keras.Input((6, 6, 8))
    for number in range(2):
        y = layers.Conv2D(8, 3, padding="same", name=f"conv{number}")(x)
        x = layers.Add(name=f"add{number}")([x, layers.BatchNormalization(name=f"norm{number}")(y)])
    return model_of(inputs, x)


def lending() -> Any:
    """The sum begins with the second term, whose buffer nobody needs; the first one is read by its gradient."""
    inputs = keras.Input((8,))
    m, a = layers.Dense(8, "sigmoid", name="m")(inputs), layers.Dense(8, "tanh", name="a")(inputs)
    b, c = layers.Multiply(name="b")([a, m]), layers.Dense(8, name="c")(inputs)
    x = layers.Add(name="all")([layers.Add(name="two")([a, b]), c])
    return model_of(inputs, layers.Dense(8, "tanh", name="after")(x))


def constant_after_a_difference() -> Any:
    """Constant folding adds the constant to an operand of the difference."""
    inputs = keras.Input((8,))
    a, b = (layers.Dense(8, "tanh", name=name)(inputs) for name in "ab")
    x = layers.Subtract(name="difference")([a, b]) + 0.3
    return model_of(inputs, layers.Dense(8, "tanh", name="after")(x))


def sum_of_unlike_sizes() -> Any:
    """Graph optimisation gives the sum's first size another symbol in a replay than in the forward pass."""
    inputs = keras.Input((6, 8))
    x = layers.Dense(8, name="first")(inputs)
    x = layers.Add(name="add")([x, layers.Dense(8, "gelu", name="second")(x)])
    x = layers.Dense(8, "gelu", name="last")(layers.GlobalAveragePooling1D(name="pool")(x))
    return model_of(inputs, x)


def large_norms() -> Any:
    """The plain step peaks at the end of its forward pass, with the norms recomputed it peaks in their backward pass.

    It needs more than 0.8 of 256 MiB: graph optimisation takes sums apart whose terms are in memory then.
    """
    x = inputs = keras.Input((64, 64, 3))
    x = layers.Conv2D(32, 3, padding="same", name="front")(x)
    for number in range(4):
        x = layers.BatchNormalization(name=f"norm{number}")(layers.Conv2D(32, 1, name=f"conv{number}")(x))
        x = layers.Activation("relu", name=f"relu{number}")(x)
    x = layers.AveragePooling2D(2, name="half")(x)
    for number in range(16):
        x = layers.Activation("tanh", name=f"tail{number}")(x)
    return model_of(inputs, x)


def everywhere(model: Any) -> Any:
    """Return a model whose plan has a segment of each layer that is not pinned, wherever the graph lets one end."""
    graph = capture_graph(model, batch_size=4)
    segments = drawn_segments(graph, set(range(len(graph.units))).difference(graph.joined), lambda what: what == "cut")
    return optimized_in_segments(model, segments, 4, "layer")


def trained_by_fit(model: Any, level: Parity, samples: int = 26, batch_size: int = 4, **compiling: Any) -> Record:
    """Return what ``fit`` leaves; with 26 samples the last batch is smaller, so that no graph knows its size."""
    numbers = np.random.default_rng(0)
    x = numbers.standard_normal((samples, *model.input_shape[1:])).astype("float32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss, jit_compile=False, **compiling)
    with at_level(level):
        return fit(model, x, numbers.integers(0, CLASSES, samples), batch_size=batch_size)


def trained_by_tape(model: Any, level: Parity, **options: Any) -> Record:
    with at_level(level):
        return train(model, steps=1, **options)


class Case(NamedTuple):
    build: Callable[[], Any]
    optimize: Callable[[Any], Any]
    trained: Callable[[Any, Parity], Record] = trained_by_fit


of_known_sizes = functools.partial(trained_by_fit, samples=24)
between_cuts = functools.partial(optimized_between_cuts, length=1)
of_operations = functools.partial(optimized_between_cuts, length=1, granularity="op")

CASES = {
    Rule.INPUT_NAMES: Case(
        argument_in_a_sum,
        lambda model: optimized_by_hand(model, ("before", "before"), ("term0", "after")),
        functools.partial(trained_by_tape, batch_size=256),
    ),
    Rule.ARRIVING_NAMES: Case(hard_swishes, everywhere),
    Rule.ARRIVING_AFTER_FACTORS: Case(hard_swishes, everywhere),
    Rule.ARRIVING_SHAPES: Case(sum_of_unlike_sizes, lambda model: optimized_by_hand(model, ("add", "last"))),
    Rule.RESULTS_AS_TERMS: Case(
        sum_after_segments, lambda model: optimized_by_hand(model, ("z", "b"), ("m", "m")), of_known_sizes
    ),
    Rule.READERS_IN_FIRST_RUN: Case(functools.partial(activated, "gelu"), between_cuts),
    Rule.READERS_IN_REPLAY: Case(functools.partial(activated, "softplus"), between_cuts),
    Rule.FIRST_SWISHES: Case(
        swishes,
        lambda model: optimized_by_hand(model, ("branch1", "norm")),
        functools.partial(of_known_sizes, steps_per_execution=3),
    ),
    Rule.CONVOLUTIONS: Case(leaky, everywhere, of_known_sizes),
    Rule.FREE_PRODUCTS: Case(scales, everywhere, of_known_sizes),
    Rule.WHOLE_FUSIONS: Case(residual_norms, of_operations),
    # All but the sum and what it is joined with is one segment, and without the rule that is in it, too.
    Rule.STORED_SUMS: Case(
        two_resolutions,
        functools.partial(optimized_between_cuts, length=100),
        functools.partial(trained_by_tape, free_batch=True),
    ),
    Rule.WHOLE_PRODUCTS: Case(
        factors_of_two_shapes,
        functools.partial(optimized_between_cuts, length=2, granularity="op"),
        functools.partial(trained_by_tape, free_batch=True),
    ),
    Rule.NAMES: Case(
        functools.partial(shared_block, dropout=0.0),
        optimized_between_cuts,
        functools.partial(trained_by_tape, free_batch=True),
    ),
    Rule.EAGER_ORDER: Case(
        loss_of_a_term,
        lambda model: optimized_by_hand(model, ("a", "c")),
        functools.partial(trained_by_tape, mode="eager"),
    ),
    Rule.TERMS_ONE_BY_ONE: Case(three_readers, lambda model: optimized_by_hand(model, ("x", "b"), ("c", "d"))),
    Rule.TERMS_IN_FIRST_RUN: Case(sums_inside, nested_around_sums, of_known_sizes),
    Rule.TERMS_IN_REPLAY: Case(sums_inside, nested_around_sums, of_known_sizes),
    Rule.SUMS_IN_PAIRS: Case(
        large_norms,
        lambda model: optimized_by_hand(model, ("conv0", "relu3")),
        functools.partial(of_known_sizes, samples=64, batch_size=32),
    ),
    # The last layer is stored: its result is held anyway, so the sum would begin with the one that is not.
    Rule.TERMS_AFTER: Case(sum_after_segments, lambda model: optimized_by_hand(model, ("z", "b")), of_known_sizes),
}


def test_layers_that_read_sums_of_up_to_four_terms() -> None:
    model = sums_of_four()
    assert not differing(trained_by_fit(model, EXACT), trained_by_fit(between_cuts(model), EXACT))


def test_segments_part_the_readers_of_a_term_of_three() -> None:
    model = sums_of_three()
    optimized = between_cuts(model)
    assert all(segment.stop - segment.start == 1 for segment in optimized.memsaver_plan.segments)
    assert not differing(trained_by_fit(model, EXACT), trained_by_fit(optimized, EXACT))


def pairs_of(make: Callable[[Any], list[Any]]) -> bool:
    """Whether terms that are made of an image are added in pairs."""
    with tf.Graph().as_default():
        terms = make(tf.ones((2, 3)))
        added = sums.in_pairs(terms)
    return added is not terms


def test_which_sums_are_added_in_pairs() -> None:
    assert pairs_of(lambda x: [tf.exp(x), tf.sin(x), tf.tanh(x)])
    assert not pairs_of(lambda x: [tf.exp(x), tf.sin(x)])
    # Others may read one, as the gradient that arrives at the end of a residual block, but not two.
    assert pairs_of(lambda x: [y := tf.exp(x), tf.sin(y), tf.tanh(x)])
    assert pairs_of(lambda x: [y := x + 1.0, tf.sin(y), tf.tanh(x)])
    assert not pairs_of(lambda x: [y := tf.exp(x), z := tf.sin(y), tf.tanh(z)])
    # Others have the buffer of one, too, and what is a sum that no other reads or has a factor in common is rewritten.
    assert not pairs_of(lambda x: [tf.exp(x), tf.sin(x), tf.reshape(tf.tanh(x), (2, 3))])
    assert not pairs_of(lambda x: [tf.exp(x), tf.sin(x), x + 1.0])
    assert not pairs_of(lambda x: [x * tf.exp(x), tf.sin(x) * x, tf.tanh(x) * x])
    assert pairs_of(lambda x: [x * tf.exp(x), tf.sin(x) * x, tf.tanh(x) * 2.0])
    with no_graph_rewriting():
        assert not pairs_of(lambda x: [tf.exp(x), tf.sin(x), tf.tanh(x)])
    # A size is not known.
    assert not pairs_of(lambda x: [each(tf.boolean_mask(x, x[:, 0] > 0)) for each in (tf.exp, tf.sin, tf.tanh)])


def test_pairs_are_added_in_the_order_of_names() -> None:
    with tf.Graph().as_default():
        x = tf.ones((2, 3))
        first, last = sums.in_pairs([tf.exp(x, "c"), tf.exp(x, "a"), tf.exp(x, "b")])
        assert last.op.name == "c" and [each.op.name for each in first.op.inputs[0].op.inputs] == ["a", "b"]


@pytest.mark.parametrize("many", [3, 8, 9, 10, 12, 16, 17, 18, 25])
@pytest.mark.parametrize("read", [None, 0, 1, 2])
def test_pairs_have_the_sum_that_the_kernel_makes(many: int, read: int | None) -> None:
    """A kernel adds ten terms and more in eights; a gradient of twelve slices was added up one by one.

    It begins with another term where the first is ``read`` after the sum, too.
    """
    values = [tf.constant(each) for each in np.random.default_rng(0).normal(size=(many, 4096)).astype(np.float32)]

    def added(take: Callable[[list[Any]], Any]) -> Any:
        @tf.function
        def run(*x: Any) -> Any:
            terms = [tf.exp(each, f"t{place:02}") for place, each in enumerate(x)]
            if read is not None:
                late = tf.identity(terms[read])
            total = tf.raw_ops.AddN(inputs=take(terms))
            if read is None:
                return total
            with tf.control_dependencies([total]):
                return total, tf.sin(late)

        return tf.nest.flatten(run(*values))[0].numpy()

    np.testing.assert_array_equal(added(list), added(lambda terms: list(sums.in_pairs(terms))))


def test_what_a_graph_holds_of_eager_terms_is_added_as_it_is() -> None:
    terms = [tf.ones(3) for _ in range(3)]
    with tf.Graph().as_default():
        assert sums.in_pairs(terms) is terms


def sum_before_a_dense_on_images() -> Any:
    """Graph optimisation does not know that a gradient has the sizes of the sum: it keeps its name from the addition.

    By that name it is the first of four terms, by its maker's the last.
    """
    inputs = keras.Input((6, 6, 8))
    x = layers.Dense(8, "gelu", name="first")(inputs)
    mean = layers.GlobalAveragePooling2D(keepdims=True, name="mean")(x)
    y = layers.Multiply(name="times")([x, layers.Conv2D(8, 1, activation="sigmoid", name="scale")(mean)])
    y = layers.DepthwiseConv2D(3, padding="same", name="depthwise")(layers.Add(name="add0")([x, y]))
    return model_of(inputs, layers.Dense(8, "gelu", name="z")(layers.Add(name="add1")([x, y])))


@pytest.mark.parametrize(
    "optimize",
    [functools.partial(optimized_between_cuts, length=2), lambda model: optimized_by_hand(model, ("first", "mean"))],
    ids=["everywhere", "in front"],
)
def test_a_gradient_of_unknown_sizes_keeps_the_name_of_its_addition(optimize: Callable[[Any], Any]) -> None:
    model = sum_before_a_dense_on_images()
    assert not differing(trained_by_fit(model, EXACT), trained_by_fit(optimize(model), EXACT))


def test_every_rule_has_a_case() -> None:
    by_graphs = {Rule.FREE_CONSTANTS, Rule.SQUARES_OF_CUBES, Rule.GRADIENTS_AS_TERMS}
    by_positions = {Rule.WHOLE_SUMS, Rule.WHOLE_CONSTANT_CHAINS, Rule.WHOLE_GRADIENT_SUMS}
    assert {*CASES, Rule.LEAVING_NAMES, *by_graphs, *by_positions} == set(Rule)


NEED_ONEDNN = (Rule.READERS_IN_FIRST_RUN, Rule.READERS_IN_REPLAY, Rule.FIRST_SWISHES)
"""What these keep apart only oneDNN's kernels compute otherwise when they are fused."""


@pytest.mark.parametrize("rule", CASES, ids=lambda rule: rule.name)
def test_bits_differ_without_a_rule(rule: Rule) -> None:
    if rule in NEED_ONEDNN and not takes_onednn():
        pytest.skip("bits are equal either way without oneDNN: on newer processors, or with TF_ENABLE_ONEDNN_OPTS=1")
    case = CASES[rule]
    model = case.build()
    plain = case.trained(model, EXACT)
    if rule is Rule.ARRIVING_SHAPES and tf.__version__ < "2.21":
        pytest.skip("bits are equal either way with TensorFlow 2.20")
    assert not differing(plain, case.trained(case.optimize(model), EXACT))
    with at_level(EXACT.without(rule)):
        optimized = case.optimize(model)
    # Where terms are added as they arrive, they may once do so in the plain order.
    assert any(differing(plain, case.trained(optimized, EXACT.without(rule))) for _ in range(3))


def shared_in_branches() -> Any:
    """An eager tape ends with the layer's calls in another order than that in which they were made, reversed."""
    inputs = keras.Input((8,))
    shared = layers.Dense(8, "tanh", name="shared")
    first = shared(inputs)
    second, third = shared(first), shared(first)
    return model_of(inputs, layers.Add(name="add")([second, third, shared(third)]))


def test_an_eager_replay_ends_with_the_calls_of_a_layer_as_the_plain_step_does() -> None:
    model = shared_in_branches()
    optimized = optimized_by_hand(model, ("shared", "add"))
    train_eagerly = functools.partial(trained_by_tape, mode="eager", batch_size=64)
    plain = train_eagerly(model, EXACT)
    assert not differing(plain, train_eagerly(optimized, EXACT))
    assert differing(plain, train_eagerly(optimized, EXACT.without(Rule.EAGER_ORDER)))


def test_a_convolution_over_time_is_not_fused_with_its_bias_where_the_plain_step_does_not() -> None:
    # In bfloat16 the fused kernel rounds once, and 62 of 64 tensors differed. Float32 rounds the same.
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        inputs = x = keras.Input((64, 16))
        for _ in range(4):
            x = layers.Activation("silu")(layers.BatchNormalization()(layers.Conv1D(32, 3, padding="same")(x)))
        model = model_of(inputs, layers.GlobalMaxPooling1D()(x))
        optimized = between_cuts(keras.models.clone_model(model))
    finally:
        keras.config.set_dtype_policy(policy)
    optimized.set_weights(model.get_weights())
    assert not differing(trained_by_fit(model, EXACT), trained_by_fit(optimized, EXACT))


def terms_that_pass_a_segment() -> Any:
    """Two terms of the last sum come out of one segment, and graph optimisation sorts them by name."""
    x = inputs = keras.Input((32,))
    for _ in range(2):
        y = layers.Dense(32)(layers.LayerNormalization()(x))
        x = x + keras.ops.tanh(y) * 0.5 + keras.ops.square(y) / (1.0 + keras.ops.exp(-y)) + inputs
    return model_of(inputs, x)


def test_terms_out_of_one_segment_keep_their_order() -> None:
    model = terms_that_pass_a_segment()
    plain = trained_by_fit(model, EXACT)
    for optimized in (everywhere(model), tf_memsaver.optimize(model, batch_size=4, strategy="min_peak")):
        assert not differing(plain, trained_by_fit(optimized, EXACT))


def test_a_gradient_that_was_reshaped_to_and_fro_has_the_name_of_what_made_it() -> None:
    with tf.Graph().as_default():
        made = tf.raw_ops.BiasAddGrad(out_backprop=tf.compat.v1.placeholder(tf.float32, (4, 16)))
        as_image = tf.reshape(made, [1, 1, 1, 16])
        back = tf.reshape(as_image, [16])
        assert maker_of(back) is made.op and maker_of(as_image) is as_image.op
        unknown = tf.reshape(tf.compat.v1.placeholder(tf.float32), [16])
        assert maker_of(unknown) is unknown.op


@pytest.mark.skipif(takes_onednn(), reason="two plain steps differ with oneDNN: run with TF_ENABLE_ONEDNN_OPTS=0")
def test_a_bias_that_keras_reshapes_in_each_of_twelve_calls_has_its_gradients_added_in_order() -> None:
    # Graph optimisation takes both reshapes out, and sorts by what is left: call 10 comes before call 2.
    inputs = keras.Input((12, 12, 12, 3))
    x = layers.TimeDistributed(layers.Conv2D(16, 3, padding="same"))(inputs)
    model = model_of(inputs, layers.GlobalAveragePooling3D()(layers.Conv3D(4, 3, padding="same", activation="gelu")(x)))
    assert not differing(trained_by_fit(model, EXACT), trained_by_fit(everywhere(model), EXACT))


class StraightThrough(layers.Layer):
    """A product whose gradient is that of an identity: an ``IdentityN`` with a custom gradient passes it on."""

    def call(self, x: Any) -> Any:
        return tf.custom_gradient(lambda x: (x * tf.tanh(x), lambda upstream: upstream))(x)


def test_no_segment_ends_between_a_product_with_a_custom_gradient_and_a_constant() -> None:
    inputs = keras.Input((16, 16, 8))
    x = layers.Conv2D(8, 3, name="first")(inputs)
    x = layers.Rescaling(0.37, name="scale")(StraightThrough(name="product")(x))
    x = layers.Conv2D(8, 3, name="third")(layers.Conv2D(8, 3, name="second")(x))
    model = model_of(inputs, layers.GlobalAveragePooling2D()(x))
    graph = capture_graph(model, batch_size=4)
    assert [graph.units[position].label for position in graph.joined] == ["scale"]
    assert not differing(trained_by_fit(model, EXACT), trained_by_fit(everywhere(model), EXACT))


class OneExpert(layers.Layer):
    """A product of three dimensions, an approximate GELU, and a gate that weighs it."""

    def build(self, input_shape: Any) -> None:
        self.gate = layers.Dense(1)
        self.gate.build(input_shape)
        self.up = self.add_weight(shape=(input_shape[-1], 128))
        self.down = self.add_weight(shape=(128, input_shape[-1]))

    def call(self, x: Any) -> Any:
        hidden = keras.ops.gelu(keras.ops.einsum("btd,dh->bth", x, self.up), approximate=True)
        return keras.ops.einsum("bth,hd->btd", hidden * keras.ops.sigmoid(self.gate(x)), self.down)


def test_the_square_of_a_gelu_s_cube_is_the_one_that_its_gradient_makes() -> None:
    """Of two equal squares the optimizer kept the other one, and the GELU's constant went elsewhere by its name."""
    inputs = keras.Input((48, 32))
    x = inputs + OneExpert()(layers.LayerNormalization()(inputs))
    model = keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))
    optimized = tf_memsaver.optimize(model, batch_size=4, strategy="recompute_all", granularity="op")
    assert not differing(trained_by_fit(model, EXACT), trained_by_fit(optimized, EXACT))


def ending_with(model: Any, label: str) -> Any:
    """Return a model that replays all up to one operation, and keeps the rest."""
    graph = capture_graph(model, batch_size=4, granularity="op")
    (end,) = (place for place, unit in enumerate(graph.units, 1) if unit.label.endswith(label))
    segments = [Segment(start=0, stop=end, mode=SegmentMode.RECOMPUTE)]
    segments.append(Segment(start=end, stop=len(graph.units), mode=SegmentMode.STORE))
    return optimized_in_segments(model, segments, 4, "op")


class RepeatedQueries(layers.Layer):
    """An attention to a sequence whose queries are learned, and repeated for each sample."""

    def build(self, input_shape: Any) -> None:
        self.queries = self.add_weight(shape=(1, 8, input_shape[-1]))
        self.attention = layers.MultiHeadAttention(2, 5)
        self.attention.build((None, 8, input_shape[-1]), input_shape)

    def call(self, x: Any) -> Any:
        return self.attention(keras.ops.repeat(self.queries, keras.ops.shape(x)[0], axis=0), x)


def test_a_replay_that_ends_with_an_einsum_has_the_symbols_of_its_operands() -> None:
    inputs = keras.Input((12, 10))
    model = model_of(inputs, layers.GlobalAveragePooling1D()(RepeatedQueries()(layers.Dense(10)(inputs))))
    optimized = ending_with(model, "einsum_1/Einsum")
    plain = trained_by_fit(model, EXACT)
    assert not differing(plain, trained_by_fit(optimized, EXACT))
    with at_level(EXACT.without(Rule.ARRIVING_SHAPES)):
        assert differing(plain, trained_by_fit(optimized, EXACT.without(Rule.ARRIVING_SHAPES)))


@pytest.mark.parametrize("end", ["/Softmax", "/stateless_dropout/SelectV2"])
def test_a_replay_that_ends_with_a_softmax_or_its_dropout_has_the_symbols_of_the_gradient(end: str) -> None:
    # Its heads are made by ``reshape``, its scale rounds, and dropout follows.
    model = formula_model("attention/softmax")
    optimized = ending_with(model, end)
    assert not differing(trained_by_fit(model, EXACT), trained_by_fit(optimized, EXACT))


@pytest.mark.parametrize("reshapes", [False, True])
def test_a_gradient_gets_the_shape_of_a_replay_that_makes_sizes_of_its_own(reshapes: bool) -> None:
    def product(x: tf.Tensor) -> tf.Tensor:
        x = tf.reshape(x, [-1, 4]) if reshapes else x
        return tf.math.erfc(x) * (0.5 * x)

    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, (None, 4))
        first = product(x)
        gradient = tf.identity(first) * 2.0
        output = product(x - tf.zeros(()))
        assert (of_shape(gradient, gradient, output, first) is not gradient) == reshapes


class Slope(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.product = layers.LayerNormalization(), layers.Conv1D(8, 3, padding="same", activation="tanh")

    def call(self, x: Any) -> Any:
        return self.product(self.norm(x))


class RungeKutta(layers.Layer):
    """Two steps of fourth order, and two residual products, after which the numbers of sums pass 9 in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = [Slope(), Slope()]
        self.last = [layers.Dense(8, "tanh"), layers.Dense(8, "tanh")]

    def call(self, x: Any) -> Any:
        for slope in self.slopes:
            first = slope(x)
            second = slope(x + 0.05 * first)
            third = slope(x + 0.05 * second)
            x = x + 0.1 / 6.0 * (first + 2.0 * second + 2.0 * third + slope(x + 0.1 * third))
        for last in self.last:
            x = x + last(x)
        return x


def test_sums_of_sums_have_the_numbers_of_the_plain_step_in_their_names() -> None:
    inputs = keras.Input((16, 8))
    model = model_of(inputs, layers.GlobalAveragePooling1D()(RungeKutta()(layers.Dense(8)(inputs))))
    graph, draw = capture_graph(model, batch_size=4, granularity="op"), random.Random(0)
    segments = drawn_segments(
        graph, [each.position for each in graph.cuts], lambda what: what == "cut" and draw.random() < 0.6
    )
    optimized = optimized_in_segments(model, segments, 4, "op")
    assert not differing(trained_by_fit(model, EXACT), trained_by_fit(optimized, EXACT))


def term_from_before() -> Any:
    """A sum begins with its last term, since the gradients of the others read them."""
    inputs = keras.Input((32,))
    a = layers.Dense(32, "tanh", name="a")(inputs)
    b = layers.Dense(32, "tanh", name="b")(a)
    scaled = layers.Rescaling(0.3, name="scaled")(b)
    x = layers.Add(name="sum")([a, layers.Dense(32, "tanh", name="d")(b), scaled])
    return model_of(inputs, layers.Dense(32, "tanh", name="after")(x))


def test_a_sum_in_a_replay_does_not_begin_with_a_term_from_outside() -> None:
    model = term_from_before()
    optimized = optimized_by_hand(model, ("a", "b"), ("scaled", "after"))
    assert not differing(trained_by_fit(model, EXACT), trained_by_fit(optimized, EXACT))


def skips() -> Any:
    """A sum of four terms that nobody needs after it: segments that end between them hold the first two."""
    inputs = keras.Input((32,))
    x, terms = layers.Dense(32, "tanh", name="first")(inputs), []
    for name in "abcd":
        terms.append(layers.Dense(32, name=name)(x))
        x = layers.Activation("tanh", name=f"{name}_end")(layers.Add(name=f"{name}_added")([x, terms[-1]]))
    x = layers.Activation("tanh", name="activated")(layers.Add(name="sum")(terms))
    return model_of(inputs, layers.Dense(32, "tanh", name="after")(x))


HOLDING_TWO_SKIPS = [("first", "a"), ("a_added", "b"), ("b_added", "b_end")]


@pytest.mark.parametrize("spans", [[], [("c", "activated")]], ids=["stored", "replayed"])
def test_a_sum_of_skips_begins_with_the_first_wherever_segments_end(spans: list[Any]) -> None:
    model = skips()
    graph = capture_graph(model, batch_size=4)
    # Graph optimisation makes one of the last term and the sum, since nothing else reads it.
    assert [graph.units[position].label for position in graph.joined] == ["sum"]
    optimized = optimized_by_hand(model, *HOLDING_TWO_SKIPS, *spans)
    assert not differing(of_known_sizes(model, EXACT), of_known_sizes(optimized, EXACT))


def test_a_sum_of_skips_begins_with_another_where_two_are_held() -> None:
    model = skips()
    optimized = optimized_by_hand(model, *HOLDING_TWO_SKIPS)
    without = EXACT.without(Rule.TERMS_AFTER)
    assert differing(of_known_sizes(model, EXACT), of_known_sizes(optimized, without))


def test_leaving_gradients_have_their_names() -> None:
    """A gradient that passes straight through an addition is a term of a sum, which is sorted by name."""
    drawn = random_fit_case(2)
    plain, made = fitted(drawn, drawn.model), everywhere(drawn.model)
    assert not differing(plain, fitted(drawn, made))
    with at_level(EXACT.without(Rule.LEAVING_NAMES)):
        assert differing(plain, fitted(drawn, made))


def _waiting_constants(graph: Any) -> list[str]:
    constants = [each for each in graph.get_operations() if each.type == "Const"]
    return [each.name for each in constants for other in each.control_inputs if "memsaver_gate" in other.name]


def _squares_in_first_runs(graph: Any) -> list[str]:
    powers = [each.name for each in graph.get_operations() if each.type == "Pow"]
    return [name for name in powers if name.endswith("_grad/Pow") and "-unrecorded" in name]


def _named_terms(graph: Any) -> list[str]:
    gradients = (each for each in graph.get_operations() if each.name.startswith(TAPE_SCOPE))
    return [each.name for each in gradients if each.type == KEPT_IDENTITY and each.name.endswith("/term")]


@pytest.mark.parametrize(
    ("rule", "build", "found", "kept"),
    [
        # In bfloat16 bits differed after some steps: a constant that waits is not folded.
        (Rule.FREE_CONSTANTS, functools.partial(activated, approximate_gelu), _waiting_constants, False),
        # The square of the gradient's name decides where the constant of the approximate GELU goes.
        (Rule.SQUARES_OF_CUBES, functools.partial(activated, approximate_gelu), _squares_in_first_runs, True),
        # Terms of the gradient of a variable that several segments read are sorted by name.
        (Rule.GRADIENTS_AS_TERMS, functools.partial(shared_block, dropout=0.0), _named_terms, True),
    ],
    ids=lambda item: item.name if isinstance(item, Rule) else "",
)
def test_graphs_differ_without_a_rule(rule: Rule, build: Any, found: Callable[[Any], list[str]], kept: bool) -> None:
    optimized = between_cuts(build())
    assert bool(found(model_graph(optimized))) is kept
    with at_level(EXACT.without(rule)):
        assert bool(found(model_graph(optimized))) is not kept


@pytest.mark.parametrize(
    ("rule", "build", "granularity"),
    [
        (Rule.WHOLE_SUMS, lending, "layer"),
        (Rule.WHOLE_CONSTANT_CHAINS, constant_after_a_difference, "layer"),
        (Rule.WHOLE_GRADIENT_SUMS, sums_of_four, "layer"),
    ],
    ids=lambda item: item.name if isinstance(item, Rule) else "",
)
def test_segments_end_elsewhere_without_a_rule(rule: Rule, build: Any, granularity: str) -> None:
    joined = set(capture_graph(build(), batch_size=4, granularity=granularity).joined)
    with at_level(EXACT.without(rule)):
        assert set(capture_graph(build(), batch_size=4, granularity=granularity).joined) < joined


class _Asks(layers.Layer):
    """Notes the level of parity that it is called at."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[Parity] = set()

    def call(self, x: Any) -> Any:
        self.found.add(level_here())
        return x


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("how", ["fit", "function", "inside", "eager"])
def test_nothing_is_done_for_equal_bits_under_xla(how: str, compiled: bool) -> None:
    asks, x = _Asks(), tf.zeros((4, 3))
    model = keras.Sequential([keras.Input((3,)), asks, layers.Dense(1)])
    asks.found.clear()
    if how == "fit":
        model.compile("sgd", "mse", jit_compile=compiled)
        model.fit(x, tf.zeros((4, 1)), verbose=0)
    elif how == "function":
        tf.function(lambda y: model(y, training=True), jit_compile=compiled)(x)
    elif how == "inside":
        inner = tf.function(lambda y: model(y, training=True))
        tf.function(lambda y: inner(y), jit_compile=compiled)(x)
    else:
        model(x, training=True)
    assert asks.found == {ROUNDING if compiled and how != "eager" else EXACT}


def test_a_step_that_xla_compiles_has_no_extra_readers() -> None:
    optimized = between_cuts(activated("gelu"))

    def extra(graph: Any) -> bool:
        return any(EXTRA_READERS in each.name for each in graph.get_operations())

    assert extra(model_graph(optimized))
    with at_level(ROUNDING):
        assert not extra(model_graph(optimized))
