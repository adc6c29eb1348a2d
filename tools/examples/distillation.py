"""Distillation: a frozen teacher tells a small student more than the labels do."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tools.examples import data
from tools.examples.running import Made, run


def classifier(widths: tuple[int, ...], name: str) -> Any:
    """Return a network from images to the logits of ten classes."""
    steps = [
        step
        for width in widths
        for step in (layers.Conv2D(width, 3, padding="same"), layers.LeakyReLU(0.2), layers.MaxPooling2D())
    ]
    return keras.Sequential([keras.Input((64, 64, 3)), *steps, layers.Flatten(), layers.Dense(10)], name=name)


class Distiller(keras.Model):
    """Trains the student on the labels and on the teacher's softened predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = classifier((64, 128, 128), "teacher"), classifier((32, 64, 64), "student")
        self.teacher.trainable = False

    def compile(self, optimizer: Any, metrics: Any, temperature: float = 3.0) -> None:
        super().compile(optimizer=optimizer, metrics=metrics)
        self.temperature = temperature

    def call(self, x: Any) -> Any:
        return self.student(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        told = self.teacher(x, training=False)
        with tf.GradientTape() as tape:
            found = self.student(x, training=True)
            hard = keras.losses.sparse_categorical_crossentropy(y, found, from_logits=True)
            soft = keras.losses.kl_divergence(
                tf.nn.softmax(told / self.temperature), tf.nn.softmax(found / self.temperature)
            )
            loss = tf.reduce_mean(0.1 * hard + 0.9 * soft * self.temperature**2)
        gradients = tape.gradient(loss, self.student.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.student.trainable_variables, strict=True))
        return {"loss": loss, **self.compute_metrics(x, y, found)}


def make() -> Made:
    """Return the model and its data."""
    model = Distiller()
    model.compile(optimizer="adam", metrics=["sparse_categorical_accuracy"])
    return model, data.labelled_images(64, 10, batch=32)


if __name__ == "__main__":
    run(make)
