"""An image classifier in a loop of one's own: a ``tf.function`` with a tape, a metric, and an optimizer's update."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tools.examples import data
from tools.examples.running import Made, run

SIZE, CLASSES = 64, 10


def classifier() -> Any:
    """Return a small residual network; its outputs are logits."""
    x = inputs = keras.Input((SIZE, SIZE, 3))
    x = layers.Conv2D(24, 3, padding="same")(x)
    for filters in (24, 48):
        for _ in range(2):
            y = layers.Activation("relu")(layers.BatchNormalization()(x))
            y = layers.Conv2D(x.shape[-1], 3, padding="same")(y)
            y = layers.Activation("relu")(layers.BatchNormalization()(y))
            y = layers.Dropout(0.1)(y)
            x = layers.Add()([x, layers.Conv2D(x.shape[-1], 3, padding="same")(y)])
        x = layers.Conv2D(filters * 2, 1, strides=2)(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


class Trainer:
    """What the loop works with."""

    def __init__(self) -> None:
        self.model, self.optimizer = classifier(), keras.optimizers.Adam(1e-3)
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.mean = keras.metrics.Mean()

    @tf.function
    def step(self, images: Any, labels: Any) -> Any:
        """Train on a batch; return the mean loss so far."""
        with tf.GradientTape() as tape:
            loss = self.loss_fn(labels, self.model(images, training=True))
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        self.mean.update_state(loss)
        return self.mean.result()

    def save_memory(self, dataset: Any, **options: Any) -> Any:
        """Optimize the model; return the plan."""
        import tf_memsaver

        self.model = tf_memsaver.optimize(self.model, data=dataset, step=self.step, **options)
        return self.model.memsaver_plan

    @property
    def variables(self) -> list[Any]:
        """All that training changes."""
        return [*self.model.variables, *self.optimizer.variables, *self.mean.variables]


def make() -> Made:
    """Return the loop and its data."""
    return Trainer(), data.labelled_images(SIZE, CLASSES, batch=16)


if __name__ == "__main__":
    run(make)
