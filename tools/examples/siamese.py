"""A siamese network: one network is called three times, for a triplet loss."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tools.examples import data
from tools.examples.running import Made, run


def embedding() -> Any:
    """Return a network from images to vectors of length one."""
    inputs = keras.Input((64, 64, 3))
    x = inputs
    for filters in (32, 64, 128):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.MaxPooling2D()(x)
    x = layers.Dense(64)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, layers.UnitNormalization()(x), name="embedding")


class Siamese(keras.Model):
    """Draws what belongs together close, and pushes others away."""

    def __init__(self, margin: float = 0.5) -> None:
        super().__init__()
        self.embedding, self.margin = embedding(), margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]

    def train_step(self, data: Any) -> Any:
        anchor, positive, negative = data
        with tf.GradientTape() as tape:
            a, p, n = (self.embedding(each, training=True) for each in (anchor, positive, negative))
            near, far = (tf.reduce_sum((a - other) ** 2, axis=-1) for other in (p, n))
            loss = tf.reduce_mean(tf.maximum(near - far + self.margin, 0.0))
        gradients = tape.gradient(loss, self.embedding.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.embedding.trainable_weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def make() -> Made:
    """Return the model and its data."""
    model = Siamese()
    model.compile(optimizer=keras.optimizers.Adam(1e-3))
    triplets = tf.data.Dataset.zip((data.images(64), data.images(64), data.images(64)))
    return model, triplets


if __name__ == "__main__":
    run(make)
