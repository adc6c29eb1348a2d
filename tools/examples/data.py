"""Generated data for the examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

BATCHES = 4


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
