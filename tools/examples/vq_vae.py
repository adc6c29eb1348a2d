"""A VQ-VAE: a codebook between encoder and decoder, straight-through gradients, losses that a layer adds."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tools.examples import data
from tools.examples.running import Made, run


class Codebook(layers.Layer):
    """Replaces each vector by the nearest one of its own, and passes gradients straight through."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.size, self.width = size, width

    def build(self, shape: Any) -> None:
        self.codes = self.add_weight(shape=(self.width, self.size), initializer="random_uniform", name="codes")

    def call(self, inputs: Any) -> Any:
        flat = tf.reshape(inputs, (-1, self.width))
        near = -2 * tf.matmul(flat, self.codes) + tf.reduce_sum(self.codes**2, axis=0)
        chosen = tf.one_hot(tf.argmin(near, axis=1), self.size)
        codes = tf.reshape(tf.matmul(chosen, self.codes, transpose_b=True), tf.shape(inputs))
        self.add_loss(0.25 * tf.reduce_mean((tf.stop_gradient(codes) - inputs) ** 2))
        self.add_loss(tf.reduce_mean((codes - tf.stop_gradient(inputs)) ** 2))
        return inputs + tf.stop_gradient(codes - inputs)


def autoencoder() -> Any:
    """Return encoder, codebook and decoder as one network."""
    inputs = keras.Input((64, 64, 3))
    x = inputs
    for filters in (64, 128):
        x = layers.Conv2D(filters, 3, strides=2, padding="same", activation="relu")(x)
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
    x = Codebook(128, 32)(layers.Conv2D(32, 1)(x))
    for filters in (128, 64):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.Conv2DTranspose(filters, 3, strides=2, padding="same", activation="relu")(x)
    return keras.Model(inputs, layers.Conv2D(3, 3, padding="same")(x), name="vq_vae")


class Trainer(keras.Model):
    """Trains the network with its reconstruction's loss and those that its codebook adds."""

    def __init__(self) -> None:
        super().__init__()
        self.network = autoencoder()
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            made = self.network(data)
            loss = tf.reduce_mean((data - made) ** 2) / 0.08 + sum(self.network.losses)
        gradients = tape.gradient(loss, self.network.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def make() -> Made:
    """Return the model and its data."""
    model = Trainer()
    model.compile(optimizer="adam")
    return model, data.images(64)


if __name__ == "__main__":
    run(make)
