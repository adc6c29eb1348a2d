"""tf_memsaver trains TensorFlow and Keras models in less memory, with the same results, under a byte budget.

Importing this package is quick and imports no TensorFlow; the verbs are loaded when they are first used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from tf_memsaver.compat.backend import TENSORFLOW, backend, check_backend
from tf_memsaver.compat.versions import __version__
from tf_memsaver.errors import (
    CertificationError,
    HintError,
    InfeasibleBudgetError,
    InfeasibleOverheadError,
    InvalidRequestError,
    MeasurementError,
    MemsaverError,
    MissingExtraError,
    OutputError,
    OutputExistsError,
    PlanFormatError,
    PlanMismatchError,
    SecondDerivativeError,
    UnknownDimensionError,
    UnsupportedModelError,
)
from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.request import Request

if TYPE_CHECKING:
    from tf_memsaver import callbacks
    from tf_memsaver.api import (
        Measurement,
        Trace,
        Verification,
        apply_plan,
        capture_graph,
        estimate,
        export_saved_model,
        max_batch_size,
        measure,
        memory_time_curve,
        optimize,
        optimize_function,
        report,
        rewrite_saved_model,
        search_plan,
        strip,
        trace,
        verify,
    )
    from tf_memsaver.judge.estimate import Estimate
    from tf_memsaver.plan.problem import Problem
    from tf_memsaver.plan.registry import register_planner
    from tf_memsaver.planners.largest import LargestBatch

__all__ = [
    "CertificationError",
    "Estimate",
    "Graph",
    "HintError",
    "InfeasibleBudgetError",
    "InfeasibleOverheadError",
    "InvalidRequestError",
    "LargestBatch",
    "Measurement",
    "MeasurementError",
    "MemsaverError",
    "MissingExtraError",
    "OutputError",
    "OutputExistsError",
    "Plan",
    "PlanFormatError",
    "PlanMismatchError",
    "Problem",
    "Request",
    "SecondDerivativeError",
    "Segment",
    "SegmentMode",
    "Trace",
    "UnknownDimensionError",
    "UnsupportedModelError",
    "Verification",
    "__version__",
    "apply_plan",
    "callbacks",
    "capture_graph",
    "estimate",
    "export_saved_model",
    "max_batch_size",
    "measure",
    "memory_time_curve",
    "optimize",
    "optimize_function",
    "register_planner",
    "report",
    "rewrite_saved_model",
    "search_plan",
    "strip",
    "trace",
    "verify",
]

_API, _CALLBACKS = "tf_memsaver.api", "tf_memsaver.callbacks"
_LOADED_WHEN_USED = {
    **{name: _API for name in __all__ if name not in globals()},
    "Estimate": "tf_memsaver.judge.estimate",
    "LargestBatch": "tf_memsaver.planners.largest",
    "Problem": "tf_memsaver.plan.problem",
    "callbacks": _CALLBACKS,
    "register_planner": "tf_memsaver.plan.registry",
}


def __getattr__(name: str) -> Any:
    module = _LOADED_WHEN_USED.get(name)
    if module is None:
        raise AttributeError(f"module 'tf_memsaver' has no attribute {name!r}")
    if module in (_API, _CALLBACKS):
        check_backend()
    found = importlib.import_module(module)
    return found if module == _CALLBACKS else getattr(found, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


if "keras" in sys.modules and backend() == TENSORFLOW:
    # A script that has Keras already may load a saved optimized model before it uses a verb: register its class now.
    importlib.import_module("tf_memsaver.rewrite.optimized_model")
