"""What other orders of the layer calls would gain: ``python -m tools.bench.orders``.

A plan's segments are runs of calls in the order in which the model runs them. Each model's calls are put into other
topological orders here, branch by branch and by chance, its training step is traced in each, and planned: for the least
peak at any price, without limits (``auto``), and for a budget half way between the least peak of the model's own order
and the plain step. Predictions only; the table goes to ``tools/results/bench_orders.md``. Ten minutes on two cores.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from absl import app, flags

from tools.shared.results import RESULTS, machine_line, write_text

if TYPE_CHECKING:
    from tf_memsaver.ir.graph import Graph
    from tf_memsaver.program.calls import CallSequence

_OUTPUT = flags.DEFINE_string("output", str(RESULTS / "bench_orders.md"), "where to write the table")
_MODELS = flags.DEFINE_list("models", [], "names of models (default: all)")

BATCH = 8
CHANCES = 3
"""Orders by chance."""

Order = Callable[[Sequence[Sequence[int]], Sequence[int]], list[int]]
"""Takes, for each call, those whose results it reads, and those that make the outputs; returns the calls in order."""


def _own(reads: Sequence[Sequence[int]], ends: Sequence[int]) -> list[int]:
    del ends
    return list(range(len(reads)))


def _branch_by_branch(reads: Sequence[Sequence[int]], ends: Sequence[int]) -> list[int]:
    """Return an order in which each call comes right behind what only it needs."""
    placed: dict[int, None] = {}
    pending = [*reversed(range(len(reads))), *reversed(ends)]
    while pending:
        call = pending.pop()
        missing = [each for each in reads[call] if each not in placed]
        if call in placed:
            continue
        if missing:
            pending += [call, *reversed(missing)]
        else:
            placed[call] = None
    return list(placed)


@dataclass(frozen=True)
class _ByChance:
    """An order that goes on with one of the calls that have become ready last."""

    seed: int

    def __call__(self, reads: Sequence[Sequence[int]], ends: Sequence[int]) -> list[int]:
        del ends
        chance = random.Random(self.seed)
        missing = [set(each) for each in reads]
        ready = [call for call, each in enumerate(missing) if not each]
        placed = []
        while ready:
            placed.append(ready.pop())
            found = [call for call, each in enumerate(missing) if placed[-1] in each]
            for call in found:
                missing[call].discard(placed[-1])
            found = [call for call in found if not missing[call]]
            chance.shuffle(found)
            ready += found
        return placed


ORDERS: dict[str, Order] = {
    "own": _own,
    "branch by branch": _branch_by_branch,
    **{f"by chance {seed}": _ByChance(seed) for seed in range(CHANCES)},
}


def _application(name: str, size: int) -> Callable[[], Any]:
    def build() -> Any:
        from tools.shared.models.real import application

        return application(name, size, classes=10)

    return build


def _unet() -> Any:
    from tools.shared.models.real import unet

    return unet()


MODELS: dict[str, Callable[[], Any]] = {
    "U-Net": _unet,
    "DenseNet121": _application("DenseNet121", 128),
    "EfficientNetB0": _application("EfficientNetB0", 128),
    "InceptionV3": _application("InceptionV3", 139),
    "NASNetMobile": _application("NASNetMobile", 224),
}


def _put_into(order: Order, sequence: CallSequence) -> CallSequence:
    maker = {slot: number for number, call in enumerate(sequence.calls) for slot in call.outputs}
    reads = [sorted({maker[slot] for slot in call.inputs if slot in maker}) for call in sequence.calls]
    placed = order(reads, [maker[slot] for slot in sequence.outputs if slot in maker])
    return replace(sequence, calls=tuple(sequence.calls[number] for number in placed))


def _captured(model: Any, order: Order) -> Graph:
    from tf_memsaver.capture.convert import traced_graph
    from tf_memsaver.capture.model_step import ModelStep
    from tf_memsaver.program.layer_program import LayerProgram

    program = LayerProgram(model)
    program.sequence = _put_into(order, program.sequence)
    return traced_graph(ModelStep(model, BATCH, program), BATCH)


def _rows(name: str) -> list[str]:
    """Return the rows of one model."""
    from tf_memsaver.errors import InfeasibleBudgetError
    from tf_memsaver.plan.request import Request
    from tf_memsaver.planners.solve import solve
    from tf_memsaver.units import format_bytes

    model = MODELS[name]()
    model.compile("sgd", "mse")
    rows, budget = [], 0
    for order in ORDERS:
        graph = _captured(model, ORDERS[order])
        least, auto = (solve(graph, Request(strategy=strategy)) for strategy in ("min_peak", "auto"))
        budget = budget or (least.peak_bytes + least.plain_peak_bytes) // 2
        try:
            within = f"{solve(graph, Request(strategy='auto', budget_bytes=budget)).step_overhead:+.1%}"
        except InfeasibleBudgetError:
            within = "out of reach"
        figures = (f"{format_bytes(plan.peak_bytes)} {plan.step_overhead:+.1%}" for plan in (least, auto))
        rows.append(f"| {name} | {order} | {len(graph.cuts)} | {' | '.join(figures)} | {within} |")
        print(rows[-1], flush=True)
    return rows


def main(_: list[str]) -> None:
    """Plan all models in all orders and write the table."""
    rows = ["| model | order | cuts | least peak | auto | half way |", "|---|---|---:|---:|---:|---:|"]
    for name in _MODELS.value or MODELS:
        rows += _rows(name)
    intro = (
        f"Plans for other orders of the layer calls (`tools/bench/orders.py`), predicted, batch {BATCH}: least peak at "
        f"any price, `auto` without limits, and the overhead at a budget half way between the least peak of the "
        f"model's own order and the plain step."
    )
    text = [intro, "", machine_line(), "", *rows]
    write_text(_OUTPUT.value, "\n".join(text) + "\n")


if __name__ == "__main__":
    app.run(main)
