"""What an error says in one line: those of TensorFlow's kernels begin with where it happened."""

from __future__ import annotations

import tensorflow as tf


def first_line(error: Exception) -> str:
    """Return the reason that an error gives, in one line, with its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, tf.errors.OpError):
        # TensorFlow says where it happened, then what did, then which node it was (``[[{{node …}}]]``).
        node = next((place for place, line in enumerate(lines) if line.startswith("[[{{")), 0)
        lines = lines[max(0, node - 1) :]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
