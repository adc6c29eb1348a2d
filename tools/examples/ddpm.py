"""A diffusion model: a U-Net that predicts noise at random times, and a copy of it that follows its weights."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tools.examples import data
from tools.examples.running import Made, run

TIMES = 100


def block(x: Any, time: Any, width: int) -> Any:
    """Return a residual block that is told the time."""
    shortcut = x if x.shape[-1] == width else layers.Conv2D(width, 1)(x)
    told = layers.Dense(width, activation="swish")(time)
    x = layers.Conv2D(width, 3, padding="same")(keras.activations.swish(layers.GroupNormalization(8)(x)))
    x = layers.Add()([x, told[:, None, None, :]])
    x = layers.Conv2D(width, 3, padding="same")(keras.activations.swish(layers.GroupNormalization(8)(x)))
    return layers.Add()([x, shortcut])


def unet() -> Any:
    """Return the network."""
    image, time = keras.Input((32, 32, 3)), keras.Input((), dtype="int32")
    told = layers.Dense(64, activation="swish")(layers.Embedding(TIMES, 32)(time))
    x = layers.Conv2D(32, 3, padding="same")(image)
    skips = []
    for width in (32, 64):
        x = block(x, told, width)
        skips.append(x)
        x = layers.AveragePooling2D(2)(x)
    x = block(x, told, 128)
    for width in (64, 32):
        x = layers.Concatenate()([layers.UpSampling2D()(x), skips.pop()])
        x = block(x, told, width)
    return keras.Model([image, time], layers.Conv2D(3, 3, padding="same")(x), name="unet")


class Diffusion(keras.Model):
    """Trains the network on noised images."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.follower = unet(), unet()
        self.follower.set_weights(self.network.get_weights())
        self.follower.trainable = False
        self.seeds = keras.random.SeedGenerator(3)
        self.kept = tf.math.cumprod(1.0 - tf.linspace(1e-4, 0.02, TIMES))

    def train_step(self, images: Any) -> Any:
        size = tf.shape(images)[0]
        time = keras.random.randint((size,), 0, TIMES, seed=self.seeds)
        with tf.GradientTape() as tape:
            noise = keras.random.normal(tf.shape(images), seed=self.seeds)
            kept = tf.gather(self.kept, time)[:, None, None, None]
            noised = tf.sqrt(kept) * images + tf.sqrt(1.0 - kept) * noise
            loss = self.loss(noise, self.network([noised, time], training=True))
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        for mine, its in zip(self.follower.weights, self.network.weights, strict=True):
            mine.assign(0.999 * mine + 0.001 * its)
        return {"loss": loss}


def make() -> Made:
    """Return the model and its data."""
    model = Diffusion()
    model.compile(loss=keras.losses.MeanSquaredError(), optimizer=keras.optimizers.Adam(2e-4))
    return model, data.images(32, batch=32)


if __name__ == "__main__":
    run(make)
