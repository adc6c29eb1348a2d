"""The models of the benchmarks: eight of keras.applications and a U-Net, at 128×128, and transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

PIXELS = 128

APPLICATIONS = (
    "ResNet50",
    "ResNet152V2",
    "VGG16",
    "DenseNet121",
    "InceptionV3",
    "MobileNetV2",
    "EfficientNetB0",
    "ConvNeXtTiny",
)


def unet(levels: int = 4, filters: int = 32, classes: int = 4, pixels: int = PIXELS) -> keras.Model:
    """Return a U-Net (Ronneberger et al. 2015, arXiv:1505.04597) with BatchNorm.

    Each of ``levels`` levels halves the image and doubles the filters; every skip connection spans the levels below it,
    so that hardly any cut of the graph is crossed by one tensor only.
    """
    inputs = keras.Input((pixels, pixels, 3))
    x, skips = inputs, []
    for level in range(levels):
        x = _double_convolution(x, filters * 2**level, f"down{level}")
        skips.append(x)
        x = keras.layers.MaxPooling2D(name=f"down{level}_pool")(x)
    x = _double_convolution(x, filters * 2**levels, "bottom")
    for level in reversed(range(levels)):
        x = keras.layers.Conv2DTranspose(filters * 2**level, 2, strides=2, name=f"up{level}_grow")(x)
        x = keras.layers.Concatenate(name=f"up{level}_join")([skips[level], x])
        x = _double_convolution(x, filters * 2**level, f"up{level}")
    outputs = keras.layers.Conv2D(classes, 1, activation="softmax", name="classes")(x)
    return keras.Model(inputs, outputs, name="unet")


def _double_convolution(x: keras.KerasTensor, filters: int, name: str) -> keras.KerasTensor:
    for number in (1, 2):
        x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False, name=f"{name}_conv{number}")(x)
        x = keras.layers.BatchNormalization(name=f"{name}_norm{number}")(x)
        x = keras.layers.ReLU(name=f"{name}_relu{number}")(x)
    return x


def bert(layers: int = 12, width: int = 768, heads: int = 12, length: int = 128, vocabulary: int = 1000) -> keras.Model:
    """Return a model of the shape of BERT-base (Devlin et al. 2018, arXiv:1810.04805), with a small vocabulary."""
    inputs = keras.Input((length,), dtype="int32")
    x = keras.layers.LayerNormalization()(keras.layers.Embedding(vocabulary, width)(inputs))
    for _ in range(layers):
        y = keras.layers.MultiHeadAttention(heads, width // heads, dropout=0.1)(x, x)
        x = keras.layers.LayerNormalization()(keras.layers.Add()([x, keras.layers.Dropout(0.1)(y)]))
        y = keras.layers.Dense(width)(keras.layers.Dense(4 * width, activation="gelu")(x))
        x = keras.layers.LayerNormalization()(keras.layers.Add()([x, keras.layers.Dropout(0.1)(y)]))
    return keras.Model(inputs, keras.layers.Dense(2)(x[:, 0]), name="bert")


def approximate_gelu(x: keras.KerasTensor) -> keras.KerasTensor:
    """Return GELU by its tanh approximation, whose cube shares a square with its gradient."""
    return keras.activations.gelu(x, approximate=True)


def gpt2(layers: int = 12, width: int = 768, heads: int = 12, length: int = 128, vocabulary: int = 1000) -> keras.Model:
    """Return a model of the shape of GPT-2 (Radford et al. 2019), with a small vocabulary."""
    inputs = keras.Input((length,), dtype="int32")
    x = keras.layers.Dropout(0.1)(keras.layers.Embedding(vocabulary, width)(inputs))
    for _ in range(layers):
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.MultiHeadAttention(heads, width // heads, dropout=0.1)(y, y, use_causal_mask=True)
        x = keras.layers.Add()([x, keras.layers.Dropout(0.1)(y)])
        y = keras.layers.Dense(4 * width, activation=approximate_gelu)(keras.layers.LayerNormalization()(x))
        x = keras.layers.Add()([x, keras.layers.Dropout(0.1)(keras.layers.Dense(width)(y))])
    outputs = keras.layers.Dense(vocabulary, use_bias=False)(keras.layers.LayerNormalization()(x))
    return keras.Model(inputs, outputs, name="gpt2")


def vit(layers: int = 12, width: int = 768, heads: int = 12, patch: int = 16) -> keras.Model:
    """Return a model of the shape of ViT-B/16 (Dosovitskiy et al. 2020, arXiv:2010.11929), with pooled patches."""
    inputs = keras.Input((224, 224, 3))
    x = keras.layers.Conv2D(width, patch, strides=patch)(inputs)
    x = keras.layers.Reshape((-1, width))(x)
    for _ in range(layers):
        y = keras.layers.LayerNormalization()(x)
        x = keras.layers.Add()([x, keras.layers.MultiHeadAttention(heads, width // heads)(y, y)])
        y = keras.layers.Dense(4 * width, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = keras.layers.Add()([x, keras.layers.Dense(width)(y)])
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(x))
    return keras.Model(inputs, keras.layers.Dense(10)(x), name="vit")


def application(name: str, pixels: int = PIXELS, **options: Any) -> keras.Model:
    """Return a model of keras.applications for square images, with random weights."""
    return getattr(keras.applications, name)(weights=None, input_shape=(pixels, pixels, 3), **options)


MODELS: dict[str, Callable[[], keras.Model]] = {
    **{name: functools.partial(application, name) for name in APPLICATIONS},
    "UNet": unet,
}
TRANSFORMERS: dict[str, Callable[[], keras.Model]] = {
    "BERT-base": bert,
    "GPT-2": gpt2,
    "ViT-B": vit,
    # As many layers as BERT-large; narrow, for what depends on the number of layers alone.
    "BERT-24": lambda: bert(layers=24, width=256, heads=4),
}


def build(name: str, seed: int = 0) -> keras.Model:
    """Return a model of the benchmark, by its name, with the same initial weights in every process."""
    keras.utils.set_random_seed(seed)
    return {**MODELS, **TRANSFORMERS}[name]()
