"""tf_memsaver trains TensorFlow and Keras models in less memory, with the same results, under a byte budget.

Importing this package is quick and imports no TensorFlow; the verbs are loaded when they are first used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from tf_memsaver.compat.backend import TENSORFLOW, backend, check_backend
from tf_memsaver.errors import MemsaverError
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.plan.plan import Plan

if TYPE_CHECKING:
    from tf_memsaver.api import (
        apply_plan,
        capture_graph,
        estimate,
        export_saved_model,
        measure,
        memory_time_curve,
        optimize,
        optimize_function,
        rewrite_saved_model,
        search_plan,
        strip,
        verify,
    )
    from tf_memsaver.plan.problem import Problem
    from tf_memsaver.plan.registry import register_planner

__version__ = "0.1.0"

__all__ = [
    "MemsaverError",
    "Plan",
    "Problem",
    "Segment",
    "SegmentMode",
    "apply_plan",
    "capture_graph",
    "estimate",
    "export_saved_model",
    "measure",
    "memory_time_curve",
    "optimize",
    "optimize_function",
    "register_planner",
    "rewrite_saved_model",
    "search_plan",
    "strip",
    "verify",
]

_PLANNING = {"Problem": "tf_memsaver.plan.problem", "register_planner": "tf_memsaver.plan.registry"}


def __getattr__(name: str) -> Any:
    if name in _PLANNING:
        return getattr(importlib.import_module(_PLANNING[name]), name)
    if name in __all__:
        check_backend()
        return getattr(importlib.import_module("tf_memsaver.api"), name)
    raise AttributeError(f"module 'tf_memsaver' has no attribute {name!r}")


if "keras" in sys.modules and backend() == TENSORFLOW:
    # A script that has Keras already may load a saved optimized model before it uses a verb: register its class now.
    importlib.import_module("tf_memsaver.rewrite.optimized_model")
