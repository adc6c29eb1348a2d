"""The compiled metrics are a part of the step that is planned, and are left as they were."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tf_memsaver

SIZE, BATCH = 32, 4
PIXELS = BATCH * SIZE * SIZE


class Counted(keras.metrics.Metric):
    """A metric of somebody's own, which compares every pixel with 50 thresholds."""

    def __init__(self) -> None:
        super().__init__(name="counted")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        levels = keras.ops.reshape(keras.ops.linspace(0.0, 1.0, 50), (50, 1))
        above = keras.ops.cast(keras.ops.reshape(y_pred, (1, -1)) > levels, "float32")
        self.total.assign_add(keras.ops.sum(above * keras.ops.cast(keras.ops.reshape(y_true, (1, -1)), "float32")))

    def result(self) -> Any:
        return self.total + 0.0


class Broken(Counted):
    """One that fails while it is traced without values."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        raise ValueError("no value to look at")


def segmenter(*metrics: Any) -> Any:
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((SIZE, SIZE, 3))
    for _ in range(12):
        x = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    model = keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(x))
    model.compile("sgd", "binary_crossentropy", metrics=list(metrics), jit_compile=False)
    return model


def data() -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    x = generator.random((BATCH, SIZE, SIZE, 3)).astype("float32")
    return x, (generator.random((BATCH, SIZE, SIZE, 1)) > 0.5).astype("float32")


def test_what_metrics_take_is_predicted() -> None:
    without = tf_memsaver.estimate(segmenter(), data=data()).peak_bytes
    assert tf_memsaver.estimate(segmenter(Counted()), data=data()).peak_bytes > without + 4 * 50 * PIXELS // 2
    # What made-up targets come to says nothing of a metric.
    made_up = tf_memsaver.estimate(segmenter(), batch_size=BATCH).peak_bytes
    assert tf_memsaver.estimate(segmenter(Counted()), batch_size=BATCH).peak_bytes == made_up


def test_metrics_report_what_they_would_have_reported() -> None:
    histories = []
    for optimized in (False, True):
        model = segmenter(Counted(), "accuracy", keras.metrics.AUC(num_thresholds=50, name="auc"))
        if optimized:
            tf_memsaver.estimate(model, data=data())
            model = tf_memsaver.optimize(model, data=data(), strategy="min_peak")
            assert any(segment.mode.value == "recompute" for segment in model.memsaver_plan.segments)
        x, y = data()
        histories.append(model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0).history)
    assert histories[0] == histories[1]


def test_metrics_that_cannot_be_traced_are_left_out_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    tf_memsaver.estimate(segmenter(Broken()), data=data())
    assert any(
        "its metrics cannot be traced (ValueError: no value to look at)" in each.getMessage() for each in caplog.records
    )
