"""Random models to be trained by Keras's own ``fit``, each from one integer.

A model is a list of steps: a layer or a function, and the tensors that it is given. The same list makes a Functional
model, a Sequential one (where it is a chain), or one with a ``call`` of its own. ``FitCase`` has what else ``fit``
needs: data, a loss, an optimizer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tools.shared.records import Record
from tools.shared.training import fit

CLASSES = 3
WIDTH = 8

_SHAPES = {"dense": (WIDTH,), "text": (4, WIDTH), "image": (6, 6, WIDTH)}
_STYLES = ("functional", "functional", "functional", "sequential", "own_call", "own_call", "no_training")
_POLICIES = ("float32", "float32", "float32", "mixed_float16", "mixed_bfloat16")
_ACTIVATIONS = ("relu", "gelu", "tanh", "silu", "sigmoid", "softplus", "elu", "leaky_relu", "mish", "linear")


# Layers of a user's own -------------------------------------------------------------------------------------------


class PerChannel(layers.Layer):
    """Scales and shifts each channel, as many people write it."""

    def build(self, shape: Any) -> None:
        self.gain = self.add_weight(shape=(shape[-1],), initializer="ones", name="gain")
        self.shift = self.add_weight(shape=(shape[-1],), initializer="zeros", name="shift")

    def call(self, x: Any) -> Any:
        return x * self.gain + self.shift


class LayerScale(layers.Layer):
    """A residual branch's weight for each channel."""

    def build(self, shape: Any) -> None:
        self.gamma = self.add_weight(shape=(shape[-1],), initializer=keras.initializers.Constant(0.3), name="gamma")

    def call(self, x: Any) -> Any:
        return x * self.gamma


class Averaged(layers.Layer):
    """Keeps a moving average and counts its calls; both are assigned in ``call``."""

    def build(self, shape: Any) -> None:
        self.average = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="average")
        self.calls = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False, name="calls")

    def call(self, x: Any, training: bool = False) -> Any:
        average = keras.ops.cast(self.average, x.dtype)
        if training:
            mean = keras.ops.mean(x, axis=tuple(range(len(x.shape) - 1)))
            self.average.assign(0.9 * self.average + 0.1 * keras.ops.cast(mean, self.average.dtype))
            self.calls.assign(self.calls + 1)
        return x - average


class Experts(layers.Layer):
    """A mixture of experts: the sum of several branches, each weighted by a softmax of the input."""

    def __init__(self, count: int, activation: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gate = layers.Dense(count, activation="softmax", name="gate")
        self.experts = [layers.Dense(WIDTH, activation, name=f"expert{number}") for number in range(count)]

    def build(self, shape: Any) -> None:
        for layer in (self.gate, *self.experts):
            layer.build(shape)

    def call(self, x: Any) -> Any:
        gate = self.gate(x)
        return sum(gate[..., n : n + 1] * expert(x) for n, expert in enumerate(self.experts))


class Residual(layers.Layer):
    """Adds what a chain of layers makes of its input to the input."""

    def __init__(self, inner: Sequence[Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inner = list(inner)

    def build(self, shape: Any) -> None:
        for layer in self.inner:
            layer.build(shape)

    def call(self, x: Any) -> Any:
        y = x
        for layer in self.inner:
            y = layer(y)
        return x + y


# Models ------------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A layer or a function, and the places of the tensors that it is given."""

    function: Callable[..., Any]
    reads: tuple[int, ...]


def run_steps(steps: Sequence[Step], inputs: Sequence[Any]) -> Any:
    """Return what the last of the steps makes, for the tensors in the first places."""
    tensors = list(inputs)
    for step in steps:
        tensors.append(step.function(*(tensors[place] for place in step.reads)))
    return tensors[-1]


class OwnCall(keras.Model):
    """A model with a ``call`` of its own."""

    def __init__(self, steps: Sequence[Step], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.steps = tuple(steps)
        self.parts = list(dict.fromkeys(layer for step in steps for layer in _layers_of(step.function)))

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return run_steps(self.steps, inputs if isinstance(inputs, (list, tuple)) else [inputs])


class NoTrainingArgument(OwnCall):
    """The same, and its ``call`` takes nothing but the inputs."""

    def call(self, inputs: Any) -> Any:  # type: ignore[override]
        return run_steps(self.steps, inputs if isinstance(inputs, (list, tuple)) else [inputs])


class OfList:
    """Gives several tensors to a layer that takes a list of them."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, *tensors: Any) -> Any:
        return self.layer(list(tensors))


def _layers_of(function: Any) -> list[Any]:
    layer = function.layer if isinstance(function, OfList) else function
    return [layer] if isinstance(layer, layers.Layer) else []


# What a draw can be ---------------------------------------------------------------------------------------------------

_CHAINED = (
    "mixing", "mixing", "mixing", "activation", "normalization", "normalization", "prelu", "prelu_shared",
    "per_channel", "layer_scale", "dropout", "noise", "averaged", "experts_layer", "residual_layer", "nested",
    "depthwise",
)  # fmt: skip
_BRANCHED = (
    "residual", "residual", "residual", "experts", "experts", "time", "time", "attention", "gated", "squeeze", "join",
    "join", "shared", "operators", "blocks", "blocks",
)  # fmt: skip


class _Builder:
    def __init__(self, seed: int, style: str | None, frozen: bool) -> None:
        self.random = random.Random(seed)
        self.kind = self.random.choice(list(_SHAPES))
        drawn = self.random.choice(_STYLES)
        self.style = style or drawn
        self.policy = self.random.choice(_POLICIES)
        self.steps: list[Step] = []
        self._frozen = frozen
        self._shape = _SHAPES[self.kind]
        self._number = 0
        self._shared: list[Any] = []
        self._at = 0
        self.inputs = [keras.Input(self._shape, name="x")]
        with_time = self.style != "sequential" and self.random.random() < 0.6
        if with_time:
            self.inputs.append(keras.Input((4,), name="time"))
        self._alike = [0]  # the tensors that have the current shape
        self._time: int | None = None

    def draw(self) -> None:
        """Draw the steps."""
        if len(self.inputs) > 1:
            self._time = self._step(self._trained(layers.Dense(WIDTH, self._activation(), name=self._name("time"))), 1)
        self._apply(self._mixing())
        for _ in range(self.random.randint(3, 8)):
            kinds = _CHAINED if self.style == "sequential" else (*_CHAINED, *_BRANCHED)
            self._draw_one(self.random.choice(kinds))

    # Steps ----------------------------------------------------------------------------------------------------------

    def _step(self, function: Callable[..., Any], *reads: int) -> int:
        self.steps.append(Step(function, reads))
        return len(self.inputs) + len(self.steps) - 1

    def _apply(self, function: Callable[..., Any], *reads: int) -> int:
        """Add a step whose result is the current tensor from now on."""
        self._at = self._step(function, *(reads or (self._at,)))
        self._alike.append(self._at)
        return self._at

    def _name(self, kind: str) -> str:
        # Names in no order, since graph optimisation sorts by them.
        self._number += 1
        return f"{self.random.choice('abxyz')}_{kind}{self._number}"

    def _activation(self) -> str:
        return self.random.choice(_ACTIVATIONS)

    def _trained(self, layer: Any, share: float = 0.12) -> Any:
        """Return the layer, sometimes frozen."""
        if self.random.random() < share and self._frozen:
            layer.trainable = False
        return layer

    def _earlier(self) -> int:
        """Return another tensor of the current shape, mostly a late one, or the current one where there is none."""
        others = [place for place in self._alike if place != self._at]
        return self.random.choice(others[-4:]) if others else self._at

    # Layers ---------------------------------------------------------------------------------------------------------

    def _mixing(self, activation: str | None = None) -> Any:
        activation = activation or self._activation()
        bias = self.random.random() < 0.7
        if self.kind != "image":
            return self._trained(layers.Dense(WIDTH, activation, use_bias=bias, name=self._name("dense")))
        size = self.random.choice([1, 3, 3])
        made = layers.Conv2D(WIDTH, size, padding="same", activation=activation, use_bias=bias, name=self._name("conv"))
        return self._trained(made)

    def _normalization(self) -> Any:
        kind = self.random.choice(["batch", "batch", "layer", "group", "rms"])
        name = self._name(kind)
        if kind == "batch":
            return self._trained(layers.BatchNormalization(momentum=0.9, name=name), 0.3)
        if kind == "layer":
            return self._trained(layers.LayerNormalization(name=name))
        if kind == "rms":
            return self._trained(layers.RMSNormalization(name=name))
        return self._trained(layers.GroupNormalization(self.random.choice([1, 2, 4]), name=name))

    def _layer(self, kind: str) -> Any:
        """Return a layer that makes one tensor of the shape of the one that it is given."""
        name = self._name(kind)
        spatial = list(range(1, len(self._shape)))
        if kind == "normalization":
            return self._normalization()
        if kind == "mixing":
            return self._mixing()
        if kind == "nested":
            return self._nested(name)
        if kind == "residual_layer":
            inner = [self._layer(each) for each in self._chain(self.random.randint(1, 3))]
            return Residual(inner, name=name)
        if kind == "depthwise" and self.kind == "image":
            return self._trained(layers.DepthwiseConv2D(3, padding="same", activation=self._activation(), name=name))
        made = {
            "activation": lambda: layers.Activation(self._activation(), name=name),
            "prelu": lambda: layers.PReLU(alpha_initializer="normal", name=name),
            "prelu_shared": lambda: layers.PReLU("normal", shared_axes=spatial or None, name=name),
            "per_channel": lambda: PerChannel(name=name),
            "layer_scale": lambda: LayerScale(name=name),
            "dropout": lambda: layers.Dropout(0.3, name=name),
            "noise": lambda: layers.GaussianNoise(0.1, name=name),
            "averaged": lambda: Averaged(name=name),
            "experts_layer": lambda: Experts(self.random.randint(2, 4), self._activation(), name=name),
            "depthwise": lambda: layers.LayerNormalization(name=name),
        }
        return self._trained(made[kind]())

    def _chain(self, count: int) -> list[str]:
        plain = (
            "mixing",
            "mixing",
            "activation",
            "normalization",
            "prelu_shared",
            "per_channel",
            "layer_scale",
            "dropout",
        )
        return [self.random.choice(plain) for _ in range(count)]

    def _nested(self, name: str) -> Any:
        inner = [self._layer(kind) for kind in self._chain(self.random.randint(1, 4))]
        if self.random.random() < 0.5:
            return keras.Sequential([keras.Input(self._shape), *inner], name=name)
        x = inputs = keras.Input(self._shape)
        for layer in inner:
            x = layer(x)
        if self.random.random() < 0.5:
            x = layers.Add(name=self._name("inner_add"))([x, inputs])
        return keras.Model(inputs, x, name=name)

    # Steps of several layers ----------------------------------------------------------------------------------------

    def _draw_one(self, kind: str) -> None:
        if kind in _CHAINED:
            self._apply(self._layer(kind))
        else:
            getattr(self, f"_draw_{kind}")()

    def _draw_residual(self) -> None:
        skip = self._at
        for kind in self._chain(self.random.randint(1, 4)):
            self._apply(self._layer(kind))
        self._add([self._at, skip])

    def _add(self, places: Sequence[int]) -> None:
        if len(places) == 2 and self.random.random() < 0.4:
            self._apply(lambda a, b: a + b, *places)
        else:
            self._apply(OfList(layers.Add(name=self._name("add"))), *places)

    def _draw_experts(self) -> None:
        """Branches of one tensor, weighted by a softmax: of each position, or of the whole sample."""
        source, count = self._at, self.random.randint(2, 4)
        gate = source
        if self.kind != "dense" and self.random.random() < 0.5:
            gate = self._step(self._pooling(), source)
        gate = self._step(self._trained(layers.Dense(count, "softmax", name=self._name("gate"))), gate)
        pooled = len(self._shape) - 1

        def weight(number: int) -> Callable[[Any], Any]:
            def picked(g: Any) -> Any:
                part = g[..., number : number + 1]
                while len(part.shape) < pooled + 2:
                    part = keras.ops.expand_dims(part, 1)
                return part

            return picked

        weighted = []
        depth = self.random.randint(1, 2)
        for number in range(count):
            place = source
            for _ in range(depth):
                place = self._step(self._mixing(), place)
            part = self._step(weight(number), gate)
            if self.random.random() < 0.5:
                weighted.append(self._step(OfList(layers.Multiply(name=self._name("weighted"))), place, part))
            else:
                weighted.append(self._step(lambda a, b: a * b, place, part))
        if self.random.random() < 0.3:
            weighted.append(source)
        self._add(weighted)

    def _pooling(self) -> Any:
        kind = layers.GlobalAveragePooling2D if self.kind == "image" else layers.GlobalAveragePooling1D
        return kind(name=self._name("pool"))

    def _draw_time(self) -> None:
        """A residual block that adds what a Dense makes of ``silu(t)``, as the U-Nets of diffusion models do."""
        if self._time is None:
            return self._draw_residual()
        skip, shape = self._at, (-1, *[1] * (len(self._shape) - 1), WIDTH)
        self._apply(self._normalization())
        self._apply(self._mixing("silu"))
        embedded = self._step(keras.ops.silu, self._time)
        embedded = self._step(self._trained(layers.Dense(WIDTH, name=self._name("embed"))), embedded)
        self._apply(lambda x, t: x + keras.ops.reshape(t, shape), self._at, embedded)
        self._apply(self._mixing())
        self._add([self._at, skip])

    def _draw_attention(self) -> None:
        if self.kind == "image":
            return self._draw_squeeze()
        if self.kind == "dense":
            return self._draw_gated()
        rate = self.random.choice([0.0, 0.1])
        layer = layers.MultiHeadAttention(2, 4, dropout=rate, name=self._name("attention"))
        skip = self._at
        self._apply(self._normalization())
        self._apply(self._trained(layer), self._at, self._at if self.random.random() < 0.6 else self._earlier())
        self._add([self._at, skip])

    def _draw_gated(self) -> None:
        source, act = self._at, self.random.choice([keras.ops.sigmoid, keras.ops.silu, keras.ops.gelu])
        if self.random.random() < 0.5:
            gate, value = (self._step(self._mixing("linear"), source) for _ in range(2))
            self._apply(lambda g, v: act(g) * v, gate, value)
        else:
            both = self._step(layers.Dense(2 * WIDTH, name=self._name("both")), source)
            self._apply(lambda b: act(b[..., :WIDTH]) * b[..., WIDTH:], both)
        self._apply(self._mixing())

    def _draw_squeeze(self) -> None:
        if self.kind == "dense":
            return self._draw_gated()
        source = self._at
        pooled = self._step(self._pooling(), source)
        small = self._step(layers.Dense(2, "relu", name=self._name("squeeze")), pooled)
        gate = self._step(layers.Dense(WIDTH, "sigmoid", name=self._name("excite")), small)
        shape = (-1, *[1] * (len(self._shape) - 1), WIDTH)
        spread = self._step(layers.Reshape(shape[1:], name=self._name("spread")), gate)
        self._apply(OfList(layers.Multiply(name=self._name("excited"))), source, spread)

    def _draw_join(self) -> None:
        kind = self.random.choice(["add", "add", "add", "multiply", "concatenate", "average", "subtract", "maximum"])
        count = 2 if kind == "subtract" else self.random.randint(2, 4)
        places = list(dict.fromkeys([self._at, *(self._earlier() for _ in range(count - 1))]))
        if len(places) == 1:
            places.append(self._step(layers.Activation("tanh", name=self._name("tanh")), places[0]))
        name = self._name(kind)
        if kind == "add":
            self._add(places)
        elif kind == "concatenate":
            joined = self._step(OfList(layers.Concatenate(name=name)), *places)
            self._apply(self._mixing(), joined)
        else:
            kinds = {
                "multiply": layers.Multiply,
                "average": layers.Average,
                "subtract": layers.Subtract,
                "maximum": layers.Maximum,
            }
            made = kinds[kind](name=name)
            self._apply(OfList(made), *(places[:2] if kind == "subtract" else places))

    def _draw_shared(self) -> None:
        if not self._shared or self.random.random() < 0.5:
            nested = self.random.random() < 0.4
            self._shared.append(self._nested(self._name("shared_model")) if nested else self._mixing())
        layer = self.random.choice(self._shared)
        self._apply(layer)
        if self.random.random() < 0.6:
            self._draw_one(self.random.choice(["activation", "normalization"]))
            self._apply(layer)

    def _draw_operators(self) -> None:
        functions = (
            lambda x: x + keras.ops.tanh(x) * 0.5 + keras.ops.square(x) * 0.1,
            lambda x: x * keras.ops.sigmoid(1.702 * x),
            lambda x: keras.ops.softmax(x, axis=-1) * 3.0,
            lambda x: x / (1.0 + keras.ops.abs(x)),
            lambda x: keras.ops.log1p(keras.ops.exp(-keras.ops.abs(x))) + keras.ops.relu(x),
            lambda x: x / keras.ops.sqrt(keras.ops.mean(x * x, axis=-1, keepdims=True) + 1e-3),
        )
        self._apply(self.random.choice(functions))

    def _draw_blocks(self) -> None:
        """Equal blocks, with other weights; some layers of some are frozen."""
        kinds = self._chain(self.random.randint(2, 4))
        freezes = [self.random.random() < 0.3 for _ in range(self.random.randint(2, 3))]
        frozen, self._frozen = self._frozen, False
        state = self.random.getstate()
        for freeze in freezes:
            self.random.setstate(state)
            skip = self._at
            made = [self._layer(kind) for kind in kinds]
            made[0].trainable = not (freeze and frozen)
            for layer in made:
                self._apply(layer)
            self._apply(OfList(layers.Add(name=self._name("block_add"))), self._at, skip)
        self._frozen = frozen

    # The end --------------------------------------------------------------------------------------------------------

    def finish(self) -> tuple[Any, str]:
        """Add the head; return the loss, and what it compares with."""
        if self._time is not None and not any(self._time in step.reads for step in self.steps):
            self._draw_time()
        if self.kind != "dense" and self.random.random() < 0.7:
            self._apply(self._pooling())
        elif self.kind != "dense" and self.random.random() < 0.5:
            self._apply(layers.Flatten(name=self._name("flat")))
        kind = self.random.choice(["softmax", "softmax", "logits", "logits", "one_hot", "sigmoid", "mse"])
        activation = {"softmax": "softmax", "one_hot": "softmax", "sigmoid": "sigmoid"}.get(kind)
        dtype = "float32" if self.random.random() < 0.6 else None
        head = layers.Dense(CLASSES, activation, dtype=dtype, name="head")
        if self.random.random() < 0.3:
            inner = [layers.Dense(WIDTH, self._activation()), layers.Dropout(0.2), layers.LayerNormalization()]
            head = keras.Sequential([*inner[: self.random.randint(1, 3)], head], name="head_network")
        self._apply(head)
        loss = {
            "softmax": lambda: keras.losses.SparseCategoricalCrossentropy(),
            "logits": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "one_hot": lambda: keras.losses.CategoricalCrossentropy(),
            "sigmoid": lambda: keras.losses.BinaryCrossentropy(),
            "mse": lambda: keras.losses.MeanSquaredError(),
        }[kind]()
        return loss, kind

    def model(self) -> Any:
        if self.style == "functional":
            return keras.Model(self.inputs, run_steps(self.steps, self.inputs), name="functional")
        if self.style == "sequential":
            return keras.Sequential([self.inputs[0], *(step.function for step in self.steps)], name="sequential")
        made = (OwnCall if self.style == "own_call" else NoTrainingArgument)(self.steps, name=self.style)
        made([keras.ops.zeros((2, *each.shape[1:])) for each in self.inputs])
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class FitCase:
    """A model and all that ``fit`` needs."""

    model: Any
    x: Any
    y: Any
    batch_size: int
    epochs: int
    loss: Any
    optimizer: Callable[[], Any]
    inputs: Any
    """What the plan of a model with a ``call`` of its own is told; None for others."""
    description: str

    def compile(self, model: Any) -> None:
        """Compile a model with a fresh optimizer."""
        model.compile(optimizer=self.optimizer(), loss=self.loss, jit_compile=False)


def random_fit_case(seed: int, *, style: str | None = None, frozen: bool = True, policy: str | None = None) -> FitCase:
    """Return the model of a seed, built with seeds and names of its own.

    Args:
      seed: any integer.
      style: ``"functional"``, ``"sequential"``, ``"own_call"`` or ``"no_training"`` (a ``call`` without a ``training``
        argument) instead of the one drawn.
      frozen: whether some layers may be frozen.
      policy: a dtype policy instead of the one drawn.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    before = keras.config.dtype_policy()
    builder = _Builder(seed, style, frozen)
    policy = policy or builder.policy
    keras.config.set_dtype_policy(policy)
    try:
        builder.draw()
        loss, target = builder.finish()
        model = builder.model()
    finally:
        keras.config.set_dtype_policy(before)
    draw, numbers = builder.random, np.random.default_rng(seed)
    batch_size = draw.choice([2, 4, 6])
    epochs = 2
    count = batch_size * draw.randint(3, 5) + draw.choice([0, 0, 1])
    x = [numbers.standard_normal((count, *each.shape[1:])).astype(np.float32) for each in builder.inputs]
    shape_known = builder.style in ("functional", "sequential")
    shape = model.output_shape if shape_known else model(x[0][:1] if len(x) == 1 else [each[:1] for each in x]).shape
    shape = (count, *shape[1:])
    y: Any = numbers.integers(0, CLASSES, shape[:-1])
    if target == "one_hot":
        y = np.eye(CLASSES, dtype=np.float32)[y]
    elif target == "sigmoid":
        y = numbers.integers(0, 2, shape).astype(np.float32)
    elif target == "mse":
        y = numbers.standard_normal(shape).astype(np.float32)
    kind = draw.choice(["adam", "adam", "sgd", "momentum"])
    optimizer = {
        "adam": lambda: keras.optimizers.Adam(1e-2),
        "sgd": lambda: keras.optimizers.SGD(0.05),
        "momentum": lambda: keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True),
    }[kind]
    one = len(builder.inputs) == 1
    specs = [tf.TensorSpec((None, *each.shape[1:]), tf.float32) for each in builder.inputs]
    return FitCase(
        model=model,
        x=x[0] if one else x,
        y=y,
        batch_size=batch_size,
        epochs=epochs,
        loss=loss,
        optimizer=optimizer,
        inputs=None if shape_known else specs[0] if one else specs,
        description=f"{builder.style} {builder.kind} {policy} {kind} {target} batch {batch_size} of {count}",
    )


def fitted(case: FitCase, model: Any) -> Record:
    """Return every number that ``fit`` leaves, and the losses on the way; the variables are put back."""
    case.compile(model)
    return fit(model, case.x, case.y, batch_size=case.batch_size, epochs=case.epochs)
