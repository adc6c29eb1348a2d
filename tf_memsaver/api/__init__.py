"""The verbs: each a few lines over the rooms below. Here are those for models.

Not here: how anything is done.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from absl import logging

from tf_memsaver.api.asked import check_before_tracing, part_of, request_of, tell_of
from tf_memsaver.api.compiled import warn_where_xla_runs
from tf_memsaver.api.functions import optimize_function, rewrite_saved_model
from tf_memsaver.api.traced import TracedStep
from tf_memsaver.capture import model_step
from tf_memsaver.check.measure import measure
from tf_memsaver.check.measurement import Measurement
from tf_memsaver.check.verify import Verification, verify
from tf_memsaver.compat.versions import versions
from tf_memsaver.display.figures import plotly
from tf_memsaver.display.notices import tell
from tf_memsaver.errors import InvalidRequestError
from tf_memsaver.files.targets import TargetKind, check_target
from tf_memsaver.ir.graph import Graph
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
from tf_memsaver.planners.measured import plan_that_keeps
from tf_memsaver.program.kinds import program_of
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


class Trace(TracedStep):
    """One training step of a model as it was traced: what comes of it is worked out without tracing it again.

    ``graph`` is the step, ``model`` the plain model. Two plans that differ in nothing but their limits share what was
    computed for the first.
    """

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
    forget(plain)
    options["step"] = None
    return Trace(plain, model_step.capture_graph(plain, **options), **options)


@functools.wraps(model_step.capture_graph)
def capture_graph(model: Any, **options: Unpack[CaptureOptions]) -> Graph:
    """Return the traced step of a model, the plain one's if it is optimized."""
    return trace(model, **options).graph


@takes(CalibratedOptions)
def optimize(model: Any, **options: Unpack[CalibratedOptions]) -> Any:
    """Return ``model`` as one of the same class, over the same layers and variables, that trains in less memory.

    The original stays as it was; the plan is in the result's ``memsaver_plan``. A compiled model comes back compiled,
    with the same optimizer object; compile it before, so that the optimizer's slots count towards the budget. A model
    that is optimized already gets another plan.

    What the plan saves is logged (absl, level INFO) and, in a notebook or on a terminal, shown. A plan that saves less
    than 3% is a warning, which says why and what to try.

    Example::

        model.compile("adam", "mse")
        model = tf_memsaver.optimize(model, data=train_ds)  # about the smallest peak for at most 30% more time
        model.fit(train_ds)

        model = tf_memsaver.optimize(model, batch_size=32, budget="6GiB")  # the quickest step within 6 GiB
        print(model.memsaver_plan)

    Args:
      model: a Keras 3 model on the TensorFlow backend: a built Functional or Sequential one, or any with ``inputs``.

    Raises:
      InfeasibleBudgetError: nothing fits the budget; it names the smallest that works. With ``calibrate``, also where
        real steps by no plan kept the budget.
      InfeasibleOverheadError: the strategy's plan is slower than ``max_overhead`` allows.
      HintError: a pattern of ``keep``, ``recompute`` or ``candidates`` matches no layer, or they contradict each other.
      UnsupportedModelError: the model is of a kind that cannot be planned; the sentence says what would help.
      UnknownDimensionError: an input has a dimension, other than the batch, that is not known.
      InvalidRequestError: an argument has no meaning; the sentence names it and what is accepted.
    """
    if options["calibrate"] and options["budget"] is None:
        raise InvalidRequestError("calibrate=True holds real steps to a budget: give one, such as budget='80%'.")
    traced, plan = _planned(model, options)
    if options["calibrate"]:
        plan = _calibrated(traced, plan, options)
    optimized = traced.apply(plan)
    tell_of(_subject(traced.model, options), plan)
    if is_planned_as_a_step(traced.model):
        program = program_of(traced.model, plan.request.granularity, None, plan.request.time_chunks)
        if program.runs_step and program.stays_plain:
            (logging.warning if plan.advice else tell)(f"tf_memsaver: {program.stays_plain}")
    return optimized


def _subject(model: Any, options: Mapping[str, Any]) -> str:
    """Return what a plan is for, in words."""
    if options["step"] is not None:
        return f"step '{model.name}'"
    is_whole = getattr(model, "compiled", False) or is_planned_as_a_step(model)
    return f"model '{model.name}'{'' if is_whole else ' (a step of this model alone: it is not compiled)'}"


def _calibrated(traced: Trace, plan: Plan, options: Mapping[str, Any]) -> Plan:
    """Return the plan, or one for less whose steps keep the budget that it was made for."""
    limits = part_of(options, PlanOfTraceOptions)
    how = {"data": options["data"], "step": options["step"], "batch_size": plan.batch_size, "isolate": False}

    def measured(plan: Plan) -> int:
        logging.info("tf_memsaver: running real steps of '%s': %s", traced.model.name, plan)
        return measure(make_optimized(traced.model, plan), **how).peak_bytes

    kept, peak = plan_that_keeps(plan, lambda limit: traced.plan(**{**limits, "budget": limit}), measured)
    budget = format_bytes(plan.request.budget_bytes or 0)
    tell(f"tf_memsaver: real steps of '{traced.model.name}' took at most {format_bytes(peak)} of {budget}")
    return kept


@takes(OptimizeOptions)
def search_plan(model: Any, **options: Unpack[OptimizeOptions]) -> Plan:
    """Trace one training step of ``model`` and return the plan of ``strategy`` for it; nothing is run or changed.

    Args:
      model: a Keras 3 model on the TensorFlow backend, as in ``optimize``.

    Raises:
      InfeasibleBudgetError: nothing fits the budget; it names the smallest that works.
      InfeasibleOverheadError: the strategy's plan is slower than ``max_overhead`` allows.
      HintError: a pattern matches no layer, or the hints contradict each other.
      UnsupportedModelError, UnknownDimensionError, InvalidRequestError: see ``capture_graph``.
    """
    return _planned(model, options)[1]


def _planned(model: Any, options: Mapping[str, Any]) -> tuple[Trace, Plan]:
    """Return a model's traced step and its plan."""
    check_before_tracing(model, options)
    traced = trace(model, **part_of(options, CaptureOptions))
    return traced, traced.plan(**part_of(options, PlanOfTraceOptions))


@takes(CurveOptions)
def memory_time_curve(model: Any, **options: Unpack[CurveOptions]) -> tuple[Plan, ...]:
    """Trace one training step of ``model`` and return what memory costs in time: plans from plain to the least peak.

    No plan of them beats another one in both. Read ``peak_bytes`` (of a whole step) and ``step_overhead`` (a share of
    the plain step's time) off them, and give the one you choose to ``apply_plan``. The peaks are those of TensorFlow's
    own executor: a warning says so where ``fit`` compiles the model with XLA.

    Args:
      model: as in ``optimize``.

    Raises:
      HintError: a pattern matches no layer, or the hints contradict each other.
      UnsupportedModelError, UnknownDimensionError, InvalidRequestError: see ``capture_graph``.
    """
    check_before_tracing(model, options)
    return trace(model, **part_of(options, CaptureOptions)).curve(**part_of(options, CurveOfTraceOptions))


@takes(ReportOptions)
def report(model: Any, output: str | os.PathLike[str], **options: Unpack[ReportOptions]) -> Plan:
    """Plan as ``search_plan`` does, write one page of HTML that shows the plan, and return the plan.

    The page has the step's memory over time, plain and planned, with the tensors alive; memory against time; where the
    peak falls; and what becomes of each layer. All of it is predicted: nothing is run. The page needs no network. To
    show a plan that is there already: ``trace(model, ...).report(plan, output)``.

    Args:
      model: as in ``optimize``.
      output: the file to write, such as ``"report.html"``.

    Raises:
      MissingExtraError: plotly is not installed.
      InvalidRequestError, OutputExistsError, OutputError: ``output`` cannot be written.
      MemsaverError: what ``search_plan`` raises.
    """
    plotly()
    target = check_target(output, TargetKind.FILE, overwrite=options["overwrite"])
    traced, plan = _planned(model, options)
    traced.report_to(target, plan, points=options["points"])
    return plan


@takes(ApplyOptions)
def apply_plan(model: Any, plan: Plan, **options: Unpack[ApplyOptions]) -> Any:
    """Return ``model`` as one that trains by ``plan``; an optimized model changes its plan.

    The plan is certified for this model first. That traces a training step, unless the plan was made for the same model
    object in this process.

    Args:
      model: what the plan was made for; with ``step`` as in ``optimize``.
      plan: what ``search_plan`` returned, here or in another process.

    Raises:
      InvalidRequestError: ``plan`` is no Plan.
      PlanMismatchError: the plan was made for another model; it names the first layer that differs.
      CertificationError: the plan replays what cannot be replayed, or cuts where results would change.
      UnsupportedModelError: the model computes in a ``call`` of its own, and its inputs are not known: ``data`` tells
        them.
    """
    plain = _plain_subject(model, options)
    if options["data"] is not None and isinstance(plan, Plan):
        told_of(plain, {**options, "batch_size": plan.batch_size, "step": None})
    optimized = make_optimized(plain, plan)
    for place in places_of_networks(plain) if isinstance(plain, Loop) else ():
        tell(f"tf_memsaver: {place}")
    return optimized


def _plain_subject(model: Any, options: Mapping[str, Any]) -> Any:
    """Return what is trained, plain: a model or, with the option ``step``, the loop that calls it or them."""
    return subject_of(mapped(strip, model), options)


@takes(EstimateOptions)
def estimate(model: Any, **options: Unpack[EstimateOptions]) -> Estimate:
    """Return where the bytes of one plain training step of ``model`` go; nothing is run.

    Where ``fit`` compiles the model with XLA, its compiler is asked for the peak (``compiled_peak_bytes``), which takes
    as long as the first step of ``fit``.

    Args:
      model: as in ``optimize``.

    Raises:
      UnsupportedModelError: see ``capture_graph``; or XLA cannot compile the step, as ``fit`` could not.
      UnknownDimensionError, InvalidRequestError: see ``capture_graph``.
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
    check_before_tracing(model, options)
    start = options["batch_size"] or (32 if options["data"] is None else None)
    plain = _plain_subject(model, options)
    forget(plain)
    told = told_of(plain, {**options, "batch_size": start})
    request = request_of({**options, "budget": options["budget"] or AUTO}, told.model)
    if request.budget_bytes is None:
        raise InvalidRequestError("a share of the plain peak is a budget for one batch size. Give bytes, or 'auto'.")
    warn_where_xla_runs(
        told.model, request, "the largest batch is", "Planning it again, by optimize(..., batch_size=..., budget=...),"
    )

    def capture(size: int) -> Graph:
        logging.info("tf_memsaver: tracing the step of '%s' at a batch of %d", told.model.name, size)
        return model_step.capture_graph(
            told.model, **{**part_of(options, CaptureOptions), "batch_size": size, "step": None}
        )

    def measured(plan: Plan) -> int:
        optimized = make_optimized(told.model, plan)
        return measure(optimized, data=options["data"], batch_size=plan.batch_size, steps=3).peak_bytes

    is_run = options["step"] is None and not options["predict_only"]
    return largest_batch(capture, request, told.batch_size, versions=versions(), measure=measured if is_run else None)
