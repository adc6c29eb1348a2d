"""All that a report shows, as plain data: worked out of a traced step and a plan, drawn elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tf_memsaver.cost.device import processor
from tf_memsaver.display.layers import Fate, LayerRow, layer_rows
from tf_memsaver.display.steps import ShownStep
from tf_memsaver.errors import PlanMismatchError
from tf_memsaver.ir.segments import stored
from tf_memsaver.judge.simulate import Simulator
from tf_memsaver.options.table import RequestOptions, options_of
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One training step of the model ``name``, plain and under ``plan``; everything is predicted.

    ``curve`` are plans from plain to the least peak, ``command`` what was written to get the plan. ``uncounted_bytes``
    are in the timelines, and not in the peaks (``Simulator.uncounted_bytes``).
    """

    name: str
    plan: Plan
    plain: ShownStep
    planned: ShownStep
    curve: tuple[Plan, ...]
    layers: tuple[LayerRow, ...]
    device: str
    uncounted_bytes: int
    command: str

    @classmethod
    def of(cls, simulator: Simulator, plan: Plan, curve: Sequence[Plan], command: str) -> Report:
        """Return the report of a plan that was made for the simulator's graph.

        Raises:
          PlanMismatchError: the plan was made for another model or batch size.
        """
        graph = simulator.graph
        if plan.batch_size != graph.batch_size:
            raise PlanMismatchError(f"its batch size is {graph.batch_size}, the plan's is {plan.batch_size}")
        plan.check_matches(graph.signatures, [unit.label for unit in graph.units])
        plain, planned = ShownStep.of(simulator, stored(len(graph.units))), ShownStep.of(simulator, plan.segments)
        return cls(
            name=graph.name,
            plan=plan,
            plain=plain,
            planned=planned,
            curve=tuple(curve),
            layers=layer_rows(graph, plan, plain.kept_bytes, planned.kept_bytes),
            device=processor(graph.device),
            uncounted_bytes=simulator.uncounted_bytes,
            command=command,
        )

    @property
    def saved_bytes(self) -> int:
        """What the plan takes off the peak; not above 0 where it saves nothing."""
        return self.plan.plain_peak_bytes - self.plan.peak_bytes

    def rows_of(self, fate: Fate) -> tuple[LayerRow, ...]:
        """Return the layers of a fate, in order."""
        return tuple(row for row in self.layers if row.fate is fate)

    def reasons(self) -> dict[str, tuple[LayerRow, ...]]:
        """Return the pinned layers by the reason why they are."""
        found: dict[str, tuple[LayerRow, ...]] = {}
        for row in self.rows_of(Fate.PINNED):
            found[row.why] = (*found.get(row.why, ()), row)
        return found


def call_of(plan: Plan) -> str:
    """Return a call of the library in Python that plans as this plan was planned.

    ``executor="graph"`` is left out: a plan has it also where "auto" was asked for, as it nearly always is.
    """
    request, plain = plan.request, Request()
    given: dict[str, object] = {"batch_size": plan.batch_size}
    if request.budget_share is not None:
        given["budget"] = f"{100 * request.budget_share:g}%"
    elif request.budget_bytes is not None:
        given["budget"] = request.budget_bytes
    for name in options_of(RequestOptions):
        if name == "executor" and request.executor == "graph":
            continue
        if name != "budget" and getattr(request, name) != getattr(plain, name):
            given[name] = getattr(request, name)
    return f"tf_memsaver.search_plan(model, {', '.join(f'{name}={value!r}' for name, value in given.items())})"
