"""Blocks of one formula each, as people write them beside two ``Dense`` layers, and attentions of ``keras.ops``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

CLASSES, LENGTH, WIDTH = 3, 6, 8

Formula = Callable[[Any, Any], Any]

FORMULAS: dict[str, Formula] = {
    "swiglu": lambda a, b: ops.silu(a) * b,
    "geglu": lambda a, b: ops.gelu(a) * b,
    "gelu_tanh": lambda a, b: ops.gelu(a, approximate=True),
    "gelu_written_out": lambda a, b: 0.5 * a * (1.0 + ops.tanh(0.79788456 * (a + 0.044715 * ops.power(a, 3)))),
    "quick_gelu": lambda a, b: a * ops.sigmoid(1.702 * a),
    "squared_relu": lambda a, b: ops.square(ops.relu(a)),
    "hard_silu": lambda a, b: ops.hard_silu(a),
    "snake": lambda a, b: a + ops.square(ops.sin(a * 1.3)) / 1.3,
    "l2_normalize": lambda a, b: tf.math.l2_normalize(a, axis=-1) * 1.7,
    "root_mean_square": lambda a, b: a * ops.rsqrt(ops.mean(ops.square(a), -1, keepdims=True) + 1e-6),
    "softplus_power": lambda a, b: ops.power(ops.softplus(a), 1.5),
    "soft_cap": lambda a, b: 30.0 * ops.tanh(a / 30.0),
    "scaled_product": lambda a, b: 0.3 * a * b * 1.1,
    "three_factors": lambda a, b: a * ops.sigmoid(b) * ops.tanh(b) * 0.9,
    "squeeze_excite": lambda a, b: b * ops.sigmoid(ops.mean(a, 1, keepdims=True) * 1.5),
    "modulated": lambda a, b: a * (1.0 + 0.1 * ops.tanh(b)),
}
"""What comes between the layers, by name, of what two of them make."""

ATTENTIONS: dict[str, Callable[[Any], Any]] = {
    "softmax": ops.softmax,
    "causal": lambda w: ops.softmax(ops.where(ops.tril(ops.ones((LENGTH, LENGTH), "bool")), w, -1e9)),
    "sigmoid": lambda w: ops.sigmoid(w - 1.79),
    "squared_relu": lambda w: ops.square(ops.relu(w)) / LENGTH,
}
"""What makes an attention's weights of its scores, by name."""


class FormulaBlock(layers.Layer):
    """A residual block around a formula."""

    def __init__(self, formula: Formula) -> None:
        super().__init__()
        self.formula = formula
        self.first, self.second, self.last = (layers.Dense(WIDTH) for _ in range(3))
        self.dropout = layers.Dropout(0.2, seed=4)

    def build(self, shape: Any) -> None:
        for layer in (self.first, self.second, self.last):
            layer.build(shape)

    def call(self, x: Any, training: Any = None) -> Any:
        made = self.formula(self.first(x), self.second(x))
        return x + self.last(self.dropout(made, training=training))


class Attention(layers.Layer):
    """An attention whose heads are made by ``reshape``, with dropout on its weights."""

    def __init__(self, weigh: Callable[[Any], Any]) -> None:
        super().__init__()
        self.weigh = weigh
        self.qkv, self.out = layers.Dense(3 * WIDTH), layers.Dense(WIDTH)
        self.dropout = layers.Dropout(0.2, seed=3)

    def build(self, shape: Any) -> None:
        self.qkv.build(shape)
        self.out.build(shape)

    def call(self, x: Any, training: Any = None) -> Any:
        size = WIDTH // 2
        q, k, v = (
            ops.transpose(ops.reshape(each, (-1, LENGTH, 2, size)), (0, 2, 1, 3))
            for each in ops.split(self.qkv(x), 3, axis=-1)
        )
        weights = self.weigh(ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) * 0.3)
        mixed = ops.transpose(ops.matmul(self.dropout(weights, training=training), v), (0, 2, 1, 3))
        return x + self.out(ops.reshape(mixed, ops.shape(x)))


def formula_names() -> list[str]:
    """Return the names that ``formula_model`` takes."""
    return [*FORMULAS, *(f"attention/{name}" for name in ATTENTIONS)]


def formula_model(name: str) -> Any:
    """Return a model with a block of this name between two layers."""
    kind, _, weigh = name.partition("/")
    block = Attention(ATTENTIONS[weigh]) if weigh else FormulaBlock(FORMULAS[kind])
    inputs = keras.Input((LENGTH, WIDTH))
    x = layers.GlobalAveragePooling1D()(block(layers.Dense(WIDTH)(inputs)))
    return keras.Model(inputs, layers.Dense(CLASSES)(x))
