"""What an error says in one line: those of TensorFlow's kernels and of Keras's calls begin with where it happened."""

from __future__ import annotations

import re

import tensorflow as tf

_IN_CALL = re.compile(r"Exception encountered when calling .*?\x1b\[1m(.*)\x1b\[0m\s*Arguments received by", re.DOTALL)
"""What Keras puts around the message of an error in a call (Keras 3.15, ``utils/traceback_utils.py``)."""

_CONVERTED = re.compile(r"in user code:\n\n.*?\n\n(.*)", re.DOTALL)
"""A message where TensorFlow has converted Python code: the way to the error comes first, then its type and what it
says (TensorFlow 2.20 and 2.21, ``python/autograph/pyct/error_utils.py``)."""


def first_line(error: Exception) -> str:
    """Return the reason that an error gives, in one line, with its type."""
    text, kind = str(error), type(error).__name__
    while inside := _IN_CALL.search(text) or _CONVERTED.search(text):
        text = inside[1]
    lines = [line.strip() for line in text.strip().removeprefix(f"{kind}:").splitlines() if line.strip()]
    if isinstance(error, tf.errors.OpError):
        # TensorFlow says where it happened, then what did, then which node it was (``[[{{node …}}]]``).
        node = next((place for place, line in enumerate(lines) if line.startswith("[[{{")), 0)
        lines = lines[max(0, node - 1) :]
    return f"{kind}: {lines[0].rstrip('.')}" if lines else kind
