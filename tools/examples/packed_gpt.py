"""A GPT in a loop of one's own, on texts of several documents: ``net(ids, allowed)`` gets who may look at whom."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from tools.examples import data
from tools.examples.running import Made, run

WORDS, LENGTH, WIDTH, HEADS, BLOCKS = 2000, 128, 96, 4, 4
END, DOCUMENT = 0, 40
"""The word that ends a document, and about how many words one has."""


class Block(layers.Layer):
    """Attention to some of the words, and two dense layers, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = [layers.LayerNormalization() for _ in range(2)]
        self.attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=0.1)
        self.wide, self.narrow = layers.Dense(4 * WIDTH, activation="gelu"), layers.Dense(WIDTH)

    def call(self, x: Any, allowed: Any) -> Any:
        y = self.norms[0](x)
        x = x + self.attention(y, y, attention_mask=allowed)
        return x + self.narrow(self.wide(self.norms[1](x)))


class GPT(keras.Model):
    """Tells the next word of each word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = layers.Embedding(WORDS, WIDTH), layers.Embedding(LENGTH, WIDTH)
        self.blocks = [Block() for _ in range(BLOCKS)]
        self.norm, self.head = layers.LayerNormalization(), layers.Dense(WORDS)

    def call(self, ids: Any, allowed: Any) -> Any:
        x = self.words(ids) + self.places(ops.arange(LENGTH))
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.norm(x))


def allowed(ids: Any) -> Any:
    """Return who may look at whom: each word at those before it in its document, and at itself."""
    document = ops.cumsum(ops.cast(ids == END, "int32"), axis=1)
    places = ops.arange(LENGTH)
    return (document[:, :, None] == document[:, None, :]) & (places[:, None] >= places)


class Trainer:
    """What the loop works with."""

    def __init__(self) -> None:
        self.net = GPT()
        self.net(tf.zeros((1, LENGTH), tf.int32), tf.ones((1, LENGTH, LENGTH), tf.bool))
        self.optimizer = keras.optimizers.AdamW(1e-3, global_clipnorm=1.0)
        self.optimizer.build(self.net.trainable_variables)

    @tf.function
    def step(self, ids: Any, targets: Any) -> Any:
        """Train on a batch; return its loss."""
        with tf.GradientTape() as tape:
            logits = self.net(ids, allowed(ids), training=True)
            losses = keras.losses.sparse_categorical_crossentropy(targets, logits, from_logits=True)
            loss = tf.reduce_mean(losses)
        weights = self.net.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    def save_memory(self, dataset: Any, **options: Any) -> Any:
        """Optimize the network; return the plan."""
        import tf_memsaver

        self.net = tf_memsaver.optimize(self.net, data=dataset, step=self.step, **options)
        return self.net.memsaver_plan

    @property
    def variables(self) -> list[Any]:
        """All that training changes."""
        return [*self.net.variables, *self.optimizer.variables]


def make() -> Made:
    """Return the loop and its data."""

    def shifted(text: Any) -> Any:
        packed = tf.where(text % DOCUMENT == 0, tf.cast(END, text.dtype), text)
        return packed[:, :-1], packed[:, 1:]

    return Trainer(), data.sentences(WORDS, LENGTH + 1).map(shifted).prefetch(tf.data.AUTOTUNE)


if __name__ == "__main__":
    run(make)
