"""A BERT classifier of KerasHub with its preprocessor: sentences go in as they are."""

from __future__ import annotations

from typing import Any

import keras

from tools.examples import data
from tools.examples.packages import keras_hub
from tools.examples.running import Made, run

CLASSES, LENGTH, BATCH = 4, 64, 16


def vocabulary() -> list[str]:
    """Return what a WordPiece tokenizer knows: its signs, whole words, and ends of others."""
    signs = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return [*signs, *data.WORDS, "un", *(f"##{ending}" for ending in ("s", "ed", "ing", "ly", "est"))]


def classifier() -> Any:
    """Return a small BERT with random weights, and a head."""
    models = keras_hub().models
    backbone = models.BertBackbone(
        vocabulary_size=len(vocabulary()),
        num_layers=4,
        num_heads=4,
        hidden_dim=128,
        intermediate_dim=512,
        max_sequence_length=LENGTH,
    )
    tokenizer = models.BertTokenizer(vocabulary=vocabulary(), lowercase=True)
    preprocessor = models.BertTextClassifierPreprocessor(tokenizer, sequence_length=LENGTH)
    return models.BertTextClassifier(backbone=backbone, num_classes=CLASSES, preprocessor=preprocessor)


def make() -> Made:
    """Return the model and its data."""
    model = classifier()
    model.compile(
        optimizer=keras.optimizers.AdamW(5e-5),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model, data.labelled_texts(LENGTH, CLASSES, BATCH)


if __name__ == "__main__":
    run(make)
