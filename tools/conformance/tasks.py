"""Tasks of KerasHub, small and with random weights; some take raw data (``raw_batch``)."""

from __future__ import annotations

from typing import Any

import numpy as np

_TEXT: dict[str, Any] = {
    "vocabulary_size": 50,
    "num_layers": 3,
    "num_heads": 4,
    "hidden_dim": 32,
    "intermediate_dim": 128,
}


def bert_classifier() -> Any:
    """Return a BERT classifier."""
    from keras_hub import models

    backbone = models.BertBackbone(**_TEXT, max_sequence_length=24)
    return models.BertTextClassifier(backbone=backbone, num_classes=4, preprocessor=None)


def gpt2_language_model() -> Any:
    """Return a GPT-2 language model."""
    from keras_hub import models

    return models.GPT2CausalLM(backbone=models.GPT2Backbone(**_TEXT, max_sequence_length=24), preprocessor=None)


_WORDS = "a blue cat dog mat on ran red sat the".split()
_LETTERS = ["<|endoftext|>", *"abcdefghijklmnopqrstuvwxyz", "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}", "th"]


def _texts(size: int, seed: int) -> tuple[Any, Any]:
    """Return sentences, and a class for each."""
    generator = np.random.default_rng(seed)
    return np.array([" ".join(generator.choice(_WORDS, 9)) for _ in range(size)]), generator.integers(0, 4, size)


def bert_with_preprocessor() -> Any:
    """Return a BERT classifier that takes sentences (``raw_batch``)."""
    from keras_hub import models

    tokenizer = models.BertTokenizer(vocabulary=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS])
    task = models.BertTextClassifier(
        backbone=models.BertBackbone(**_TEXT, max_sequence_length=24),
        num_classes=4,
        preprocessor=models.BertTextClassifierPreprocessor(tokenizer, sequence_length=24),
    )
    task.raw_batch = _texts
    return task


def gpt2_with_preprocessor() -> Any:
    """Return a GPT-2 language model that takes sentences (``raw_batch``)."""
    from keras_hub import models

    places = {letter: place for place, letter in enumerate(_LETTERS)}
    tokenizer = models.GPT2Tokenizer(vocabulary=places, merges=["t h"])
    task = models.GPT2CausalLM(
        backbone=models.GPT2Backbone(**_TEXT, max_sequence_length=24),
        preprocessor=models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=24),
    )
    # It makes the labels itself.
    task.raw_batch = lambda size, seed: (_texts(size, seed)[0], None)
    return task


def vit_with_preprocessor() -> Any:
    """Return a vision transformer that takes images of bytes and of another size (``raw_batch``)."""
    from keras_hub import layers as hub_layers
    from keras_hub import models

    task = models.ViTImageClassifier(
        backbone=_vit_backbone(),
        num_classes=4,
        preprocessor=models.ViTImageClassifierPreprocessor(
            image_converter=hub_layers.ViTImageConverter(image_size=(32, 32), scale=1 / 255)
        ),
    )

    def images(size: int, seed: int) -> tuple[Any, Any]:
        generator = np.random.default_rng(seed)
        return generator.integers(0, 255, (size, 48, 40, 3), np.uint8), generator.integers(0, 4, size)

    task.raw_batch = images
    return task


def t5_encoder_decoder() -> Any:
    """Return the encoder and decoder of T5."""
    from keras_hub import models

    return models.T5Backbone(**_TEXT)


def bart_encoder_decoder() -> Any:
    """Return the encoder and decoder of BART."""
    from keras_hub import models

    return models.BartBackbone(**_TEXT, max_sequence_length=24)


def vit_classifier() -> Any:
    """Return a vision transformer."""
    from keras_hub import models

    return models.ViTImageClassifier(backbone=_vit_backbone(), num_classes=4, preprocessor=None)


def _vit_backbone() -> Any:
    from keras_hub import models

    size = {"num_layers": 3, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 128}
    return models.ViTBackbone(image_shape=(32, 32, 3), patch_size=8, **size)


def deeplab_segmenter() -> Any:
    """Return DeepLabV3, which segments images."""
    from keras_hub import models

    encoder = models.ResNetBackbone(
        input_conv_filters=[16],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 16, 16, 16],
        stackwise_num_blocks=[1, 1, 1, 1],
        stackwise_num_strides=[1, 2, 2, 2],
        block_type="bottleneck_block",
        image_shape=(64, 64, 3),
    )
    backbone = models.DeepLabV3Backbone(
        image_encoder=encoder,
        low_level_feature_key="P2",
        spatial_pyramid_pooling_key="P4",
        upsampling_size=4,
        dilation_rates=[6, 12, 18],
        image_shape=(64, 64, 3),
    )
    return models.DeepLabV3ImageSegmenter(backbone=backbone, num_classes=3, preprocessor=None)
