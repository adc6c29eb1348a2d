"""The models of the conformance suite by name, and what each is trained with. Weights are random."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras

from tools.conformance import own_layers, small_models, tasks
from tools.shared.models.real import application


class Case(NamedTuple):
    """How to build a model, and what it is trained with.

    ``inputs`` are the shapes and dtypes of the inputs of a model that does not know them; ``has_own_loop`` says whether
    only its ``train_step`` trains it.
    """

    build: Callable[[], Any]
    loss: Any = "mse"
    batch_size: int = 64
    inputs: Any = None
    has_own_loop: bool = False


def _tokens(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, ((None, 24), "int32"))


_PAIR = _tokens("encoder_token_ids", "encoder_padding_mask", "decoder_token_ids", "decoder_padding_mask")


def _classes(name: str) -> Callable[[], Any]:
    return functools.partial(application, name, 75 if name.startswith(("Inception", "Xception")) else 32, classes=10)


SPARSE = "sparse_categorical_crossentropy"


def _logits() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


SMALL: dict[str, Case] = {
    "perceptron": Case(small_models.perceptron, batch_size=1024),
    "own_step": Case(small_models.own_step, batch_size=1024),
    "sequential": Case(small_models.sequential, SPARSE),
    "residual": Case(small_models.residual, SPARSE),
    "unet": Case(small_models.unet, SPARSE),
    "text_classifier": Case(small_models.text_classifier, SPARSE),
    "language_model": Case(small_models.language_model, _logits),
    "albert": Case(small_models.albert),
    "recurrent": Case(small_models.recurrent, batch_size=256),
    "convolutional_lstm": Case(small_models.convolutional_lstm),
    "encoder_decoder": Case(small_models.encoder_decoder, batch_size=256),
    "siamese": Case(small_models.siamese, batch_size=1024),
    "autoencoder": Case(small_models.autoencoder, batch_size=1024),
    "dictionaries": Case(small_models.dictionaries, {"kind": SPARSE, "value": "mae"}, batch_size=512),
    "nested": Case(small_models.nested, batch_size=1024),
    "frozen_backbone": Case(small_models.frozen_backbone, SPARSE),
    "partly_frozen": Case(small_models.partly_frozen, SPARSE),
    "layer_policies": Case(small_models.layer_policies, batch_size=1024),
    "spectral": Case(small_models.spectral),
    "operators": Case(small_models.operators, batch_size=1024),
    "subclassed": Case(small_models.subclassed, inputs=((None, 24, 16), "float32")),
    "gan": Case(small_models.gan, batch_size=1024, inputs=((None, 32), "float32"), has_own_loop=True),
}

OWN_LAYERS: dict[str, Case] = {
    "subclassed": SMALL["subclassed"],
    "own_language_model": Case(own_layers.own_language_model, _logits),
    "own_windows": Case(own_layers.own_windows, SPARSE),
    "own_residual": Case(own_layers.own_residual, SPARSE, inputs=((None, 16, 16, 3), "float32")),
    "own_latents": Case(own_layers.own_latents, _logits, inputs=((None, 20, 16), "float32")),
    "own_messages": Case(own_layers.own_messages, batch_size=256),
    "own_recurrent": Case(own_layers.own_recurrent, batch_size=256),
}
"""What people write themselves, in which ``granularity="auto"`` cuts."""

TASKS: dict[str, Case] = {
    "bert_classifier": Case(tasks.bert_classifier, _logits, inputs=_tokens("token_ids", "segment_ids", "padding_mask")),
    "gpt2_language_model": Case(tasks.gpt2_language_model, _logits, inputs=_tokens("token_ids", "padding_mask")),
    "t5_encoder_decoder": Case(tasks.t5_encoder_decoder, inputs=_PAIR),
    "bart_encoder_decoder": Case(tasks.bart_encoder_decoder, inputs=_PAIR),
    "vit_classifier": Case(tasks.vit_classifier, _logits),
    "deeplab_segmenter": Case(tasks.deeplab_segmenter, "categorical_crossentropy", batch_size=4),
}

RAW: dict[str, Case] = {
    "bert_with_preprocessor": Case(
        tasks.bert_with_preprocessor, _logits, inputs=_tokens("token_ids", "segment_ids", "padding_mask")
    ),
    "gpt2_with_preprocessor": Case(tasks.gpt2_with_preprocessor, _logits, inputs=_tokens("token_ids", "padding_mask")),
    "vit_with_preprocessor": Case(tasks.vit_with_preprocessor, _logits),
}
"""Tasks that are trained on raw data by their own preprocessors; text needs the package tensorflow-text."""

APPLICATIONS: dict[str, Case] = {
    name: Case(_classes(name), SPARSE, batch_size=4)
    for name in (
        "ConvNeXtTiny",
        "DenseNet121",
        "EfficientNetB0",
        "EfficientNetV2B0",
        "InceptionResNetV2",
        "InceptionV3",
        "MobileNet",
        "MobileNetV2",
        "MobileNetV3Small",
        "NASNetMobile",
        "ResNet50",
        "ResNet50V2",
        "VGG16",
        "Xception",
    )
}

MODELS: dict[str, Case] = {**SMALL, **OWN_LAYERS, **TASKS, **RAW, **APPLICATIONS}
