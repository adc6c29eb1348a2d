"""Functions of tensors with variables: Keras models as functions, and functions with what is hard to replay in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

Case = tuple[Any, list[tf.Variable], list[tf.Tensor]]
"""A function, its variables, and the arguments to call it with."""


def of_model(model: Any, x: Any) -> Case:
    return tf.function(lambda x: model(x, training=True)), [v.value for v in model.variables], [tf.constant(x)]


def normal(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def dense(activation: Any = "gelu") -> Case:
    x = inputs = keras.Input((16,))
    for _ in range(4):
        x = layers.Dense(16, activation=activation)(x)
    return of_model(keras.Model(inputs, layers.Dense(2)(x)), normal(64, 16))


def convolutions() -> Case:
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, padding="same")(inputs)
    for _ in range(3):
        y = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.Add()([x, layers.Dropout(0.2)(layers.Conv2D(8, 3, padding="same")(y))])
    return of_model(keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling2D()(x))), normal(16, 8, 8, 3))


def attention() -> Case:
    x = inputs = keras.Input((12, 16))
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.Dropout(0.1)(layers.MultiHeadAttention(2, 8)(y, y))])
        y = layers.Dense(32, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(16)(y)])
    return of_model(keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x))), normal(16, 12, 16))


def recurrent() -> Case:
    inputs = keras.Input((6, 8))
    x = layers.Dense(8, activation="tanh")(inputs)
    x = layers.LSTM(8, return_sequences=True)(x)
    return of_model(keras.Model(inputs, layers.Dense(2)(layers.Dense(8, activation="tanh")(x))), normal(32, 6, 8))


def embedding() -> Case:
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(50, 16)(inputs)
    x = layers.Dense(2)(layers.Dense(16, activation="tanh")(layers.Dense(16, activation="tanh")(x)))
    ids = np.random.default_rng(0).integers(0, 50, (32, 6)).astype(np.int32)
    return of_model(keras.Model(inputs, x), ids)


def silu() -> Case:
    return dense("silu")


def looped() -> Case:
    """A loop that reads a variable: its gradient function has state, and is called by another operation."""
    generator = np.random.default_rng(1)
    matrices = [tf.Variable(generator.standard_normal((16, 16)).astype(np.float32) / 4) for _ in range(6)]

    def call(x: tf.Tensor) -> tf.Tensor:
        for matrix in matrices:
            x = tf.nn.gelu(x @ matrix)
        for _ in tf.range(2):
            x = tf.tanh(x @ matrices[0])
        return x

    return tf.function(call), matrices, [tf.constant(normal(64, 16))]


class OwnCall(keras.Model):
    """A model whose call is Python code, with a loop and a branch that tracing unrolls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [layers.Dense(16, activation="tanh") for _ in range(4)]
        self.drop, self.head = layers.Dropout(0.2), layers.Dense(2)

    def call(self, x: Any, training: bool = False) -> Any:
        for number, block in enumerate(self.blocks):
            x = x + block(x)
            if training and number % 2:
                x = self.drop(x, training=training)
        return self.head(x)


def own_call() -> Case:
    model, x = OwnCall(), normal(64, 16)
    model(x)
    return of_model(model, x)


def half() -> Case:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return dense("tanh")
    finally:
        keras.config.set_dtype_policy("float32")


def brain_half() -> Case:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return dense("relu")
    finally:
        keras.config.set_dtype_policy("float32")


class Module(tf.Module):
    """Control flow, a nested function, a custom gradient, hidden random state, and a counter assigned twice."""

    def __init__(self) -> None:
        super().__init__()
        generator = np.random.default_rng(1)
        self.matrices = [
            tf.Variable(generator.standard_normal((16, 16)).astype(np.float32) / 4, name=f"w{i}") for i in range(4)
        ]
        self.scale = tf.Variable(1.5, name="scale")
        self.count = tf.Variable(0, trainable=False, dtype=tf.int64, name="count")

    @tf.function
    def inner(self, x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return tf.tanh(x @ w) * self.scale

    @tf.function
    def __call__(self, x: tf.Tensor) -> Any:
        self.count.assign_add(1)
        x = tf.sin(self.inner(x, self.matrices[0]))
        x = tf.cond(tf.reduce_sum(x) > 0.0, lambda: x @ self.matrices[1], lambda: x @ self.matrices[2])
        for _ in tf.range(3):
            x = tf.tanh(x @ self.matrices[3])
        x = clipped(tf.exp(-tf.square(x)))
        self.count.assign(self.count * 3)
        return {"x": tf.sin(x), "count": self.count.read_value(), "pair": (x[:, :2], tf.shape(x)), "none": None}


def waiting() -> Case:
    """Layers as Keras 2 saves them: functions whose result waits for the reads of all their variables."""
    weights = [(tf.Variable(normal(16, 16) / 4), tf.Variable(normal(16))) for _ in range(4)]

    def layer(x: tf.Tensor, kernel: tf.Variable, bias: tf.Variable) -> tf.Tensor:
        reads = [kernel.read_value(), bias.read_value(), kernel.read_value(), bias.read_value()]
        y = tf.einsum("bi,ij->bj", tf.tanh(x), reads[0] + reads[2]) + (reads[1] + reads[3])
        with tf.control_dependencies([tf.group(*(read.op for read in reads))]):
            return tf.identity(y)

    layers_ = [tf.function(layer) for _ in weights]

    @tf.function
    def call(x: tf.Tensor) -> tf.Tensor:
        for each, (kernel, bias) in zip(layers_, weights, strict=True):
            x = x + each(x, kernel, bias)
        return x

    return call, [v for pair in weights for v in pair], [tf.constant(normal(64, 16))]


def _called(looped: bool, **settings: Any) -> Case:
    """Layers that call a function of their own, made with the given settings, which graph optimisation leaves alone."""
    kernels = [tf.Variable(normal(16, 16) / 4, name=f"kernel{number}") for number in range(4)]

    @tf.function(autograph=False, **settings)
    def layer(x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        def step(number: Any, state: tf.Tensor) -> Any:
            return number + 1, tf.nn.gelu(state @ kernel + x, approximate=True)

        if looped:
            y = tf.while_loop(lambda number, _: number < 3, step, (0, x), maximum_iterations=3)[1]
        else:
            y = step(0, step(0, x)[1])[1]
        return y + tf.sin(x) + x

    @tf.function
    def call(x: tf.Tensor) -> tf.Tensor:
        for kernel in kernels:
            x = tf.tanh(tf.exp(-tf.square(layer(x, kernel))))
        return x

    return call, kernels, [tf.constant(normal(64, 16))]


def chosen_by_device() -> Case:
    """As the LSTM and GRU layers of Keras 2."""
    return _called(True, experimental_attributes={"api_implements": "layer_1", "api_preferred_device": "CPU"})


def compiled_inside() -> Case:
    return _called(False, jit_compile=True)


@tf.custom_gradient
def clipped(x: tf.Tensor) -> Any:
    return tf.sqrt(x), lambda upstream: tf.clip_by_value(upstream, -0.001, 0.001)


def module() -> Case:
    made = Module()
    return tf.function(lambda x: made(x)), [*made.matrices, made.scale, made.count], [tf.constant(normal(64, 16))]


CASES: list[Callable[[], Case]] = [
    dense,
    convolutions,
    attention,
    recurrent,
    embedding,
    half,
    brain_half,
    module,
    looped,
    own_call,
    waiting,
    chosen_by_device,
    compiled_inside,
]
