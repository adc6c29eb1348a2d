"""What the allocator says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf


def peak_over_live(run: Callable[[], Any], device: str = "CPU:0") -> int:
    """Return the most bytes that were in use while something ran, over what was in use before it."""
    before = tf.config.experimental.get_memory_info(device)["current"]
    tf.config.experimental.reset_memory_stats(device)
    result = run()
    peak = tf.config.experimental.get_memory_info(device)["peak"] - before
    del result
    return int(peak)
