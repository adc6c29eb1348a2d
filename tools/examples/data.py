"""Generated data for the examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

BATCHES = 4
WORDS = "a any bird blue box cat day dog garden green happy house kind mat on quick ran red sat slow song tree".split()


def images(size: int, channels: int = 3, batch: int = 16) -> Any:
    """Return images with values from 0 to 1, in shuffled batches."""
    made = np.random.default_rng(0).random((BATCHES * batch, size, size, channels), np.float32)
    return tf.data.Dataset.from_tensor_slices(made).shuffle(BATCHES * batch).batch(batch)


def labelled_images(size: int, classes: int, batch: int = 16) -> Any:
    """Return images with the number of a class each, in shuffled batches."""
    generator = np.random.default_rng(0)
    made = generator.random((BATCHES * batch, size, size, 3), np.float32)
    labels = generator.integers(0, classes, BATCHES * batch)
    return tf.data.Dataset.from_tensor_slices((made, labels)).shuffle(BATCHES * batch).batch(batch)


def one_hot_images(size: int, classes: int, batch: int = 16) -> Any:
    """Return images with their classes as vectors of zeros and a one."""

    def hot(image: Any, label: Any) -> Any:
        return image, tf.one_hot(label, classes)

    return labelled_images(size, classes, batch).map(hot, num_parallel_calls=tf.data.AUTOTUNE).prefetch(2)


def pairs(size: int, batch: int = 16) -> Any:
    """Return pairs of images, the second a little noisier, in shuffled batches."""
    generator = np.random.default_rng(0)
    anchors = generator.random((BATCHES * batch, size, size, 3), np.float32)
    positives = anchors + 0.05 * generator.standard_normal(anchors.shape, np.float32)
    return tf.data.Dataset.from_tensor_slices((anchors, positives)).shuffle(BATCHES * batch).batch(batch).prefetch(1)


def masked_images(size: int, classes: int, batch: int = 8, *, channel: bool = False) -> Any:
    """Return images with the class of every pixel, whose last axis is ``channel`` or the width."""
    generator = np.random.default_rng(0)
    made = generator.integers(0, 256, (BATCHES * batch, size, size, 3), np.uint8)
    masks = generator.integers(0, classes, (BATCHES * batch, size, size, 1), np.uint8)

    def decode(image: Any, mask: Any) -> Any:
        return tf.cast(image, tf.float32) / 127.5 - 1.0, mask if channel else tf.cast(mask[..., 0], tf.int32)

    slices = tf.data.Dataset.from_tensor_slices((made, masks)).map(decode, num_parallel_calls=tf.data.AUTOTUNE)
    return slices.shuffle(BATCHES * batch).batch(batch).prefetch(tf.data.AUTOTUNE)


def sentences(words: int, length: int, batch: int = 16) -> Any:
    """Return numbers of words, ended by zeros, in shuffled batches."""
    generator = np.random.default_rng(0)
    made = generator.integers(1, words, (BATCHES * batch, length), np.int64)
    made *= np.arange(length) < generator.integers(length // 2, length + 1, (BATCHES * batch, 1))
    return tf.data.Dataset.from_tensor_slices(made).shuffle(BATCHES * batch).batch(batch)


def texts(words: int, batch: int = 16) -> Any:
    """Return sentences as strings, in batches."""
    return tf.data.Dataset.from_tensor_slices(_sentences(words, batch)).batch(batch)


def labelled_texts(words: int, classes: int, batch: int = 16) -> Any:
    """Return sentences as strings with the number of a class each, in batches."""
    labels = np.random.default_rng(0).integers(0, classes, BATCHES * batch)
    return tf.data.Dataset.from_tensor_slices((_sentences(words, batch), labels)).batch(batch)


def _sentences(words: int, batch: int) -> list[str]:
    generator = np.random.default_rng(0)
    return [" ".join(generator.choice(WORDS, generator.integers(words // 2, words))) for _ in range(BATCHES * batch)]
