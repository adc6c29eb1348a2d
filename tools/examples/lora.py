"""LoRA: the backbone of a language model of KerasHub is frozen, and small matrices beside its own are trained."""

from __future__ import annotations

from typing import Any

import keras

from tools.examples import data
from tools.examples.packages import keras_hub
from tools.examples.running import Made, run

LENGTH, BATCH, RANK = 96, 16, 4


def language_model() -> Any:
    """Return a small GPT-2 with random weights, whose words are letters."""
    models = keras_hub().models
    # GPT-2 writes a space as a letter of its own.
    letters = ["<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz", "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}", "th"]
    tokenizer = models.GPT2Tokenizer({letter: number for number, letter in enumerate(letters)}, merges=["t h"])
    backbone = models.GPT2Backbone(
        vocabulary_size=len(letters),
        num_layers=4,
        num_heads=4,
        hidden_dim=128,
        intermediate_dim=512,
        max_sequence_length=LENGTH,
    )
    preprocessor = models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=LENGTH)
    return models.GPT2CausalLM(backbone=backbone, preprocessor=preprocessor)


def make() -> Made:
    """Return the model and its data."""
    model = language_model()
    model.backbone.enable_lora(RANK)
    optimizer = keras.optimizers.AdamW(5e-5, weight_decay=0.01)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model, data.texts(LENGTH, BATCH)


if __name__ == "__main__":
    run(make)
