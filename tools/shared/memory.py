"""What the allocator says. Importing this has the CPU's memory counted, if no operation has run before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_memsaver.compat.counting import count_memory

count_memory()


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
