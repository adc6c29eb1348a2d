"""Which of its backends Keras runs on, asked before Keras is imported: the import fails where one is missing.

Read from Keras 3.12 to 3.15: ``backend/config.py``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tf_memsaver.errors import UnsupportedModelError

TENSORFLOW = "tensorflow"


def check_backend(name: str = "") -> None:
    """Check that Keras runs, or will run, on TensorFlow; ``name`` is what it is to run on, where that is known.

    Raises:
      UnsupportedModelError: it does not.
    """
    name = name or backend()
    if name != TENSORFLOW:
        raise UnsupportedModelError(
            f"Keras runs on its '{name}' backend; tf_memsaver needs TensorFlow. Set the environment variable "
            f"KERAS_BACKEND=tensorflow before Keras is imported."
        )


def backend() -> str:
    """Return the backend that Keras has or, before it is imported, will have."""
    loaded: Any = getattr(sys.modules.get("keras"), "backend", None)
    if loaded is not None:
        return str(loaded.backend())
    return os.environ.get("KERAS_BACKEND") or _configured()


def _configured() -> str:
    """Return the backend that Keras's own file names; a file that cannot be read names none."""
    home = os.environ.get("KERAS_HOME", "~/.keras")
    try:
        settings = json.loads(Path(home, "keras.json").expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return TENSORFLOW
    return str(settings.get("backend", TENSORFLOW)) if isinstance(settings, dict) else TENSORFLOW
