"""The seeds of random numbers that have none of their own, as a trace reads them.

Read from Keras 3.12 to 3.15: ``utils/rng_utils.py``, ``random/seed_generator.py``.
"""

from __future__ import annotations

import weakref
from typing import Any

from keras.src.backend.common import global_state
from tensorflow.python.eager import context


def seeds_in_force() -> tuple[Any, ...]:
    """Return what ``tf.random.set_seed`` and ``keras.utils.set_random_seed`` change; equal to what is the same."""
    generator = global_state.get_global_attribute("global_seed_generator")
    return context.global_seed(), generator and weakref.ref(generator)
