"""Small models, each with one thing that is easily lost when layers run in recompute segments."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tools.shared.models.real import bert, gpt2, vit

register = keras.saving.register_keras_serializable(package="tests")


# Layers ------------------------------------------------------------------------------------------------------------


@register
class Scale(layers.Layer):
    """Takes a tensor as a keyword argument."""

    def call(self, x: Any, scale: Any = None) -> Any:
        return keras.ops.tanh(x) * scale


@register
class Switch(layers.Layer):
    """Takes arguments that are no tensors: a text, a bool, None, a number."""

    def call(self, x: Any, kind: str = "none", negate: bool = False, extra: Any = None, power: int = 1) -> Any:
        assert isinstance(kind, str) and isinstance(negate, bool) and extra is None and isinstance(power, int)
        x = keras.ops.tanh(x) if kind == "tanh" else x
        return (-x if negate else x) ** power


@register
class AddsLoss(layers.Layer):
    """Adds a loss in its call, on a weight and on its input."""

    def build(self, shape: Any) -> None:
        self.gain = self.add_weight(shape=(shape[-1],), initializer="ones", name="gain")

    def call(self, x: Any) -> Any:
        y = keras.ops.sin(x * self.gain)
        self.add_loss(keras.ops.mean(keras.ops.cos(y)) + 0.1 * keras.ops.sum(self.gain))
        return y


@register
class Counter(layers.Layer):
    """Updates a float and an integer state, and uses both."""

    def build(self, shape: Any) -> None:
        self.average = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="average")
        self.calls = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="calls")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.calls.assign(self.calls + 1)
            self.average.assign(0.5 * self.average + keras.ops.mean(x, axis=tuple(range(len(x.shape) - 1))))
        return keras.ops.tanh(x - self.average) * (1.0 + keras.ops.cast(self.calls, x.dtype))


@register
class TwoHeads(layers.Layer):
    """Makes two tensors; the first is small, and its gradient comes early when it goes straight into the loss."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")

    def call(self, x: Any) -> Any:
        y = keras.ops.tanh(keras.ops.matmul(x, self.kernel))
        return keras.ops.mean(y, axis=-1, keepdims=True), y


@register
class Branches(layers.Layer):
    """Python control flow on a tensor, which AutoGraph converts (Keras 3 leaves that to ``tf.function``)."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1],), initializer="ones", name="kernel")

    @tf.function
    def branch(self, x: Any) -> Any:
        y = tf.sin(x) * self.kernel
        if tf.reduce_sum(x) > 0:
            y = tf.tanh(y)
        steps = tf.constant(0)
        while steps < 2:
            y = y * 1.5
            steps += 1
        return y

    def call(self, x: Any) -> Any:
        return self.branch(x)

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape, x.dtype)


@register
class ToSparse(layers.Layer):
    """Makes a sparse tensor."""

    def call(self, x: Any) -> Any:
        return tf.sparse.from_dense(tf.nn.relu(x))

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape, x.dtype, sparse=True)


@register
class FromSparse(layers.Layer):
    """Reads a sparse tensor."""

    def call(self, x: Any) -> Any:
        return tf.sparse.to_dense(x)

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape, x.dtype)


@register
class HiddenRandom(layers.Layer):
    """Draws numbers from TensorFlow's own generator, whose state nobody can put back."""

    def call(self, x: Any) -> Any:
        return x * tf.random.uniform(tf.shape(x))


@register
class Reciprocal(layers.Layer):
    """Tells -0.0 from 0.0."""

    def call(self, x: Any) -> Any:
        return tf.tanh(1.0 / tf.stop_gradient(x))


@register
class OwnStep(keras.Model):
    """A Functional subclass with a training step and attributes of its own."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.factor * self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.seen.assign_add(1.0)
        return {"own_loss": loss}

    def with_factor(self, factor: float) -> OwnStep:
        self.factor = factor
        self.seen = keras.Variable(0.0, trainable=False, name="seen")
        return self


# Models ------------------------------------------------------------------------------------------------------------


def chain(width: int = 6, depth: int = 4, **dense: Any) -> Any:
    """``depth`` Dense layers d0, d1, … and a head."""
    x = inputs = keras.Input((width,), name="x")
    for number in range(depth):
        x = layers.Dense(width, activation="tanh", name=f"d{number}", **dense)(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(x), name="chain")


def dropout_chain() -> Any:
    """Dense layers, each with a Dropout."""
    x = inputs = keras.Input((8,), name="x")
    for number in range(3):
        x = layers.Dense(8, activation="tanh", name=f"d{number}")(x)
        x = layers.Dropout(0.5, name=f"drop{number}")(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(x))


def residual_net(blocks: int = 3, filters: int = 4) -> Any:
    """Convolutions with BatchNorm, Dropout and additions, all of which a segment must keep right."""
    inputs = keras.Input((6, 6, 3), name="image")
    x = layers.Conv2D(filters, 3, padding="same", name="stem")(inputs)
    for number in range(blocks):
        y = layers.Conv2D(filters, 3, padding="same", use_bias=False, name=f"conv{number}")(x)
        y = layers.BatchNormalization(name=f"norm{number}")(y)
        y = layers.Activation("relu", name=f"relu{number}")(y)
        y = layers.Dropout(0.3, seed=number, name=f"drop{number}")(y)
        x = layers.Add(name=f"add{number}")([x, y])
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(x), name="residual")


def unet() -> Any:
    """Skips that cross the middle."""
    x = inputs = keras.Input((8, 8, 2), name="image")
    skips = []
    for level in range(2):
        x = layers.Conv2D(4, 3, padding="same", activation="tanh", name=f"down{level}")(x)
        skips.append(x)
        x = layers.MaxPooling2D(name=f"shrink{level}")(x)
    x = layers.Conv2D(4, 3, padding="same", activation="tanh", name="middle")(x)
    for level in reversed(range(2)):
        x = layers.UpSampling2D(name=f"grow{level}")(x)
        x = layers.Concatenate(name=f"join{level}")([x, skips[level]])
        x = layers.Conv2D(4, 3, padding="same", activation="tanh", name=f"up{level}")(x)
    return keras.Model(inputs, layers.Conv2D(1, 1, name="head")(x), name="unet")


def text_lstm(bidirectional: bool = False) -> Any:
    """Embedding with a mask, passed through a Dense and on to an LSTM."""
    inputs = keras.Input((6,), dtype="int32", name="tokens")
    x = layers.Embedding(7, 5, mask_zero=True, name="embed")(inputs)
    x = layers.Dense(5, activation="tanh", name="d0")(x)
    x = layers.Dropout(0.2, name="drop")(x)
    lstm = layers.LSTM(4, return_sequences=True, name="lstm")
    x = layers.Bidirectional(lstm, name="both")(x) if bidirectional else lstm(x)
    x = layers.GRU(4, dropout=0.3, recurrent_dropout=0.2, name="gru")(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(x), name="text")


def text_attention() -> Any:
    """Embedding with a mask, attention that uses it, and pooling that uses it."""
    inputs = keras.Input((6,), dtype="int32", name="tokens")
    x = layers.Embedding(7, 8, mask_zero=True, name="embed")(inputs)
    y = layers.MultiHeadAttention(2, 4, dropout=0.2, name="attention")(x, x)
    x = layers.Add(name="add")([x, y])
    x = layers.LayerNormalization(name="norm")(x)
    x = layers.Dense(8, activation="tanh", name="d0")(x)
    x = layers.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(x), name="attention_text")


def two_by_two() -> Any:
    """Dict inputs, two outputs with names."""
    a, b = keras.Input((6,), name="a"), keras.Input((4,), name="b")
    x = layers.Dense(6, name="left")(a)
    y = layers.Dense(6, name="right")(b)
    x = layers.Concatenate(name="join")([x, y])
    x = layers.Dense(6, activation="tanh", name="d0")(x)
    x = layers.Dense(6, activation="tanh", name="d1")(x)
    first, second = layers.Dense(2, name="first")(x), layers.Dense(1, name="second")(x)
    return keras.Model({"a": a, "b": b}, {"first": first, "second": second}, name="two_by_two")


def backbone(name: str = "backbone") -> Any:
    """Two convolutions with BatchNorm, for other models to hold."""
    x = inputs = keras.Input((6, 6, 3), name="pixels")
    for number in range(2):
        x = layers.Conv2D(4, 3, padding="same", name=f"conv{number}")(x)
        x = layers.BatchNormalization(name=f"norm{number}")(x)
        x = layers.ReLU(name=f"relu{number}")(x)
    return keras.Model(inputs, x, name=name)


def transfer(training: bool | None = None) -> Any:
    """A backbone used as a layer, with ``training`` passed in its call, and a head."""
    inputs = keras.Input((6, 6, 3), name="image")
    base = backbone()
    x = base(inputs) if training is None else base(inputs, training=training)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    x = layers.Dropout(0.2, seed=1, name="drop")(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(x), name="transfer")


def three_deep() -> Any:
    """A model inside a model inside a model; the innermost is a Sequential."""
    innermost = keras.Sequential(
        [keras.Input((6,)), layers.Dense(6, "tanh", name="a"), layers.Dropout(0.2, name="b")], name="innermost"
    )
    x = inputs = keras.Input((6,))
    x = layers.Dense(6, "tanh", name="c")(x)
    middle = keras.Model(inputs, layers.BatchNormalization(name="d")(innermost(x)), name="middle")
    x = inputs = keras.Input((6,))
    outer = keras.Model(inputs, layers.Dense(6, "tanh", name="e")(middle(x)), name="outer")
    x = inputs = keras.Input((6,), name="x")
    return keras.Model(inputs, layers.Dense(2, name="head")(outer(x)), name="three_deep")


def siamese() -> Any:
    """An inner model that is called twice, with BatchNorm and Dropout inside."""
    x = inputs = keras.Input((6,))
    x = layers.Dense(6, activation="tanh", name="d0")(x)
    x = layers.BatchNormalization(name="norm")(x)
    x = layers.Dropout(0.3, name="drop")(x)
    tower = keras.Model(inputs, layers.Dense(6, name="d1")(x), name="tower")
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    joined = layers.Subtract(name="minus")([tower(a), tower(b)])
    return keras.Model([a, b], layers.Dense(2, name="head")(joined), name="siamese")


def adds_losses() -> Any:
    x = inputs = keras.Input((8,))
    for number in range(3):
        x = AddsLoss(name=f"loss{number}")(layers.Dense(8, activation="tanh", kernel_regularizer="l2")(x))
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(x))


def small_bert() -> Any:
    return bert(layers=2, width=16, heads=2, length=6, vocabulary=5)


def small_gpt2() -> Any:
    return gpt2(layers=2, width=16, heads=2, length=6, vocabulary=5)


def small_vit() -> Any:
    return vit(layers=2, width=16, heads=2, patch=56)


def diffusion(blocks: int = 2, width: int = 8) -> Any:
    """A small network of residual blocks that each take silu of one embedding, as those of diffusion models do."""
    image, time = keras.Input((6, 6, width)), keras.Input((16,))
    embedding, x = layers.Dense(16)(time), image
    for _ in range(blocks):
        h = keras.activations.silu(layers.GroupNormalization(4)(x))
        h = layers.Conv2D(width, 3, padding="same")(h)
        h = layers.Add()([h, layers.Dense(width)(keras.activations.silu(embedding))[:, None, None, :]])
        x = layers.Add()([x, layers.Conv2D(width, 3, padding="same", activation="silu")(h)])
    return keras.Model([image, time], layers.Conv2D(3, 1)(x))


def shared_block(calls: int = 3, dropout: float = 0.1) -> Any:
    """A transformer whose blocks are one and the same, as in ALBERT."""
    attention = layers.MultiHeadAttention(2, 4, dropout=dropout, name="attention")
    norms = [layers.LayerNormalization(name=f"norm{number}") for number in range(2)]
    up, down = layers.Dense(16, "gelu", name="up"), layers.Dense(8, name="down")
    x = inputs = keras.Input((6, 8))
    for number in range(calls):
        x = norms[0](layers.Add(name=f"middle{number}")([x, attention(x, x)]))
        x = norms[1](layers.Add(name=f"end{number}")([x, down(up(x))]))
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.GlobalAveragePooling1D()(x)))


def two_resolutions(interpolation: str = "nearest") -> Any:
    """Two branches of an HRNet: ``across`` gives the upper one to the lower one, and ``both`` adds them."""

    def conv(x: Any, strides: int = 1, activation: str | None = "relu") -> Any:
        return layers.Conv2D(16, 3, strides=strides, padding="same", activation=activation)(x)

    inputs = keras.Input((32, 32, 3))
    upper = conv(inputs)
    lower = conv(upper, strides=2)
    up = layers.UpSampling2D(interpolation=interpolation, name="up")(conv(lower, activation=None))
    upper = layers.ReLU()(layers.Add(name="upper")([upper, up]))
    across = layers.BatchNormalization(name="across")(conv(upper, strides=2, activation=None))
    x = layers.Add(name="both")([across, layers.ReLU()(conv(lower, activation=None))])
    x = layers.ReLU(name="last")(x)
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling2D(name="mean")(conv(x))))


def factors_of_two_shapes() -> Any:
    """Return products that graph optimisation reorders: the half of a GELU and its argument, twice."""
    x = inputs = keras.Input((6,))
    y = layers.Activation("gelu", name="gelu")(x)
    y = layers.Activation("gelu", name="again")(layers.Multiply(name="multiply")([y, x]))
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.Dense(6, name="dense")(y)))
