"""The models of the benchmark: eight of keras.applications and a U-Net, at 128×128, and their training data."""

from __future__ import annotations

from collections.abc import Callable

import keras

IMAGE_SHAPE = (128, 128, 3)

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


def unet(levels: int = 4, filters: int = 32, classes: int = 4) -> keras.Model:
    """Return a U-Net (Ronneberger et al. 2015, arXiv:1505.04597) with BatchNorm.

    Each of ``levels`` levels halves the image and doubles the filters; every skip connection spans the levels below it,
    so that hardly any cut of the graph is crossed by one tensor only.
    """
    inputs = keras.Input(IMAGE_SHAPE)
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


def _application(name: str) -> Callable[[], keras.Model]:
    return lambda: getattr(keras.applications, name)(weights=None, input_shape=IMAGE_SHAPE)


MODELS: dict[str, Callable[[], keras.Model]] = {**{name: _application(name) for name in APPLICATIONS}, "UNet": unet}


def build(name: str, seed: int = 0) -> keras.Model:
    """Return a model of the benchmark, by its name, with the same initial weights in every process."""
    keras.utils.set_random_seed(seed)
    return MODELS[name]()
