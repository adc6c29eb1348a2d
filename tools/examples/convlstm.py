"""Convolutional LSTM: sees a video, and is to tell each next frame."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tools.examples import data
from tools.examples.running import Made, run

SIZE, FRAMES = 24, 10


def videos(batch: int = 8) -> Any:
    """Return videos of moving squares, and the same one frame later."""
    generator, count = np.random.default_rng(0), data.BATCHES * batch
    made = np.zeros((count, FRAMES + 1, SIZE, SIZE, 1), np.float32)
    for video, (row, column) in zip(made, generator.integers(0, SIZE - 6, (count, 2)), strict=True):
        for time, frame in enumerate(video):
            frame[(row + time) % SIZE :, (column + time) % SIZE :][:5, :5] = 1.0

    def shifted(frames: Any) -> Any:
        return frames[:-1], frames[1:]

    return tf.data.Dataset.from_tensor_slices(made).map(shifted).shuffle(count).batch(batch)


def make() -> Made:
    """Return the model and its data."""
    inputs = keras.Input((None, SIZE, SIZE, 1))
    x = inputs
    for kernel in (5, 3, 1):
        x = layers.ConvLSTM2D(16, kernel, padding="same", return_sequences=True, activation="relu")(x)
        if kernel > 1:
            x = layers.BatchNormalization()(x)
    x = layers.Conv3D(1, (3, 3, 3), activation="sigmoid", padding="same")(x)
    model = keras.Model(inputs, x)
    model.compile(loss=keras.losses.binary_crossentropy, optimizer=keras.optimizers.Adam())
    return model, videos()


if __name__ == "__main__":
    run(make)
