"""What people write in the ``call`` of a block of their own, beside layers: one block for each way of doing it.

Each is called as ``block(self, x, training)``, where ``self`` has the layers of ``Block``, and adds to ``x``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

WIDTH, LENGTH, BLOCKS = 16, 24, 3

Way = Callable[["Block", Any, Any], Any]

IDIOMS: dict[str, Way] = {}
"""The ways, by name."""


def _way(function: Way) -> Way:
    IDIOMS[function.__name__] = function
    return function


class Block(layers.Layer):
    """A residual block with layers for all ways."""

    def __init__(self, way: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.way = IDIOMS[way]
        self.norm = layers.LayerNormalization()
        self.wide = layers.Dense(4 * WIDTH, activation="gelu")
        self.narrow = layers.Dense(WIDTH)
        self.drop = layers.Dropout(0.1)
        self.spatial = layers.SpatialDropout1D(0.1)
        self.batch_norm = layers.BatchNormalization()
        self.again = layers.Dense(WIDTH, activation="relu")
        self.inner = keras.Sequential([layers.Dense(WIDTH), layers.LayerNormalization(), layers.Dropout(0.1)])
        self.keys, self.values = layers.Dense(WIDTH), layers.Dense(WIDTH)
        self.seeds = keras.random.SeedGenerator(3)
        self.mean = self.add_weight(shape=(WIDTH,), initializer="zeros", trainable=False)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def feed(self, x: Any) -> Any:
        """Return what most of the ways are written around."""
        return self.narrow(self.wide(self.norm(x)))

    @tf.function
    def compiled(self, x: Any) -> Any:
        """Return a part that is a function of its own."""
        return tf.nn.gelu(self.again(x))

    def call(self, x: Any, training: Any = None) -> Any:
        return x + self.way(self, x, training)


@_way
def dropout_twice(block: Block, x: Any, training: Any) -> Any:
    return block.drop(block.narrow(block.drop(block.wide(block.norm(x)), training=training)), training=training)


@_way
def norm_twice(block: Block, x: Any, _: Any) -> Any:
    return block.norm(block.feed(x))


@_way
def batch_norm_twice(block: Block, x: Any, training: Any) -> Any:
    return block.batch_norm(block.again(block.batch_norm(block.feed(x), training=training)), training=training)


@_way
def shared_layer(block: Block, x: Any, _: Any) -> Any:
    return block.again(block.again(block.feed(x)))


@_way
def function_dropout(block: Block, x: Any, training: Any) -> Any:
    return tf.nn.dropout(block.feed(x), 0.1) if training else block.feed(x)


@_way
def keras_dropout(block: Block, x: Any, training: Any) -> Any:
    return keras.random.dropout(block.feed(x), 0.1, seed=block.seeds) if training else block.feed(x)


@_way
def drop_path(block: Block, x: Any, training: Any) -> Any:
    made = block.feed(x)
    return made / 0.9 * tf.floor(0.9 + tf.random.uniform((tf.shape(x)[0], 1, 1))) if training else made


@_way
def noise(block: Block, x: Any, training: Any) -> Any:
    return block.feed(x + tf.random.normal(tf.shape(x), stddev=0.1) if training else x)


@_way
def two_dropouts(block: Block, x: Any, training: Any) -> Any:
    return block.spatial(block.drop(block.feed(x), training=training), training=training)


@_way
def counted(block: Block, x: Any, _: Any) -> Any:
    block.count.assign_add(1.0)
    return block.feed(x) * (1.0 - 0.5 / (1.0 + block.count))


@_way
def moving_average(block: Block, x: Any, training: Any) -> Any:
    made = block.feed(x)
    if training:
        block.mean.assign(0.9 * block.mean + 0.1 * tf.stop_gradient(tf.reduce_mean(made, [0, 1])))
    return made - block.mean


@_way
def asserted(block: Block, x: Any, _: Any) -> Any:
    tf.debugging.assert_equal(tf.shape(x)[-1], WIDTH)
    return block.feed(tf.debugging.check_numerics(x, "x"))


@_way
def branch(block: Block, x: Any, _: Any) -> Any:
    made = block.feed(x)
    return tf.cond(tf.reduce_mean(made) > 0, lambda: made * 2.0, lambda: made * 0.5)


@_way
def function_inside(block: Block, x: Any, _: Any) -> Any:
    return block.narrow(block.wide(block.compiled(x)))


@_way
def mapped(block: Block, x: Any, _: Any) -> Any:
    return block.feed(tf.map_fn(lambda row: row * 2.0, x) + tf.vectorized_map(tf.nn.softmax, x))


@_way
def gated(block: Block, x: Any, _: Any) -> Any:
    left, right = tf.split(block.wide(block.norm(x)), 2, -1)
    return block.narrow(left * tf.sigmoid(right))


@_way
def root_mean_square(block: Block, x: Any, _: Any) -> Any:
    return block.narrow(block.wide(x * tf.math.rsqrt(tf.reduce_mean(tf.square(x), -1, keepdims=True) + 1e-6)))


@_way
def attention(block: Block, x: Any, _: Any) -> Any:
    """With a causal mask; the average of what it attends to is read, too."""
    scores = tf.matmul(block.keys(x), x, transpose_b=True) / 4.0
    allowed = tf.linalg.band_part(tf.ones(tf.shape(scores)[1:], tf.bool), -1, 0)
    weights = tf.nn.softmax(tf.where(allowed, scores, -1e9))
    return block.feed(x + tf.matmul(weights, block.values(x))) + tf.reduce_mean(weights)


@_way
def sequential_inside(block: Block, x: Any, training: Any) -> Any:
    return block.narrow(block.wide(block.inner(x, training=training)))


@_way
def experts(block: Block, x: Any, _: Any) -> Any:
    made = tf.stack([block.feed(x), block.again(x)], -1)
    return tf.reduce_sum(made * tf.nn.softmax(block.keys(x)[..., None, :2]), -1)


@_way
def chunks(block: Block, x: Any, _: Any) -> Any:
    return tf.concat([block.feed(part) for part in tf.split(x, 4, axis=1)], 1)


@_way
def pieces(block: Block, x: Any, _: Any) -> Any:
    padded = tf.pad(block.norm(x), [[0, 0], [1, 1], [0, 0]], "REFLECT")
    return block.feed(tf.roll(padded[:, 1:-1] + 0.5 * padded[:, 2:], 3, 1))


@_way
def rows(block: Block, x: Any, _: Any) -> Any:
    return block.feed(tf.gather(x, tf.argsort(x[0, :, 0]), axis=1) + tf.cumsum(x, 1))


@_way
def straight_through(block: Block, x: Any, _: Any) -> Any:
    made = block.feed(x)
    return made + tf.stop_gradient(tf.one_hot(tf.argmax(made, -1), WIDTH) - made)


@_way
def spectrum(block: Block, x: Any, _: Any) -> Any:
    return block.feed(tf.math.real(tf.signal.fft2d(tf.cast(x, tf.complex64))) / 50.0)


@_way
def scan_of_pairs(block: Block, x: Any, _: Any) -> Any:
    """The linear recurrence of S5 and Mamba. Keras 3.15 knows nothing of the shape of what comes out."""

    def joined(one: Any, two: Any) -> Any:
        return one[0] * two[0], two[0] * one[1] + two[1]

    _, states = ops.associative_scan(joined, (ops.sigmoid(block.keys(x)), block.values(x)), axis=1)
    return block.feed(ops.reshape(states, ops.shape(x)))


@_way
def added_loss(block: Block, x: Any, _: Any) -> Any:
    made = block.feed(x)
    block.add_loss(1e-3 * tf.reduce_mean(made * made))
    return made


class Idiom(keras.Model):
    """Blocks written one way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.before = layers.Dense(WIDTH)
        self.blocks = [Block(way) for _ in range(BLOCKS)]
        self.out = layers.Dense(1)

    def call(self, x: Any, training: Any = None) -> Any:
        x = self.before(x)
        for block in self.blocks:
            x = block(x, training=training)
        return self.out(ops.mean(x, 1))
