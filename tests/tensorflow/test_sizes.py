"""Sizes inside loops and branches that were traced for a free batch: those of the same step traced for a known one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.tensorflow.copies import Function, copy_of, traced, with_gradients
from tf_memsaver.tfgraph.emission import sizes_worked_out
from tf_memsaver.tfgraph.operations import called_functions

X = np.linspace(-1.0, 1.0, 3 * 5 * 4, dtype=np.float32).reshape(3, 5, 4)
W = np.linspace(-0.5, 0.7, 16, dtype=np.float32).reshape(4, 4)


# What a loop or a branch may hold -------------------------------------------------------------------------------------


def product(x: Any, w: Any) -> Any:
    return tf.tanh(x @ w)


def product_of_rows(x: Any, w: Any) -> Any:
    """A product of rows, as ``keras.layers.Dense`` makes them: more than there are samples."""
    rows = tf.reshape(x, (-1, 4)) @ w
    return tf.reshape(rows, tf.shape(x))


def branches(of: Function) -> Function:
    return lambda x, w: tf.cond(tf.reduce_sum(x) > -1e9, lambda: of(x, w), lambda: x)


def loops(of: Function) -> Function:
    return lambda x, w: tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, of(y, w)), (0, x))[1]


def marked(x: Any, w: Any) -> Any:
    """As many columns as the data says."""
    return tf.boolean_mask(x, tf.reduce_sum(x, (0, 2)) > -1e9, axis=1) @ w


def weighted(x: Any, w: Any) -> Any:
    """One more weight than a range has numbers."""
    weights = tf.concat([tf.cast(tf.range(tf.shape(x)[1] - 1), tf.float32), [1.0]], 0)
    return x @ w * tf.reduce_mean(weights)


def in_rows(of: Function) -> Function:
    """Another function of more rows than there are samples."""
    return lambda x, w: tf.reshape(of(tf.reshape(x, (-1, 4)), w), tf.shape(x))


def of_each_sample(of: Function) -> Function:
    return lambda x, w: tf.map_fn(lambda row: of(row, w), x)


def over_time(x: Any, w: Any) -> Any:
    time_first = tf.transpose(x, (1, 0, 2))
    return tf.scan(lambda state, row: tf.tanh(state @ w + row), time_first, tf.zeros_like(time_first[0]))


def counted_by_the_batch(x: Any, w: Any) -> Any:
    """A list with an element for each sample, which says how many steps there are."""
    rows = tf.TensorArray(tf.float32, size=tf.shape(x)[0])
    step = lambda i, rows: (i + 1, rows.write(i, tf.tanh(x[i] @ w)))  # noqa: E731
    return tf.while_loop(lambda i, _: i < tf.shape(x)[0], step, (0, rows))[1].stack()


def two_of_one_free_size(x: Any, w: Any) -> Any:
    one, two = tf.reshape(x, (-1, 4)), tf.reshape(tf.concat([x, x], 1), (-1, 4))
    _, one, two = tf.while_loop(lambda i, *_: i < 2, lambda i, a, b: (i + 1, a @ w, b @ w), (0, one, two))
    return tf.reshape(one, tf.shape(x)) + tf.reduce_sum(two)


def a_list_of_any_length(x: Any, w: Any) -> Any:
    """Written beyond the length that it began with."""
    rows = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
    step = lambda i, rows: (i + 1, rows.write(i, tf.tanh(x @ w)))  # noqa: E731
    return tf.reshape(tf.while_loop(lambda i, _: i < 4, step, (0, rows))[1].stack(), (2, 2, -1, 5, 4))


def a_list_of_any_length_without_a_loop(x: Any, w: Any) -> Any:
    rows = tf.TensorArray(tf.float32, size=1, dynamic_size=True)
    for place in range(4):
        rows = rows.write(place, tf.tanh(x @ w))
    return tf.reshape(rows.stack(), (2, 2, -1, 5, 4))


def a_list_of_unlike_elements(x: Any, w: Any) -> Any:
    rows = tf.TensorArray(tf.float32, size=3, infer_shape=False, element_shape=(None, 5, 4)).write(0, x[:1])
    step = lambda i, rows: (i + 1, rows.write(i, tf.tanh(tf.repeat(x[:1], i + 1, 0) @ w)))  # noqa: E731
    _, rows = tf.while_loop(lambda i, _: i < 3, step, (1, rows))
    return tf.reshape(rows.read(2), (3, -1, 4)) + tf.reduce_sum(rows.concat())


def growing(x: Any, w: Any) -> Any:
    """A sequence that is one longer after each step, as a decoder makes it."""
    shapes = (tf.TensorShape([]), tf.TensorShape([None, None, 4]))
    step = lambda i, y: (i + 1, tf.concat([y, tf.tanh(y[:, -1:] @ w)], 1))  # noqa: E731
    return tf.while_loop(lambda i, _: i < 2, step, (0, x), shape_invariants=shapes)[1][:, -5:]


def swapped(x: Any, w: Any) -> Any:
    """Two sizes that change places: neither is the same in all steps."""
    shapes = (tf.TensorShape([]), tf.TensorShape([None, 4]), tf.TensorShape([None, 4]))
    one, two = tf.reshape(x, (-1, 4)), x[:, 0]
    found = tf.while_loop(lambda i, *_: i < 2, lambda i, a, b: (i + 1, b @ w, a @ w), (0, one, two), shapes)
    return tf.reshape(found[1], tf.shape(x))


SIZED = {
    "branch": branches(product),
    "loop": loops(product),
    "rows in a branch": branches(product_of_rows),
    "rows in a loop": loops(product_of_rows),
    "a loop over rows in a branch": branches(in_rows(loops(product))),
    "a loop over rows in a loop": loops(in_rows(loops(product))),
    "a branch over rows in a loop": loops(in_rows(branches(product))),
    "a branch over rows in a branch": branches(in_rows(branches(product))),
    "each sample": of_each_sample(product),
    "a loop for each sample": of_each_sample(loops(product)),
    "each row of each sample": of_each_sample(lambda x, w: tf.map_fn(lambda row: tf.tanh(row[None] @ w)[0], x)),
    "over time": over_time,
    "counted by the batch": counted_by_the_batch,
    "a list in a branch": branches(of_each_sample(product)),
    "two of one free size": two_of_one_free_size,
    "one more than a range": branches(weighted),
}
OPEN = {
    "as the data says": branches(marked),
    "a list of any length": a_list_of_any_length,
    "a list of any length without a loop": a_list_of_any_length_without_a_loop,
    "a list of unlike elements": a_list_of_unlike_elements,
    "growing": growing,
    "swapped": swapped,
}


def copies(function: Function, *, free: bool) -> Any:
    """A step with gradients that is traced with known sizes, of a function that was traced with or without them."""
    specs = [tf.TensorSpec((None if free else 3, 5, 4)), tf.TensorSpec((4, 4))]
    source = tf.function(function, autograph=False).get_concrete_function(*specs)
    with sizes_worked_out():
        return traced(with_gradients(copy_of(source)), X, W)


def activations(graph: Any, depth: int = 0) -> Iterator[tuple[int, Any, tf.TensorShape]]:
    """The depth, the type of the operation and the shape of each floating result in a graph and all that it calls."""
    for operation in graph.get_operations():
        for tensor in operation.outputs:
            if tensor.dtype.is_floating:
                yield depth, operation.type, tensor.shape
        for body in called_functions(operation, graph):
            yield from activations(body, depth + 1)


@pytest.mark.parametrize("free", [False, True], ids=["fixed", "free"])
@pytest.mark.parametrize("name", [*SIZED, *OPEN])
def test_values_and_gradients_are_those_of_the_source(name: str, free: bool) -> None:
    function = (SIZED | OPEN)[name]
    copy, expected = copies(function, free=free), traced(with_gradients(function), X, W)
    for found, wanted in zip(tf.nest.flatten(copy(X, W)), tf.nest.flatten(expected(X, W)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("name", SIZED)
def test_all_sizes_are_known(name: str) -> None:
    found = list(activations(copies(SIZED[name], free=True).graph))
    assert max(depth for depth, _, _ in found) > 0
    assert [each for each in found if not each[2].is_fully_defined()] == []


@pytest.mark.parametrize("name", SIZED)
def test_sizes_are_those_of_a_step_that_is_traced_for_a_known_batch(name: str) -> None:
    """What both make: a step that is traced for a known batch works some shapes out beforehand."""
    free, fixed = (
        {(depth, kind, tuple(shape)) for depth, kind, shape in activations(graph) if shape.rank and kind != "Const"}
        for graph in (copies(SIZED[name], free=True).graph, traced(with_gradients(SIZED[name]), X, W).graph)
    )
    kinds = {(depth, kind) for depth, kind, _ in free & fixed}
    assert kinds
    assert {each for each in free ^ fixed if each[:2] in kinds and None not in each[2]} == set()


@pytest.mark.parametrize("name", OPEN)
def test_sizes_that_change_stay_open(name: str) -> None:
    assert any(not shape.is_fully_defined() for _, _, shape in activations(copies(OPEN[name], free=True).graph))


def test_sizes_are_only_worked_out_where_asked_for() -> None:
    source = traced(loops(product), X[:, 0], W, free=True)
    copy = traced(copy_of(source), X[:, 0], W)
    body = [shape for depth, _, shape in activations(copy.graph) if depth]
    assert body and not any(shape.is_fully_defined() for shape in body if shape.rank == 2 and shape[1] != 4)
