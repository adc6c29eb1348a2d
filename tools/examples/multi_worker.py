"""An image classifier trained by several workers, each with a part of the batch.

Started on each machine with a ``TF_CONFIG`` that lists them; without it, this process is the one worker. The model is
called in a loop of one's own: Keras's ``fit`` cannot train with this strategy.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tools.examples import data
from tools.examples.running import Made, run

SIZE, CLASSES, BATCH = 64, 10, 16


def classifier() -> Any:
    """Return a small convolutional network; its outputs are logits."""
    x = inputs = keras.Input((SIZE, SIZE, 3))
    for filters in (32, 64, 96):
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = layers.Activation("relu")(layers.BatchNormalization()(x))
        x = layers.MaxPooling2D()(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


class Trainer:
    """What the loop works with, on each worker."""

    def __init__(self) -> None:
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with self.strategy.scope():
            self.model, self.optimizer = classifier(), keras.optimizers.Adam(1e-3)
            self.optimizer.build(self.model.trainable_variables)
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def replica_step(self, images: Any, labels: Any) -> Any:
        """Train on a worker's part of a batch; return its part of the loss."""
        with tf.GradientTape() as tape:
            loss = self.loss_fn(labels, self.model(images, training=True)) / (
                BATCH * self.strategy.num_replicas_in_sync
            )
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(self, images: Any, labels: Any) -> Any:
        """Train on a batch; return the loss."""
        losses = self.strategy.run(self.replica_step, (images, labels))
        return self.strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    def save_memory(self, dataset: Any, **options: Any) -> Any:
        """Optimize the model; return the plan."""
        import tf_memsaver

        with self.strategy.scope():
            self.model = tf_memsaver.optimize(self.model, data=dataset, step=self.replica_step, **options)
        return self.model.memsaver_plan

    @property
    def variables(self) -> list[Any]:
        """All that training changes."""
        return [*self.model.variables, *self.optimizer.variables]


def make() -> Made:
    """Return the loop and the data of one worker."""
    trainer = Trainer()
    worker = trainer.strategy.cluster_resolver.task_id or 0
    # All have as many batches, and wait for each other in each.
    return trainer, data.labelled_images(SIZE, CLASSES, BATCH).repeat().skip(worker).take(data.BATCHES)


if __name__ == "__main__":
    run(make)
