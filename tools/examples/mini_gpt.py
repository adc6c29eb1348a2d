"""A small GPT: blocks that do not look ahead tell the next word; what they see inside is an output, too."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from tools.examples import data
from tools.examples.running import Made, run

WORDS, LENGTH, WIDTH, HEADS, INNER, BLOCKS = 2000, 80, 128, 4, 256, 3


def causal_mask(batch: Any, targets: Any, sources: Any) -> Any:
    """Return who may look at whom, for a batch."""
    mask = ops.arange(targets)[:, None] >= ops.arange(sources) - sources + targets
    mask = ops.reshape(ops.cast(mask, "bool"), [1, targets, sources])
    return ops.tile(mask, [batch, 1, 1])


class TransformerBlock(layers.Layer):
    """Attention to what came before, and two dense layers."""

    def __init__(self, width: int, heads: int, inner: int, rate: float = 0.1) -> None:
        super().__init__()
        self.attention = layers.MultiHeadAttention(heads, width)
        self.dense = keras.Sequential([layers.Dense(inner, activation="relu"), layers.Dense(width)])
        self.norm1, self.norm2 = layers.LayerNormalization(epsilon=1e-6), layers.LayerNormalization(epsilon=1e-6)
        self.dropout1, self.dropout2 = layers.Dropout(rate), layers.Dropout(rate)

    def call(self, inputs: Any) -> Any:
        batch, size, _ = ops.shape(inputs)
        attended = self.attention(inputs, inputs, attention_mask=causal_mask(batch, size, size))
        x = self.norm1(inputs + self.dropout1(attended))
        return self.norm2(x + self.dropout2(self.dense(x)))


class TokenAndPositionEmbedding(layers.Layer):
    """Embeds words and where they are."""

    def __init__(self, length: int, words: int, width: int) -> None:
        super().__init__()
        self.token, self.position = layers.Embedding(words, width), layers.Embedding(length, width)

    def call(self, x: Any) -> Any:
        return self.token(x) + self.position(ops.arange(0, ops.shape(x)[-1], 1))


def make() -> Made:
    """Return the model and its data."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = TokenAndPositionEmbedding(LENGTH, WORDS, WIDTH)(inputs)
    for _ in range(BLOCKS):
        x = TransformerBlock(WIDTH, HEADS, INNER)(x)
    model = keras.Model(inputs, [layers.Dense(WORDS)(x), x])
    model.compile("adam", loss=[keras.losses.SparseCategoricalCrossentropy(from_logits=True), None])

    def shifted(text: Any) -> Any:
        return text[:, :-1], text[:, 1:]

    return model, data.sentences(WORDS, LENGTH + 1, 32).map(shifted, num_parallel_calls=2).prefetch(tf.data.AUTOTUNE)


if __name__ == "__main__":
    run(make)
