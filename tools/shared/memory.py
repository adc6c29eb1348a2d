"""What the allocator says. Importing this has the CPU's memory counted, if no operation has run before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_memsaver.compat.counting import count_memory

count_memory()


REGION_BYTES = 6 << 30
"""More than any step takes that is run here. It is reserved, not touched: the system gives pages when they are."""


def one_region() -> None:
    """Have the CPU's allocator take one region, as a GPU's does, before anything else is made.

    By itself it takes regions that double: a large block, as XLA's temporaries are, is rounded up to one (TensorFlow
    2.21: ``xla/tsl/framework/bfc_allocator.cc: Extend``).
    """
    with tf.device("CPU:0"):
        tf.raw_ops.Empty(shape=[REGION_BYTES >> 20, 1 << 20], dtype=tf.uint8, init=False)


def live(device: str = "CPU:0") -> int:
    """Return the bytes that are in use."""
    return int(tf.config.experimental.get_memory_info(device)["current"])


def peak(device: str = "CPU:0") -> int:
    """Return the most bytes that were in use since ``reset_peak``."""
    return int(tf.config.experimental.get_memory_info(device)["peak"])


def reset_peak(device: str = "CPU:0") -> None:
    """Begin to count the most bytes anew."""
    tf.config.experimental.reset_memory_stats(device)


def peak_over_live(run: Callable[[], Any], device: str = "CPU:0") -> int:
    """Return the most bytes that were in use while something ran, over what was in use before it."""
    before = live(device)
    reset_peak(device)
    result = run()
    most = peak(device) - before
    del result
    return most
