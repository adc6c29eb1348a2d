"""A Wasserstein GAN with a gradient penalty: a gradient is taken of a gradient, and the critic trains several times."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tools.examples import data
from tools.examples.dcgan import discriminator, generator
from tools.examples.running import Made, run


class WGAN(keras.Model):
    """Trains the critic twice for each step of the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.critic, self.generator = discriminator(), generator()
        self.seeds = keras.random.SeedGenerator(7)

    def compile(self, critic_optimizer: Any, generator_optimizer: Any) -> None:
        super().compile()
        self.critic_optimizer, self.generator_optimizer = critic_optimizer, generator_optimizer

    def penalty(self, real: Any, fake: Any) -> Any:
        """Return how far the critic's gradient is from one."""
        share = keras.random.uniform((tf.shape(real)[0], 1, 1, 1), seed=self.seeds)
        between = real + share * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            judged = self.critic(between, training=True)
        (slopes,) = tape.gradient(judged, [between])
        return tf.reduce_mean((tf.sqrt(tf.reduce_sum(slopes**2, axis=[1, 2, 3]) + 1e-12) - 1.0) ** 2)

    def train_step(self, real: Any) -> Any:
        size = tf.shape(real)[0]
        for _ in range(2):
            noise = keras.random.normal((size, 64), seed=self.seeds)
            with tf.GradientTape() as tape:
                fake = self.generator(noise, training=True)
                judged_fake, judged_real = self.critic(fake, training=True), self.critic(real, training=True)
                d_loss = tf.reduce_mean(judged_fake) - tf.reduce_mean(judged_real) + 10.0 * self.penalty(real, fake)
            weights = self.critic.trainable_variables
            self.critic_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        noise = keras.random.normal((size, 64), seed=self.seeds)
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(self.critic(self.generator(noise, training=True), training=True))
        weights = self.generator.trainable_variables
        self.generator_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


def make() -> Made:
    """Return the model and its data."""
    model = WGAN()
    model.compile(keras.optimizers.Adam(1e-4, beta_1=0.5), keras.optimizers.Adam(1e-4, beta_1=0.5))
    return model, data.images(64)


if __name__ == "__main__":
    run(make)
