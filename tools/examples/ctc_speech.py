"""Speech to characters: spectrograms of any length, recurrent layers both ways, and a loss without alignment."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tools.examples import data
from tools.examples.running import Made, run

CHARACTERS, FFT, STEP = 30, 256, 160


def speech(batch: int = 8) -> Any:
    """Return spectrograms and numbers of characters, filled with zeros to the longest of each batch."""
    generator, count = np.random.default_rng(0), data.BATCHES * batch
    lengths = generator.integers(24_000, 32_000, count)
    sounds = tf.ragged.constant([generator.standard_normal(length).astype(np.float32) for length in lengths])
    spoken = tf.ragged.constant(
        [generator.integers(1, CHARACTERS, size).astype(np.int64) for size in generator.integers(10, 20, count)]
    )

    def spectrogram(sound: Any, label: Any) -> Any:
        made = tf.abs(tf.signal.stft(sound, frame_length=256, frame_step=STEP, fft_length=FFT))
        made = tf.pow(made, 0.5)
        mean, spread = tf.math.reduce_mean(made, 1, keepdims=True), tf.math.reduce_std(made, 1, keepdims=True)
        return (made - mean) / (spread + 1e-10), label

    slices = tf.data.Dataset.from_tensor_slices((sounds, spoken)).map(spectrogram, num_parallel_calls=2)
    return slices.shuffle(count).padded_batch(batch).prefetch(tf.data.AUTOTUNE)


def ctc_loss(y_true: Any, y_pred: Any) -> Any:
    """Return the loss of any alignment."""
    lengths = ops.full((ops.shape(y_pred)[0],), ops.shape(y_pred)[1], dtype="int32")
    labels = ops.sum(ops.cast(ops.not_equal(y_true, 0), "int32"), axis=-1)
    return ops.ctc_loss(ops.cast(y_true, "int32"), y_pred, labels, lengths, mask_index=0)


def make() -> Made:
    """Return the model and its data."""
    bins = FFT // 2 + 1
    inputs = keras.Input((None, bins), name="spectrogram")
    x = layers.Reshape((-1, bins, 1))(inputs)
    for number, (kernel, strides) in enumerate((((11, 41), (2, 2)), ((11, 21), (1, 2))), 1):
        x = layers.Conv2D(16, kernel, strides=strides, padding="same", use_bias=False, name=f"conv_{number}")(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Reshape((-1, x.shape[-2] * x.shape[-1]))(x)
    for number in range(2):
        x = layers.Bidirectional(layers.LSTM(96, return_sequences=True), name=f"bidirectional_{number}")(x)
        x = layers.Dropout(0.5)(x)
    x = layers.Dropout(0.5)(layers.Dense(192, activation="relu")(x))
    model = keras.Model(inputs, layers.Dense(CHARACTERS)(x), name="speech")
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-4), loss=ctc_loss)
    return model, speech()


if __name__ == "__main__":
    run(make)
