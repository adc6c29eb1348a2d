"""Models that compute in a ``call`` of their own, told what they are given."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tf_memsaver.program.signature import note_inputs
from tools.shared.models.small import register


@register
class Blocks(keras.Model):
    """A loop, a branch on ``training``, layers in a list, BatchNorm and dropout, a loss and a variable of its own."""

    def __init__(self, width: int = 16, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.width = width
        self.blocks = [layers.Dense(width, activation="tanh") for _ in range(4)]
        self.norm, self.drop, self.head = layers.BatchNormalization(), layers.Dropout(0.2), layers.Dense(2)
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")

    def call(self, x: Any, training: bool = False) -> Any:
        for number, block in enumerate(self.blocks):
            x = x + block(x)
            if training and number % 2:
                x = self.drop(self.norm(x, training=training), training=training)
        if training:
            self.steps.assign(self.steps + 1.0)
            self.add_loss(1e-3 * keras.ops.sum(x**2))
        return self.head(x)

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, "width": self.width}


class Attention(layers.Layer):
    """Attention, and a Dropout, that somebody put together."""

    def __init__(self, width: int = 16, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attend = layers.MultiHeadAttention(2, width // 2, name="attend")
        self.drop = layers.Dropout(0.1, name="drop")

    def call(self, x: Any, training: Any = None) -> Any:
        return self.drop(self.attend(x, x), training=training)


class NoTraining(keras.Model):
    """Takes no ``training``; a dict in, a dict out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dense, self.out = layers.Embedding(8, 16), layers.Dense(16, "relu"), layers.Dense(3)

    def call(self, batch: Any) -> Any:
        x = keras.ops.mean(self.embed(batch["words"]), axis=1) * batch["scale"]
        for _ in range(3):
            x = self.dense(x)
        return {"class": self.out(x), "size": keras.ops.sum(x, axis=-1, keepdims=True)}


class OwnCallOfAGraph(keras.Model):
    """Made from inputs and outputs, but called otherwise."""

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        return 2.0 * super().call(inputs, training=training, mask=mask)


def blocks() -> Any:
    model = Blocks()
    note_inputs(model, tf.TensorSpec((None, 16)))
    return model


def blocks_half() -> Any:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = Blocks()
        note_inputs(model, np.zeros((2, 16), np.float32))
    finally:
        keras.config.set_dtype_policy("float32")
    return model


def dictionaries() -> Any:
    model = NoTraining()
    note_inputs(model, {"words": tf.TensorSpec((None, 5), tf.int32), "scale": tf.TensorSpec((None, 1))})
    return model


def of_a_graph() -> Any:
    x = inputs = keras.Input((16,))
    for _ in range(4):
        x = layers.Dense(16, activation="tanh")(x)
    return OwnCallOfAGraph(inputs, layers.Dense(2)(x))
