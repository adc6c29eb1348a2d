"""Identical segments share one trace: the graph is the one that tracing each of them gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.tensorflow.graphs import described, gradient_graph, model_graph
from tests.tensorflow.plans import cut_everywhere, optimized_between_cuts
from tf_memsaver.capture.function_step import concrete_function
from tf_memsaver.program.function_calls import FunctionCalls
from tf_memsaver.runtime import twins
from tools.shared.models import small as models


class _Counted:
    """What is traced and what is copied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.traced = self.copied = 0
        self.copying = True
        gradients, copied = twins.Traces.gradients, twins._copied

        def counting(traces: Any, segment: Any, trace: Any, kept: Any) -> Any:
            def once() -> Any:
                self.traced += 1
                return trace()

            return gradients(traces, segment if self.copying else None, once, kept)

        def counting_copies(*args: Any) -> Any:
            self.copied += 1
            return copied(*args)

        monkeypatch.setattr(twins.Traces, "gradients", counting)
        monkeypatch.setattr(twins, "_copied", counting_copies)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> _Counted:
    return _Counted(monkeypatch)


_SMALL = (models.adds_losses, models.dropout_chain, models.residual_net)
_TRANSFORMERS = (models.small_gpt2, models.small_vit)


@pytest.mark.parametrize(
    ("build", "length"),
    [
        *((build, length) for build in _SMALL for length in (1, 5)),
        *((build, 1) for build in _TRANSFORMERS),
        pytest.param(models.small_gpt2, 5, marks=pytest.mark.long),
        (models.small_vit, 5),
    ],
)
def test_the_graph_is_the_same_as_without_copies(build: Callable[[], Any], length: int, counted: _Counted) -> None:
    optimized = optimized_between_cuts(build(), length=length, granularity="op")
    with_copies = described(model_graph(optimized))
    copied, traced = counted.copied, counted.traced
    counted.copying = False
    without = described(model_graph(optimized))
    assert with_copies == without
    assert counted.copied == copied and counted.traced == copied + 2 * traced
    assert copied >= 2 or length > 1


def test_layers_share_traces_too(counted: _Counted) -> None:
    x = inputs = keras.Input((8,))
    for name in "abcdefgh":
        x = layers.Dense(8, activation="gelu", name=f"block_{name}")(x)
    model = keras.Model(inputs, layers.Dense(2, name="head")(x))
    optimized = optimized_between_cuts(model, length=2)
    with_copies = described(model_graph(optimized))
    # The first one has no gradient of its input, which is data.
    assert counted.copied == 2 and counted.traced == 2
    counted.copying = False
    assert with_copies == described(model_graph(optimized))


def test_a_layer_that_is_called_elsewhere_has_a_trace_of_its_own(counted: _Counted) -> None:
    # Its weights' gradients are added to others, and so do not leave the segment before the rest.
    x = inputs = keras.Input((8,))
    blocks = [layers.Dense(8, activation="gelu", name=f"block_{name}") for name in "abcdefgh"]
    for block in blocks:
        x = block(x)
    model = keras.Model(inputs, layers.Dense(2, name="head")(blocks[4](x)))
    optimized = optimized_between_cuts(model, length=1)
    with_copies = described(model_graph(optimized))
    assert counted.copied
    counted.copying = False
    assert with_copies == described(model_graph(optimized))


def test_constants_of_replays_wait_for_nothing() -> None:
    # Else the optimizer leaves the constant of GELU's cube in its place: in bfloat16, bits differed after some steps.
    x = inputs = keras.Input((8,))
    for _ in range(3):
        x = layers.Dense(8, activation=lambda y: keras.ops.gelu(y, approximate=True), dtype="mixed_bfloat16")(x)
    optimized = optimized_between_cuts(keras.Model(inputs, layers.Dense(2)(x)), length=1)
    constants = [each for each in model_graph(optimized).get_operations() if each.type == "Const"]
    assert constants
    waiting = [each.name for each in constants for other in each.control_inputs if "memsaver_gate" in other.name]
    assert waiting == []


def blocks(act: Callable[[Any], Any] = tf.tanh) -> tuple[Callable[..., Any], list[tf.Variable]]:
    kernels = [tf.Variable(np.eye(8, dtype=np.float32)) for _ in range(5)]

    def function(x: tf.Tensor) -> tf.Tensor:
        for kernel in kernels:
            x = act(x @ kernel)
            x = act(x - tf.reduce_sum(x, axis=1, keepdims=True))
        return x

    return function, kernels


def copies_of(counted: _Counted, function: Callable[..., Any], variables: Any) -> int:
    spec = tf.TensorSpec((None, 8))
    optimized, _ = cut_everywhere(FunctionCalls(concrete_function(function, [spec])), 8)
    before = counted.copied
    gradient_graph(optimized, variables, spec)
    return counted.copied - before


def test_functions_share_traces_in_a_graph_of_their_gradients(counted: _Counted) -> None:
    assert copies_of(counted, *blocks()) >= 2


def described_twice(*bodies: Callable[[Any, Any], Any]) -> list[Any]:
    """What ``description`` says of each body, on arguments of its own."""
    found = []
    with tf.Graph().as_default() as graph:
        for body in bodies:
            x, axis = tf.compat.v1.placeholder(tf.float32, (8, 8)), tf.constant(1)
            start = graph.num_operations()
            result = body(x, axis)
            described = twins.description(graph.get_operations()[start:], [x, result])
            found.append(None if described is None else described[0])
    return found


def test_what_makes_twins() -> None:
    zero = [0]

    def outside(x: Any, _: Any) -> Any:
        with tf.control_dependencies(zero):
            return tf.tanh(x)

    first, second = described_twice(lambda x, axis: tf.reduce_sum(x, axis), lambda x, axis: tf.reduce_sum(x, axis))
    assert first is not None and first == second
    different = described_twice(
        lambda x, axis: tf.reduce_sum(x, axis),
        lambda x, _: tf.reduce_sum(x, 1),
        lambda x, _: tf.reduce_sum(x, 0),
        lambda x, _: tf.reduce_sum(x, tf.range(1)),
        lambda x, axis: tf.reduce_max(x, axis),
        lambda x, _: x - tf.transpose(x),
        lambda x, _: tf.transpose(x) - x,
        lambda x, _: x - tf.transpose(tf.identity(x)),
    )
    assert None not in different and len(set(different)) == len(different)
    with tf.Graph().as_default():
        zero[0] = tf.constant(0)
        x = tf.compat.v1.placeholder(tf.float32, (8, 8))
        made = outside(x, None)
        assert twins.description([made.op], [x]) is None


def test_numbers_from_outside_are_compared() -> None:
    with tf.Graph().as_default() as graph:
        found = []
        x = tf.compat.v1.placeholder(tf.float32, (8, 8))
        for axis in (tf.constant(0), tf.constant(1), tf.constant(1), tf.rank(x) - 1, tf.shape(x)[0] - 7):
            start = graph.num_operations()
            result = tf.raw_ops.Sum(input=x, axis=axis)
            described = twins.description(graph.get_operations()[start:], [x, result])
            assert described is not None
            found.append(described[0])
    assert found[0] != found[1] == found[2] and found[0] != found[3]


def test_gradients_of_their_own_are_traced_each(counted: _Counted) -> None:
    # Two of them are the same only to who wrote them.
    @tf.custom_gradient
    def doubled(x: tf.Tensor) -> Any:
        return tf.tanh(x), lambda upstream: 2.0 * upstream

    assert copies_of(counted, *blocks(doubled)) == 0


def test_nothing_is_shared_between_graphs(counted: _Counted) -> None:
    optimized = optimized_between_cuts(models.dropout_chain(), length=1, granularity="op")
    model_graph(optimized)
    traced = counted.traced
    model_graph(optimized)
    assert counted.traced == 2 * traced
