"""A plain ``tf.Module``, without a layer of Keras, in a ``tf.function`` loop with a momentum of its own."""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf

from tools.examples import data
from tools.examples.running import Made, run

SIZE, CLASSES, WIDTH, DEPTH, BATCH = 64, 10, 32, 8, 16


class Network(tf.Module):
    """Convolutions with a scale and an offset for each channel."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [3] + [WIDTH] * DEPTH
        self.kernels = [
            tf.Variable(tf.random.stateless_normal((3, 3, before, after), (0, place)) / (3.0 * before**0.5))
            for place, (before, after) in enumerate(itertools.pairwise(sizes))
        ]
        self.scales = [tf.Variable(tf.ones((WIDTH,))) for _ in range(DEPTH)]
        self.offsets = [tf.Variable(tf.zeros((WIDTH,))) for _ in range(DEPTH)]
        self.head = tf.Variable(tf.random.stateless_normal((WIDTH, CLASSES), (1, 0)) / WIDTH**0.5)

    def __call__(self, x: Any) -> Any:
        for kernel, scale, offset in zip(self.kernels, self.scales, self.offsets, strict=True):
            x = tf.nn.conv2d(x, kernel, 1, "SAME")
            mean, variance = tf.nn.moments(x, (1, 2), keepdims=True)
            x = tf.nn.gelu((x - mean) * tf.math.rsqrt(variance + 1e-5) * scale + offset)
        return tf.reduce_mean(x, (1, 2)) @ self.head


class Trainer:
    """What the loop works with; ``forward`` is what the step calls."""

    def __init__(self) -> None:
        self.network = Network()
        self.forward: Any = self.network
        self.momenta = [tf.Variable(tf.zeros(each.shape), trainable=False) for each in self.network.trainable_variables]

    @tf.function
    def step(self, images: Any, labels: Any) -> Any:
        """Train on a batch; return the loss."""
        weights = self.network.trainable_variables
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, self.forward(images))
            loss = tf.reduce_mean(losses)
        for weight, momentum, gradient in zip(weights, self.momenta, tape.gradient(loss, weights), strict=True):
            momentum.assign(0.9 * momentum + gradient)
            weight.assign_sub(0.01 * momentum)
        return loss

    def save_memory(self, dataset: Any, **options: Any) -> Any:
        """Optimize what the step calls; return the plan."""
        del dataset
        import tf_memsaver

        # The loop's tf.function is traced for full batches: a function for a free batch dimension would be another one.
        images = tf.TensorSpec((BATCH, SIZE, SIZE, 3))
        self.forward = tf_memsaver.optimize_function(self.network.__call__, images, **options)
        return self.forward.memsaver_plan

    @property
    def variables(self) -> list[Any]:
        """All that training changes."""
        return [*self.network.variables, *self.momenta]


def make() -> Made:
    """Return the loop and its data."""
    return Trainer(), data.labelled_images(SIZE, CLASSES, batch=BATCH)


if __name__ == "__main__":
    run(make)
