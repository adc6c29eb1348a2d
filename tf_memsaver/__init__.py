"""tf_memsaver trains TensorFlow and Keras models in less memory, with the same results, under a byte budget.

Importing this package is quick and imports no TensorFlow; the verbs are loaded when they are first used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from tf_memsaver.errors import MemsaverError
from tf_memsaver.plan.types import Plan

if TYPE_CHECKING:
    from tf_memsaver.api import (
        apply_plan,
        capture_graph,
        estimate,
        export_saved_model,
        measure,
        optimize,
        optimize_function,
        rewrite_saved_model,
        search_plan,
        strip,
        verify,
    )

__version__ = "0.1.0"

__all__ = [
    "MemsaverError",
    "Plan",
    "apply_plan",
    "capture_graph",
    "estimate",
    "export_saved_model",
    "measure",
    "optimize",
    "optimize_function",
    "rewrite_saved_model",
    "search_plan",
    "strip",
    "verify",
]

_VERBS = frozenset(__all__) - {"MemsaverError", "Plan"}


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return getattr(importlib.import_module("tf_memsaver.api"), name)
    raise AttributeError(f"module 'tf_memsaver' has no attribute {name!r}")


if "keras" in sys.modules:
    # A script that has Keras already may load a saved optimized model before it uses a verb: register its class now.
    importlib.import_module("tf_memsaver.rewrite.keras_model")
