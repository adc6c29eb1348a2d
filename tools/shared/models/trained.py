"""Models that benchmarks train: how each is built, and two batch sizes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def built_by(function: str, *sizes: Any, **options: Any) -> Callable[[], Any]:
    """Return what builds a model by a function of ``tools/shared/models/real.py``; Keras is imported by then only."""
    return lambda: getattr(importlib.import_module("tools.shared.models.real"), function)(*sizes, **options)


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
    "MobileNetV2": (built_by("application", "MobileNetV2", 96, classes=10), (16, 32)),
    "MobileNetV3Small": (built_by("application", "MobileNetV3Small", 96, classes=10), (32, 64)),
    "EfficientNetB0": (built_by("application", "EfficientNetB0", 64, classes=10), (16, 32)),
    "EfficientNetV2B0": (built_by("application", "EfficientNetV2B0", 64, classes=10), (16, 32)),
    "ResNet50": (built_by("application", "ResNet50", 64, classes=10), (16, 32)),
    "ResNet50V2": (built_by("application", "ResNet50V2", 64, classes=10), (16, 32)),
    "DenseNet121": (built_by("application", "DenseNet121", 64, classes=10), (16, 32)),
    "InceptionV3": (built_by("application", "InceptionV3", 96, classes=10), (16, 32)),
    "Xception": (built_by("application", "Xception", 96, classes=10), (8, 16)),
    "VGG16": (built_by("application", "VGG16", 64, classes=10), (16, 32)),
    "NASNetMobile": (built_by("application", "NASNetMobile", 64, classes=10), (16, 32)),
    "ConvNeXtTiny": (built_by("application", "ConvNeXtTiny", 64, classes=10), (8, 16)),
    "bert": (built_by("bert", layers=4, width=128, heads=4, length=64, vocabulary=100), (16, 32)),
    "gpt2": (built_by("gpt2", layers=4, width=128, heads=4, length=64, vocabulary=100), (16, 32)),
    "vit": (built_by("vit", layers=3, width=192, heads=3), (4, 8)),
    "encoder": (_encoder, (32, 64)),
    "unet": (built_by("unet", levels=3, filters=16, pixels=96), (8, 16)),
    "lstm": (_recurrent("LSTM"), (32, 64)),
    "gru": (_recurrent("GRU"), (32, 64)),
}
"""How to build a model, and two batch sizes."""
