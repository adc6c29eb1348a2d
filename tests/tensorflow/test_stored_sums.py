"""Sums that a first run would join with others otherwise than a plain step does: they stay stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras import layers

from tests.tensorflow.plans import optimized_in_segments, segments_of
from tf_memsaver.capture.model_step import capture_graph
from tools.shared.models.small import two_resolutions
from tools.shared.training import assert_trains_alike


def _pinned(model: Any, reason: str = "only gradients tell") -> list[str]:
    units = capture_graph(model, batch_size=4, granularity="layer").units
    return [unit.label for unit in units if reason in unit.pinned]


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


def _attentions(x: Any) -> list[Any]:
    y = layers.LayerNormalization()(x)
    return [x, *(layers.MultiHeadAttention(2, 8)(y, y) for _ in range(2))]


def _attention_and_dense(x: Any) -> list[Any]:
    y = layers.LayerNormalization()(x)
    return [x, layers.MultiHeadAttention(2, 8)(y, y), layers.Dense(16)(layers.Dense(32, "gelu")(y))]


def _dilations(x: Any) -> list[Any]:
    """A dilated convolution has a batch size of its own, and no gradient tells that it is that of the others."""
    y = layers.ReLU()(layers.LayerNormalization()(x))
    return [x, *(layers.Conv1D(16, 3, padding="same", dilation_rate=2, activation=each)(y) for each in ("relu", None))]


@pytest.mark.parametrize("terms", [_attentions, _attention_and_dense, _dilations])
def test_sums_of_what_no_operation_hides_are_not_stored(terms: Callable[[Any], list[Any]]) -> None:
    """Blocks with parallel branches: their sums begin with the same term in a first run, too."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((12, 16))
    for number in range(2):
        x = layers.Activation("tanh", name=f"block{number}")(layers.Add()(terms(x)))
    model = keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D(name="last")(x)))
    assert _pinned(model) == []
    _train(model, ("", "block0"))
    _train(model, ("", "last"))


def _makes_equal_terms() -> Any:
    """Return a model with two sums of three that begin alike: ``a + b`` is a term of both, once it is left once."""
    a = keras.Input((16,))
    b, c, d = (layers.Dense(16, name=name)(a) for name in "bcd")
    first, second = layers.Add(name="first")([a, b, c]), layers.Add(name="second")([a, b, d])
    return _ending(layers.Multiply()([first, second]))


def _is_read_by_equals() -> Any:
    """Return a model with a sum that two equal additions read: it is joined with the one that is left."""
    a = layers.Dense(16, "tanh", name="a")(keras.Input((16,)))
    b, c, d = (layers.Dense(16, name=name)(a) for name in "bcd")
    # As one sum, they are added in the order of their names.
    inner = layers.Add(name="inner")([a, c, d])
    first, second = layers.Add(name="first")([inner, b]), layers.Add(name="second")([b, inner])
    return _ending(layers.Multiply()([layers.Dense(16)(first), second]))


def _ending(x: Any) -> Any:
    outputs = layers.Dense(4)(layers.Dense(16, "relu", name="last")(x))
    return keras.Model(keras.utils.get_source_inputs(x), outputs)


@pytest.mark.parametrize(
    ("make", "stored"),
    [(_makes_equal_terms, ["first", "second"]), (_is_read_by_equals, ["inner", "first", "second"])],
)
def test_sums_with_equal_additions_are_stored(make: Any, stored: list[str]) -> None:
    """Of equal additions graph optimisation leaves one, which decides what is one sum of many terms."""
    keras.utils.set_random_seed(0)
    model = make()
    assert _pinned(model, "added elsewhere, too") == stored
    _train(model, ("", ""), ("last", "last"))
    with pytest.raises(AssertionError, match="differ"):
        _train(model, ("", "first"))
