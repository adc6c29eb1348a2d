"""Steps that the sub-commands share: load the model, trace it, plan it, apply the plan."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
from rich.console import RenderableType
from rich.text import Text

from tf_memsaver import api
from tf_memsaver.api.asked import check_before_tracing
from tf_memsaver.command.flags import LIMITS
from tf_memsaver.command.model_source import load_data, load_model
from tf_memsaver.display import overview, tables
from tf_memsaver.display.progress import Progress
from tf_memsaver.errors import InvalidRequestError
from tf_memsaver.judge.estimate import Estimate
from tf_memsaver.options.table import Units, options_of
from tf_memsaver.plan.plan import Plan


class Given(NamedTuple):
    """What a command line names: the model, the same as a plain one, and what tells a verb of the batches."""

    model: keras.Model
    plain: keras.Model
    batches: dict[str, Any]

    def batches_of(self, made: Plan) -> dict[str, Any]:
        """Return what tells of the batches for a plan: of its size, where no other is given."""
        size = self.batches["batch_size"]
        return {**self.batches, "batch_size": made.batch_size if size is None else size}


def load(source: str, flags: Any, progress: Progress) -> Given:
    """Return the model and the data that a command line names.

    Raises:
      InvalidRequestError: what ``model_source`` raises.
    """
    with progress.stage(f"loading {source}"):
        model = load_model(source, input_shape=flags.input_shape or None, optimizer=flags.optimizer, loss=flags.loss)
    if not getattr(model, "compiled", False):
        progress.note("the model is not compiled, so no optimizer slots are counted; --optimizer=NAME compiles it")
    batches: dict[str, Any] = {"batch_size": flags.batch_size}
    if flags.data is not None:
        with progress.stage(f"calling {flags.data} for data"):
            batches["data"] = load_data(flags.data)
    return Given(model, api.strip(model), batches)


def searched(given: Given, flags: Any, progress: Progress) -> tuple[api.Trace, Plan]:
    """Return the traced step and the plan that the flags ask for."""
    asked = {name: getattr(flags, name) for name in LIMITS}
    # A module of the user's own may have registered a strategy when the model was made.
    check_before_tracing(given.plain, asked)
    how = {name: asked.pop(name) for name in (*options_of(Units), "profile")}
    with progress.stage("tracing one training step"):
        traced = api.trace(given.plain, **given.batches, **how)
    with progress.stage("planning"):
        return traced, traced.plan(**asked)


def plan_shown(traced: api.Trace, made: Plan, flags: Any) -> tuple[RenderableType, ...]:
    """Return what a person is shown of a plan: its answer and the largest blocks or, with --all, all segments."""
    found = Estimate.from_graph(traced.graph)  # The plan has what XLA's compiler told, where it was asked.
    if flags.all:
        return (*overview.answer(found, made), Text(), tables.segments_table(made))
    return overview.plan_view(found, made)


def calibrated(given: Given, flags: Any, progress: Progress) -> tuple[Plan, keras.Model]:
    """Return a plan that real steps have kept, and the optimized model."""
    limits = {name: getattr(flags, name) for name in LIMITS}
    with progress.stage("tracing one training step, planning, and running real steps"):
        optimized = api.optimize(given.plain, **given.batches, **limits, calibrate=True)
    return optimized.memsaver_plan, optimized


def planned(given: Given, flags: Any, progress: Progress, *, any_batch: bool = False) -> tuple[Plan, keras.Model]:
    """Return a plan and the optimized model: from the plan file, from the model's own plan, or planned anew.

    Raises:
      MemsaverError: the errors of ``own_plan``, ``search_plan`` and ``apply_plan``.
    """
    found = own_plan(given, flags, any_batch=any_batch)
    if found is not None and flags.plan is None:
        return found, given.model
    made = searched(given, flags, progress)[1] if found is None else found
    with progress.stage("rewriting the model"):
        return made, api.apply_plan(given.plain, made, data=given.batches.get("data"))


def own_plan(given: Given, flags: Any, *, any_batch: bool = False) -> Plan | None:
    """Return the plan of the plan file, or the model's own where no limits are given; None if there is neither.

    Raises:
      PlanFormatError: the file is not a plan.
      InvalidRequestError: --batch_size is not the plan's. With ``any_batch`` it may differ.
    """
    found: Plan | None
    if flags.plan is not None:
        found, remedy = Plan.load(flags.plan), "without --plan"
    elif all(flags[name].using_default_value for name in LIMITS):
        found, remedy = getattr(given.model, "memsaver_plan", None), "with --strategy=auto"
    else:
        return None
    if found is not None and not any_batch and flags.batch_size not in (None, found.batch_size):
        raise InvalidRequestError(
            f"the plan was made for batch size {found.batch_size}, not {flags.batch_size}. Leave --batch_size out, or "
            f"plan for {flags.batch_size} {remedy}."
        )
    return found
