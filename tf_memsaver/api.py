"""The verbs: each a few lines over the floors below."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_memsaver.capture.function_step import capture_function, concrete_function
from tf_memsaver.capture.model_step import capture_graph
from tf_memsaver.check.measure import Measurement, measure
from tf_memsaver.check.verify import Verification, verify
from tf_memsaver.ir.graph import Graph
from tf_memsaver.judge.estimate import Estimate
from tf_memsaver.options import checked
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import DEFAULT_POINTS, check_strategy, curve, solve
from tf_memsaver.program.function_calls import FunctionCalls
from tf_memsaver.program.signature import note_inputs
from tf_memsaver.report.notices import tell
from tf_memsaver.rewrite.optimized_function import make_optimized_function
from tf_memsaver.rewrite.optimized_model import make_optimized, strip
from tf_memsaver.saved import saved_model
from tf_memsaver.saved.export import export_saved_model

__all__ = [
    "Estimate",
    "Measurement",
    "Verification",
    "apply_plan",
    "capture_graph",
    "estimate",
    "export_saved_model",
    "measure",
    "memory_time_curve",
    "optimize",
    "optimize_function",
    "rewrite_saved_model",
    "search_plan",
    "strip",
    "verify",
]


def optimize(
    model: Any,
    *,
    batch_size: int,
    budget: int | str | None = None,
    max_overhead: float | None = None,
    strategy: str = "auto",
    keep: str | Sequence[str] = (),
    recompute: str | Sequence[str] = (),
    candidates: str | Sequence[str] = (),
    granularity: str = "layer",
    inputs: Any = None,
    profile: bool = False,
) -> Any:
    """Return ``model`` as one of the same class, over the same layers and variables, that trains in less memory.

    The arguments are those of ``search_plan``, whose plan is in the result's ``memsaver_plan``. The original stays as
    it was. A compiled model comes back compiled, with the same optimizer object; compile it before, so that the
    optimizer's slots count towards the budget.

    What the plan saves is logged (absl, level INFO) and, in a notebook or on a terminal, shown. A plan that saves less
    than 3% is a warning, which says why and what to try.

    Raises:
      MemsaverError: what ``search_plan`` and ``apply_plan`` raise.
    """
    plain = strip(model)
    plan = search_plan(
        plain,
        batch_size=batch_size,
        budget=budget,
        max_overhead=max_overhead,
        strategy=strategy,
        keep=keep,
        recompute=recompute,
        candidates=candidates,
        granularity=granularity,
        inputs=inputs,
        profile=profile,
    )
    optimized = apply_plan(plain, plan)
    _tell_of(f"model '{model.name}'", plan)
    return optimized


def search_plan(
    model: Any,
    *,
    batch_size: int,
    budget: int | str | None = None,
    max_overhead: float | None = None,
    strategy: str = "auto",
    keep: str | Sequence[str] = (),
    recompute: str | Sequence[str] = (),
    candidates: str | Sequence[str] = (),
    granularity: str = "layer",
    inputs: Any = None,
    profile: bool = False,
) -> Plan:
    """Trace one training step of ``model`` and return the plan of ``strategy`` for it; nothing is run or changed.

    Args:
      model: a Keras 3 model on the TensorFlow backend: a built Functional or Sequential one, or any with ``inputs``.
      batch_size: samples in a training batch (per replica).
      budget: bytes, or text such as ``"6GiB"``, that the peak of a whole training step must stay within.
      max_overhead: the extra predicted step time allowed, as a share of the plain step; 0.3 without a budget.
      strategy: a planner's name; ``"auto"`` takes the quickest step within the budget or, without one, the smallest
        peak within ``max_overhead`` (of those within 2% of it, the quickest; nested ones only where more than 0.3 is
        allowed, or a budget needs them).
      keep: names or patterns of layers that must not be replayed.
      recompute: names or patterns of layers that must be replayed.
      candidates: names or patterns of the only layers behind which a segment may end.
      granularity: ``"layer"``, or ``"op"`` for segments of single operations, which may keep a matrix product and
        recompute the softmax behind it; names are then those of operations.
      inputs: what a model with a ``call`` of its own is called with: specs such as ``tf.TensorSpec((None, 224, 224,
        3))``, or a batch, in the structure of the call's first argument. It is remembered for this model. A Functional
        model knows it, but for dimensions that its ``keras.Input`` left open, such as the length of a text.
      profile: whether to time the step's operations on the device at hand, each by itself (seconds), where otherwise
        their times are predicted from their arithmetic and the bytes that they move. Such plans vary a little.

    Raises:
      InfeasibleBudgetError: nothing fits the budget; it names the smallest that works.
      InfeasibleOverheadError: the strategy's plan is slower than ``max_overhead`` allows.
      HintError: a pattern matches no layer, or the hints contradict each other.
      UnsupportedModelError, UnknownDimensionError, InvalidRequestError: see ``capture_graph``.
    """
    request = _request(budget, max_overhead, strategy, keep, recompute, candidates, granularity, profile)
    return solve(_captured(model, batch_size, request, inputs), request, versions=versions())


def memory_time_curve(
    model: Any,
    *,
    batch_size: int,
    points: int = DEFAULT_POINTS,
    keep: str | Sequence[str] = (),
    recompute: str | Sequence[str] = (),
    candidates: str | Sequence[str] = (),
    granularity: str = "layer",
    inputs: Any = None,
    profile: bool = False,
) -> tuple[Plan, ...]:
    """Trace one training step of ``model`` and return what memory costs in time: plans from plain to the least peak.

    No plan of them beats another one in both. Read ``peak_bytes`` (of a whole step) and ``step_overhead`` (a share of
    the plain step's time) off them, and give the one you choose to ``apply_plan``.

    Args:
      model: as in ``search_plan``.
      batch_size: as in ``search_plan``.
      points: how many plans; there may be fewer where fewer differ.
      keep: as in ``search_plan``.
      recompute: as in ``search_plan``.
      candidates: as in ``search_plan``.
      granularity: as in ``search_plan``.
      inputs: as in ``search_plan``.
      profile: as in ``search_plan``.

    Raises:
      HintError: a pattern matches no layer, or the hints contradict each other.
      UnsupportedModelError, UnknownDimensionError, InvalidRequestError: see ``capture_graph``.
    """
    points = checked(points=points)["points"]
    request = _request(None, None, "auto", keep, recompute, candidates, granularity, profile)
    return curve(_captured(model, batch_size, request, inputs), request, points, versions=versions())


def optimize_function(
    function: Any,
    *specs: Any,
    batch_size: int | None = None,
    budget: int | str | None = None,
    max_overhead: float | None = None,
    strategy: str = "auto",
    keep: str | Sequence[str] = (),
    recompute: str | Sequence[str] = (),
    candidates: str | Sequence[str] = (),
    profile: bool = False,
) -> Any:
    """Return a ``tf.function`` that computes what ``function`` does, over its variables, and trains in less memory.

    Segments are made of single operations, so that a plan may keep a matrix product and recompute the softmax behind
    it. Nothing of Keras is needed: a plain ``tf.Module``, or a function of a loaded SavedModel, will do. Gradients are
    taken outside, by a tape around the call, and are bit-identical in a ``tf.function``.

    Args:
      function: a ``tf.function``, a concrete function, or a Python function to trace.
      *specs: what to trace it with (``tf.TensorSpec``, or Python values for arguments that are no tensors); none for a
        concrete function. A first dimension may be unknown and stays free.
      batch_size: what a free first dimension is planned for. It may be left out where all dimensions are known.
      budget: as in ``search_plan``; what the training step takes outside the function is not known, and not counted.
      max_overhead: as in ``search_plan``.
      strategy: as in ``search_plan``.
      keep: as in ``search_plan``, with names of operations.
      recompute: as in ``search_plan``, with names of operations.
      candidates: as in ``search_plan``, with names of operations.
      profile: as in ``search_plan``.

    Returns:
      A ``tf.function`` with the plan in its attribute ``memsaver_plan``. It stands for the trace with the given specs:
      called with another Python value, it raises.

    Raises:
      InvalidRequestError: a dimension is free and there is no ``batch_size``, or an argument has no meaning.
      UnknownDimensionError: a dimension other than the first is unknown.
      UnsupportedModelError: the function uses no trainable variable, or returns nothing that has a gradient.
      MemsaverError: what ``search_plan`` raises for plans.
    """
    request = _request(budget, max_overhead, strategy, keep, recompute, candidates, "op", profile)
    batch_size = _known_or_none(batch_size)
    calls = FunctionCalls(concrete_function(function, specs))
    plan = _function_plan(calls, batch_size, request)
    optimized = make_optimized_function(calls, plan)
    _tell_of(f"function '{calls.name}'", plan)
    return optimized


def rewrite_saved_model(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    functions: Sequence[str] = (),
    budget: int | str | None = None,
    max_overhead: float | None = None,
    strategy: str = "auto",
    keep: str | Sequence[str] = (),
    recompute: str | Sequence[str] = (),
    candidates: str | Sequence[str] = (),
    profile: bool = False,
    overwrite: bool = False,
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
      functions: names of the functions to rewrite, such as ``__call__``; all that can be trained through if none.
      budget: as in ``optimize_function``.
      max_overhead: as in ``optimize_function``.
      strategy: as in ``optimize_function``.
      keep: as in ``optimize_function``.
      recompute: as in ``optimize_function``.
      candidates: as in ``optimize_function``.
      profile: as in ``search_plan``.
      overwrite: whether a SavedModel at ``target`` may be replaced; nothing else is.

    Raises:
      InvalidRequestError: ``source`` is no readable SavedModel, or has no such function; or ``target`` is no place for
        output (an empty path, a folder in use, the source).
      OutputExistsError: ``target`` exists and may not be replaced.
      UnsupportedModelError: nothing in it can be trained.
      MemsaverError: what ``optimize_function`` raises.
    """
    request = _request(budget, max_overhead, strategy, keep, recompute, candidates, "op", profile)
    batch_size = _known_or_none(batch_size)
    plans = saved_model.rewrite(
        target=target,
        planner=lambda calls: _function_plan(calls, batch_size, request),
        **checked(source=source, functions=functions, overwrite=overwrite),
    )
    for name, plan in plans.items():
        _tell_of(f"function '{name}'", plan)
    return plans


def apply_plan(model: Any, plan: Plan) -> Any:
    """Return ``model`` as one that trains by ``plan``; an optimized model changes its plan.

    The plan is certified for this model first. That traces a training step, unless the plan was made for the same model
    object in this process.

    Raises:
      InvalidRequestError: ``plan`` is no Plan.
      PlanMismatchError: the plan was made for another model; it names the first layer that differs.
      CertificationError: the plan replays what cannot be replayed, or cuts where results would change.
      UnsupportedModelError: the model computes in a ``call`` of its own, and its inputs are not known: ``search_plan``
        is told them.
    """
    return make_optimized(strip(model), plan)


def estimate(model: Any, *, batch_size: int, granularity: str = "layer", inputs: Any = None) -> Estimate:
    """Return where the bytes of one plain training step of ``model`` go; nothing is run.

    Args:
      model: as in ``search_plan``.
      batch_size: as in ``search_plan``.
      granularity: as in ``search_plan``: what a row stands for.
      inputs: as in ``search_plan``.

    Raises:
      UnsupportedModelError, UnknownDimensionError, InvalidRequestError: see ``capture_graph``.
    """
    return Estimate.from_graph(_captured(model, batch_size, Request(granularity=granularity).checked(), inputs))


def versions() -> tuple[tuple[str, str], ...]:
    """Return the versions that a plan or a result was made with, sorted by name."""
    from tf_memsaver import __version__

    found = {
        "keras": keras.__version__,
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "tf_memsaver": __version__,
    }
    return tuple(sorted(found.items()))


def _captured(model: Any, batch_size: int, request: Request, inputs: Any) -> Graph:
    """Return the graph of the plain model's step; ``inputs`` are noted before, where they are given."""
    batch_size = checked(batch_size=batch_size)["batch_size"]
    plain = strip(model)
    if inputs is not None:
        note_inputs(plain, inputs)
    return capture_graph(plain, batch_size=batch_size, granularity=request.granularity, profile=request.profile)


def _tell_of(subject: str, plan: Plan) -> None:
    """Say what a plan does for a model or function, and warn where that is little."""
    tell(f"tf_memsaver: {subject}: {plan}")
    if plan.advice:
        logging.warning("tf_memsaver: %s: %s", subject, plan.advice)


def _known_or_none(batch_size: int | None) -> int | None:
    """Return the batch size of a function, which may say it by itself."""
    return None if batch_size is None else int(checked(batch_size=batch_size)["batch_size"])


def _function_plan(calls: FunctionCalls, batch_size: int | None, request: Request) -> Plan:
    graph = capture_function(calls, batch_size=batch_size, profile=request.profile)
    return solve(graph, request, versions=versions())


def _request(
    budget: int | str | None,
    max_overhead: float | None,
    strategy: str,
    keep: str | Sequence[str],
    recompute: str | Sequence[str],
    candidates: str | Sequence[str],
    granularity: str,
    profile: bool,
) -> Request:
    options = checked(
        budget=budget,
        max_overhead=max_overhead,
        strategy=strategy,
        keep=keep,
        recompute=recompute,
        candidates=candidates,
        granularity=granularity,
        profile=profile,
    )
    check_strategy(options["strategy"])
    return Request(budget_bytes=options.pop("budget"), **options)
