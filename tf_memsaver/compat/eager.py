"""The eager runtime: single operations by name, and its switch for deterministic kernels.

Read from TensorFlow 2.20 and 2.21: ``tensorflow/python/eager/execute.py`` and ``context.py``,
``tensorflow/python/framework/config.py``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context, execute
from tensorflow.python.framework import config


def operation_by_itself(
    op_type: str, inputs: Sequence[Any], attributes: Sequence[Any], outputs: int
) -> Callable[[], Any]:
    """Return what runs an operation of this type, which has so many outputs, on eager tensors.

    ``attributes`` are names and values by turns, dtypes by number, as the runtime takes them (``execute.execute``).
    """
    return functools.partial(execute.execute, op_type.encode(), outputs, inputs, attributes, context.context())


def is_deterministic() -> bool:
    """Whether TensorFlow uses deterministic kernels alone; there is no public way to ask."""
    return bool(config.is_op_determinism_enabled())


@contextlib.contextmanager
def deterministic_operations() -> Iterator[None]:
    """Enable op determinism and leave it as it was; there is no public way back."""
    enabled = is_deterministic()
    tf.config.experimental.enable_op_determinism()
    try:
        yield
    finally:
        if not enabled:
            config.disable_op_determinism()
