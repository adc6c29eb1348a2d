"""Packages that some examples need and that are not of the tools' own environment."""

from __future__ import annotations

import importlib
from typing import Any


class MissingPackageError(ImportError):
    """An example needs a package that is not installed; what it says is how to get it."""


def keras_hub() -> Any:
    """Return KerasHub.

    Raises:
      MissingPackageError: it is not installed.
    """
    try:
        return importlib.import_module("keras_hub")
    except ImportError as error:
        raise MissingPackageError(
            f"this example needs KerasHub: pip install keras-hub tensorflow-text ({error})"
        ) from error
