"""Random Functional models; ``draw`` is that of Hypothesis.

They are no strategies themselves: Keras uses Python's ``random`` when it builds layers.
"""

from __future__ import annotations

from typing import Any

import keras
from hypothesis import strategies as st
from keras import layers

from tools.shared.models import small as models

WIDTH = 6

_ONE_TO_ONE = (
    "dense", "dense", "activated", "batch_norm", "layer_norm", "dropout", "noise", "counter", "loss", "operators",
    "regularized", "spectral", "attention", "gated",
)  # fmt: skip
_JOINING = ("add", "add", "add_three", "multiply", "concatenate", "average", "subtract")
_SHARED = ("shared", "shared_model")


class _Builder:
    """Draws one call after another; all tensors have ``WIDTH`` features."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw
        self._number = 0
        self.tensors: list[Any] = []
        self._shared: list[Any] = []

    def inputs(self) -> list[Any]:
        count = self._draw(st.integers(1, 3))
        self.tensors = [keras.Input((4, WIDTH), name=f"in{number}") for number in range(count)]
        return list(self.tensors)

    def name(self, kind: str) -> str:
        # Names in no order, since graph optimisation sorts by them.
        self._number += 1
        return f"{self._draw(st.sampled_from('abxyz'))}_{kind}{self._number}"

    def pick(self) -> Any:
        """Return a tensor, mostly a late one."""
        back = min(self._draw(st.integers(0, 5)), self._draw(st.integers(0, 5)), len(self.tensors) - 1)
        return self.tensors[len(self.tensors) - 1 - back]

    def call(self) -> None:
        kind = self._draw(st.sampled_from((*_ONE_TO_ONE, *_JOINING, *_SHARED)))
        name = self.name(kind)
        if kind in _JOINING:
            made = self._joined(kind, name)
        elif kind in _SHARED:
            made = self._again(kind, name)(self.pick())
        else:
            made = self._applied(kind, name, self.pick())
        self.tensors.append(made)

    def _joined(self, kind: str, name: str) -> Any:
        # Of different tensors: algebra would shorten a difference of the same, and not through a segment's boundary.
        parts = list(
            {id(part): part for part in (self.pick() for _ in range(3 if kind == "add_three" else 2))}.values()
        )
        if len(parts) == 1:
            parts.append(layers.Activation("tanh", name=f"{name}_tanh")(parts[0]))
        if kind == "concatenate":
            return layers.Dense(WIDTH, name=f"{name}_dense")(layers.Concatenate(name=name)(parts))
        kinds = {"multiply": layers.Multiply, "average": layers.Average, "subtract": layers.Subtract}
        return kinds.get(kind, layers.Add)(name=name)(parts)

    def _again(self, kind: str, name: str) -> Any:
        """Return a layer or a model that may have been called before."""
        if not self._shared or self._draw(st.booleans()):
            self._shared.append(layers.Dense(WIDTH, "tanh", name=name) if kind == "shared" else self._model(name))
        return self._shared[self._draw(st.integers(0, len(self._shared) - 1))]

    def _model(self, name: str) -> Any:
        x = inputs = keras.Input((4, WIDTH))
        x = layers.Dense(WIDTH, "gelu", name=self.name("inner"))(x)
        if self._draw(st.booleans()):
            x = layers.Add(name=self.name("inner_add"))([x, inputs])
        return keras.Model(inputs, layers.Dropout(0.2, name=self.name("inner_drop"))(x), name=name)

    def _applied(self, kind: str, name: str, x: Any) -> Any:
        if kind == "operators":
            return x + keras.ops.tanh(x) * 0.5 + keras.ops.square(x)
        if kind == "attention":
            return layers.MultiHeadAttention(2, 3, dropout=0.1, name=name)(x, self.pick())
        if kind == "gated":
            gate, value = keras.ops.split(layers.Dense(2 * WIDTH, name=name)(x), 2, axis=-1)
            return keras.ops.sigmoid(gate) * value
        activation = self._draw(st.sampled_from(["relu", "gelu", "tanh", "silu", "sigmoid", "softplus"]))
        made = {
            "dense": lambda: layers.Dense(WIDTH, activation, name=name),
            "activated": lambda: layers.Activation(activation, name=name),
            "batch_norm": lambda: layers.BatchNormalization(name=name),
            "layer_norm": lambda: layers.LayerNormalization(name=name),
            "dropout": lambda: layers.Dropout(0.3, name=name),
            "noise": lambda: layers.GaussianNoise(0.1, name=name),
            "counter": lambda: models.Counter(name=name),
            "loss": lambda: models.AddsLoss(name=name),
            "regularized": lambda: layers.Dense(WIDTH, kernel_regularizer="l2", activity_regularizer="l1", name=name),
            "spectral": lambda: layers.SpectralNormalization(layers.Dense(WIDTH, name=f"{name}_dense"), name=name),
        }[kind]()
        made.trainable = self._draw(st.integers(0, 5)) > 0
        return made(x)


def random_model(draw: Any) -> Any:
    """Return a model of branches, skips, shared layers, random and stateful layers, with several inputs and outputs."""
    builder = _Builder(draw)
    inputs = builder.inputs()
    builder.tensors.append(layers.Dense(WIDTH, name="stem")(layers.Average()(inputs) if len(inputs) > 1 else inputs[0]))
    for _ in range(draw(st.integers(2, 14))):
        builder.call()
    count = draw(st.integers(1, 3))
    heads = [layers.Dense(2, name=f"head{number}")(builder.pick()) for number in range(count)]
    return keras.Model(inputs, heads)
