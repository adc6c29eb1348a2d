"""Models of layers and calls that people write themselves: ``granularity="auto"`` takes them apart."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops


class CausalBlock(layers.Layer):
    """A block of a language model, with a mask of its own."""

    def __init__(self, width: int, heads: int, **options: Any) -> None:
        """Make the layers."""
        super().__init__(**options)
        self.attention = layers.MultiHeadAttention(heads, width // heads, dropout=0.1)
        self.feed = keras.Sequential([layers.Dense(4 * width, activation="gelu"), layers.Dense(width)])
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.dropout = layers.Dropout(0.1)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Attend to what came before, and feed forward."""
        mask = ops.tril(ops.ones((ops.shape(inputs)[1],) * 2, dtype="bool"))
        attended = self.attention(inputs, inputs, attention_mask=mask[None], training=training)
        x = self.norms[0](inputs + self.dropout(attended, training=training))
        return self.norms[1](x + self.dropout(self.feed(x), training=training))


class WindowBlock(layers.Layer):
    """Attention within windows of an image, which is rolled in every other block."""

    def __init__(self, width: int, window: int, shift: int, **options: Any) -> None:
        """Make the layers."""
        super().__init__(**options)
        self.width, self.window, self.shift = width, window, shift
        self.qkv, self.out = layers.Dense(3 * width), layers.Dense(width)
        self.feed, self.shrink = layers.Dense(2 * width, activation="gelu"), layers.Dense(width)
        self.norms = [layers.LayerNormalization(epsilon=1e-5) for _ in range(2)]

    def build(self, shape: Any) -> None:
        """Add the bias of positions."""
        self.bias = self.add_weight(shape=(self.window**2, self.window**2), initializer="random_normal", name="bias")
        super().build(shape)

    def _windows(self, x: Any) -> Any:
        _, height, width, depth = x.shape
        size = self.window
        x = ops.reshape(x, (-1, height // size, size, width // size, size, depth))
        return ops.reshape(ops.transpose(x, (0, 1, 3, 2, 4, 5)), (-1, size * size, depth))

    def _image(self, windows: Any, shape: Any) -> Any:
        _, height, width, depth = shape
        size = self.window
        x = ops.reshape(windows, (-1, height // size, width // size, size, size, depth))
        return ops.reshape(ops.transpose(x, (0, 1, 3, 2, 4, 5)), (-1, height, width, depth))

    def call(self, inputs: Any) -> Any:
        """Attend within windows, and feed forward."""
        x = self.norms[0](inputs)
        if self.shift:
            x = ops.roll(x, (-self.shift, -self.shift), axis=(1, 2))
        query, key, value = ops.split(self.qkv(self._windows(x)), 3, axis=-1)
        scores = ops.matmul(query, ops.transpose(key, (0, 2, 1))) * self.width**-0.5 + self.bias
        x = self._image(self.out(ops.matmul(ops.softmax(scores), value)), inputs.shape)
        if self.shift:
            x = ops.roll(x, (self.shift, self.shift), axis=(1, 2))
        x = inputs + x
        return x + self.shrink(self.feed(self.norms[1](x)))


class ResidualUnit(layers.Layer):
    """Two convolutions, normalised, with a penalty on the weights and a loss of its own."""

    def __init__(self, filters: int, **options: Any) -> None:
        """Make the layers."""
        super().__init__(**options)
        self.convs = [
            layers.Conv2D(filters, 3, padding="same", use_bias=False, kernel_regularizer=keras.regularizers.L2(1e-4))
            for _ in range(2)
        ]
        self.norms = [layers.BatchNormalization() for _ in range(2)]

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Return the inputs and what the convolutions make of them."""
        # Smooth, since a ReLU that turns makes much of XLA's rounding.
        x = ops.silu(self.norms[0](self.convs[0](inputs), training=training))
        x = self.norms[1](self.convs[1](x), training=training)
        self.add_loss(1e-4 * ops.mean(ops.square(ops.cast(x, keras.config.floatx()))))
        return ops.silu(x + inputs)


class ResidualNetwork(keras.Model):
    """A network that sums in its ``call``, between its layers."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.stem = layers.Conv2D(16, 3, padding="same")
        self.units = [ResidualUnit(16) for _ in range(3)]
        self.gates = [layers.Conv2D(16, 1, activation="sigmoid") for _ in range(3)]
        self.head = layers.Dense(10, activation="softmax")

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Return the classes."""
        x = self.stem(inputs)
        for unit, gate in zip(self.units, self.gates, strict=True):
            x = x + gate(x) * unit(x, training=training)
        return self.head(tf.reduce_mean(x, axis=[1, 2]))


class Latents(keras.Model):
    """Latents that read the inputs, again and again, and think about it: the same weights each time."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.latents = self.add_weight(shape=(12, 32), initializer="random_normal", name="latents")
        self.read = layers.MultiHeadAttention(2, 16)
        self.think = [CausalBlock(32, 2) for _ in range(2)]
        self.norm, self.head = layers.LayerNormalization(), layers.Dense(10)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Return the classes."""
        x = tf.tile(self.latents[None], (tf.shape(inputs)[0], 1, 1))
        for _ in range(3):
            x = x + self.read(self.norm(x), inputs)
            for block in self.think:
                x = block(x, training=training)
        return self.head(ops.mean(x, axis=1))


class Messages(layers.Layer):
    """Nodes of a graph that hear from their neighbours, as many as there are nodes in a row."""

    def __init__(self, width: int, **options: Any) -> None:
        """Make the layers."""
        super().__init__(**options)
        self.send, self.update = layers.Dense(width, activation="relu"), layers.GRUCell(width)

    def call(self, nodes: Any) -> Any:
        """Send to the next two nodes, and take in what was sent."""
        sent = self.send(ops.concatenate([ops.roll(nodes, 1, axis=1), nodes, ops.roll(nodes, -1, axis=1)], axis=-1))
        flat = ops.reshape(nodes, (-1, nodes.shape[-1]))
        heard, _ = self.update(ops.reshape(sent, (-1, sent.shape[-1])), [flat])
        return nodes + ops.reshape(heard, ops.shape(nodes))


class RecurrentUnit(layers.Layer):
    """A convolution, an LSTM and a gate."""

    def __init__(self, width: int, **options: Any) -> None:
        """Make the layers."""
        super().__init__(**options)
        self.conv, self.rnn = layers.Conv1D(width, 3, padding="same"), layers.LSTM(width, return_sequences=True)
        self.gate, self.norm = layers.Dense(width, activation="sigmoid"), layers.BatchNormalization()

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Return the inputs, gated, and what was remembered."""
        x = ops.silu(self.norm(self.conv(inputs), training=training))
        return inputs + self.gate(x) * self.rnn(x)


def own_language_model() -> Any:
    """Return blocks of one's own in a Functional model, as keras.io's miniature GPT has them."""
    inputs = keras.Input((24,), dtype="int32")
    x = layers.Embedding(100, 32)(inputs)
    for _ in range(3):
        x = CausalBlock(32, 2)(x)
    return keras.Model(inputs, layers.Dense(100)(x))


def own_windows() -> Any:
    """Return attention in windows that shift."""
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(24, 2, strides=2)(inputs)
    for number in range(4):
        x = WindowBlock(24, 4, 2 * (number % 2))(x)
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(layers.GlobalAveragePooling2D()(x)))


def own_residual() -> Any:
    """Return a residual network with a ``call`` of its own, down to its layers."""
    return ResidualNetwork()


def own_latents() -> Any:
    """Return a small Perceiver."""
    return Latents()


def own_messages() -> Any:
    """Return a graph network without ``training`` in its calls."""
    inputs = keras.Input((24, 16))
    x = layers.Dense(32)(inputs)
    for _ in range(3):
        x = Messages(32)(x)
    return keras.Model(inputs, layers.Dense(1)(x))


def own_recurrent() -> Any:
    """Return layers that hold recurrent ones."""
    inputs = keras.Input((16, 16))
    x = layers.Dense(32)(inputs)
    for _ in range(3):
        x = RecurrentUnit(32)(x)
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalMaxPooling1D()(x)))
