"""Which values get an extra reader: those that the plain step's backward ops read, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tf_memsaver.parity.extra_readers import FirstRunReads, needed_for
from tf_memsaver.parity.gates import Gates
from tf_memsaver.parity.gradient_reads import read_by_gradients
from tf_memsaver.parity.level import EXACT


def traced(function: Callable[[tf.Tensor, tf.Tensor], Any]) -> tuple[list[Any], list[Any], Any]:
    """Operations that ``function`` adds to a graph for an input and a weight; the two tensors; the result."""
    graph = tf.__internal__.FuncGraph("first_run")
    with graph.as_default():
        sources = [tf.compat.v1.placeholder(tf.float32, shape) for shape in ([None, 4], [4, 4])]
        start = graph.num_operations()
        result = function(*sources)
        return list(graph.get_operations()[start:]), sources, result


def read(function: Callable[[tf.Tensor, tf.Tensor], Any]) -> set[str]:
    """Types of the ops whose results gradients read."""
    operations, sources, result = traced(function)
    return {each.tensor.op.type for each in read_by_gradients(operations, sources, [result])}


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, w: tf.nn.gelu(x @ w), {"Erfc", "Mul"}),
        (lambda x, w: (x @ w) * tf.tanh(tf.nn.softplus(x @ w)), {"MatMul", "Tanh"}),
        (lambda x, w: tf.nn.relu(tf.nn.bias_add(x @ w, w[0])), {"Relu"}),
        (lambda x, w: tf.nn.softplus(tf.nn.bias_add(x @ w, w[0])), {"BiasAdd"}),
        # The gradient of an addition reads shapes, unless they are known.
        (lambda x, w: tf.nn.bias_add(x @ w, w[0]) + x, {"BiasAdd"}),
        (lambda x, w: tf.nn.bias_add(w @ w, w[0]) + w, set()),
        # Not those of a sum of many terms, which might be held by a reader when the sum begins.
        (lambda x, w: tf.nn.bias_add(x @ w, w[0]) + x + x @ w, set()),
        (lambda x, w: x + x @ w + tf.nn.bias_add(x @ w, w[0]), set()),
        (lambda x, w: tf.tanh(x + x @ w) + tf.nn.bias_add(x @ w, w[0]), {"Tanh", "BiasAdd"}),
        (lambda x, w: x @ w + x, set()),
        (lambda x, w: 2.0 * (x @ w), set()),
        (lambda x, w: tf.stop_gradient(tf.exp(x)) * x, {"StopGradient"}),
        # So does that of a squeeze, behind which a product may be made one with a bias.
        (lambda x, w: tf.squeeze((x @ w)[:, None], 1), {"StridedSlice"}),
        (lambda x, w: tf.squeeze((w @ w)[:, None], 1), set()),
        # A function with its own gradient is not differentiated op by op.
        (lambda x, w: tf.nn.silu(x @ w), set()),
    ],
)
def test_values_that_gradients_read(function: Callable[[Any, Any], Any], expected: set[str]) -> None:
    assert read(function) == expected


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, w: tf.nn.bias_add(x @ w, w[0]) + x, set()),
        (lambda x, w: tf.squeeze((x @ w)[:, None], 1), set()),
        (lambda x, w: tf.nn.softplus(tf.nn.bias_add(x @ w, w[0])) + x, {"BiasAdd"}),
    ],
)
def test_a_value_of_which_sizes_are_read_is_not_kept_for_it(function: Callable[[Any, Any], Any], expected: Any) -> None:
    operations, sources, result = traced(function)
    read = read_by_gradients(operations, sources, [result])
    assert {each.tensor.op.type for each in read if each.is_kept} == expected


def test_no_extra_reader_where_there_are_readers_enough() -> None:
    operations, sources, result = traced(lambda x, w: (lambda y: y * y + tf.sin(y))(x @ w))
    with sources[0].graph.as_default():
        assert EXACT.read_in_first_run(operations, sources, [result], False, Gates())[0] == ()


def test_an_extra_reader_has_one_element_of_each_value() -> None:
    operations, sources, result = traced(lambda x, w: tf.nn.gelu(x @ w))
    with sources[0].graph.as_default():
        (read,), _ = EXACT.read_in_first_run(operations, sources, [result], False, Gates())
    assert read.dtype == tf.float32 and read.shape.rank == 1


def test_a_cube_comes_with_the_square_of_its_gradient() -> None:
    operations, sources, result = traced(lambda x, w: 0.04 * tf.pow(x @ w, 3.0))
    with sources[0].graph.as_default():
        start = sources[0].graph.num_operations()
        EXACT.read_in_first_run(operations, sources, [result], False, Gates())
        added = sources[0].graph.get_operations()[start:]
    square = next(operation for operation in added if operation.type == "Pow")
    # Its exponent is computed, as in the plain step: equal squares are found in the order in which they are known.
    exponent = square.inputs[1].op
    assert square.name.startswith("0_gradients/") and exponent.type == "Sub"
    assert [tf.get_static_value(each) for each in exponent.inputs] == [3.0, 1.0]
    # The cube itself is read by nobody else: a constant in front of it moves into it.
    read = [each.inputs[0].op for each in added if each.type == "Reshape"]
    assert {each.type for each in read} == {"MatMul", "Pow"} and all(
        each.name.startswith("0_gradients/") for each in read if each.type == "Pow"
    )


def test_a_replay_keeps_the_readers_that_are_not_needed() -> None:
    graph = tf.__internal__.FuncGraph("replay")
    with graph.as_default():
        x, upstream = (tf.compat.v1.placeholder(tf.float32, [None, 4]) for _ in range(2))
        start = graph.num_operations()
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.nn.softplus(tf.sin(x))
        end = graph.num_operations()
        gradient = tape.gradient(y, x, upstream)
        added = graph.get_operations()[start:]
        assert "Sigmoid" in {operation.type for operation in added}
        before = graph.num_operations()
        replayed = added[: end - start]
        assert EXACT.read_in_replay([], [], replayed, needed_for([gradient, y], added), [y], [], Gates()) == ()
        assert EXACT.read_in_replay([], [], replayed, needed_for([gradient], added), [y], [], Gates())
        reads = graph.get_operations()[before:]
    # Softplus is not needed; its input is, and would have the gradient as its only reader.
    sine = next(operation for operation in added if operation.type == "Sin")
    assert [op.inputs[0].op for op in reads if op.type == "Reshape"] == [sine]


def test_a_replay_keeps_no_reader_that_leads_nowhere() -> None:
    graph = tf.__internal__.FuncGraph("replay")
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [8, 4])
        y = tf.square(tf.nn.silu(tf.sin(x)))
        replayed = graph.get_operations()[1:]
        product = y.op.inputs[0].op.inputs[0]
        # What tf.custom_gradient adds, whatever reads it, and sizes that are known.
        assert {each.type for each in product.consumers()} == {"Identity", "IdentityN"}
        tf.shape(product)
        needed = needed_for([y], replayed)
        assert EXACT.read_in_replay([], [], replayed, needed, [y], [], Gates()) == ()


@pytest.mark.parametrize(
    ("exponent", "count"), [(3.0, 1), ([3.0] * 4, 1), ([0.0, 1.0, 2.0, 3.0], 0), (2.0, 0), (None, 0)], ids=str
)
def test_cubes_have_the_squares_of_their_gradients(exponent: Any, count: int) -> None:
    operations, sources, result = traced(lambda x, w: tf.pow(x, w[0] if exponent is None else tf.constant(exponent)))
    with result.graph.as_default():
        made = list(FirstRunReads(operations, sources, [result]).squares_of_cubes(None))
    assert [tensor.op.type for tensor in made] == ["Pow"] * count


@pytest.mark.parametrize("batch", [None, 2])
def test_a_term_is_free_for_the_sum(batch: int | None) -> None:
    """An element of it was read, or its sizes, and held its buffer at times: sums in two runs began with two terms."""
    graph = tf.__internal__.FuncGraph("first_run")
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [batch, 4])
        start = graph.num_operations()
        biased = tf.nn.bias_add(tf.sin(x), tf.ones(4))
        result = biased + tf.cos(x) + tf.tanh(x)
        operations = graph.get_operations()[start:]
        EXACT.read_in_first_run(operations, [x], [result], False, Gates())
    assert [reader.type for reader in biased.consumers()] == ["AddV2"]
