"""The networks of Checkmate's largest-batch table (Jain et al., MLSys 2020, arXiv:1910.02653, section 6.4), in Keras 3.

VGG19, MobileNet and ResNet50 are those of keras.applications. The other three are what Checkmate's scripts name
``vgg_unet``, ``fcn_8`` and ``segnet``: models of image-segmentation-keras (D. Gupta) for images of 416×608 and 19
classes, layer for layer. Its FCN8 and SegNet have a *vanilla* encoder of five convolutions; its U-Net has VGG16's.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
from keras import layers

IMAGE = (416, 608, 3)
CLASSES = 19
"""Cityscapes has 19 classes that count; Checkmate's ``load_keras_model.py`` takes that number."""

Encoder = tuple[keras.KerasTensor, list[keras.KerasTensor]]


def vanilla_encoder() -> Encoder:
    """Return the input and what comes out of each of five convolutions with BatchNorm and pooling."""
    inputs = x = keras.Input(IMAGE)
    levels = []
    for filters in (64, 128, 256, 256, 256):
        x = layers.ZeroPadding2D(1)(x)
        x = layers.BatchNormalization()(layers.Conv2D(filters, 3)(x))
        x = layers.MaxPooling2D(2)(layers.Activation("relu")(x))
        levels.append(x)
    return inputs, levels


def vgg_encoder() -> Encoder:
    """Return the input and what comes out of each of the five blocks of VGG16."""
    inputs = x = keras.Input(IMAGE)
    levels = []
    for filters, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D(2)(x)
        levels.append(x)
    return inputs, levels


def unet() -> keras.Model:
    """Return ``vgg_unet``: up from the fourth level, beside three skip connections, to half the image's size."""
    inputs, levels = vgg_encoder()
    x = _padded_convolution(levels[3], 512)
    for filters, skip in ((256, levels[2]), (128, levels[1]), (64, levels[0])):
        x = layers.Concatenate()([layers.UpSampling2D(2)(x), skip])
        x = _padded_convolution(x, filters)
    return _classified(inputs, layers.Conv2D(CLASSES, 3, padding="same")(x), "unet")


def segnet() -> keras.Model:
    """Return ``segnet``: up from the fourth level without skip connections."""
    inputs, levels = vanilla_encoder()
    x = _padded_convolution(levels[3], 512)
    for filters in (256, 128, 64):
        x = _padded_convolution(layers.UpSampling2D(2)(x), filters)
    return _classified(inputs, layers.Conv2D(CLASSES, 3, padding="same")(x), "segnet")


def fcn8() -> keras.Model:
    """Return ``fcn_8``: class scores of the last three levels, the smaller ones enlarged, cropped and added."""
    inputs, levels = vanilla_encoder()
    x = levels[4]
    for kernel in (7, 1):
        x = layers.Dropout(0.5)(layers.Conv2D(4096, kernel, padding="same", activation="relu")(x))
    x = layers.Conv2D(CLASSES, 1)(x)
    for level in (levels[3], levels[2]):
        x = layers.Conv2DTranspose(CLASSES, 4, strides=2, use_bias=False)(x)
        x = layers.Add()(_cropped(x, layers.Conv2D(CLASSES, 1)(level)))
    x = layers.Conv2DTranspose(CLASSES, 16, strides=8, use_bias=False)(x)
    return _classified(inputs, x, "fcn8")


def _padded_convolution(x: keras.KerasTensor, filters: int) -> keras.KerasTensor:
    return layers.BatchNormalization()(layers.Conv2D(filters, 3)(layers.ZeroPadding2D(1)(x)))


def _cropped(left: keras.KerasTensor, right: keras.KerasTensor) -> list[keras.KerasTensor]:
    """Return both at the smaller width, then height, of the two; one of equal size is cropped by nothing, as there."""
    both = [left, right]
    for axis in (2, 1):
        surplus = both[0].shape[axis] - both[1].shape[axis]
        larger = 0 if surplus > 0 else 1
        rows, columns = ((0, abs(surplus)), (0, 0)) if axis == 1 else ((0, 0), (0, abs(surplus)))
        both[larger] = layers.Cropping2D((rows, columns))(both[larger])
    return both


def _classified(inputs: keras.KerasTensor, scores: keras.KerasTensor, name: str) -> keras.Model:
    pixels = scores.shape[1] * scores.shape[2]
    x = layers.Reshape((pixels, CLASSES))(scores)
    return keras.Model(inputs, layers.Activation("softmax")(x), name=name)


MODELS: dict[str, Callable[[], keras.Model]] = {
    "VGG19": lambda: keras.applications.VGG19(weights=None),
    "U-Net": unet,
    "MobileNet": lambda: keras.applications.MobileNet(weights=None),
    "FCN8": fcn8,
    "SegNet": segnet,
    "ResNet50": lambda: keras.applications.ResNet50(weights=None),
}
