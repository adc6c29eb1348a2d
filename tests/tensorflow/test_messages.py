"""What an error says in one line."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from tf_memsaver.compat.messages import first_line


def _says_two_lines(x: Any) -> Any:
    if x.shape[0] == 2:
        raise ValueError("the reason\nand more of it")
    return x


def _says_nothing(x: Any) -> Any:
    raise TypeError


def _fails_in_a_layer(x: Any) -> Any:
    layer = keras.layers.Dense(3)
    layer.build((2, 7))
    return layer(x)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_says_two_lines, "ValueError: the reason"),
        (_says_nothing, "TypeError"),
        (
            _fails_in_a_layer,
            # Keras 3.12 words it the second way.
            ("ValueError: Input 0 with name 'None' of layer 'dense", 'ValueError: Input 0 of layer "dense"'),
        ),
    ],
)
@pytest.mark.parametrize("converted", [False, True])
def test_the_reason_stands_once_with_its_type(function: Any, expected: Any, converted: bool) -> None:
    """TensorFlow puts where it happened before the errors of the functions that it converts."""
    with pytest.raises((TypeError, ValueError)) as caught:
        tf.function(function, autograph=converted).get_concrete_function(tf.TensorSpec((2, 3)))
    assert first_line(caught.value).startswith(expected) and first_line(caught.value).count("Error") == 1
