"""The verbs: each a few lines over the rooms below."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from absl import logging

from tf_memsaver.capture.function_step import capture_function, concrete_function
from tf_memsaver.capture.model_step import capture_graph
from tf_memsaver.check.measure import measure
from tf_memsaver.check.measurement import Measurement
from tf_memsaver.check.verify import Verification, verify
from tf_memsaver.compat.devices import bytes_left
from tf_memsaver.compat.keras_training import own_optimizer
from tf_memsaver.compat.keras_variables import bytes_of
from tf_memsaver.compat.versions import versions
from tf_memsaver.errors import InvalidRequestError
from tf_memsaver.ir.graph import Graph
from tf_memsaver.judge.estimate import Estimate
from tf_memsaver.options import checked
from tf_memsaver.options.checks import path
from tf_memsaver.options.table import (
    ApplyOptions,
    CalibratedOptions,
    CaptureOptions,
    CurveOfTraceOptions,
    CurveOptions,
    EstimateOptions,
    FunctionOptions,
    LargestBatchOptions,
    OptimizeOptions,
    PlanOfTraceOptions,
    RequestOptions,
    SavedModelOptions,
    options_of,
)
from tf_memsaver.options.verbs import takes
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.largest import LargestBatch, largest_batch
from tf_memsaver.planners.measured import plan_that_keeps
from tf_memsaver.planners.solve import Plans, check_strategy, solve
from tf_memsaver.program.function_calls import FunctionCalls
from tf_memsaver.program.loop import mapped
from tf_memsaver.program.told import subject_of, told_of
from tf_memsaver.report.notices import tell
from tf_memsaver.rewrite.optimized_function import make_optimized_function
from tf_memsaver.rewrite.optimized_model import make_optimized, strip
from tf_memsaver.saved import saved_model
from tf_memsaver.saved.export import export_saved_model
from tf_memsaver.units import AUTO, format_bytes

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "Estimate",
    "LargestBatch",
    "Measurement",
    "Trace",
    "Verification",
    "apply_plan",
    "capture_graph",
    "estimate",
    "export_saved_model",
    "max_batch_size",
    "measure",
    "memory_time_curve",
    "optimize",
    "optimize_function",
    "rewrite_saved_model",
    "search_plan",
    "strip",
    "trace",
    "verify",
]


class Trace:
    """One training step of a model as it was traced: what comes of it is worked out without tracing it again.

    ``graph`` is the step, ``model`` the plain model. Two plans that differ in nothing but their limits share what was
    computed for the first.
    """

    def __init__(self, model: Any, graph: Graph, **how: Any) -> None:
        """Wrap a captured step and how it was captured; ``trace`` makes it."""
        self.model, self.graph = model, graph
        self._how = _part(how, RequestOptions)
        self._plans = Plans(graph, versions=versions())

    def __repr__(self) -> str:
        return f"Trace of '{self.graph.name}' ({len(self.graph.units)} units, batch size {self.graph.batch_size})"

    def estimate(self) -> Estimate:
        """Return where the bytes of the plain step go."""
        return Estimate.from_graph(self.graph)

    @takes(PlanOfTraceOptions)
    def plan(self, **options: Unpack[PlanOfTraceOptions]) -> Plan:
        """Return the plan of ``strategy`` for the step.

        Raises:
          MemsaverError: what ``search_plan`` raises for limits and hints.
        """
        return self._plans.plan(_request(options, self.model, **self._how))

    @takes(CurveOfTraceOptions)
    def curve(self, **options: Unpack[CurveOfTraceOptions]) -> tuple[Plan, ...]:
        """Return plans of the step from plain to the least peak, as ``memory_time_curve`` does.

        Raises:
          HintError: a pattern matches no layer, or the hints contradict each other.
        """
        return self._plans.curve(_request(options, self.model, **self._how), options["points"])

    def apply(self, plan: Plan) -> Any:
        """Return the model as one that trains by ``plan``; what is returned and raised is ``apply_plan``'s."""
        return apply_plan(self.model, plan)


@takes(CaptureOptions)
def trace(model: Any, **options: Unpack[CaptureOptions]) -> Trace:
    """Trace one training step of ``model``, to be planned as often as one likes; nothing is run or changed.

    ``estimate()``, ``plan(budget=...)``, ``curve()`` and ``apply(plan)`` of the result trace nothing again. The other
    verbs are short forms of it.

    Args:
      model: as in ``optimize``.

    Raises:
      UnsupportedModelError, UnknownDimensionError, InvalidRequestError: see ``capture_graph``.
    """
    plain = _plain_subject(model, options)
    options["step"] = None
    return Trace(plain, capture_graph(plain, **options), **options)


@takes(CalibratedOptions)
def optimize(model: Any, **options: Unpack[CalibratedOptions]) -> Any:
    """Return ``model`` as one of the same class, over the same layers and variables, that trains in less memory.

    The original stays as it was; the plan is in the result's ``memsaver_plan``. A compiled model comes back compiled,
    with the same optimizer object; compile it before, so that the optimizer's slots count towards the budget. A model
    that is optimized already gets another plan.

    What the plan saves is logged (absl, level INFO) and, in a notebook or on a terminal, shown. A plan that saves less
    than 3% is a warning, which says why and what to try.

    Args:
      model: a Keras 3 model on the TensorFlow backend: a built Functional or Sequential one, or any with ``inputs``.

    Raises:
      MemsaverError: what ``search_plan`` and ``apply_plan`` raise.
      InfeasibleBudgetError: with ``calibrate``, also where real steps by no plan kept the budget.
    """
    if options["calibrate"] and options["budget"] is None:
        raise InvalidRequestError("calibrate=True holds real steps to a budget: give one, such as budget='80%'.")
    traced, plan = _planned(model, options)
    if options["calibrate"]:
        plan = _calibrated(traced, plan, options)
    optimized = traced.apply(plan)
    _tell_of(f"{'model' if options['step'] is None else 'step'} '{traced.model.name}'", plan)
    return optimized


def _calibrated(traced: Trace, plan: Plan, options: Mapping[str, Any]) -> Plan:
    """Return the plan, or one for less whose steps keep the budget that it was made for."""
    limits = _part(options, PlanOfTraceOptions)
    how = {"data": options["data"], "step": options["step"], "batch_size": plan.batch_size, "isolate": False}

    def measured(plan: Plan) -> int:
        logging.info("tf_memsaver: running real steps of '%s': %s", traced.model.name, plan)
        return measure(traced.apply(plan), **how).peak_bytes

    kept, peak = plan_that_keeps(plan, lambda limit: traced.plan(**{**limits, "budget": limit}), measured)
    budget = format_bytes(plan.request.budget_bytes or 0)
    tell(f"tf_memsaver: real steps of '{traced.model.name}' took at most {format_bytes(peak)} of {budget}")
    return kept


@takes(OptimizeOptions)
def search_plan(model: Any, **options: Unpack[OptimizeOptions]) -> Plan:
    """Trace one training step of ``model`` and return the plan of ``strategy`` for it; nothing is run or changed.

    Args:
      model: as in ``optimize``.

    Raises:
      InfeasibleBudgetError: nothing fits the budget; it names the smallest that works.
      InfeasibleOverheadError: the strategy's plan is slower than ``max_overhead`` allows.
      HintError: a pattern matches no layer, or the hints contradict each other.
      UnsupportedModelError, UnknownDimensionError, InvalidRequestError: see ``capture_graph``.
    """
    return _planned(model, options)[1]


def _planned(model: Any, options: Mapping[str, Any]) -> tuple[Trace, Plan]:
    """Return a model's traced step and its plan."""
    # A strategy that is not known is told before the step is traced, which takes seconds.
    check_strategy(options["strategy"])
    traced = trace(model, **_part(options, CaptureOptions))
    return traced, traced.plan(**_part(options, PlanOfTraceOptions))


@takes(CurveOptions)
def memory_time_curve(model: Any, **options: Unpack[CurveOptions]) -> tuple[Plan, ...]:
    """Trace one training step of ``model`` and return what memory costs in time: plans from plain to the least peak.

    No plan of them beats another one in both. Read ``peak_bytes`` (of a whole step) and ``step_overhead`` (a share of
    the plain step's time) off them, and give the one you choose to ``apply_plan``.

    Args:
      model: as in ``optimize``.

    Raises:
      HintError: a pattern matches no layer, or the hints contradict each other.
      UnsupportedModelError, UnknownDimensionError, InvalidRequestError: see ``capture_graph``.
    """
    return trace(model, **_part(options, CaptureOptions)).curve(**_part(options, CurveOfTraceOptions))


@takes(FunctionOptions)
def optimize_function(
    function: Any, *specs: Any, batch_size: int | None = None, **options: Unpack[FunctionOptions]
) -> Any:
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
    request = _request(options, granularity="op")
    calls = FunctionCalls(concrete_function(function, specs))
    plan = _function_plan(calls, _known_or_none(batch_size), request)
    optimized = make_optimized_function(calls, plan)
    _tell_of(f"function '{calls.name}'", plan)
    return optimized


@takes(SavedModelOptions)
def rewrite_saved_model(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    batch_size: int | None = None,
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
    request, size = _request(options, granularity="op"), _known_or_none(batch_size)
    plans = saved_model.rewrite(
        source=path("source", source),
        target=target,
        functions=options["functions"],
        overwrite=options["overwrite"],
        planner=lambda calls: _function_plan(calls, size, request),
    )
    for name, plan in plans.items():
        _tell_of(f"function '{name}'", plan)
    return plans


@takes(ApplyOptions)
def apply_plan(model: Any, plan: Plan, **options: Unpack[ApplyOptions]) -> Any:
    """Return ``model`` as one that trains by ``plan``; an optimized model changes its plan.

    The plan is certified for this model first. That traces a training step, unless the plan was made for the same model
    object in this process.

    Args:
      model: what the plan was made for; with ``step`` as in ``optimize``.
      plan: what ``search_plan`` returned.

    Raises:
      InvalidRequestError: ``plan`` is no Plan.
      PlanMismatchError: the plan was made for another model; it names the first layer that differs.
      CertificationError: the plan replays what cannot be replayed, or cuts where results would change.
      UnsupportedModelError: the model computes in a ``call`` of its own, and its inputs are not known: ``search_plan``
        is told them.
    """
    if options["step"] is not None:
        model = told_of(_plain_subject(model, options), {**options, "batch_size": None, "step": None}).model
    return make_optimized(strip(model), plan)


def _plain_subject(model: Any, options: Mapping[str, Any]) -> Any:
    """Return what is trained, plain: a model or, with the option ``step``, the loop that calls it or them."""
    return subject_of(model if options["step"] is None else mapped(strip, model), options)


@takes(EstimateOptions)
def estimate(model: Any, **options: Unpack[EstimateOptions]) -> Estimate:
    """Return where the bytes of one plain training step of ``model`` go; nothing is run.

    Args:
      model: as in ``optimize``.

    Raises:
      UnsupportedModelError, UnknownDimensionError, InvalidRequestError: see ``capture_graph``.
    """
    return trace(model, **options).estimate()


@takes(LargestBatchOptions)
def max_batch_size(model: Any, **options: Unpack[LargestBatchOptions]) -> LargestBatch:
    """Return the largest batch that trains within ``budget``, with its plan, and what smaller ones come to.

    It is found by planning, to 0.4%: the step is traced at two batch sizes, planned for others by the line between
    them, and traced once more at the answer. ``apply_plan(model, found.plan)`` makes the model that trains it.

    Args:
      model: as in ``optimize``.
      budget: as in ``optimize``, but no share; if none is given, what the device has left.
      batch_size: a size to begin with, where data does not tell one; 32 without both.

    Raises:
      InfeasibleBudgetError, InfeasibleOverheadError: not even a batch of one trains so.
      MeasurementError: the steps at the answer could not be run.
      MemsaverError: what ``search_plan`` raises.
    """
    check_strategy(options["strategy"])
    start = options["batch_size"] or (32 if options["data"] is None else None)
    told = told_of(_plain_subject(model, options), {**options, "batch_size": start})
    request = _request({**options, "budget": options["budget"] or AUTO}, told.model)
    if request.budget_bytes is None:
        raise InvalidRequestError("a share of the plain peak is a budget for one batch size. Give bytes, or 'auto'.")

    def capture(size: int) -> Graph:
        logging.info("tf_memsaver: tracing the step of '%s' at a batch of %d", told.model.name, size)
        return capture_graph(told.model, **{**_part(options, CaptureOptions), "batch_size": size, "step": None})

    def measured(plan: Plan) -> int:
        optimized = make_optimized(told.model, plan)
        return measure(optimized, data=options["data"], batch_size=plan.batch_size, steps=3).peak_bytes

    is_run = options["step"] is None and not options["predict_only"]
    return largest_batch(capture, request, told.batch_size, versions=versions(), measure=measured if is_run else None)


def _part(options: Mapping[str, Any], group: Any) -> dict[str, Any]:
    """Return those of a verb's options that are of a group."""
    return {name: options[name] for name in options_of(group) if name in options}


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


def _request(options: Mapping[str, Any], model: Any = None, **fixed: Any) -> Request:
    """Return what the options of a verb ask of a planner; ``budget="auto"`` is what the device has left for a step.

    What a model's variables and optimizer take already is a part of a step.

    Raises:
      InvalidRequestError: nothing tells how much memory there is, or a limit has no meaning.
    """
    asked = {**options, **fixed}
    if asked.get("budget") == AUTO:
        asked["budget"] = int(_OF_WHAT_IS_LEFT * _bytes_left()) + _bytes_taken(model)
    request = Request.of(asked)
    check_strategy(request.strategy)
    return request


_OF_WHAT_IS_LEFT = 0.9
"""Buffers are not all that a process needs, and others work beside it."""


def _bytes_left() -> int:
    left = bytes_left()
    if left is None:
        raise InvalidRequestError("budget='auto': this system does not tell how much memory is left. Give bytes.")
    return left


def _bytes_taken(model: Any) -> int:
    optimizer = own_optimizer(model)
    variables = [*getattr(model, "variables", ()), *(optimizer.variables if optimizer else ())]
    return sum(map(bytes_of, variables))
