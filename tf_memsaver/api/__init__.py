"""The public verbs for models, each a few lines.

Not here: the work itself, which the rooms below do.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from absl import logging

from tf_memsaver.api.asked import (
    bytes_of_others,
    check_before_tracing,
    part_of,
    request_of,
    tell_of,
    tell_of_plain_calls,
    warn_of_other_batches,
    warn_of_others,
    warn_of_unknown_length,
)
from tf_memsaver.api.compiled import warn_where_xla_runs
from tf_memsaver.api.functions import optimize_function, rewrite_saved_model
from tf_memsaver.api.traced import TracedGraph
from tf_memsaver.capture import model_step
from tf_memsaver.check.measure import measure
from tf_memsaver.check.measurement import Measurement
from tf_memsaver.check.verify import Verification, verify
from tf_memsaver.compat.devices import reserves_gpu
from tf_memsaver.compat.versions import versions
from tf_memsaver.display.figures import plotly
from tf_memsaver.display.notices import tell
from tf_memsaver.errors import InvalidRequestError
from tf_memsaver.files.targets import TargetKind, check_target
from tf_memsaver.ir.graph import Graph, MemoryKind
from tf_memsaver.judge.estimate import Estimate
from tf_memsaver.options.table import (
    ApplyOptions,
    CalibratedOptions,
    CaptureOptions,
    CurveOfTraceOptions,
    CurveOptions,
    EstimateOptions,
    LargestBatchOptions,
    OptimizeOptions,
    PlanOfTraceOptions,
    ReportOptions,
)
from tf_memsaver.options.verbs import takes
from tf_memsaver.plan.plan import Plan
from tf_memsaver.planners.largest import LargestBatch, largest_batch
from tf_memsaver.planners.measured import quickest_that_keeps
from tf_memsaver.program.loop import Loop, mapped, places_of_networks
from tf_memsaver.program.memo import forget
from tf_memsaver.program.signature import is_planned_as_a_step
from tf_memsaver.program.told import subject_of, told_of
from tf_memsaver.rewrite.optimized_model import make_optimized, strip
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
    "report",
    "rewrite_saved_model",
    "search_plan",
    "strip",
    "trace",
    "verify",
]


class Trace(TracedGraph):
    """One traced training step of a model. Its methods estimate and plan without tracing the step again.

    ``graph`` is the step, ``model`` the plain model. Plans that differ only in their limits share computations, so the
    second one takes less time.
    """

    def apply(self, plan: Plan) -> Any:
        """Return a model that trains by ``plan``. It returns and raises what ``apply_plan`` does."""
        return _applied(self.model, plan, self._given.get("data"))


@takes(CaptureOptions)
def trace(model: Any, **options: Unpack[CaptureOptions]) -> Trace:
    """Trace one training step of ``model`` and return the result, from which you can make any number of plans.

    The step is not run, and the model does not change. The methods ``estimate()``, ``plan(budget=...)``, ``curve()``
    and ``apply(plan)`` of the result do not trace again. ``estimate``, ``search_plan``, ``memory_time_curve`` and
    ``optimize`` are short forms of them.

    Example::

        traced = tf_memsaver.trace(model, data=train_ds)
        print(traced.estimate())
        model = traced.apply(traced.plan(budget="6GiB"))

    Args:
      model: as in ``optimize``.

    Raises:
      UnsupportedModelError, UnknownDimensionError, InvalidRequestError: see ``capture_graph``.
    """
    plain = _plain_subject(model, options)
    forget(plain)
    options["step"] = None
    return Trace(plain, model_step.capture_graph(plain, **options), **options)


@functools.wraps(model_step.capture_graph)
def capture_graph(model: Any, **options: Unpack[CaptureOptions]) -> Graph:
    """Return the graph of one plain training step; an optimized model is traced in its plain form."""
    return trace(model, **options).graph


@takes(CalibratedOptions)
def optimize(model: Any, **options: Unpack[CalibratedOptions]) -> Any:
    """Return a model that trains in less memory, with the same layers and variables as ``model``.

    The result has the same class as ``model``. In training, it keeps some activations and recomputes the others in the
    backward pass (gradient checkpointing); a planner chooses which. Without XLA, losses, gradients and weights are the
    same bit for bit for most models (``verify`` checks yours). ``model`` itself does not change, and training one
    trains both, since they share their variables.

    Compile ``model`` first, so that the optimizer's slots count towards the budget. The result is compiled, too, with
    the same optimizer object. If ``model`` is already optimized, the result has a new plan.

    ``result.memsaver_plan`` is the plan (a ``Plan``). One line says what it saves. It is logged (absl, level INFO); if
    that level is off, as it is by default, the line goes to stderr or, in a notebook, to the cell's output. Set absl's
    verbosity to ERROR to turn it off. If the plan saves less than 3% of the peak, a warning says why and what to try.
    All figures are predicted; ``measure`` runs real steps. ``strip`` returns the plain model.

    Example::

        import keras
        import tf_memsaver

        model = keras.applications.ResNet50(weights=None, classes=10)
        model.compile("adam", "sparse_categorical_crossentropy")

        # About the smallest peak for at most 30% more time. train_ds is what you give to fit.
        optimized = tf_memsaver.optimize(model, data=train_ds)
        optimized.fit(train_ds)
        print(optimized.memsaver_plan)

        # The quickest step within 6 GiB, at batch size 32.
        optimized = tf_memsaver.optimize(model, batch_size=32, budget="6GiB")

    Args:
      model: a Keras 3 model on the TensorFlow backend: Functional, Sequential or subclassed. With ``step``, a network
        that the step calls, or a tuple, list or dict of networks; the result has the same structure.

    Returns:
      The optimized model.

    Raises:
      InfeasibleBudgetError: no plan fits the budget; the message names the smallest budget that works. With
        ``calibrate``, also if the real steps of no plan kept the budget.
      InfeasibleOverheadError: the plan is slower than ``max_overhead`` allows.
      HintError: a pattern of ``keep``, ``recompute`` or ``candidates`` matches no layer, or two of them contradict each
        other.
      UnsupportedModelError: this kind of model cannot be planned; the message says what would help.
      UnknownDimensionError: the size of an input dimension other than the batch is not known.
      InvalidRequestError: an argument is not valid; the message names it and says what is accepted.
    """
    if options["calibrate"] and options["budget"] is None:
        raise InvalidRequestError("calibrate=True compares real steps with a budget. Give one, such as budget='80%'.")
    warn_of_other_batches(model if options["step"] is None else None, options["data"], options["batch_size"])
    traced, plan = (_calibrated if options["calibrate"] else _planned)(model, options)
    if options["budget"] != AUTO:
        warn_of_others(traced.model, plan, traced.graph)
    return _applied(traced.model, plan, options["data"], _subject(traced.model, options))


def _applied(model: Any, plan: Plan, data: Any, subject: str = "") -> Any:
    """Return a plain model as one that trains by a plan, and say what a person should know of it.

    ``subject`` is what the plan is for, in words, if a person is to read what it does.
    """
    optimized = make_optimized(model, plan)
    if subject:
        tell_of(subject, plan)
    warn_of_unknown_length(model, plan, data)
    tell_of_plain_calls(model, plan)
    for place in places_of_networks(model) if isinstance(model, Loop) else ():
        tell(f"tf_memsaver: {place}")
    return optimized


def _subject(model: Any, options: Mapping[str, Any]) -> str:
    """Return what a plan is for, in words."""
    if options["step"] is not None:
        return f"step '{model.name}'"
    is_whole = getattr(model, "compiled", False) or is_planned_as_a_step(model)
    return f"model '{model.name}'{'' if is_whole else ' (a step of this model alone: it is not compiled)'}"


def _calibrated(model: Any, options: Mapping[str, Any]) -> tuple[Trace, Plan]:
    """Return a model's traced step, and the quickest plan found whose real steps keep the budget."""
    traced, limits = _traced(model, options), part_of(options, PlanOfTraceOptions)

    def plan_for(limit: int | None) -> Plan:
        return traced.plan(**(limits if limit is None else {**limits, "budget": limit}))

    def measured(plan: Plan) -> int:
        logging.info("tf_memsaver: running real steps of '%s': %s", traced.model.name, plan)
        how = {"data": options["data"], "step": options["step"], "batch_size": plan.batch_size, "isolate": False}
        others = bytes_of_others(traced.model, traced.graph.bytes_of(MemoryKind.DATA))
        return _peak_of(make_optimized(traced.model, plan), others, **how)

    plan, budget = quickest_that_keeps(plan_for, measured)
    took = f"{format_bytes(plan.measured_peak_bytes)} of {format_bytes(budget)}"
    tell(f"tf_memsaver: real steps of '{traced.model.name}' took at most {took}")
    return traced, plan


def _peak_of(optimized: Any, others: int, **how: Any) -> int:
    """Return the largest peak of real steps, without the ``others`` bytes that lie in the same process beside them."""
    return int(measure(optimized, **how).peak_bytes - others)


@takes(OptimizeOptions)
def search_plan(model: Any, **options: Unpack[OptimizeOptions]) -> Plan:
    """Return the plan that ``optimize`` would use, without making a model. No step is run.

    ``print(plan)`` shows the predicted peaks and the extra time in one sentence; ``plan.layers`` says what happens to
    each layer and why; ``plan.save(path)`` writes it to a file. ``apply_plan(model, plan)`` makes the model.

    Example::

        plan = tf_memsaver.search_plan(model, data=train_ds, budget="6GiB")
        print(plan)

    Args:
      model: as in ``optimize``.

    Raises:
      InfeasibleBudgetError: no plan fits the budget; the message names the smallest budget that works.
      InfeasibleOverheadError: the plan is slower than ``max_overhead`` allows.
      HintError: a pattern matches no layer, or two hints contradict each other.
      UnsupportedModelError, UnknownDimensionError, InvalidRequestError: see ``capture_graph``.
    """
    return _planned(model, options)[1]


def _planned(model: Any, options: Mapping[str, Any]) -> tuple[Trace, Plan]:
    """Return a model's traced step and its plan."""
    traced = _traced(model, options)
    return traced, traced.plan(**part_of(options, PlanOfTraceOptions))


def _traced(model: Any, options: Mapping[str, Any]) -> Trace:
    check_before_tracing(model, options)
    return trace(model, **part_of(options, CaptureOptions))


@takes(CurveOptions)
def memory_time_curve(model: Any, **options: Unpack[CurveOptions]) -> tuple[Plan, ...]:
    """Return plans from the plain step to the smallest peak: the curve of memory against time.

    Each plan has ``peak_bytes``, the predicted peak of a whole step, and ``step_overhead``, its extra time as a share
    of the plain step's time. No plan on the curve beats another in both. Give the plan that you choose to
    ``apply_plan``. The peaks are for TensorFlow's own executor; if ``fit`` compiles the model with XLA, a warning says
    so. No step is run.

    Args:
      model: as in ``optimize``.

    Raises:
      HintError: a pattern matches no layer, or two hints contradict each other.
      UnsupportedModelError, UnknownDimensionError, InvalidRequestError: see ``capture_graph``.
    """
    check_before_tracing(model, options)
    return trace(model, **part_of(options, CaptureOptions)).curve(**part_of(options, CurveOfTraceOptions))


@takes(ReportOptions)
def report(model: Any, output: str | os.PathLike[str], **options: Unpack[ReportOptions]) -> Plan:
    """Plan as ``search_plan`` does, write an HTML page that shows the plan, and return the plan.

    The page shows the memory of the step over time, plain and planned, with the tensors that are alive; memory against
    time; where the peak is; and what happens to each layer, and why. All figures are predicted; no step is run. A
    browser shows the page without a network. For a plan that you already have, use
    ``trace(model, ...).report(plan, output)``.

    Args:
      model: as in ``optimize``.
      output: the file to write, such as ``"report.html"``.

    Raises:
      MissingExtraError: plotly is not installed.
      InvalidRequestError, OutputExistsError, OutputError: ``output`` cannot be written.
      MemsaverError: the errors of ``search_plan``.
    """
    plotly()
    target = check_target(output, TargetKind.FILE, overwrite=options["overwrite"])
    traced, plan = _planned(model, options)
    traced.report_to(target, plan, points=options["points"])
    return plan


@takes(ApplyOptions)
def apply_plan(model: Any, plan: Plan, **options: Unpack[ApplyOptions]) -> Any:
    """Return a model that trains by ``plan``, as ``optimize`` does. For an optimized model, ``plan`` replaces its plan.

    First, the plan is checked against the model. This traces a training step, which takes seconds, unless the plan was
    made for the same model object in this process.

    Example::

        plan = tf_memsaver.Plan.load("plan.json")
        optimized = tf_memsaver.apply_plan(model, plan)

    Args:
      model: the model that the plan was made for; with ``step``, as in ``optimize``.
      plan: a plan from ``search_plan``, from this or another process.

    Raises:
      InvalidRequestError: ``plan`` is not a Plan.
      PlanMismatchError: the plan was made for another model; the message names the first layer that differs.
      CertificationError: the plan recomputes a layer that cannot be recomputed, or would change results.
      UnsupportedModelError: the model has its own ``call``, and its inputs are not known. Give ``data``.
    """
    plain = _plain_subject(model, options)
    if options["data"] is not None and isinstance(plan, Plan):
        told_of(plain, {**options, "batch_size": plan.batch_size, "step": None})
    return _applied(plain, plan, options["data"])


def _plain_subject(model: Any, options: Mapping[str, Any]) -> Any:
    """Return the plain model or, with the option ``step``, the loop that calls its networks."""
    return subject_of(mapped(strip, model), options)


@takes(EstimateOptions)
def estimate(model: Any, **options: Unpack[EstimateOptions]) -> Estimate:
    """Return where the memory of one plain training step of ``model`` goes, in bytes. No step is run.

    ``print(estimate)`` shows the predicted peak and the activations; ``estimate.units`` has one entry for each layer.
    If ``fit`` compiles the model with XLA, the compiler reports the peak (``compiled_peak_bytes``). This takes as long
    as the first step of ``fit``.

    Example::

        print(tf_memsaver.estimate(model, data=train_ds))

    Args:
      model: as in ``optimize``.

    Raises:
      UnsupportedModelError: see ``capture_graph``; also if XLA cannot compile the step (``fit`` would fail, too).
      UnknownDimensionError, InvalidRequestError: see ``capture_graph``.
    """
    return trace(model, **options).estimate()


@takes(LargestBatchOptions)
def max_batch_size(model: Any, **options: Unpack[LargestBatchOptions]) -> LargestBatch:
    """Return the largest batch that trains within ``budget``, with its plan and the speed of some smaller batches.

    The batch is found by planning, to within 0.4%. The step is traced at two batch sizes; the memory at other sizes is
    interpolated or extrapolated linearly, and the step is traced once more at the answer. Then ``measure`` confirms it
    with real steps, unless ``predict_only=True``.

    Example::

        found = tf_memsaver.max_batch_size(model, data=train_ds, budget="6GiB")
        print(found)
        optimized = tf_memsaver.apply_plan(model, found.plan)

    Args:
      model: as in ``optimize``.
      budget: as in ``optimize``, but not a share; by default, the memory that the device has left.
      batch_size: the first size to try, if ``data`` does not give one (default: 32).

    Raises:
      InfeasibleBudgetError, InfeasibleOverheadError: not even a batch of one sample fits.
      InvalidRequestError: the budget is a share: what it is of depends on the batch.
      MeasurementError: the steps at the answer could not be run.
      MemsaverError: the errors of ``search_plan``.
    """
    check_before_tracing(model, options)
    start = options["batch_size"] or (32 if options["data"] is None else None)
    plain = _plain_subject(model, options)
    forget(plain)
    told = told_of(plain, {**options, "batch_size": start})
    request = request_of({**options, "budget": options["budget"] or AUTO}, told.model)
    if request.budget_bytes is None:
        raise InvalidRequestError(
            "a budget in percent depends on the batch size, so it cannot limit the largest batch. Give bytes, such as "
            "budget='6GiB', or 'auto'."
        )
    warn_where_xla_runs(told.model, request, "the largest batch is", "optimize(..., batch_size=..., budget=...)")

    def capture(size: int) -> Graph:
        logging.info("tf_memsaver: tracing the step of '%s' at a batch of %d", told.model.name, size)
        return model_step.capture_graph(
            told.model, **{**part_of(options, CaptureOptions), "batch_size": size, "step": None}
        )

    def measured(plan: Plan) -> int:
        optimized, alone = make_optimized(told.model, plan), not reserves_gpu()
        how = {"data": options["data"], "batch_size": plan.batch_size, "steps": 3, "isolate": alone}
        return _peak_of(optimized, 0 if alone else bytes_of_others(told.model), **how)

    is_run = options["step"] is None and not options["predict_only"]
    found = largest_batch(capture, request, told.batch_size, versions=versions(), measure=measured if is_run else None)
    if not is_run and found.plan.advice:
        logging.warning("tf_memsaver: a batch of %d: %s", found.batch_size, found.plan.advice)
    return found
