"""The sub-commands: each loads the model, calls the library, and returns what it found; none prints or exits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from tf_memsaver import api
from tf_memsaver.api.asked import check_before_tracing, request_of
from tf_memsaver.check.measurement import Measurement
from tf_memsaver.command.arguments import SourceKind, kind_of, output_target
from tf_memsaver.command.doctor import doctor
from tf_memsaver.command.flags import LIMITS, command_line
from tf_memsaver.command.output import Result
from tf_memsaver.command.steps import Given, calibrated, load, own_plan, plan_shown, planned, searched
from tf_memsaver.cost.device import processor
from tf_memsaver.display import overview, tables
from tf_memsaver.display.figures import plotly
from tf_memsaver.display.parts import BAD, GOOD
from tf_memsaver.display.progress import Progress
from tf_memsaver.files.targets import MODEL_FILE, PLAN_FILE, SAVED_MODEL_FOLDER, TargetKind
from tf_memsaver.files.writing import written
from tf_memsaver.options.table import FunctionOptions, PlanOfTraceOptions, Units, options_of
from tf_memsaver.plan.plan import Plan
from tf_memsaver.units import AUTO, Share, format_bytes


def estimate(source: str, flags: Any, progress: Progress) -> Result:
    """Count one training step, layer by layer or operation by operation."""
    given = load(source, flags, progress)
    with progress.stage("tracing one training step"):
        traced = api.trace(given.plain, **given.batches, granularity=flags.granularity, time_chunks=flags.time_chunks)
        found = traced.estimate()
    with progress.stage("planning"):
        made = traced.plan(executor="graph")
    shown = overview.estimate_view(found, made)
    if flags.all:
        shown = (*overview.answer(found, made), Text(), tables.totals_table(found), Text(), tables.layers_table(found))
    kept = {name: getattr(made, name) for name in ("peak_bytes", "step_overhead", "planner")}
    return Result(satisfied=True, document={**found.to_json(), "planned": kept}, shown=shown)


def plan(source: str, flags: Any, progress: Progress) -> Result:
    """Make a plan, and write it when --output says where."""
    target = None if flags.output is None else output_target(source, flags, TargetKind.FILE)
    traced, made = searched(load(source, flags, progress), flags, progress)
    written = _written(made, target, flags)
    document = {**made.to_json(), "device": processor(traced.graph.device)}
    return Result(satisfied=True, document=document, shown=(*plan_shown(traced, made, flags), *written))


def curve(source: str, flags: Any, progress: Progress) -> Result:
    """Plan for budgets between the plain step and the least peak."""
    given = load(source, flags, progress)
    hints = {name: getattr(flags, name) for name in LIMITS if name in flags}
    with progress.stage("tracing one training step, and planning"):
        found = api.memory_time_curve(given.plain, **given.batches, points=flags.points, **hints)
    return Result(
        satisfied=True,
        document={"plans": [each.to_json() for each in found]},
        shown=(tables.curve_table(found),),
    )


def report(source: str, flags: Any, progress: Progress) -> Result:
    """Write a page that shows a plan: one from a file, the model's own, or one made anew."""
    plotly()
    target = output_target(source, flags, TargetKind.FILE)
    given = load(source, flags, progress)
    made = own_plan(given, flags)
    batches = given.batches if made is None else given.batches_of(made)
    how = flags if made is None else made.request
    units = {name: getattr(how, name) for name in options_of(Units)}
    if made is None:
        check_before_tracing(given.plain, {name: getattr(flags, name) for name in LIMITS})
    with progress.stage("tracing one training step"):
        traced = api.trace(given.plain, **batches, **units, profile=flags.profile)
    if made is None:
        with progress.stage("planning"):
            made = traced.plan(
                **{name: getattr(flags, name) for name in LIMITS if name in options_of(PlanOfTraceOptions)}
            )
    if made.advice:
        progress.note(made.advice)
    with progress.stage("planning for other budgets, and writing the page"):
        traced.report_to(target, made, points=flags.points, command=command_line("report", source, flags))
    return Result(
        satisfied=True,
        document={"output": str(target.path), "plan": made.to_json()},
        shown=(tables.before_after_table(made), f"report written to {flags.output}"),
    )


def max_batch(source: str, flags: Any, progress: Progress) -> Result:
    """Find the largest batch within the budget, and write its plan when --output says where."""
    target = None if flags.output is None else output_target(source, flags, TargetKind.FILE)
    given = load(source, flags, progress)
    limits = {name: getattr(flags, name) for name in LIMITS}
    with progress.stage("planning for several batch sizes" + ("" if flags.predict_only else ", running the largest")):
        found = api.max_batch_size(given.plain, **given.batches, **limits, predict_only=flags.predict_only)
    written = _written(found.plan, target, flags)
    return Result(
        satisfied=True, document=found.to_json(), shown=(str(found), Text(), tables.rates_table(found), *written)
    )


def optimize(source: str, flags: Any, progress: Progress) -> Result:
    """Plan and rewrite the model, and write the output folder."""
    if kind_of(source) is SourceKind.SAVED_MODEL:
        return _optimize_saved_model(source, flags, progress)
    target = output_target(source, flags, TargetKind.FOLDER)
    given = load(source, flags, progress)
    made, optimized = (calibrated if flags.calibrate else planned)(given, flags, progress)
    files = [PLAN_FILE]
    with written(target) as folder:
        made.save(folder / PLAN_FILE)
        if "keras" in flags.save_format:
            with progress.stage(f"writing {MODEL_FILE}"):
                optimized.save(folder / MODEL_FILE)
            files.append(MODEL_FILE)
        if "saved_model" in flags.save_format:
            with progress.stage(f"exporting {SAVED_MODEL_FOLDER}"):
                api.export_saved_model(optimized, folder / SAVED_MODEL_FOLDER)
            files.append(SAVED_MODEL_FOLDER)
    shown = (tables.before_after_table(made), f"{', '.join(files)} written to {flags.output}")
    document = {"output": str(target.path), "files": files, "plan": made.to_json()}
    return Result(satisfied=True, document=document, shown=shown)


def verify(source: str, flags: Any, progress: Progress) -> Result:
    """Compare the plain and the optimized model over some training steps."""
    given = load(source, flags, progress)
    made, optimized = planned(given, flags, progress, any_batch=True)
    with progress.stage(f"training plain and optimized model, {flags.mode} mode"):
        found = api.verify(
            given.plain,
            optimized,
            **given.batches_of(made),
            steps=flags.steps,
            mode=flags.mode,
        )
    verdict = Text("passed" if found.passed else "FAILED", GOOD if found.passed else BAD)
    shown = (Text.assemble(verdict, ": ", str(found)), str(made), Text(), tables.verification_table(found))
    document = {"plan": made.to_json(), "verification": found.to_json()}
    return Result(satisfied=found.passed, document=document, shown=shown)


def measure(source: str, flags: Any, progress: Progress) -> Result:
    """Measure both models, each in a process of its own, and compare the optimized one with the budget."""
    given = load(source, flags, progress)
    made, optimized = planned(given, flags, progress, any_batch=True)
    found: dict[str, Measurement] = {}
    for name, subject in (("plain", given.plain), ("optimized", optimized)):
        with progress.stage(f"measuring the {name} model"):
            found[name] = api.measure(
                subject,
                **given.batches_of(made),
                mode=flags.mode,
                steps=flags.steps,
                beside_plain=subject is optimized,
            )
    plain, peak = found["plain"], found["optimized"].peak_bytes
    budget = _budget_of_steps(given, made, flags, plain)
    kept = None if budget is None else peak <= budget
    shown: tuple[RenderableType, ...] = (tables.measurements_table(made, plain, found["optimized"]),)
    if budget is not None:
        sign, verdict = ("≤", "kept") if kept else (">", "NOT kept")
        line = f"budget {verdict}: measured {format_bytes(peak)} {sign} {format_bytes(budget)}"
        shown = (Text(line, GOOD if kept else BAD), *shown)
    predicted = {"plain": made.plain_peak_bytes, "optimized": made.peak_bytes}
    is_predicted = plain.batch_size == made.batch_size
    document = {
        "plan": made.to_json(),
        "budget_bytes": budget,
        "budget_kept": kept,
        "measurements": {
            name: {"predicted_peak_bytes": predicted[name] if is_predicted else None, **each.to_json()}
            for name, each in found.items()
        },
    }
    return Result(satisfied=kept is not False, document=document, shown=shown)


VERBS: dict[str, Callable[..., Result]] = {
    verb.__name__.replace("_", "-"): verb
    for verb in (estimate, plan, curve, report, max_batch, optimize, verify, measure, doctor)
}
"""By name. A verb is called with what the command line names, the flags, where progress goes and, if it runs a script,
the script's arguments."""


def _written(made: Plan, target: Any, flags: Any) -> tuple[RenderableType, ...]:
    """Write a plan to where --output says, if it does; return what to say of it."""
    if target is None:
        return ()
    made.save_to(target)
    return (f"plan written to {flags.output}",)


def _budget_of_steps(given: Given, made: Plan, flags: Any, plain: Measurement) -> int | None:
    """Return what a measured step may take, by --budget or else by the plan, if it was made for such batches.

    A share is one of the measured plain step.

    Raises:
      InvalidRequestError: nothing tells how much memory the device has left.
    """
    if isinstance(flags.budget, Share):
        return int(flags.budget * plain.peak_bytes)
    if isinstance(flags.budget, int):
        return flags.budget
    if flags.plan is not None and flags.budget == AUTO:
        return request_of({"budget": AUTO}, given.plain).budget_bytes
    return made.request.budget_bytes if plain.batch_size == made.batch_size else None


def _optimize_saved_model(source: str, flags: Any, progress: Progress) -> Result:
    """Rewrite the functions of a SavedModel that can be trained through; without its Python code."""
    target = output_target(source, flags, TargetKind.FOLDER)
    with progress.stage(f"tracing, planning and rewriting {source}"):
        plans = api.rewrite_saved_model(
            source,
            target.path,
            batch_size=flags.batch_size,
            functions=flags.function,
            overwrite=flags.overwrite,
            **{name: getattr(flags, name) for name in LIMITS if name in options_of(FunctionOptions)},
        )
    shown = tuple(part for name, made in plans.items() for part in (name, tables.before_after_table(made)))
    document = {"output": str(target.path), "plans": {name: made.to_json() for name, made in plans.items()}}
    return Result(satisfied=True, document=document, shown=(*shown, f"SavedModel written to {flags.output}"))
