"""The verbs for functions of TensorFlow and for SavedModels."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tf_memsaver.api.asked import request_of, tell_of
from tf_memsaver.capture.function_step import capture_function, concrete_function
from tf_memsaver.compat.versions import versions
from tf_memsaver.options.checks import path
from tf_memsaver.options.table import FunctionOptions, SavedModelOptions
from tf_memsaver.options.verbs import takes
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import solve
from tf_memsaver.program.function_calls import FunctionCalls
from tf_memsaver.rewrite.optimized_function import make_optimized_function
from tf_memsaver.saved import saved_model

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes(FunctionOptions)
def optimize_function(function: Any, *specs: Any, **options: Unpack[FunctionOptions]) -> Any:
    """Return a ``tf.function`` that computes what ``function`` does, over its variables, and trains in less memory.

    Segments are made of single operations, so that a plan may keep a matrix product and recompute the softmax after
    it; ``keep``, ``recompute`` and ``candidates`` name operations. Nothing of Keras is needed: a plain ``tf.Module``,
    or a function of a loaded SavedModel, will do. Gradients are taken outside, by a tape around the call, and are
    bit-identical in a ``tf.function``.

    Args:
      function: a ``tf.function``, a concrete function, or a Python function to trace.
      *specs: what to trace it with (``tf.TensorSpec``, or Python values for arguments that are no tensors); none for a
        concrete function. A first dimension may be unknown and stays free.
      batch_size: what a free first dimension is planned for. It may be left out where all dimensions are known.
      budget: as in ``optimize``; what the training step takes outside the function is not known, and not counted.

    Returns:
      A ``tf.function`` with the plan in its attribute ``memsaver_plan``. It stands for the trace with the given specs:
      called with another Python value, it raises.

    Raises:
      InvalidRequestError: a dimension is free and there is no ``batch_size``, or an argument has no meaning.
      UnknownDimensionError: a dimension other than the first is unknown.
      UnsupportedModelError: the function uses no trainable variable, or returns nothing that has a gradient.
      MemsaverError: what ``search_plan`` raises for plans.
    """
    request = request_of(options, granularity="op")
    calls = FunctionCalls(concrete_function(function, specs))
    plan = _function_plan(calls, options["batch_size"], request)
    optimized = make_optimized_function(calls, plan)
    tell_of(f"function '{calls.name}'", plan)
    return optimized


@takes(SavedModelOptions)
def rewrite_saved_model(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    **options: Unpack[SavedModelOptions],
) -> dict[str, Plan]:
    """Write a SavedModel anew so that training through its functions takes less memory; return the plans by function.

    The model's Python code is not needed, and neither is tf_memsaver where the result is loaded. Functions that
    gradients can be taken through are rewritten as ``optimize_function`` does it: those traced with ``training=True``,
    and those without such an argument that use trainable variables. Serving signatures, variables and their names,
    assets and all other objects are carried over.

    Args:
      source: the folder of a SavedModel.
      target: the folder to write.
      batch_size: what a free first dimension is planned for.
      budget: as in ``optimize_function``.

    Raises:
      InvalidRequestError: ``source`` is no readable SavedModel, or has no such function; or ``target`` is no place for
        output (an empty path, a folder in use, the source).
      OutputExistsError: ``target`` exists and may not be replaced.
      UnsupportedModelError: nothing in it can be trained.
      MemsaverError: what ``optimize_function`` raises.
    """
    request = request_of(options, granularity="op")
    plans = saved_model.rewrite(
        source=path("source", source),
        target=target,
        functions=options["functions"],
        overwrite=options["overwrite"],
        planner=lambda calls: _function_plan(calls, options["batch_size"], request),
    )
    for name, plan in plans.items():
        tell_of(f"function '{name}'", plan)
    return plans


def _function_plan(calls: FunctionCalls, batch_size: int | None, request: Request) -> Plan:
    graph = capture_function(calls, batch_size=batch_size, profile=request.profile)
    return solve(graph, request, versions=versions())
