"""A DCGAN: the discriminator's tape, its update, then the generator's tape through the discriminator."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tools.examples import data
from tools.examples.running import Made, run


def discriminator() -> Any:
    """Return a network from images to one number."""
    sizes = (32, 64, 128)
    steps = [
        step
        for filters in sizes
        for step in (layers.Conv2D(filters, 4, strides=2, padding="same"), layers.LeakyReLU(0.2))
    ]
    return keras.Sequential(
        [keras.Input((64, 64, 3)), *steps, layers.Flatten(), layers.Dropout(0.2), layers.Dense(1)], name="discriminator"
    )


def generator() -> Any:
    """Return a network from random numbers to images."""
    steps = [
        step
        for filters in (128, 64, 32)
        for step in (
            layers.Conv2DTranspose(filters, 4, strides=2, padding="same"),
            layers.BatchNormalization(),
            layers.LeakyReLU(0.2),
        )
    ]
    start = [keras.Input((64,)), layers.Dense(8 * 8 * 64), layers.Reshape((8, 8, 64))]
    last = layers.Conv2D(3, 5, padding="same", activation="sigmoid")
    return keras.Sequential([*start, *steps, last], name="generator")


class GAN(keras.Model):
    """Trains both against each other."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator, self.generator = discriminator(), generator()
        self.seeds = keras.random.SeedGenerator(7)
        self.d_tracker, self.g_tracker = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer: Any, g_optimizer: Any, loss_fn: Any) -> None:
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    @property
    def metrics(self) -> list[Any]:
        return [self.d_tracker, self.g_tracker]

    def train_step(self, real: Any) -> Any:
        size = tf.shape(real)[0]
        noise = keras.random.normal((size, 64), seed=self.seeds)
        fake = self.generator(noise)
        both = tf.concat([fake, real], axis=0)
        labels = tf.concat([tf.ones((size, 1)), tf.zeros((size, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both, training=True))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        noise = keras.random.normal((size, 64), seed=self.seeds)
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(noise, training=True), training=True)
            g_loss = self.loss_fn(tf.zeros((size, 1)), judged)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}


def make() -> Made:
    """Return the model and its data."""
    model = GAN()
    model.compile(
        keras.optimizers.Adam(1e-4), keras.optimizers.Adam(1e-4), keras.losses.BinaryCrossentropy(from_logits=True)
    )
    return model, data.images(64, batch=32)


if __name__ == "__main__":
    run(make)
