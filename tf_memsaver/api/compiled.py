"""Plans for steps that XLA compiles, as ``fit`` does on a GPU: each candidate's step is compiled, none is run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from absl import logging

from tf_memsaver.check.compiled import compiled_step_memory
from tf_memsaver.compat.keras_training import fit_compiles
from tf_memsaver.compat.xla import CompiledMemory
from tf_memsaver.cost.compiled import as_compiled, most_scratch
from tf_memsaver.errors import InfeasibleBudgetError, InvalidRequestError
from tf_memsaver.ir.segments import Segment
from tf_memsaver.judge.simulate import Simulator
from tf_memsaver.options.table import DEFAULT_MAX_OVERHEAD
from tf_memsaver.plan.advice import WORTH_WHILE
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.registry import planner_named
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.compiled import MOST_COMPILED, least_of, quickest_compiled_within
from tf_memsaver.planners.measured import least_plan, plan_that_keeps
from tf_memsaver.planners.solve import Plans
from tf_memsaver.program.data import Batch
from tf_memsaver.rewrite.optimized_model import make_optimized
from tf_memsaver.units import format_bytes

POINTS = 12
"""Plans on each of the curves that those to be compiled are taken from."""

MOST_OF_COMPILED = 1.02
"""The most that a step takes, as a share of what the compiler says: a budget is compared with that.

The allocator rounds buffers up, and on a busy machine the buffers of two variables are there twice for a moment. The
largest of twenty steps of ``fit`` took up to 2% more in 48 of 56 rows, plain and planned, and 4.1% more at worst, for a
ViT whose peak is small beside its weights (tools/results/bench_xla.md).
"""

LARGE_SCRATCH = 0.1
"""Scratch memory of one operation that is so large a share of a plan's peak is told of,"""

SAVED_WELL = 0.5
"""if the plan does not save so large a share of the plain step's peak."""


def is_for_xla(model: Any, request: Request) -> bool:
    """Whether XLA's compiler is to judge the plans of a request.

    Raises:
      InvalidRequestError: it is to, and there is no step of ``fit`` to compile.
    """
    if request.executor != "xla":
        return request.executor == "auto" and fit_compiles(model)
    if not getattr(model, "compiled", False):
        raise InvalidRequestError(
            "executor='xla' needs a compiled model. Call model.compile(...) first, or leave executor= out."
        )
    return True


def warn_where_xla_runs(model: Any, request: Request, what: str, instead: str) -> None:
    """Warn, where XLA is to judge the plans of a request, that something is told of TensorFlow's own executor alone.

    ``what`` is what is told; ``instead`` is what asks XLA's compiler.
    """
    if is_for_xla(model, request):
        logging.warning(
            "tf_memsaver: fit compiles the steps of '%s' with XLA, but %s computed for TensorFlow's own executor. "
            "For XLA's figures, use %s.",
            model.name,
            what,
            instead,
        )


class CompiledSteps:
    """The memory of a model's steps by XLA's compiler; a step is compiled once for each plan."""

    def __init__(self, model: Any, specs: Batch, data_bytes: int = 0) -> None:
        """Take the plain model, the specs of a batch that it is trained on, and what its data holds beside."""
        self._model, self._specs, self._data_bytes = model, specs, data_bytes
        self._memories: dict[tuple[Segment, ...], CompiledMemory] = {}

    def most_bytes(self, plan: Plan) -> int:
        """Return the bytes that steps by a plan stay under, about."""
        return math.ceil(MOST_OF_COMPILED * self._memory(plan).peak_bytes) + self._data_bytes

    def peak_bytes(self, plan: Plan) -> int:
        """Return the peak bytes of a step by a plan, as the compiler says them, with what the data holds."""
        return self._memory(plan).peak_bytes + self._data_bytes

    def fixed_bytes(self, plan: Plan) -> int:
        """Return the bytes that are the same with every plan: what a step is given and returns, and the data."""
        memory = self._memory(plan)
        return memory.argument_bytes + memory.output_bytes + self._data_bytes

    def _memory(self, plan: Plan) -> CompiledMemory:
        if plan.segments not in self._memories:
            what = plan.recomputed_in_words
            logging.info("tf_memsaver: XLA compiles a step of '%s', %s recomputed", self._model.name, what)
            judged = replace(plan, request=replace(plan.request, executor="xla"))
            model = make_optimized(self._model, judged) if plan.recomputed_units else self._model
            self._memories[plan.segments] = compiled_step_memory(model, self._specs)
        return self._memories[plan.segments]

    def __contains__(self, plan: Plan) -> bool:
        """Whether a step by a plan was compiled."""
        return plan.segments in self._memories


def plan_for_xla(plans: Plans, request: Request, compiled: CompiledSteps) -> Plan:
    """Return the plan that XLA's compiler finds best among those that are proposed for a request.

    Raises:
      InfeasibleBudgetError: none of those that were compiled is within the budget; it names the least, and what of it
        no plan changes.
      InfeasibleOverheadError, HintError: as ``Plans.plan``.
    """
    free = replace(request, budget_bytes=None, budget_share=None)
    proposed = _Proposed(plans)
    plain = proposed.plain(request)
    plain_bytes = compiled.peak_bytes(plain)
    request = replace(request.for_peak(plain_bytes), executor="xla")
    scratch = most_scratch(plans.graph)
    try:
        plan = _chosen(proposed, free, request.budget_bytes, plain, compiled)
    except InfeasibleBudgetError as error:
        raise _explained(error, compiled.fixed_bytes(plain), *scratch) from None
    found = replace(
        plan,
        request=request,
        strategy=request.strategy,
        activation_bytes=plans.plan(_plain(request)).activation_bytes,
        peak_bytes=compiled.peak_bytes(plan),
        highest_peak_bytes=compiled.most_bytes(plan),
        plain_peak_bytes=plain_bytes,
        bound_seconds=None,
        gap=None,
    )
    reasons = [_advice(found), _scratch_advice(found, *scratch)]
    return replace(found, advice=". ".join(filter(None, reasons)))


def _explained(error: InfeasibleBudgetError, given: int, name: str, nbytes: int) -> InfeasibleBudgetError:
    """Return an error that says what of the least no plan changes: what a step is given, and XLA's own scratch."""
    kept = f"{format_bytes(given)} are weights, the optimizer's slots and data"
    if nbytes < LARGE_SCRATCH * error.least_bytes:
        return InfeasibleBudgetError(error.budget_bytes, error.least_bytes, given, kept)
    scratch = f"{format_bytes(nbytes)} are scratch memory of '{name}' as XLA's CPU compiler expands it"
    return InfeasibleBudgetError(error.budget_bytes, error.least_bytes, given + nbytes, f"{kept}, and {scratch}")


def _scratch_advice(plan: Plan, name: str, nbytes: int) -> str:
    """Return what keeps a plan from saving more, if that is scratch memory of an operation."""
    if nbytes < LARGE_SCRATCH * plan.peak_bytes or plan.peak_bytes < (1 - SAVED_WELL) * plan.plain_peak_bytes:
        return ""
    return (
        f"XLA's CPU compiler expands '{name}', which takes {format_bytes(nbytes)} of scratch memory that no plan "
        f"changes; with jit_compile=False it takes none of that"
    )


def _plain(request: Request) -> Request:
    return Request(
        strategy="plain",
        keep=request.keep,
        candidates=request.candidates,
        granularity=request.granularity,
        time_chunks=request.time_chunks,
    )


class _Proposed:
    """What is proposed to the compiler: plans of a step as XLA fuses it, and as TensorFlow's executor runs it.

    What each is expected to take is told of the fused step.
    """

    def __init__(self, plans: Plans) -> None:
        self._of_executor = plans
        self.plans = Plans(as_compiled(plans.graph), versions=plans.versions)

    def plain(self, request: Request) -> Plan:
        """Return the plain step."""
        return replace(self.plans.plan(_plain(request)), advice="")

    def curves(self, free: Request, most: float | None) -> tuple[list[Plan], list[Plan]]:
        """Return plans that replay something within an overhead, in order of rising times, and others."""
        free = free.without_limits()
        both = self.plans.curve(free, POINTS), self._of_executor.curve(free, POINTS)
        quick, others = (
            [p for p in c if p.recomputed_units and (most is None or p.step_overhead <= most)] for c in both
        )
        peak_of = Simulator(self.plans.graph).reported_peak
        known = {plan.segments for plan in quick}
        return quick, [replace(p, peak_bytes=peak_of(p.segments)) for p in others if p.segments not in known]


def _chosen(proposed: _Proposed, free: Request, budget: int | None, plain: Plan, compiled: CompiledSteps) -> Plan:
    most_bytes, may_be_plain = compiled.most_bytes, not free.recompute
    if budget is not None and may_be_plain and most_bytes(plain) <= budget:
        return plain
    if free.strategy != "auto":
        return _by_name(proposed.plans, free, budget, compiled)
    most = DEFAULT_MAX_OVERHEAD if free.max_overhead is None and budget is None else free.max_overhead
    quick, others = proposed.curves(free, most)
    if not quick and not others and not (budget is not None and may_be_plain):
        return proposed.plans.plan(free)  # Nothing can be replayed so quickly: it says why, or that hints forbid it.
    if budget is not None:
        known = [plan for plan in [*quick, *others] if plan in compiled]
        known += [plain] if may_be_plain else []
        return quickest_compiled_within(quick, budget, most_bytes, known, others)[0]
    best, peak = least_of(quick, most_bytes, others)
    is_worth_it = not may_be_plain or peak <= (1 - WORTH_WHILE) * most_bytes(plain)
    return best if is_worth_it else plain


def _by_name(plans: Plans, free: Request, budget: int | None, compiled: CompiledSteps) -> Plan:
    """Return the plan of a planner that was asked for by name."""
    most_bytes = compiled.most_bytes
    if budget is None or not planner_named(free.strategy).keeps_budget:
        plan = plans.plan(free)
        if budget is not None and most_bytes(plan) > budget:
            raise InfeasibleBudgetError(budget, most_bytes(plan))
        return plan

    def plan_for(limit: int) -> Plan:
        return plans.plan(replace(free, budget_bytes=limit))

    try:
        first = plan_for(budget)
    except InfeasibleBudgetError as expected:
        # The compiler may find that it takes less than the planner expects.
        least = least_plan(plan_for, expected)
        if least is None:
            raise
        if most_bytes(least) > budget:
            raise InfeasibleBudgetError(budget, most_bytes(least)) from None
        return least
    return plan_that_keeps(first, plan_for, most_bytes)[0]


def _advice(plan: Plan) -> str:
    """Return why a plan saves little, and what to try, or nothing."""
    if plan.peak_bytes <= (1 - WORTH_WHILE) * plan.plain_peak_bytes:
        return ""
    budget = plan.request.budget_bytes
    if budget is not None and plan.plain_peak_bytes <= budget and not plan.recomputed_units:
        return (
            f"the plan recomputes nothing: as XLA compiles it, the plain step ({format_bytes(plan.plain_peak_bytes)}) "
            f"already fits the budget of {format_bytes(budget)}"
        )
    if plan.advice and not plan.recomputed_units:
        return plan.advice
    return (
        f"the plan saves no memory worth its time: as XLA compiles them, the plain step takes "
        f"{format_bytes(plan.plain_peak_bytes)}, and none of up to {MOST_COMPILED} plans much less. Try a larger "
        f"max_overhead or, if bits matter more than speed, jit_compile=False. On CPUs, XLA orders for speed by "
        f"itself: XLA_FLAGS=--xla_cpu_enable_concurrency_optimized_scheduler=false in the environment orders for "
        f"memory, as on GPUs."
    )
