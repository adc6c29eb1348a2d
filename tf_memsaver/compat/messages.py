"""What an error says in one line: those of TensorFlow's kernels and of Keras's calls begin with where it happened."""

from __future__ import annotations

import re

import tensorflow as tf

_IN_CALL = re.compile(r"Exception encountered when calling .*?\x1b\[1m(.*)\x1b\[0m\s*Arguments received by", re.DOTALL)
"""What Keras puts around the message of an error in a call (Keras 3.15, ``utils/traceback_utils.py``)."""

_CONVERTED = "in user code"
"""Begins a message where TensorFlow has converted Python code: the way to the error follows, then what it is."""


def first_line(error: Exception) -> str:
    """Return the reason that an error gives, in one line, with its type."""
    text = str(error)
    in_call = _IN_CALL.search(text)
    lines = [line.strip() for line in (in_call[1] if in_call else text).splitlines() if line.strip()]
    if lines and lines[0].startswith(_CONVERTED):
        lines = lines[-1:]
    if isinstance(error, tf.errors.OpError):
        # TensorFlow says where it happened, then what did, then which node it was (``[[{{node …}}]]``).
        node = next((place for place, line in enumerate(lines) if line.startswith("[[{{")), 0)
        lines = lines[max(0, node - 1) :]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
