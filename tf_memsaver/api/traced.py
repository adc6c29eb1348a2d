"""A traced step, and what is made from it without the model: estimates, plans, curves, reports and plots."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_memsaver.api.asked import part_of, request_of
from tf_memsaver.api.compiled import CompiledSteps, is_for_xla, plan_for_xla, warn_where_xla_runs
from tf_memsaver.compat.versions import versions
from tf_memsaver.display import plots
from tf_memsaver.display.figures import plotly
from tf_memsaver.display.page import page
from tf_memsaver.display.report import Report, call_of
from tf_memsaver.display.steps import ShownStep
from tf_memsaver.files.targets import Target, TargetKind, check_target
from tf_memsaver.files.writing import written
from tf_memsaver.ir.graph import Graph, MemoryKind
from tf_memsaver.ir.segments import stored
from tf_memsaver.judge.estimate import Estimate
from tf_memsaver.judge.simulate import Simulator
from tf_memsaver.options.table import (
    Batches,
    CurveOfTraceOptions,
    PlanOfTraceOptions,
    Points,
    ReportOfTraceOptions,
    RequestOptions,
)
from tf_memsaver.options.verbs import takes
from tf_memsaver.plan.plan import Plan
from tf_memsaver.planners.solve import Plans
from tf_memsaver.program.data import of_size
from tf_memsaver.program.told import told_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from typing_extensions import Unpack


class TracedGraph:
    """One traced training step; ``graph`` is the step, ``model`` the plain model."""

    def __init__(self, model: Any, graph: Graph, **how: Any) -> None:
        """Take a captured step, and the options that it was captured with. ``trace`` makes objects of this class."""
        self.model, self.graph = model, graph
        self._how, self._given = part_of(how, RequestOptions), part_of(how, Batches)
        self._plans = Plans(graph, versions=versions())

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__} of '{self.graph.name}' ({len(self.graph.units)} units, "
            f"batch size {self.graph.batch_size})"
        )

    def estimate(self) -> Estimate:
        """Return where the memory of the plain step goes, in bytes, as ``tf_memsaver.estimate`` does.

        Raises:
          UnsupportedModelError: ``fit`` uses XLA, and XLA cannot compile the step.
        """
        found, plain = Estimate.from_graph(self.graph), request_of({}, self.model, strategy="plain", **self._how)
        if not is_for_xla(self.model, plain):
            return found
        return dataclasses.replace(found, compiled_peak_bytes=self._compiled_steps.peak_bytes(self._plans.plan(plain)))

    @takes(PlanOfTraceOptions)
    def plan(self, **options: Unpack[PlanOfTraceOptions]) -> Plan:
        """Return a plan for the step, as ``tf_memsaver.search_plan`` does.

        Raises:
          MemsaverError: the errors of ``search_plan`` for limits and hints.
        """
        request = request_of(options, self.model, data=self._given.get("data"), **self._how)
        if is_for_xla(self.model, request):
            return plan_for_xla(self._plans, request, self._compiled_steps)
        return self._plans.plan(request)

    @functools.cached_property
    def _compiled_steps(self) -> CompiledSteps:
        told = told_of(self.model, {**self._given, "step": None})
        if told.data is not None and not told.has_batches:
            specs = told.data.specs.mapped(functools.partial(of_size, told.batch_size))
        else:
            specs = told.batches(self.model, 1)[0].mapped(tf.TensorSpec.from_tensor)
        return CompiledSteps(self.model, specs, self.graph.bytes_of(MemoryKind.DATA))

    @takes(CurveOfTraceOptions)
    def curve(self, **options: Unpack[CurveOfTraceOptions]) -> tuple[Plan, ...]:
        """Return plans from the plain step to the smallest peak, as ``tf_memsaver.memory_time_curve`` does.

        Raises:
          HintError: a pattern matches no layer, or two hints contradict each other.
        """
        request = request_of(options, self.model, **self._how)
        warn_where_xla_runs(self.model, request, "the curve is", "search_plan(..., budget=...)")
        return self._plans.curve(request, options["points"])

    @takes(ReportOfTraceOptions)
    def report(self, plan: Plan, output: str | os.PathLike[str], **options: Unpack[ReportOfTraceOptions]) -> None:
        """Write the HTML page that ``tf_memsaver.report`` writes, for a plan of this step.

        Args:
          plan: a plan from ``plan`` or ``curve``, or from a file.
          output: the file to write, such as ``"report.html"``.

        Raises:
          PlanMismatchError: the plan was made for another model or batch size.
          MissingExtraError: plotly is not installed.
          InvalidRequestError, OutputExistsError, OutputError: ``output`` cannot be written.
        """
        plotly()
        target = check_target(output, TargetKind.FILE, overwrite=options["overwrite"])
        self.report_to(target, plan, points=options["points"])

    def report_to(self, target: Target, plan: Plan, *, points: int, command: str = "") -> None:
        """Write a report as ``report`` does, to a target that is already checked.

        ``command`` is the command line that the page shows; if empty, the page shows a call in Python.
        """
        curve = self._curve_like(plan, points)
        text = page(Report.of(Simulator(self.graph), plan, curve, command or call_of(plan)))
        with written(target) as fresh:
            fresh.write_text(text, encoding="utf-8")

    def plot_timeline(self, plan: Plan | None = None, *, ax: Any = None) -> Axes:
        """Plot the live bytes of the step over its predicted time (matplotlib), and return the axes.

        Args:
          plan: a plan of this step, drawn beside the plain step.
          ax: matplotlib axes to draw into; if None, the axes of a new figure.

        Raises:
          PlanMismatchError: the plan was made for another model.
          MissingExtraError: matplotlib is not installed.
        """
        simulator, planned = Simulator(self.graph), None
        if plan is not None:
            plan.check_matches(self.graph.signatures, [unit.label for unit in self.graph.units])
            planned = ShownStep.of(simulator, plan.segments)
        return plots.timeline(self._title, ShownStep.of(simulator, stored(len(self.graph.units))), planned, ax)

    @takes(Points)
    def plot_curve(self, plan: Plan | None = None, *, ax: Any = None, **options: Unpack[Points]) -> Axes:
        """Plot memory against time (matplotlib), and return the axes.

        Args:
          plan: a plan of this step, which is marked; the plans on the curve keep its hints.
          ax: matplotlib axes to draw into; if None, the axes of a new figure.

        Raises:
          MissingExtraError: matplotlib is not installed.
        """
        return plots.curve(self._title, self._curve_like(plan, options["points"]), plan, ax)

    def plot_layers(self, *, ax: Any = None) -> Axes:
        """Plot the bytes that each layer keeps for the backward pass, for the 30 largest; return matplotlib's axes.

        Args:
          ax: matplotlib axes to draw into; if None, the axes of a new figure.

        Raises:
          MissingExtraError: matplotlib is not installed.
        """
        return plots.layers(Estimate.from_graph(self.graph), ax)

    @property
    def _title(self) -> str:
        return f"{self.graph.name}, batch size {self.graph.batch_size}"

    def _curve_like(self, plan: Plan | None, points: int) -> tuple[Plan, ...]:
        """Return the curve of plans with the hints of one."""
        request = None if plan is None else plan.request
        hints = (
            {} if request is None else {name: getattr(request, name) for name in ("keep", "recompute", "candidates")}
        )
        return self.curve(points=points, **hints)
