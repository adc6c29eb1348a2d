"""The version of this package, and of what it runs on."""

from __future__ import annotations

import platform

__version__ = "0.2.0"
"""The one place where it is written: pyproject.toml reads it here."""


def versions() -> tuple[tuple[str, str], ...]:
    """Return the versions that a plan or a result was made with, sorted by name."""
    # The version of this package is read where TensorFlow must not be loaded.
    import keras
    import tensorflow as tf

    return (
        ("keras", keras.__version__),
        ("python", platform.python_version()),
        ("tensorflow", tf.__version__),
        ("tf_memsaver", __version__),
    )
