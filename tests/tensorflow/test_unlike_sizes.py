"""Sums of tensors of which only gradients tell that they are of one size: they stay stored."""

from __future__ import annotations

from typing import Any

import keras
import pytest
from keras import layers

from tests.tensorflow.plans import optimized_in_segments, segments_of
from tf_memsaver.capture.model_step import capture_graph
from tools.shared.training import assert_trains_alike


def _conv(x: Any, strides: int = 1, activation: str | None = "relu") -> Any:
    return layers.Conv2D(16, 3, strides=strides, padding="same", activation=activation)(x)


def two_resolutions(interpolation: str) -> Any:
    """Two branches of an HRNet: ``across`` gives the upper one to the lower one, and ``both`` adds them."""
    inputs = keras.Input((32, 32, 3))
    upper = _conv(inputs)
    lower = _conv(upper, strides=2)
    up = layers.UpSampling2D(interpolation=interpolation, name="up")(_conv(lower, activation=None))
    upper = layers.ReLU()(layers.Add(name="upper")([upper, up]))
    across = layers.BatchNormalization(name="across")(_conv(upper, strides=2, activation=None))
    x = layers.Add(name="both")([across, layers.ReLU()(_conv(lower, activation=None))])
    x = layers.ReLU(name="last")(x)
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling2D(name="mean")(_conv(x))))


def _pinned(model: Any) -> list[str]:
    units = capture_graph(model, batch_size=4, granularity="layer").units
    return [unit.label for unit in units if "only gradients tell" in unit.pinned]


def _train(model: Any, *spans: tuple[str, str]) -> None:
    names = [unit.label for unit in capture_graph(model, batch_size=4, granularity="layer").units]
    optimized = optimized_in_segments(model, segments_of(names, spans), 4, "layer")
    assert_trains_alike(model, optimized, modes=("graph",), free_batch=True)


def test_such_a_sum_is_stored() -> None:
    """``tf.repeat`` hides sizes: the upper branch has a batch size of its own, until a ReLU's gradient tells it."""
    keras.utils.set_random_seed(0)
    model = two_resolutions("nearest")
    assert _pinned(model) == ["both"]
    with pytest.raises(AssertionError, match="differ"):
        _train(model, ("conv2d", "last"))


def test_such_a_sum_may_stand_beside_segments() -> None:
    keras.utils.set_random_seed(0)
    model = two_resolutions("nearest")
    names = [layer.name for layer in model.layers]
    _train(model, (names[1], "upper"), ("last", "mean"))


def test_a_sum_of_known_sizes_is_not() -> None:
    keras.utils.set_random_seed(0)
    model = two_resolutions("bilinear")
    assert _pinned(model) == []
    _train(model, (model.layers[1].name, "last"))
