"""Where no segment may end: the exact positions in small nets, and which rule forbids each of them.

A rule that forbids too little changes bits, and one that forbids too much takes plans away without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tf_memsaver.capture import cuts
from tf_memsaver.capture.model_step import capture_graph
from tf_memsaver.parity.level import Rule

SUM, FUSED, LENDING = Rule.WHOLE_GRADIENT_SUMS, Rule.WHOLE_FUSIONS, Rule.WHOLE_SUMS
CONSTANT, SHAPES = Rule.WHOLE_CONSTANT_CHAINS, Rule.WHOLE_PRODUCTS

Build = Callable[[Any], Any]
"""Makes the output of a net of its input."""

Positions = dict[Rule, list[int]]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Positions:
    """What each rule has forbidden since the last capture."""
    positions: Positions = {}

    def noting(rule: Rule) -> Callable[[Any], set[int]]:
        found_by = cuts._RULES[rule]

        def noted(step: Any) -> set[int]:
            forbidden = found_by(step)
            positions[rule] = sorted(forbidden)
            return forbidden

        return noted

    monkeypatch.setattr(cuts, "_RULES", {rule: noting(rule) for rule in cuts._RULES})
    return positions


def captured(build: Build, shape: tuple[int, ...], granularity: str) -> Any:
    inputs = keras.Input(shape)
    return capture_graph(keras.Model(inputs, build(inputs)), batch_size=4, granularity=granularity)


def _dense(x: Any, name: str, units: int = 6, activation: str | None = "tanh", **more: Any) -> Any:
    return layers.Dense(units, activation=activation, name=name, **more)(x)


def _conv(x: Any, name: str, **more: Any) -> Any:
    return layers.Conv2D(4, 3, padding="same", name=name, **more)(x)


def _pooled(x: Any) -> Any:
    return _dense(layers.GlobalAveragePooling2D(name="pool")(x), "head", 2, None)


# Nets -----------------------------------------------------------------------------------------------------------------


def chain(x: Any) -> Any:
    return _dense(_dense(_dense(x, "d0"), "d1"), "head", 2, None)


def residual_block(x: Any) -> Any:
    x = _conv(x, "stem", use_bias=False)
    y = layers.ReLU(name="relu0")(layers.BatchNormalization(name="norm0")(x))
    y = layers.BatchNormalization(name="norm1")(_conv(y, "conv", use_bias=False))
    return _pooled(layers.ReLU(name="relu1")(layers.Add(name="add")([x, y])))


def norm_after_add(x: Any) -> Any:
    x = _conv(x, "stem", use_bias=False)
    for block in range(2):
        x = layers.Add(name=f"add{block}")([x, _conv(x, f"conv{block}")])
        x = layers.BatchNormalization(name=f"norm{block}")(x)
    return _pooled(x)


def norm_after_add_of_activations(x: Any) -> Any:
    x = _conv(x, "stem", activation="relu")
    x = layers.Add(name="add")([x, _conv(x, "conv", activation="relu")])
    return _pooled(layers.ReLU(name="relu")(layers.BatchNormalization(name="norm")(x)))


def convolutions(x: Any) -> Any:
    x = layers.ReLU(name="with_bias")(_conv(x, "conv0"))
    x = layers.ReLU(name="without_bias")(_conv(x, "conv1", use_bias=False))
    x = layers.DepthwiseConv2D(3, name="depth")(_conv(x, "conv2", activation="relu"))
    return _pooled(layers.ReLU(6.0, name="relu6")(x))


ACTIVATIONS = ("relu", "tanh", "sigmoid", "elu", "gelu", "silu", "softplus", "leaky_relu")


def activations(x: Any) -> Any:
    for name in ACTIVATIONS:
        x = layers.Activation(name, name=name)(_dense(x, f"before_{name}", activation=None))
    return _dense(x, "head", 2, None)


def softmax_output(x: Any) -> Any:
    return layers.Softmax(name="softmax")(_dense(_dense(x, "d0", activation="relu"), "logits", 3, None))


def attention_block(x: Any) -> Any:
    y = layers.LayerNormalization(name="norm0")(x)
    x = layers.Add(name="add0")([x, layers.MultiHeadAttention(2, 4, name="attention")(y, y)])
    y = layers.LayerNormalization(name="norm1")(x)
    y = _dense(_dense(y, "up", 16, "gelu"), "down", 8, None)
    x = layers.Add(name="add1")([x, y])
    return _dense(layers.GlobalAveragePooling1D(name="pool")(x), "head", 2, None)


def shared_layer(x: Any) -> Any:
    shared = layers.Dense(6, activation="tanh", name="shared")
    x = _dense(x, "first", activation=None)
    return _dense(shared(shared(shared(x))), "head", 2, None)


def three_readers(x: Any) -> Any:
    x = _dense(x, "x")
    y = layers.Add(name="add0")([_dense(_dense(x, "a"), "b"), x])
    y = layers.Add(name="add1")([_dense(y, "c"), x])
    return _dense(_dense(y, "last"), "head", 2, None)


def three_readers_and_a_concat(x: Any) -> Any:
    x = _dense(x, "x")
    y = layers.Multiply(name="times")([_dense(x, "a"), x])
    y = layers.Concatenate(name="concat")([_dense(y, "b"), x])
    return _dense(_dense(y, "last"), "head", 2, None)


def dense_block(x: Any) -> Any:
    x = _dense(x, "stem", activation="relu")
    for number in range(3):
        x = layers.Concatenate(name=f"concat{number}")([x, _dense(x, f"grow{number}", 4, "relu")])
    return _dense(x, "head", 2, None)


def penalised(x: Any) -> Any:
    x = _dense(x, "x", activity_regularizer="l2")
    y = _dense(_dense(x, "a"), "b")
    return _dense(layers.Concatenate(name="concat")([y, x]), "head", 2, None)


def readers_and_a_sum(x: Any, others: str = "c") -> Any:
    x = _dense(x, "x")
    y = layers.Add(name="add")([_dense(_dense(x, "a"), "b"), x, *(_dense(x, name) for name in others)])
    return _dense(_dense(y, "last"), "head", 2, None)


def readers_and_a_sum_of_four(x: Any) -> Any:
    return readers_and_a_sum(x, "cd")


def sum_of_four(x: Any, activation: str | None = "tanh") -> Any:
    a, b, c, d = (_dense(x, name, activation=activation) for name in "abcd")
    y = layers.Add(name="abc")([layers.Add(name="ab")([a, b]), c])
    return _dense(_dense(layers.Add(name="abcd")([y, d]), "last"), "head", 2, None)


def sum_of_linear(x: Any) -> Any:
    return sum_of_four(x, None)


def sums_of_rows(x: Any) -> Any:
    """The backward pass reads the first term of each sum: in rows, as dense layers are given it."""
    x = _dense(x, "first", activation=None)
    for number in range(2):
        a, b = (_dense(x, f"{name}{number}") for name in "ab")
        x = layers.Add(name=f"sum{number}")([layers.Add(name=f"two{number}")([x, a]), b])
    return _pooled_rows(x)


def _pooled_rows(x: Any) -> Any:
    return _dense(layers.GlobalAveragePooling1D(name="pool")(x), "head", 2, None)


def scales(x: Any) -> Any:
    x = _dense(x, "d0")
    x = layers.Rescaling(3.0, name="triple")(layers.Rescaling(0.5, name="half")(x))
    x = layers.Rescaling(1.0, offset=2.0, name="plus_two")(x)
    return _dense(_dense(x, "d1"), "head", 2, None)


def masked(x: Any) -> Any:
    first = x[:, :1]
    y = layers.Multiply(name="by_all")([_dense(x, "d0"), x])
    return _dense(_dense(layers.Multiply(name="by_first")([y, first]), "d1"), "head", 2, None)


def squeeze_and_excite(x: Any) -> Any:
    x = _conv(x, "conv", activation="relu")
    s = layers.GlobalAveragePooling2D(keepdims=True, name="mean")(x)
    return _pooled(layers.Multiply(name="excite")([x, _dense(s, "squeeze", 4, "sigmoid")]))


# Tests ----------------------------------------------------------------------------------------------------------------

IMAGE = (6, 6, 3)


@pytest.mark.parametrize(
    ("build", "shape", "expected"),
    [
        (chain, (6,), {}),
        # The addition and that at the end of the BatchNorm are one chain.
        (residual_block, IMAGE, {FUSED: ["add"]}),
        # The convolution takes in its bias and what is added; the BatchNorm may stand alone.
        (norm_after_add, IMAGE, {FUSED: ["add0", "add1"]}),
        # Gradients read what an activation makes, or is given: the addition has another reader.
        (norm_after_add_of_activations, IMAGE, {}),
        (convolutions, IMAGE, {FUSED: ["with_bias", "without_bias", "relu6"]}),
        # Those whose gradient reads what they are given leave the product and its bias alone.
        (activations, (6,), {FUSED: ["relu", "tanh", "sigmoid", "elu"]}),
        (softmax_output, (6,), {}),
        (attention_block, (5, 8), {FUSED: ["add0", "add1"]}),
        (shared_layer, (6,), {}),
        # The terms of a gradient leave a segment one by one, and so arrive.
        (three_readers, (6,), {}),
        (three_readers_and_a_concat, (6,), {}),
        (dense_block, (6,), {}),
        (penalised, (6,), {}),
        # A sum of four terms, not of three, is one of those that read x.
        (readers_and_a_sum, (6,), {}),
        (readers_and_a_sum_of_four, (6,), {SUM: ["b", "c", "d", "add"]}),
        (sum_of_four, (6,), {FUSED: ["c", "abc", "d", "abcd"]}),
        # Nothing needs the terms afterwards, so the sum begins with the first, whoever holds them.
        (sum_of_linear, (6,), {FUSED: ["b", "ab", "c", "abc", "d", "abcd"]}),
        # But here they are held.
        (sums_of_rows, (5, 6), {FUSED: ["b0", "sum0", "b1", "sum1"]}),
        (scales, (6,), {CONSTANT: ["triple", "plus_two"], SHAPES: ["triple", "plus_two"]}),
        # What has no gradient is read by nothing else, and the smaller factors would be multiplied first.
        (masked, (6,), {SHAPES: ["get_item", "by_first"]}),
        (squeeze_and_excite, IMAGE, {}),
    ],
)
def test_no_segment_begins_with(
    found: Positions, build: Build, shape: tuple[int, ...], expected: dict[Rule, list[str]]
) -> None:
    graph = captured(build, shape, "layer")
    labels = [unit.label for unit in graph.units]
    assert {rule: [labels[p] for p in positions] for rule, positions in found.items() if positions} == expected
    assert list(graph.joined) == sorted({labels.index(label) for names in expected.values() for label in names})


BIAS = "MatMul | BiasAdd"


@pytest.mark.parametrize(
    ("build", "shape", "expected"),
    [
        # A product, its bias and an activation are one; a head has no activation.
        (chain, (6,), {FUSED: [BIAS, "BiasAdd | Tanh", BIAS, "BiasAdd | Tanh", BIAS]}),
        (softmax_output, (6,), {FUSED: [BIAS, "BiasAdd | Relu", BIAS]}),
        (
            convolutions,
            IMAGE,
            {
                FUSED: [
                    *("Conv2D | BiasAdd", "BiasAdd | Relu", "Conv2D | Relu", "Conv2D | BiasAdd", "BiasAdd | Relu"),
                    *("DepthwiseConv2dNative | BiasAdd", "BiasAdd | Relu6", BIAS),
                ]
            },
        ),
        (shared_layer, (6,), {FUSED: [BIAS, *[BIAS, "BiasAdd | Tanh"] * 3, BIAS]}),
        (squeeze_and_excite, IMAGE, {FUSED: ["Conv2D | BiasAdd", "BiasAdd | Relu", "BiasAdd | Sigmoid", BIAS]}),
        (
            scales,
            (6,),
            {
                FUSED: [BIAS, "BiasAdd | Tanh", BIAS, "BiasAdd | Tanh", BIAS],
                CONSTANT: ["Mul | AddV2", "AddV2 | Mul"] * 2,
                SHAPES: ["Mul | AddV2", "AddV2 | Mul"] * 2,
            },
        ),
        (residual_block, IMAGE, {CONSTANT: ["SquaredDifference | Mul"] * 2, FUSED: ["AddV2 | AddV2", BIAS]}),
    ],
)
def test_no_segment_ends_between_operations(
    found: Positions, build: Build, shape: tuple[int, ...], expected: dict[Rule, list[str]]
) -> None:
    graph = captured(build, shape, "op")
    kinds = [unit.kind for unit in graph.units]
    between = {rule: [f"{kinds[p - 1]} | {kinds[p]}" for p in positions] for rule, positions in found.items()}
    assert {rule: pairs for rule, pairs in between.items() if pairs} == expected
    assert list(graph.joined) == sorted({p for positions in found.values() for p in positions})


class Around(keras.Model):
    """Adds up, in code, what two layers in front of a network make and what the network returns, for another one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = layers.Dense(8), layers.Dense(8)
        hidden = [layers.Dense(8, "tanh") for _ in range(4)]
        self.network = keras.Sequential([keras.Input((8,)), *hidden], name="network")
        self.head = keras.Sequential([keras.Input((8,)), layers.Dense(8), layers.Dense(1)], name="head")

    def train_step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            left, right = self.left(x), self.right(x)
            loss = tf.reduce_mean(self.head(self.network(x, training=True) + left + right, training=True))
        weights = [each.value for each in self.trainable_variables]
        self.optimizer.apply(tape.gradient(loss, weights), self.trainable_variables)
        return {"loss": loss}


def test_a_network_is_cut_whatever_goes_past_it() -> None:
    model = Around()
    model.compile("sgd")
    graph = tf_memsaver.capture_graph(model, data=tf.TensorSpec((4, 8)))
    inside = [unit.index for unit in graph.units if unit.label.startswith("network/")]
    assert len(inside) >= 4
    assert set(graph.joined).isdisjoint(range(inside[0], inside[-1] + 2))
    # The layers whose results go past it (units 0 and 3, each with its end) are not parted from what adds them up.
    assert {1, 2, 4, 5} <= set(graph.joined)
