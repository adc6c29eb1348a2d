"""A variational autoencoder: encoder and decoder under one tape, in a train_step of its own, without a call."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tools.examples import data
from tools.examples.running import Made, run


class Sampling(layers.Layer):
    """Draws from a normal distribution by its mean and log variance."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.generator = keras.random.SeedGenerator(1)

    def call(self, inputs: Any) -> Any:
        mean, log_variance = inputs
        return mean + tf.exp(0.5 * log_variance) * keras.random.normal(tf.shape(mean), seed=self.generator)


def encoder() -> Any:
    """Return a network from images to mean, log variance and a sample."""
    inputs = keras.Input((64, 64, 3))
    x = inputs
    for filters in (32, 64, 64):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.BatchNormalization()(x)
        x = layers.Conv2D(filters, 3, strides=2, padding="same", activation="relu")(x)
    x = layers.Flatten()(x)
    mean, log_variance = layers.Dense(16)(x), layers.Dense(16)(x)
    return keras.Model(inputs, [mean, log_variance, Sampling()([mean, log_variance])], name="encoder")


def decoder() -> Any:
    """Return a network from samples to images."""
    inputs = keras.Input((16,))
    x = layers.Reshape((8, 8, 64))(layers.Dense(8 * 8 * 64, activation="relu")(inputs))
    for filters in (64, 64, 32):
        x = layers.Conv2DTranspose(filters, 3, strides=2, padding="same", activation="relu")(x)
        x = layers.BatchNormalization()(x)
    return keras.Model(inputs, layers.Conv2D(3, 3, padding="same", activation="sigmoid")(x), name="decoder")


class VAE(keras.Model):
    """Trains both with the reconstruction's loss and the divergence from a normal distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder(), decoder()
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.loss_tracker]

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            mean, log_variance, sample = self.encoder(data, training=True)
            made = self.decoder(sample, training=True)
            each = tf.reduce_sum(keras.losses.binary_crossentropy(data, made), axis=(1, 2))
            divergence = -0.5 * tf.reduce_sum(1 + log_variance - mean**2 - tf.exp(log_variance), axis=1)
            loss = tf.reduce_mean(each) + tf.reduce_mean(divergence)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


def make() -> Made:
    """Return the model and its data."""
    model = VAE()
    model.compile(optimizer=keras.optimizers.Adam(1e-4))
    return model, data.images(64)


if __name__ == "__main__":
    run(make)
