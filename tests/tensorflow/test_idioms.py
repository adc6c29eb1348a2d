"""Blocks as people write them: the default plan saves memory for each way of writing one, and trains alike.

A way that is in front of a cut costs the saving of a whole model, and nothing else tells: results are the same.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_memsaver
from tools.shared.models.idioms import IDIOMS, LENGTH, WIDTH, Idiom
from tools.shared.records import differing
from tools.shared.training import fit

BATCH_SIZE = 8

LEAST_SAVED = 0.3
"""Share of the plain step's memory."""


class OwnStep(Idiom):
    """A model of such blocks that says itself what a training step does."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            loss += sum(self.losses)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.filterwarnings("ignore:(?s).*does not have a `build")  # Most people write none.
@pytest.mark.parametrize("kind", [Idiom, OwnStep], ids=["fit", "step"])
@pytest.mark.parametrize("way", IDIOMS)
def test_a_way_of_writing_a_block_is_planned_and_trains_alike(way: str, kind: Any) -> None:
    numbers = np.random.default_rng(0)
    x = numbers.standard_normal((2 * BATCH_SIZE + 3, LENGTH, WIDTH)).astype(np.float32)
    y = numbers.standard_normal((len(x), 1)).astype(np.float32)

    def fitted(optimizes: bool) -> tuple[Any, Any]:
        keras.backend.clear_session()  # Names count: graph optimisation sorts by them.
        keras.utils.set_random_seed(0)
        model = kind(way)
        model.compile("adam", "mse", jit_compile=False)
        model(x[:1], training=True)
        if optimizes:
            model = tf_memsaver.optimize(model, data=(x[:BATCH_SIZE], y[:BATCH_SIZE]), max_overhead=1.0)
        return fit(model, x, y, batch_size=BATCH_SIZE, epochs=2), model

    plain, _ = fitted(False)
    found, model = fitted(True)
    plan = model.memsaver_plan
    assert plan.peak_bytes < (1 - LEAST_SAVED) * plan.plain_peak_bytes, plan
    assert not differing(plain, found)
