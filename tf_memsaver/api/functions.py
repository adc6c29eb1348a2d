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
    """Return a ``tf.function`` that computes the same as ``function``, with the same variables, and needs less memory.

    It saves memory when you take gradients through it, with a tape around the call. In a ``tf.function``, the gradients
    are the same bit for bit. The function needs nothing of Keras: methods of a ``tf.Module`` and functions of a loaded
    SavedModel work. A plan chooses single operations, so it can keep a matrix product and recompute the softmax after
    it; ``keep``, ``recompute`` and ``candidates`` are names of operations.

    Example::

        smaller = tf_memsaver.optimize_function(function, tf.TensorSpec((None, 256)), batch_size=1024)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(smaller(x))

    Args:
      function: a ``tf.function``, a concrete function, or a Python function to trace.
      *specs: the arguments to trace it with: ``tf.TensorSpec``, or Python values for arguments that are not tensors;
        none for a concrete function. The size of the first dimension may be unknown, and then stays free.
      batch_size: the size to plan for if the first dimension is free; not needed if all sizes are known.
      budget: as in ``optimize``, but memory that the training step takes outside the function is not counted.

    Returns:
      A ``tf.function`` with the plan in its attribute ``memsaver_plan``. It accepts tensors that match the specs; other
      Python values than those in ``specs`` are an error.

    Raises:
      InvalidRequestError: the first dimension is free and ``batch_size`` is missing, or an argument is not valid.
      UnknownDimensionError: the size of a dimension other than the first is not known.
      UnsupportedModelError: the function uses no trainable variable, or returns nothing that has a gradient.
      MemsaverError: the errors of ``search_plan``.
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
    """Write a copy of a SavedModel that trains in less memory, and return the plans by function name.

    The model's Python code is not needed, and programs that load the copy do not need tf_memsaver. Functions that
    gradients go through are rewritten as by ``optimize_function``: those traced with ``training=True``, and those
    without a ``training`` argument that use trainable variables. Serving signatures, variables and their names, assets
    and all other objects are copied.

    Example::

        plans = tf_memsaver.rewrite_saved_model("saved_model", "rewritten", batch_size=32, budget="2GiB")

    Args:
      source: the folder of a SavedModel.
      target: the folder to write.
      batch_size: the size to plan for if the first dimension is free.
      budget: as in ``optimize_function``.

    Raises:
      InvalidRequestError: ``source`` is not a readable SavedModel or has no such function, or ``target`` cannot be
        written to (an empty path, a folder with other files, the source itself).
      OutputExistsError: ``target`` exists and may not be replaced.
      UnsupportedModelError: nothing in the SavedModel can be trained.
      MemsaverError: the errors of ``optimize_function``.
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
