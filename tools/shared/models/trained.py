"""Models that benchmarks train: how each is built, and two batch sizes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def _application(name: str, size: int) -> Callable[[], Any]:
    def build() -> Any:
        from tools.shared.models.real import application

        return application(name, size, classes=10)

    return build


def _real(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module("tools.shared.models.real"), name)(**options)


def _encoder() -> Any:
    import keras
    from keras import layers

    inputs = keras.Input((64, 96))
    x = inputs
    for _ in range(4):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 24, dropout=0.1)(y, y)])
        y = layers.Dense(384, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dropout(0.1)(layers.Dense(96)(y))])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)), name="encoder")


def _recurrent(kind: str) -> Callable[[], Any]:
    def build() -> Any:
        import keras
        from keras import layers

        inputs = keras.Input((48, 64))
        x = layers.Dense(128, "tanh")(inputs)
        for _ in range(3):
            x = layers.Bidirectional(getattr(layers, kind)(96, return_sequences=True))(x)
            x = layers.LayerNormalization()(layers.Dense(192, "relu")(x))
        return keras.Model(inputs, layers.Dense(10)(layers.GlobalMaxPooling1D()(x)), name=kind.lower())

    return build


MODELS: dict[str, tuple[Callable[[], Any], tuple[int, int]]] = {
    "MobileNetV2": (_application("MobileNetV2", 96), (16, 32)),
    "MobileNetV3Small": (_application("MobileNetV3Small", 96), (32, 64)),
    "EfficientNetB0": (_application("EfficientNetB0", 64), (16, 32)),
    "EfficientNetV2B0": (_application("EfficientNetV2B0", 64), (16, 32)),
    "ResNet50": (_application("ResNet50", 64), (16, 32)),
    "ResNet50V2": (_application("ResNet50V2", 64), (16, 32)),
    "DenseNet121": (_application("DenseNet121", 64), (16, 32)),
    "InceptionV3": (_application("InceptionV3", 96), (16, 32)),
    "Xception": (_application("Xception", 96), (8, 16)),
    "VGG16": (_application("VGG16", 64), (16, 32)),
    "NASNetMobile": (_application("NASNetMobile", 64), (16, 32)),
    "ConvNeXtTiny": (_application("ConvNeXtTiny", 64), (8, 16)),
    "bert": (_real("bert", layers=4, width=128, heads=4, length=64, vocabulary=100), (16, 32)),
    "gpt2": (_real("gpt2", layers=4, width=128, heads=4, length=64, vocabulary=100), (16, 32)),
    "vit": (_real("vit", layers=3, width=192, heads=3), (4, 8)),
    "encoder": (_encoder, (32, 64)),
    "unet": (_real("unet", levels=3, filters=16, pixels=96), (8, 16)),
    "lstm": (_recurrent("LSTM"), (32, 64)),
    "gru": (_recurrent("GRU"), (32, 64)),
}
"""How to build a model, and two batch sizes."""
