"""Random networks of blocks as people write them, each from one integer; ``random_fit`` draws single layers instead.

All blocks take and give sequences of ``LENGTH`` vectors of ``WIDTH`` numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers, ops

LENGTH, WIDTH, CLASSES = 8, 16, 3

Block = Callable[[Any], Any]


class Computed(layers.Layer):
    """Computes what a function of a user's own does."""

    def __init__(self, function: Block, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.function = function

    def call(self, x: Any) -> Any:
        return self.function(x)


def _dense(activation: str | None = None, units: int = WIDTH) -> Any:
    return layers.Dense(units, activation)


def _mixed_by(activation: str) -> Block:
    return lambda x: _dense(activation)(x)


def _activated(activation: Any) -> Block:
    return lambda x: layers.Activation(activation)(_dense()(x))


def _computed(function: Block) -> Block:
    return lambda x: Computed(function)(_dense()(x))


def _of_layer(make: Callable[[], Any]) -> Block:
    return lambda x: make()(_dense()(x))


def _residual(inner: Block) -> Block:
    return lambda x: layers.Add()([x, inner(layers.LayerNormalization()(x))])


def _causal(activation: str, dilation: int = 1) -> Any:
    return layers.Conv1D(WIDTH, 2, padding="causal", dilation_rate=dilation, activation=activation)


def _gated(activation: str) -> Block:
    return _residual(lambda x: _dense()(layers.Multiply()([_dense(activation)(x), _dense()(x)])))


def _convolved(activation: str, *, normalized: bool) -> Block:
    def block(x: Any) -> Any:
        x = layers.Conv1D(WIDTH, 3, padding="same", use_bias=not normalized)(x)
        return layers.Activation(activation)(layers.BatchNormalization()(x) if normalized else x)

    return block


def _down_and_up(pooling: Any) -> Block:
    return lambda x: layers.UpSampling1D(2)(pooling(2)(layers.Conv1D(WIDTH, 3, padding="same")(x)))


def _excited(activation: str) -> Block:
    def block(x: Any) -> Any:
        gate = _dense(activation)(_dense("relu", 4)(layers.GlobalAveragePooling1D()(x)))
        return layers.Multiply()([x, layers.Reshape((1, WIDTH))(gate)])

    return block


def _mixer(x: Any) -> Any:
    return layers.Permute((2, 1))(layers.Dense(LENGTH)(_dense("gelu")(layers.Permute((2, 1))(x))))


def _experts(x: Any) -> Any:
    gate = _dense("softmax", 2)(x)
    return layers.Add()([layers.Multiply()([gate[..., n : n + 1], _dense("relu")(x)]) for n in range(2)])


def _modulated(x: Any) -> Any:
    both = _dense(units=2 * WIDTH)(x)
    return layers.LayerNormalization()(x) * (1 + both[..., :WIDTH]) + both[..., WIDTH:]


def _attention(**options: Any) -> Block:
    return _residual(lambda x: layers.MultiHeadAttention(2, 8)(x, x, **options))


def _rotated(x: Any) -> Any:
    a, b = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
    return ops.concatenate([a * ops.cos(b), b * ops.sin(a)], -1)


_ACTIVATIONS = (
    "celu", "elu", "gelu", "hard_sigmoid", "hard_silu", "leaky_relu", "log_sigmoid", "mish", "relu", "relu6", "selu",
    "silu", "soft_shrink", "softmax", "softplus", "softsign", "sparse_plus", "squareplus", "tanh", "tanh_shrink",
)  # fmt: skip

_LAYERS: dict[str, Callable[[], Any]] = {
    "batch_norm": layers.BatchNormalization,
    "layer_norm": layers.LayerNormalization,
    "group_norm": lambda: layers.GroupNormalization(4),
    "rms_norm": layers.RMSNormalization,
    "unit_norm": layers.UnitNormalization,
    "dropout": lambda: layers.Dropout(0.2),
    "noise": lambda: layers.GaussianNoise(0.1),
    "prelu": lambda: layers.PReLU(shared_axes=[1]),
    "leaky": layers.LeakyReLU,
    "depthwise": lambda: layers.DepthwiseConv1D(3, padding="same"),
    "separable": lambda: layers.SeparableConv1D(WIDTH, 3, padding="same", activation="relu"),
    "spectral_norm": lambda: layers.SpectralNormalization(_dense()),
    "einsum_dense": lambda: layers.EinsumDense("btc,cd->btd", (None, WIDTH), bias_axes="d"),
    "gru": lambda: layers.GRU(WIDTH, return_sequences=True),
    "lstm": lambda: layers.LSTM(WIDTH, return_sequences=True),
    "both_ways": lambda: layers.Bidirectional(layers.LSTM(WIDTH // 2, return_sequences=True)),
}

_FUNCTIONS: dict[str, Block] = {
    "polynomial": lambda x: 0.1 * x**3 - 0.2 * x**2 + x,
    "glu": lambda x: ops.glu(ops.concatenate([x, x * 0.5], -1), axis=-1),
    "over_std": lambda x: x / (ops.std(x, axis=-1, keepdims=True) + 1e-3),
    "over_rms": lambda x: x * ops.rsqrt(ops.mean(ops.square(x), axis=-1, keepdims=True) + 1e-3),
    "over_norm": lambda x: ops.normalize(x, axis=-1) * 2.0,
    "standardized": lambda x: (x - ops.mean(x, 1, True)) / ops.sqrt(ops.var(x, 1, True) + 1e-3),
    "waves": lambda x: ops.sin(x) + ops.cos(2 * x) * 0.5,
    "signed_log": lambda x: ops.sign(x) * ops.log1p(ops.abs(x)),
    "sorted": lambda x: ops.sort(x, axis=-1),
    "largest": lambda x: x * ops.cast(x >= ops.top_k(x, 4)[0][..., -1:], x.dtype),
    "log_softmax": lambda x: x - ops.logsumexp(x, axis=-1, keepdims=True),
    "cooled": lambda x: ops.softmax(x / 0.7, axis=-1) * 3,
    "running_sum": lambda x: ops.cumsum(x, axis=1) * 0.1,
    "clipped": lambda x: ops.clip(x, -1, 1) * 1.5,
    "bounded": lambda x: ops.maximum(x, 0.1 * x) - ops.minimum(x, -0.5),
    "products": lambda x: ops.einsum("btc,bsc->bts", x, x) @ x * 0.05,
    "chosen": lambda x: ops.where(x > 0, x, ops.expm1(x) * 0.3),
    "logistic": lambda x: ops.log(ops.sigmoid(x) + 1e-3) / (1 + ops.exp(-x)),
    "rotated": _rotated,
}

BLOCKS: dict[str, Block] = {
    **{f"dense_{name}": _mixed_by(name) for name in _ACTIVATIONS},
    **{f"act_{name}": _activated(name) for name in _ACTIVATIONS},
    "act_approximate_gelu": _activated(lambda x: ops.gelu(x, approximate=True)),
    **{name: _of_layer(make) for name, make in _LAYERS.items()},
    **{name: _computed(function) for name, function in _FUNCTIONS.items()},
    **{f"conv_{name}": _convolved(name, normalized=False) for name in ("relu", "silu", "hard_silu")},
    **{f"conv_norm_{name}": _convolved(name, normalized=True) for name in ("relu", "silu", "hard_silu")},
    "feed_forward": _residual(lambda x: _dense("relu")(_dense("relu")(x))),
    "wide_gelu": _residual(lambda x: _dense()(_dense("gelu", 2 * WIDTH)(x))),
    "swiglu": _gated("silu"),
    "geglu": _gated("gelu"),
    "halved": _residual(_computed(lambda x: ops.abs(x) * 0.5)),
    "attention": _attention(),
    "causal_attention": _attention(use_causal_mask=True),
    "grouped_attention": _residual(lambda x: layers.GroupQueryAttention(8, 4, 2)(x, x)),
    "dilated": lambda x: _causal("tanh", 2)(x),
    "gated_conv": lambda x: layers.Multiply()([_causal("tanh")(x), _causal("sigmoid")(x)]),
    "max_down_up": _down_and_up(layers.MaxPooling1D),
    "mean_down_up": _down_and_up(layers.AveragePooling1D),
    "excited": _excited("sigmoid"),
    "hard_excited": _excited("hard_sigmoid"),
    "mixer": _residual(_mixer),
    "experts": _experts,
    "modulated": _modulated,
    "joined": lambda x: _dense()(layers.Concatenate()([x, _dense("relu")(x)])),
    "average": lambda x: layers.Average()([x, _dense("tanh")(x), _dense("relu")(x)]),
    "difference": lambda x: layers.Subtract()([_dense("softplus")(x), x]),
    "maxout": lambda x: layers.Maximum()([_dense()(x), _dense()(x)]),
    "similarity": lambda x: _dense()(layers.Dot(axes=(2, 2))([x, _dense()(x)])),
}  # fmt: skip
"""What a network is made of, by name."""


class Mix(NamedTuple):
    """Names of the blocks of a network, and how it is optimized and trained."""

    blocks: Sequence[str]
    strategy: str
    granularity: str
    optimizer: str


def random_mix(seed: int) -> Mix:
    """Return the network of a seed."""
    draw = random.Random(seed)
    return Mix(
        [draw.choice(sorted(BLOCKS)) for _ in range(draw.randint(3, 8))],
        draw.choice(["recompute_all", "min_peak"]),
        draw.choice(["layer", "op"]),
        draw.choice(["adam", "sgd"]),
    )


def build_mix(blocks: Sequence[str]) -> Any:
    """Return a classifier of sequences made of these blocks."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((LENGTH, WIDTH))
    x = layers.Dense(WIDTH, "relu", name="stem")(x)
    for name in blocks:
        x = BLOCKS[name](x)
    return keras.Model(inputs, layers.Dense(CLASSES, name="head")(layers.GlobalAveragePooling1D(name="pool")(x)))


def mixed_data(batches: int, batch_size: int = 4) -> tuple[Any, Any]:
    """Return data for ``fit``, with one example too many, so that no graph knows the size of a batch."""
    numbers = np.random.default_rng(1)
    count = batches * batch_size + 1
    x = numbers.standard_normal((count, LENGTH, WIDTH)).astype("float32")
    return x, numbers.integers(0, CLASSES, count)


def compile_mix(model: Any, optimizer: str) -> None:
    """Compile a network with one of the optimizers."""
    made = {"adam": lambda: keras.optimizers.Adam(1e-2), "sgd": lambda: keras.optimizers.SGD(0.02, momentum=0.9)}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(made[optimizer](), loss, jit_compile=False)
