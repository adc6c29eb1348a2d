"""From characters to characters: an LSTM reads a text, and hands its state to another that writes one.

For inference, new models are made of the trained one's layers.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tools.examples import data
from tools.examples.running import Made, run

ENCODER_TOKENS, DECODER_TOKENS, LATENT = 70, 90, 256
READ, WRITTEN = 20, 30


def texts(batch: int = 256) -> Any:
    """Return what is read, what was written so far, and what comes next; each character is a one among zeros."""
    generator, count = np.random.default_rng(0), data.BATCHES * batch
    read = np.eye(ENCODER_TOKENS, dtype="float32")[generator.integers(0, ENCODER_TOKENS, (count, READ))]
    characters = generator.integers(0, DECODER_TOKENS, (count, WRITTEN + 1))
    written = np.eye(DECODER_TOKENS, dtype="float32")[characters]
    slices = tf.data.Dataset.from_tensor_slices(((read, written[:, :-1]), written[:, 1:]))
    return slices.shuffle(count).batch(batch)


def make() -> Made:
    """Return the model and its data."""
    encoder_inputs = keras.Input((None, ENCODER_TOKENS))
    _, state_h, state_c = layers.LSTM(LATENT, return_state=True)(encoder_inputs)
    decoder_inputs = keras.Input((None, DECODER_TOKENS))
    decoder_lstm = layers.LSTM(LATENT, return_sequences=True, return_state=True)
    x, _, _ = decoder_lstm(decoder_inputs, initial_state=[state_h, state_c])
    outputs = layers.Dense(DECODER_TOKENS, activation="softmax")(x)
    model = keras.Model([encoder_inputs, decoder_inputs], outputs)
    model.compile(optimizer="rmsprop", loss="categorical_crossentropy", metrics=["accuracy"])
    return model, texts()


def inference_models(model: Any) -> tuple[Any, Any]:
    """Return an encoder and a decoder of one step, both made of the layers of a trained model."""
    _, state_h, state_c = model.layers[2].output
    encoder = keras.Model(model.input[0], [state_h, state_c])
    decoder_inputs = model.input[1]
    states = [keras.Input((LATENT,)), keras.Input((LATENT,))]
    x, state_h, state_c = model.layers[3](decoder_inputs, initial_state=states)
    decoder = keras.Model([decoder_inputs, *states], [model.layers[4](x), state_h, state_c])
    return encoder, decoder


def write(model: Any, read: Any) -> list[int]:
    """Return the characters that a trained model writes for one text."""
    encoder, decoder = inference_models(model)
    states = encoder.predict(read, verbose=0)
    last, written = np.zeros((1, 1, DECODER_TOKENS), np.float32), []
    for _ in range(WRITTEN):
        found, *states = decoder.predict([last, *states], verbose=0)
        written.append(int(found[0, -1].argmax()))
        last = np.eye(DECODER_TOKENS, dtype="float32")[written[-1]][None, None]
    return written


if __name__ == "__main__":
    run(make)
