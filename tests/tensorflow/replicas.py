"""Models that are trained in the replicas of a tf.distribute strategy, and all that they end with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tf_memsaver
from tools.shared import memory
from tools.shared.models.own_call import Attention

LENGTH, WIDTH, STEPS = 12, 16, 8

ACTIVATION = "gelu"
"""Of the model with synchronized norms."""

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(1e-2),
    "clipped": lambda: keras.optimizers.Adam(1e-3, global_clipnorm=1.0),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-3)),
    "sgd": lambda: keras.optimizers.SGD(0.01),
}


@keras.saving.register_keras_serializable()
class Meter(layers.Layer):
    """Notes a mean on which all replicas agree."""

    def build(self, shape: Any) -> None:
        del shape
        self.seen = self.add_weight(shape=(), trainable=False, aggregation="mean", name="seen")

    def call(self, x: Any) -> Any:
        self.seen.assign(0.9 * self.seen + 0.1 * keras.ops.mean(x))
        return x


class Alone(layers.Layer):
    """A layer that somebody made of one of Keras's own and a product."""

    def __init__(self, layer: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.layer, self.dense = layer, layers.Dense(16, activation="gelu")

    def call(self, x: Any, training: Any = None) -> Any:
        return self.dense(self.layer(x))


class OwnCall(keras.Model):
    """Blocks with the sums around them in ``call``."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = [Attention(name=f"attention_{n}") for n in range(2)]
        self.norms = [layers.BatchNormalization(name=f"norm_{n}") for n in range(2)]
        self.wide = [layers.Dense(2 * WIDTH, activation="gelu", name=f"wide_{n}") for n in range(2)]
        self.narrow = [layers.Dense(WIDTH, name=f"narrow_{n}") for n in range(2)]
        self.meter = Meter(name="meter")
        self.out = layers.Dense(3, name="out")

    def call(self, x: Any, training: Any = None) -> Any:
        for attention, norm, wide, narrow in zip(self.attentions, self.norms, self.wide, self.narrow, strict=True):
            x = x + attention(x, training=training)
            x = x + narrow(wide(norm(x, training=training)))
        return self.out(self.meter(x))


def own_call() -> Any:
    model = OwnCall()
    model(np.zeros((2, LENGTH, WIDTH), np.float32))
    return model


def functional() -> Any:
    inputs = x = keras.Input((LENGTH, WIDTH))
    for _ in range(2):
        y = layers.BatchNormalization()(layers.Dense(2 * WIDTH, activation="gelu")(x))
        y = layers.Dense(WIDTH)(layers.Dropout(0.2)(y))
        x = layers.LayerNormalization()(layers.Add()([x, y]))
    return keras.Model(inputs, layers.Dense(3)(Meter()(x)))


def synchronized() -> Any:
    inputs = x = keras.Input((LENGTH, WIDTH))
    for _ in range(2):
        y = layers.BatchNormalization(synchronized=True)(layers.Dense(2 * WIDTH, activation=ACTIVATION)(x))
        x = layers.Add()([x, layers.Dense(WIDTH)(layers.Dropout(0.2)(y))])
    return keras.Model(inputs, layers.Dense(3)(x))


def wide(optimizer: str) -> Any:
    """Return a compiled model of large weights and small activations."""
    inputs = x = keras.Input((512,))
    for _ in range(4):
        x = layers.Dense(1024, activation="relu")(x)
    model = keras.Model(inputs, layers.Dense(8)(x))
    model.compile(OPTIMIZERS[optimizer](), "mse", jit_compile=False)
    return model


class Peaks(keras.callbacks.Callback):
    """Notes the most bytes in use in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        memory.reset_peak()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.found.append(memory.peak())


def batches(size: int) -> Any:
    """Return the batches of all replicas together; the last one is smaller, so that the size is free."""
    numbers = np.random.default_rng(0)
    x = numbers.standard_normal((STEPS * size - 2, LENGTH, WIDTH)).astype(np.float32)
    y = numbers.standard_normal((len(x), LENGTH, 3)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(size)


@dataclass
class Fitted:
    """The model, the loss of each step, and the bytes of every variable in each replica, by path."""

    model: Any
    losses: list[float]
    start: dict[str, tuple[bytes, ...]]
    final: dict[str, tuple[bytes, ...]]


class _Losses(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.found.append(logs["loss"])


def everything(model: Any) -> dict[str, tuple[bytes, ...]]:
    """Return the bytes of all variables of a model, its optimizer and its metrics, in each replica."""
    variables = {v.path: v._value for v in (*model.variables, *model.optimizer.variables, *model.metrics_variables)}
    return {
        path: tuple(each.numpy().tobytes() for each in getattr(value, "values", (value,)))
        for path, value in variables.items()
    }


def fitted(strategy: Any, build: str, optimizer: str, granularity: str = "", size: int = 8) -> Fitted:
    """Return what ``fit`` makes of a model; without a granularity, of the plain one."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    data = batches(size)
    with strategy.scope():
        model = globals()[build]()
        model.compile(OPTIMIZERS[optimizer](), "mse", jit_compile=False)
        start = everything(model)
    if granularity:
        # Outside of the scope, where the model knows its strategy and nothing else does.
        model = tf_memsaver.optimize(model, data=data, granularity=granularity, strategy="min_peak")
        assert model.memsaver_plan.recomputed_units
        assert not model.memsaver_plan.note
    losses = _Losses()
    model.fit(data, shuffle=False, verbose=0, callbacks=[losses])
    assert len(losses.found) == STEPS
    return Fitted(model, losses.found, start, everything(model))
