"""Sums of tensors of which only gradients tell that they are of one size: they stay stored."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from tests.tensorflow.plans import optimized_in_segments, segments_of
from tf_memsaver.capture.model_step import capture_graph
from tools.shared.models.small import two_resolutions
from tools.shared.training import assert_trains_alike


def _pinned(model: Any) -> list[str]:
    units = capture_graph(model, batch_size=4, granularity="layer").units
    return [unit.label for unit in units if "only gradients tell" in unit.pinned]


def _train(model: Any, *spans: tuple[str, str]) -> None:
    """Train a model and one with segments of these layers alike; the first layer is called ""."""
    names = ["", *(unit.label for unit in capture_graph(model, batch_size=4, granularity="layer").units[1:])]
    optimized = optimized_in_segments(model, segments_of(names, spans), 4, "layer")
    assert_trains_alike(model, optimized, modes=("graph",), free_batch=True)


def test_such_a_sum_is_stored() -> None:
    """``tf.repeat`` hides sizes: the upper branch has a batch size of its own, until a ReLU's gradient tells it."""
    keras.utils.set_random_seed(0)
    model = two_resolutions("nearest")
    assert _pinned(model) == ["both"]
    with pytest.raises(AssertionError, match="differ"):
        _train(model, ("", "last"))


def test_such_a_sum_may_stand_beside_segments() -> None:
    keras.utils.set_random_seed(0)
    model = two_resolutions("nearest")
    _train(model, ("", "upper"), ("last", "mean"))


def test_a_sum_of_known_sizes_is_not() -> None:
    keras.utils.set_random_seed(0)
    model = two_resolutions("bilinear")
    assert _pinned(model) == []
    _train(model, ("", "last"))
