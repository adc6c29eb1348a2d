"""Every layer that Keras exports, in a segment or kept out of all of them, trains bit by bit as in the plain model."""

from __future__ import annotations

import importlib.util
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tf_memsaver
from tests.tensorflow.plans import labels, optimized_by_hand
from tf_memsaver.capture.model_step import capture_graph
from tf_memsaver.rewrite.optimized_model import make_optimized
from tools.shared.records import Record, assert_identical
from tools.shared.training import train

BATCH = 4
ROW, SEQUENCE, IMAGE, VOLUME = (6,), (4, 4), (8, 8, 3), (4, 4, 4, 2)


# How a layer is put between two that are trained ----------------------------------------------------------------------


def _called(layer: Any, x: Any) -> Any:
    return layer(x)


@dataclass(frozen=True)
class Case:
    """How a layer is made of its class, and called, between a trained one in front and one behind each of its outputs.

    ``second`` is the shape and dtype of another input, which ``call`` gets, too. With ``tokens`` an embedding that
    masks its zeros stands before all of them.
    """

    shape: tuple[int, ...]
    make: Callable[[Any], Any]
    call: Callable[..., Any] = _called
    second: tuple[tuple[int, ...], str] | None = None
    tokens: bool = False
    activation: str = "tanh"
    batch_size: int | None = None


def made(shape: tuple[int, ...], make: Callable[[Any], Any], **options: Any) -> Case:
    return Case(shape, make, **options)


def at(shape: tuple[int, ...], *args: Any, **kwargs: Any) -> Case:
    """Return the case of a layer made with these arguments, called with one tensor."""
    return Case(shape, lambda cls: cls(*args, **kwargs))


def image(*args: Any, **kwargs: Any) -> Case:
    """Return the case of a layer for images, whose values are between 0 and 1."""
    return replace(at(IMAGE, *args, **kwargs), activation="sigmoid")


def picture(*args: Any, **kwargs: Any) -> Case:
    """Return the case of a layer that wants to be told that the values are between 0 and 1."""
    return image(*args, value_range=(0, 1), **kwargs)


def masked(*args: Any, **kwargs: Any) -> Case:
    """Return the case of a layer for sequences that gets a mask."""
    return replace(at(SEQUENCE, *args, **kwargs), tokens=True)


def stateful(shape: tuple[int, ...], *args: Any, **kwargs: Any) -> Case:
    """Return the case of a recurrent layer that goes on from batch to batch."""
    return replace(at(shape, *args, stateful=True, **kwargs), batch_size=BATCH)


def called(case: Case, call: Callable[..., Any], **options: Any) -> Case:
    return replace(case, call=call, **options)


def beside(case: Case) -> Case:
    """Return the case of a layer that passes no gradient on, with a trained one behind what it reads, too."""
    return replace(case, call=lambda layer, x: [x, ops.cast(layer(x), "float32")])


def of_integers(case: Case) -> Case:
    """Return the case of a layer that reads integers, which come from an input of their own."""
    return replace(case, second=((3,), "int32"), call=lambda layer, x, ids: [x, ops.cast(layer(ids), "float32")])


def _three(layer: Any, x: Any) -> Any:
    return layer([x, layers.Dense(x.shape[-1], "tanh")(x), layers.Dense(x.shape[-1], "sigmoid")(x)])


def _two(layer: Any, x: Any) -> Any:
    return layer([x, layers.Dense(x.shape[-1])(x)])


def _attended(**options: Any) -> Callable[..., Any]:
    return lambda layer, x: layer([x, x], **options)


def _queried(**options: Any) -> Callable[..., Any]:
    return lambda layer, x: layer(x, x, **options)


def _with_mask(layer: Any, x: Any) -> Any:
    return layer(x, layers.Conv1D(4, 1)(x), attention_mask=ops.greater(ops.einsum("abc,adc->abd", x, x), 0))


def _with_initial_state(count: int) -> Callable[..., Any]:
    return lambda layer, x: layer(x, initial_state=[layers.Dense(3)(x[:, n]) for n in range(count)])


def _step_from(count: int) -> Callable[..., Any]:
    return lambda cell, x: cell(x, [layers.Dense(3, "tanh")(x) for _ in range(count)])


class Averaged(layers.Wrapper):
    """Adds a running mean of a layer's output to it."""

    def build(self, shape: Any) -> None:
        super().build(shape)
        self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False, name="mean")

    def call(self, x: Any) -> Any:
        y = self.layer(x)
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(y))
        return y + self.mean


class Plainly(layers.Wrapper):
    """Calls a layer."""

    def call(self, x: Any) -> Any:
        return self.layer(x)


class Counted(layers.Layer):
    """Counts its calls, keeps a metric, draws from two seeds of its own and adds a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds = [keras.random.SeedGenerator(1), keras.random.SeedGenerator(2)]
        self.metric = keras.metrics.Mean(name="size")
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="calls")

    def call(self, x: Any, training: bool = False) -> Any:
        self.calls.assign(self.calls + 1)
        self.metric.update_state(ops.abs(x))
        noise = [keras.random.normal(ops.shape(x), seed=seed) for seed in self.seeds]
        self.add_loss(ops.mean(ops.square(x * noise[0])))
        return x * ops.cast(self.calls, x.dtype) + noise[1] if training else x


class Listed(layers.Layer):
    """Fills a TensorArray in a loop."""

    def call(self, x: Any) -> Any:
        def more(place: Any, made: Any) -> Any:
            return place + 1, made.write(place, x * tf.cast(place, x.dtype))

        return tf.reduce_sum(
            tf.while_loop(lambda place, _: place < 3, more, (1, tf.TensorArray(x.dtype, 3)))[1].stack(), 0
        )

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


def _scaling() -> Any:
    scale = tf.Variable(2.0, trainable=False)
    return layers.Lambda(lambda x: x * scale)


def _checked(x: Any) -> Any:
    tf.debugging.assert_less(x, 9.0)
    return x * 2


def _branch(x: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.tanh(x), lambda: tf.sin(x))


# The layers -----------------------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Case]] = {
    "Activation": {
        "": at(ROW, "gelu"),
        "masked": masked("relu"),
        "hard_silu": at(ROW, "hard_silu"),
    },
    "ActivityRegularization": {"": at(ROW, l1=0.1, l2=0.2)},
    "AdaptiveAveragePooling1D": {"": at(SEQUENCE, 3)},
    "AdaptiveAveragePooling2D": {"": at(IMAGE, 3)},
    "AdaptiveAveragePooling3D": {"": at(VOLUME, 3)},
    "AdaptiveMaxPooling1D": {"": at(SEQUENCE, 3)},
    "AdaptiveMaxPooling2D": {"": at(IMAGE, 3)},
    "AdaptiveMaxPooling3D": {"": at(VOLUME, 3)},
    "Add": {
        "": called(at(ROW), _three),
        "product": called(at(ROW), _two),
    },
    "AdditiveAttention": {
        "": called(at(SEQUENCE, dropout=0.3), _attended()),
        "masked": called(masked(), _attended(return_attention_scores=True)),
        "causal": called(at(SEQUENCE, use_scale=False), _attended(use_causal_mask=True)),
    },
    "AlphaDropout": {"": at(SEQUENCE, 0.5, noise_shape=(None, 1, 4), seed=3)},
    "Attention": {
        "": called(at(SEQUENCE, dropout=0.3), _attended()),
        "masked": called(masked(use_scale=True), _attended(return_attention_scores=True)),
        "causal": called(at(SEQUENCE, score_mode="concat", seed=3), _attended(use_causal_mask=True)),
    },
    "AutoContrast": {"": picture()},
    "Average": {"": called(at(ROW), _three), "product": called(at(ROW), _two)},
    "AveragePooling1D": {"": at(SEQUENCE, 2)},
    "AveragePooling2D": {"": at(IMAGE, 3, strides=2, padding="same")},
    "AveragePooling3D": {"": at(VOLUME, 2)},
    "BatchNormalization": {
        "": at(IMAGE),
        "row": at(ROW, momentum=0.5, gamma_regularizer="l2"),
        "masked": masked(),
        "renorm": at(IMAGE, renorm=True, axis=1, scale=False, center=False),
    },
    "Bidirectional": {
        "": made(SEQUENCE, lambda cls: cls(layers.SimpleRNN(3, return_sequences=True, dropout=0.3)), tokens=True),
        "none": made(
            SEQUENCE, lambda cls: cls(layers.SimpleRNN(3, unroll=True, return_state=True), merge_mode=None), tokens=True
        ),
        "stateful": made(SEQUENCE, lambda cls: cls(layers.LSTM(3, stateful=True, unroll=True)), batch_size=BATCH),
    },
    "CategoryEncoding": {mode: of_integers(at(ROW, 6, output_mode=mode)) for mode in ("one_hot", "count")},
    "CenterCrop": {"": image(5, 12)},
    "Concatenate": {"": called(at(ROW), _two), "axis": called(at(SEQUENCE, axis=1), _three)},
    "ContrastLimitedAdaptiveHistogramEqualization": {"": beside(picture(tile_grid_size=(2, 2)))},
    "Conv1D": {
        "": at(SEQUENCE, 3, 3),
        "causal": at(SEQUENCE, 4, 2, padding="causal", dilation_rate=2, activation="relu"),
    },
    "Conv1DTranspose": {"": at(SEQUENCE, 3, 3, strides=2)},
    "Conv2D": {
        "": at(IMAGE, 3, 3, strides=2, padding="same", activation="gelu", kernel_regularizer="l2"),
        "groups": at(IMAGE, 6, 3, groups=3, use_bias=False, kernel_constraint="max_norm", activity_regularizer="l2"),
    },
    "Conv2DTranspose": {"": at(IMAGE, 3, 3, strides=2, padding="same")},
    "Conv3D": {"": at(VOLUME, 3, 2)},
    "Conv3DTranspose": {"": at(VOLUME, 3, 2)},
    "ConvLSTM1D": {"": at((3, 5, 2), 2, 3, dropout=0.3, recurrent_dropout=0.3)},
    "ConvLSTM2D": {"": stateful((3, 4, 4, 2), 2, 3, return_sequences=True)},
    "ConvLSTM3D": {"": at((2, 3, 3, 3, 1), 2, 2, go_backwards=True)},
    "Cropping1D": {"": at(SEQUENCE, (1, 2))},
    "Cropping2D": {"": at(IMAGE, ((1, 2), (0, 3)))},
    "Cropping3D": {"": at(VOLUME, ((1, 1), (0, 1), (1, 0)))},
    "CutMix": {"": image(factor=(0.2, 0.8), seed=3)},
    "Dense": {
        "": at(ROW, 5),
        "sequence": at(SEQUENCE, 5, "gelu", kernel_regularizer="l2", bias_constraint="non_neg"),
        "lora": at(ROW, 5, lora_rank=2),
    },
    "DepthwiseConv1D": {"": at(SEQUENCE, 3, depth_multiplier=2)},
    "DepthwiseConv2D": {"": at(IMAGE, 3, strides=2, depth_multiplier=2)},
    "Discretization": {
        "": beside(at(ROW, bin_boundaries=(-0.5, 0.0, 0.5))),
    },
    "Dot": {
        "": called(at(ROW, axes=1, normalize=True), _two),
    },
    "Dropout": {
        "": at(SEQUENCE, 0.5),
        "seeded": at(SEQUENCE, 0.5, noise_shape=(None, 1, 4), seed=3),
        "masked": masked(0.5),
    },
    "ELU": {"": at(ROW, 0.7)},
    "Embedding": {"": of_integers(at(ROW, 7, 4))},
    "EinsumDense": {
        "": at(SEQUENCE, "abc,cd->abd", (None, 5), activation="silu", bias_axes="d"),
        "heads": at(SEQUENCE, "abc,cde->abde", (None, 2, 3), bias_axes="de"),
    },
    # By itself it cannot stand in a Functional model: it returns the symbolic tensor that it is given.
    "Equalization": {"": beside(made(IMAGE, lambda cls: Plainly(cls((0, 1))), activation="sigmoid"))},
    "Flatten": {"": at(IMAGE)},
    "GRU": {
        "": at(SEQUENCE, 3, dropout=0.3, recurrent_dropout=0.3, return_sequences=True),
        "masked": masked(3, go_backwards=True, reset_after=False, return_state=True),
        "stateful": stateful(SEQUENCE, 3, unroll=True),
    },
    "GRUCell": {"": called(at(ROW, 3), _step_from(1))},
    "GaussianDropout": {"": at(SEQUENCE, 0.5, seed=3)},
    "GaussianNoise": {"": at(SEQUENCE, 0.5), "seeded": at(SEQUENCE, 0.5, seed=3)},
    "GlobalAveragePooling1D": {"": masked()},
    "GlobalAveragePooling2D": {"": at(IMAGE, keepdims=True)},
    "GlobalAveragePooling3D": {"": at(VOLUME)},
    "GlobalMaxPooling1D": {"": at(SEQUENCE)},
    "GlobalMaxPooling2D": {"": at(IMAGE)},
    "GlobalMaxPooling3D": {"": at(VOLUME)},
    "GroupNormalization": {"": at(SEQUENCE, 2)},
    "GroupQueryAttention": {
        "": called(at(SEQUENCE, 2, 4, 2, dropout=0.3), _queried(use_causal_mask=True)),
        "scores": called(at(SEQUENCE, 2, 4, 2, flash_attention=False), _queried(return_attention_scores=True)),
        "mask": called(at(SEQUENCE, 2, 2, 1, seed=3, use_bias=False, flash_attention=None), _with_mask),
    },
    "HashedCrossing": {
        "": replace(
            at(ROW, 5),
            second=((1,), "int32"),
            call=lambda layer, x, ids: [x, ops.cast(layer((ids, ids + 1)), "float32")],
        ),
    },
    "Hashing": {"": of_integers(at(ROW, 5, salt=7, output_mode="multi_hot"))},
    "Identity": {"": at(ROW), "masked": masked()},
    "LSTM": {
        "": at(SEQUENCE, 3, dropout=0.3, recurrent_dropout=0.3, return_sequences=True, return_state=True, seed=3),
        "masked": masked(3, go_backwards=True, use_cudnn=False),
        "stateful": stateful(SEQUENCE, 3, return_state=True),
        "initial_state": called(at(SEQUENCE, 3, unroll=True), _with_initial_state(2)),
    },
    "LSTMCell": {"": called(at(ROW, 3), _step_from(2))},
    "Lambda": {"": made(ROW, lambda cls: cls(lambda x, y: ops.sin(x) * y, arguments={"y": 2.0}))},
    "LayerNormalization": {"": at(SEQUENCE), "axes": at(IMAGE, axis=(1, 2), center=False)},
    "LeakyReLU": {"": at(ROW)},
    "Masking": {
        "": replace(at(SEQUENCE), activation="relu", call=lambda layer, x: layers.GRU(3, unroll=True)(layer(x)))
    },
    "MaxNumBoundingBoxes": {"": image(3)},
    "MaxPooling1D": {"": at(SEQUENCE)},
    "MaxPooling2D": {"": at(IMAGE, 3, strides=2, padding="same")},
    "MaxPooling3D": {"": at(VOLUME)},
    "Maximum": {"": called(at(ROW), _three)},
    "MelSpectrogram": {"": at((64,), fft_length=16, sequence_stride=8, num_mel_bins=4, sampling_rate=8000)},
    "Minimum": {"": called(at(ROW), _two)},
    "MixUp": {"": image(alpha=0.5, seed=3)},
    "MultiHeadAttention": {
        "": called(at(SEQUENCE, 2, 3, dropout=0.3), _queried()),
        "scores": called(masked(2, 3, value_dim=2, flash_attention=False), _queried(return_attention_scores=True)),
        "causal": called(masked(2, 3, flash_attention=None), lambda layer, x: layer(x, x, x, use_causal_mask=True)),
        "mask": called(at(SEQUENCE, 2, 3, seed=3, use_bias=False, output_shape=5), _with_mask),
    },
    "Multiply": {"": called(at(ROW), _three)},
    "Normalization": {"": at(ROW, mean=(0.1,) * 6, variance=(0.2,) * 6)},
    "PReLU": {"": at(IMAGE, "uniform", shared_axes=(1, 2))},
    "Permute": {"": at(SEQUENCE, (2, 1))},
    "Pipeline": {
        "": made(
            IMAGE,
            lambda cls: cls([layers.RandomFlip(), layers.Rescaling(2.0), layers.RandomBrightness(0.3, (0, 1))]),
            activation="sigmoid",
        ),
    },
    "RMSNormalization": {"": at(SEQUENCE)},
    "RNN": {
        "": made(SEQUENCE, lambda cls: cls(layers.GRUCell(3, dropout=0.3), return_sequences=True)),
        "stacked": made(SEQUENCE, lambda cls: cls([layers.SimpleRNNCell(3), layers.GRUCell(2)], return_state=True)),
        "masked": made(
            SEQUENCE,
            lambda cls: cls(
                layers.SimpleRNNCell(3, recurrent_dropout=0.3), return_sequences=True, zero_output_for_mask=True
            ),
            tokens=True,
        ),
    },
    "RandAugment": {"": picture(num_ops=1)},
    "RandomBrightness": {"": picture(0.5)},
    "RandomColorDegeneration": {"": picture(0.5)},
    "RandomColorJitter": {
        "": beside(picture(brightness_factor=0.3, contrast_factor=0.3, saturation_factor=0.3, hue_factor=0.3))
    },
    "RandomContrast": {"": picture(0.5)},
    "RandomCrop": {"": image(5, 5, seed=3)},
    "RandomElasticTransform": {"": picture()},
    "RandomErasing": {"": picture()},
    "RandomFlip": {"": image(), "seeded": image("horizontal", seed=3)},
    "RandomGaussianBlur": {"": picture()},
    "RandomGrayscale": {"": image()},
    "RandomHue": {"": beside(picture(0.5))},
    "RandomInvert": {"": picture(0.5)},
    "RandomPerspective": {"": image()},
    "RandomPosterization": {"": beside(picture(4))},
    "RandomRotation": {"": image(0.2)},
    "RandomSaturation": {"": beside(picture(0.5))},
    "RandomSharpness": {"": picture(0.5)},
    "RandomShear": {"": image(0.3, 0.3)},
    "RandomTranslation": {"": image(0.3, 0.3, "wrap", "nearest", seed=3)},
    "RandomZoom": {"": image(0.3, 0.2, "constant", seed=3)},
    "ReLU": {"": at(ROW, max_value=0.5, negative_slope=0.1, threshold=0.2)},
    "RepeatVector": {"": at(ROW, 3)},
    "Rescaling": {"": image(2.0, -1.0)},
    "Reshape": {"": at(SEQUENCE, (-1, 2))},
    "Resizing": {
        "cubic": image(5, 11, "bicubic", antialias=True),
        "pad": image(5, 9, pad_to_aspect_ratio=True),
    },
    "STFTSpectrogram": {
        mode: at((64, 1), mode=mode, frame_length=16, frame_step=8, window=None) for mode in ("log", "stft")
    },
    "SeparableConv1D": {"": at(SEQUENCE, 3, 3)},
    "SeparableConv2D": {"": at(IMAGE, 3, 3, padding="same", depth_multiplier=2)},
    "SimpleRNN": {
        "": masked(3, dropout=0.3, recurrent_dropout=0.3, return_sequences=True, return_state=True, unroll=True),
        "stateful": stateful(SEQUENCE, 3, go_backwards=True),
    },
    "SimpleRNNCell": {"": called(at(ROW, 3), _step_from(1))},
    "Softmax": {
        "": at(SEQUENCE),
        "mask": called(at(SEQUENCE), lambda layer, x: layer(x, ops.greater(x, 0))),
    },
    "Solarization": {"": picture(0.3, 0.3)},
    "SpatialDropout1D": {"": at(SEQUENCE, 0.5, seed=3)},
    "SpatialDropout2D": {"": at(IMAGE, 0.5)},
    "SpatialDropout3D": {"": at(VOLUME, 0.5)},
    "SpectralNormalization": {
        "": made(ROW, lambda cls: cls(layers.Dense(5))),
        "conv": made(IMAGE, lambda cls: cls(layers.Conv2D(4, 3), power_iterations=2)),
    },
    "StackedRNNCells": {"": made(ROW, lambda cls: cls([layers.GRUCell(3), layers.GRUCell(3)]), call=_step_from(2))},
    "Subtract": {"": called(at(ROW), _two)},
    "TimeDistributed": {
        "": made(SEQUENCE, lambda cls: cls(layers.Dense(3, "tanh")), tokens=True),
        "conv": made((3, 6, 6, 2), lambda cls: cls(layers.Conv2D(2, 3, use_bias=False))),
        "norm": made(SEQUENCE, lambda cls: cls(layers.BatchNormalization())),
    },
    "UnitNormalization": {"": at(IMAGE, axis=(1, 2))},
    "UpSampling1D": {"": at(SEQUENCE)},
    "UpSampling2D": {"": at(IMAGE, interpolation="bilinear")},
    "UpSampling3D": {"": at(VOLUME)},
    "Wrapper": {"": made(ROW, lambda cls: Averaged(layers.Dense(5)))},
    "ZeroPadding1D": {"": at(SEQUENCE, (1, 2))},
    "ZeroPadding2D": {"": at(IMAGE, ((1, 2), (0, 3)))},
    "ZeroPadding3D": {"": at(VOLUME)},
}


def of(shape: tuple[int, ...], call: Callable[[Any], Any], **options: Any) -> Case:
    """Return the case of what a function makes of symbolic tensors."""
    return Case(shape, lambda _: None, lambda _, x: call(x), **options)


MORE: dict[str, dict[str, Case]] = {
    "ops": {
        "elementwise": of(ROW, lambda x: ops.where(x > 0, ops.sin(x) / 3, ops.exp(x) * x) - ops.maximum(x, 0.1)),
        "reductions": of(SEQUENCE, lambda x: (x - ops.max(x, 1, keepdims=True)) / (1 + ops.std(x, -1, keepdims=True))),
        "shapes": of(SEQUENCE, lambda x: ops.concatenate([*ops.split(ops.flip(x, 1), 2, -1)[::-1], x[:, :, 1:3]], -1)),
        "products": of(SEQUENCE, lambda x: ops.matmul(ops.einsum("abc,adc->abd", x, x), x)),
        "choices": of(SEQUENCE, lambda x: x * ops.one_hot(ops.argmax(x, -1), 4) + ops.top_k(x, 1)[0]),
        "attention": of((5, 2, 4), lambda x: ops.dot_product_attention(x, x, x, is_causal=True)),
        "sums": of(ROW, lambda x: ops.cumsum(x, 1) * ops.cumprod(x, 1)),
        "scaling": of(ROW, lambda x: ops.sin(x * 255 / 25.3)),
        "resize": of(IMAGE, lambda x: ops.image.resize(x, (5, 5))),
        "fourier": of((2, 8), lambda x: ops.stack(ops.rfft(x), -1)),
        "detached": of(ROW, lambda x: x * ops.stop_gradient(ops.cast(ops.cast(x, "float16"), "float32"))),
    },
    "own": {
        "counting": made(ROW, lambda _: Counted()),
        "list": made(ROW, lambda _: Listed()),
        "variable": made(ROW, lambda _: _scaling()),
        "branch": made(ROW, lambda _: layers.Lambda(_branch, output_shape=ROW)),
        "assertion": made(ROW, lambda _: layers.Lambda(_checked, output_shape=ROW)),
    },
}

# Training them --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """A model with a layer under test in it, and the labels from the layer in front to the last one behind."""

    model: Any
    layer: Any
    span: tuple[str, str]


def _trainable(x: Any, units: int, name: str, activation: str | None = None, masked: bool = False) -> Any:
    """Return what a trainable layer makes of the last dimension; where shapes are free, a convolution has less ops."""
    kinds = {3: layers.Conv1D, 4: layers.Conv2D, 5: layers.Conv3D}
    rank = len(x.shape)
    if masked or rank not in kinds:
        return layers.Dense(units, activation, use_bias=activation is not None, name=name)(x)
    return kinds[rank](units, 1, activation=activation, use_bias=False, name=name)(x)


def build(case: Case, kind: Any) -> Built:
    batch = {} if case.batch_size is None else {"batch_size": case.batch_size}
    shape, dtype = (case.shape[:-1], "int32") if case.tokens else (case.shape, None)
    inputs = [keras.Input(shape, dtype=dtype, **batch)]
    x = layers.Embedding(7, case.shape[-1], mask_zero=True)(inputs[0]) if case.tokens else inputs[0]
    x = _trainable(x, case.shape[-1], "front", case.activation, masked=case.tokens)
    if case.second is not None:
        inputs.append(keras.Input(case.second[0], dtype=case.second[1]))
    layer = case.make(kind)
    outputs = keras.tree.flatten(case.call(layer, x, *inputs[1:]))
    ends = [_trainable(y, 2, f"back{place}", masked=case.tokens) for place, y in enumerate(outputs)]
    model = keras.Model(inputs, [layers.Activation("softmax")(y) for y in ends])
    order = labels(model)
    first = next(label for label in order if label in ("front", getattr(layer, "name", None)))
    last = next(label for label in reversed(order) if label.startswith("back"))
    return Built(model, layer, (first, last))


def trained(built: Built, model: Any, **options: Any) -> Record:
    """Return what ``train`` returns; what draws numbers begins anew, and a recurrent layer forgets its state."""
    keras.utils.set_random_seed(0)
    recurrent = getattr(built.layer, "stateful", False)
    if recurrent:
        built.layer.reset_state()
    record = train(model, **options)
    states = keras.tree.flatten(built.layer.states) if recurrent else []
    return {**record, **{("state", place): state.numpy() for place, state in enumerate(states)}}


def _takes_renorm() -> bool:
    return "renorm" in inspect.signature(layers.BatchNormalization.__init__).parameters


def _parameters() -> list[Any]:
    found = []
    for name, cases in {**CASES, **MORE}.items():
        kind = getattr(layers, name, None)
        for variant, case in cases.items() if kind is not None or name in MORE else ():
            if variant == "renorm" and not _takes_renorm():
                # From Keras 3.14 on.
                continue
            eagerly = variant in ("", "counting")
            found.append(pytest.param(kind, case, eagerly, id=f"{name}-{variant}" if variant else name))
    return found


@pytest.mark.parametrize(("kind", "case", "eagerly"), _parameters())
def test_a_layer_in_a_segment_trains_alike(kind: Any, case: Case, eagerly: bool) -> None:
    built = build(case, kind)
    optimized = optimized_by_hand(built.model, built.span)
    modes: list[dict[str, Any]] = [
        {"free_batch": case.batch_size is None, "optimizer": keras.optimizers.SGD(0.1, momentum=0.9)}
    ]
    # Run eagerly, there is no graph optimizer: what is left to get wrong is state.
    if eagerly and getattr(built.layer, "non_trainable_variables", ()):
        modes.append({"mode": "eager"})
    for options in modes:
        plain = trained(built, built.model, **options)
        assert np.any(plain["gradient", built.model.get_layer("front").kernel.path, 0])
        assert_identical(plain, trained(built, optimized, **options))


# What is kept out -----------------------------------------------------------------------------------------------------

NO_LAYERS = {
    "InputLayer": "stands for an input of a model, as in every model here",
    "InputSpec": "describes what a layer takes",
    "Layer": "is the base of all others and has no call of its own",
}

# By class: the module that it needs, which is not installed here, and how it is made.
NOT_HERE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "FlaxLayer": ("flax", lambda cls: cls(None)),
    "JaxLayer": ("jax", lambda cls: cls(lambda params, inputs: inputs, params={})),
    "TorchModuleWrapper": ("torch", lambda cls: cls(None)),
}

NUMBERS = [1, 2, 3]
WORDS = [str(number) for number in NUMBERS]


def _there_and_back(cls: Any, x: Any) -> Any:
    layer = cls(7, 4)
    return layer(layers.Dense(4, "tanh", use_bias=False)(layer(x)), reverse=True)


# By class: what it is pinned for, the shape and dtype of what it reads, and what is made of that.
KEPT_OUT: dict[str, tuple[str, tuple[tuple[int, ...], str], Callable[[Any, Any], Any]]] = {
    "AugMix": (
        "draws from Python's",
        (IMAGE, "float32"),
        lambda cls, x: cls(value_range=(0, 1), num_chains=1, all_ops=False)(layers.Dense(3, "sigmoid")(x)),
    ),
    "IntegerLookup": (
        "runs LookupTable",
        ((32,), "int32"),
        lambda cls, x: layers.Embedding(5, 4)(cls(vocabulary=NUMBERS)(x)),
    ),
    "ReversibleEmbedding": ("has a sparse gradient of", ((32,), "int32"), _there_and_back),
    "StringLookup": (
        "runs LookupTable",
        ((32,), "string"),
        lambda cls, x: layers.Embedding(5, 4)(cls(vocabulary=WORDS)(x)),
    ),
    "TextVectorization": (
        "runs LookupTable",
        ((1,), "string"),
        lambda cls, x: layers.Embedding(5, 4)(cls(vocabulary=WORDS, split=None, output_sequence_length=32)(x)),
    ),
}
KEPT_OUT_BELOW = {"TFSMLayer"}


def _stack(x: Any) -> Any:
    """Return what trainable layers, worth a replay, make of a sequence."""
    for number in range(4):
        x = layers.Dense(4, "tanh", use_bias=False, name=f"d{number}")(x)
    return layers.Dense(2, use_bias=False, name="head")(x)


def _assert_kept_out(model: Any, label: str, reason: str, **options: Any) -> None:
    pinned = {unit.label: unit.pinned for unit in capture_graph(model, batch_size=BATCH).units}
    assert pinned[label] and reason in pinned[label]
    plan = tf_memsaver.search_plan(model, batch_size=BATCH, strategy="min_peak")
    assert plan.recomputed and label not in plan.recomputed
    _assert_trains_alike(model, make_optimized(model, plan), **options)


def _words(model: Any, number: int) -> Any:
    shape = (BATCH, *model.inputs[0].shape[1:])
    return tf.constant(np.random.default_rng(number).choice([*WORDS, "other"], shape))


def _assert_trains_alike(model: Any, optimized: Any, reset: Callable[[], Any] = int, **options: Any) -> None:
    for mode in ("graph", "eager"):
        found = []
        for each in (model, optimized):
            reset()
            keras.utils.set_random_seed(0)
            found.append(train(each, mode=mode, free_batch=mode == "graph", **options))
        assert_identical(*found)


@pytest.mark.parametrize("name", [name for name in sorted(KEPT_OUT) if hasattr(layers, name)])
def test_a_layer_that_is_kept_out_of_segments(name: str) -> None:
    reason, (shape, dtype), call = KEPT_OUT[name]
    inputs = keras.Input(shape, dtype=dtype)
    model = keras.Model(inputs, _stack(call(getattr(layers, name), inputs)))
    label = next(layer.name for layer in model.layers if type(layer).__name__ == name)
    text = {"batches": lambda number: _words(model, number)} if dtype == "string" else {}
    _assert_kept_out(model, label, reason, **text)


def test_text_that_is_split_in_front() -> None:
    """Tracing does not find the shape behind it; the model says it."""
    inputs = keras.Input((1,), dtype="string")
    words = layers.TextVectorization(vocabulary=WORDS, output_sequence_length=32)(inputs)
    model = keras.Model(inputs, _stack(layers.Embedding(5, 4)(words)))
    plan = tf_memsaver.search_plan(model, batch_size=BATCH, strategy="min_peak")
    assert plan.recomputed
    _assert_trains_alike(model, make_optimized(model, plan), batches=lambda number: _words(model, number))


class _Saved(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = tf.Variable(tf.eye(4))

    @tf.function(input_signature=[tf.TensorSpec((None, 32, 4))])
    def serve(self, x: Any) -> Any:
        return tf.tanh(tf.matmul(x, self.kernel))


def test_a_layer_of_a_saved_model_is_kept_out_of_segments(tmp_path: Path) -> None:
    saved = _Saved()
    tf.saved_model.save(saved, str(tmp_path), signatures={"serve": saved.serve})
    inputs = keras.Input((32, 4))
    x = layers.Dense(4, "tanh", use_bias=False)(inputs)
    model = keras.Model(inputs, _stack(layers.TFSMLayer(str(tmp_path), name="saved")(x)))
    _assert_kept_out(model, "saved", "calls a tf.function that reads variables")


@pytest.mark.parametrize("name", sorted(NOT_HERE))
def test_a_layer_of_another_framework_cannot_be_made_without_it(name: str) -> None:
    module, make = NOT_HERE[name]
    if importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed, and no test makes this layer")
    with pytest.raises((ImportError, ValueError), match=f"(?i){module}"):
        make(getattr(layers, name))(keras.Input((3,)))


def test_every_layer_is_covered() -> None:
    exported = {name: each for name, each in vars(layers).items() if inspect.isclass(each)}
    tables = [set(CASES), set(KEPT_OUT) | KEPT_OUT_BELOW, set(NOT_HERE), set(NO_LAYERS)]
    assert sum(map(len, tables)) == len(set().union(*tables))
    known = {exported[name] for name in set().union(*tables) if name in exported}
    new = sorted(name for name, each in exported.items() if each not in known)
    assert not new, (
        f"keras.layers exports {', '.join(new)}, which no test here knows: add each to CASES (with arguments and an "
        f"input shape), to KEPT_OUT if capture pins it, to NOT_HERE if it needs another framework, or to NO_LAYERS"
    )


# What cannot be replayed ----------------------------------------------------------------------------------------------


def _twice(function: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda x: tf.ensure_shape(function(lambda y: y * 2, [x], tf.float32), x.shape)


class Generated(layers.Layer):
    """Draws from a generator of TensorFlow's."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = tf.random.Generator.from_seed(1)

    def call(self, x: Any) -> Any:
        return x * self.generator.uniform(tf.shape(x))


class Scaled(layers.Layer):
    """Reads a ``tf.Variable`` that Keras does not know, and that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = tf.Variable(2.0)

    def call(self, x: Any) -> Any:
        return x * self.scale


class Ticking(layers.Layer):
    """Counts its calls in a ``tf.Variable`` that Keras does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = tf.Variable(0.0, trainable=False)

    def call(self, x: Any) -> Any:
        return x * self.calls.assign_add(1.0)


class Drawing(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        self.numbers = np.random.default_rng(0)
        self.others = random.SystemRandom()  # Has no state.

    def call(self, x: Any) -> Any:
        return x * self.numbers.random()


# Why it is pinned, the layer, and how it is put back to where it began.
NOT_REPLAYED: dict[str, tuple[str, Callable[[], Any], Callable[[Any], Any]]] = {
    "random": ("runs RandomUniform", lambda: layers.Lambda(lambda x: x * tf.random.uniform(tf.shape(x), seed=3)), id),
    "dropout": ("runs RandomUniform", lambda: layers.Lambda(lambda x: tf.nn.dropout(x, 0.5, seed=3)), id),
    "generator": ("runs RngReadAndSkip", Generated, lambda layer: layer.generator.reset_from_seed(1)),
    "py_function": ("runs EagerPyFunc", lambda: layers.Lambda(_twice(tf.py_function)), id),
    "numpy_function": ("runs PyFunc", lambda: layers.Lambda(_twice(tf.numpy_function)), id),
    "trained_variable": ("reads 'Variable:0', a trainable tf.Variable", Scaled, id),
    "assigned_variable": ("assigns a tf.Variable", Ticking, lambda layer: layer.calls.assign(0.0)),
    "python_random": ("draws from Python's", lambda: layers.Lambda(lambda x: x * random.random()), id),
    "numpy_random": ("draws from Python's or NumPy's", lambda: layers.Lambda(lambda x: x * np.random.random()), id),
    "own_generator": ("draws from Python's or NumPy's", Drawing, lambda layer: layer.begin()),
}


@pytest.mark.parametrize("name", NOT_REPLAYED)
def test_what_cannot_be_replayed_is_kept_out_of_segments(name: str) -> None:
    reason, make, reset = NOT_REPLAYED[name]
    layer = make()
    layer.name = "odd"
    inputs = keras.Input((32, 4))
    x = layers.Dense(4, "tanh", use_bias=False, name="front")(inputs)
    _assert_kept_out(keras.Model(inputs, _stack(layer(x))), "odd", reason, reset=lambda: reset(layer))


def test_a_random_layer_without_a_seed() -> None:
    x = inputs = keras.Input((6,))
    x = layers.Dense(6, name="d0")(x)
    x = layers.Lambda(lambda y: y * keras.random.uniform((1, 6)))(x)
    model = keras.Model(inputs, layers.Dense(2)(layers.Dense(6, name="d1")(x)))
    # Before Keras 3.15, only that makes the seed of all such layers anew.
    _assert_trains_alike(model, optimized_by_hand(model, ("d0", "d1")), reset=keras.backend.clear_session)


def test_a_feature_space_in_front() -> None:
    kinds = keras.utils.FeatureSpace
    features = {
        "age": kinds.float_discretized(num_bins=3),
        "kind": kinds.string_categorical(num_oov_indices=1),
        "number": kinds.integer_hashed(num_bins=4),
        "size": kinds.float_normalized(),
    }
    space = kinds(features, crosses=[kinds.cross(("kind", "number"), crossing_dim=5)], output_mode="concat")
    rows = {
        "age": np.linspace(20, 60, 8, dtype="float32"),
        "kind": np.array(["a", "b"] * 4),
        "number": np.arange(8),
        "size": np.linspace(0, 2, 8, dtype="float32"),
    }
    space.adapt(tf.data.Dataset.from_tensor_slices(rows))
    x = layers.Dense(16, "tanh", name="d0")(space.get_encoded_features())
    x = layers.Dense(16, "tanh", name="d1")(x)
    model = keras.Model(dict(space.get_inputs()), layers.Dense(2)(x))
    batch = {name: tf.constant(column[:BATCH, None]) for name, column in rows.items()}
    _assert_trains_alike(model, optimized_by_hand(model, ("d0", "d1")), batches=lambda _: batch)
