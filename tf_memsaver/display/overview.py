"""What ``estimate`` and ``plan`` print: the answer first, then where the bytes are, on one screen of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tf_memsaver.display.folding import folded
from tf_memsaver.display.parts import (
    COST,
    DATA_IN_MEMORY,
    MINOR,
    NOW,
    PLANNED,
    Name,
    Rows,
    bar,
    bar_of_two,
    share_of,
    verbatim,
)
from tf_memsaver.display.tables import planned_in
from tf_memsaver.judge.estimate import Estimate
from tf_memsaver.plan.advice import WORTH_WHILE
from tf_memsaver.plan.layers import PlannedLayer
from tf_memsaver.plan.plan import Plan
from tf_memsaver.units import format_bytes

MOST_ROWS = 10
"""Blocks that are shown, those of the most bytes."""


def answer(estimate: Estimate, plan: Plan) -> tuple[RenderableType, ...]:
    """Return the peak as it is and where, as it would be by the plan, and what that costs."""
    return _title(estimate, plan), _answer(estimate, plan)


def estimate_view(estimate: Estimate, plan: Plan) -> tuple[RenderableType, ...]:
    """Return the answer, what the step's memory is for, and the blocks that keep the most."""
    return (
        *answer(estimate, plan),
        Text(),
        _kinds(estimate),
        Text(),
        _largest_blocks(estimate, plan),
    )


def plan_view(estimate: Estimate, plan: Plan) -> tuple[RenderableType, ...]:
    """Return the answer, and what is recomputed of the blocks that keep the most in the plain step."""
    parts: list[RenderableType] = [*answer(estimate, plan), Text()]
    if plan.advice:
        parts += [verbatim(plan.advice, COST), Text()]
    if plan.recomputed_units:
        parts.append(_recomputed_blocks(plan))
    parts.append(verbatim(planned_in(plan), MINOR))
    return tuple(parts)


# The answer -----------------------------------------------------------------------------------------------------------


def _title(estimate: Estimate, plan: Plan) -> RenderableType:
    title = f", batch size {estimate.batch_size}: one training step on {estimate.device}, {plan.judged}"
    line = Table.grid()
    line.add_column(no_wrap=False)
    line.add_column(no_wrap=True)
    line.add_row(Name(estimate.model, "bold"), Text(title, "bold"))
    return line


_NOT_OF_XLA = "by its compiler; the rest is for TensorFlow's own executor"


def _answer(estimate: Estimate, plan: Plan) -> Table:
    """Return the peak as it is, as it would be by the plan, what that costs, and where the peak is."""
    now, planned = plan.plain_peak_bytes, plan.peak_bytes
    saves = planned < (1 - WORTH_WHILE) * now
    style = PLANNED if saves else ""
    share = f"{planned / now:.0%} of now" if now else ""
    budget = plan.request.budget_bytes
    if budget is not None:
        share += f", budget {format_bytes(budget)}"
    table = _grid()
    table.add_row("peak now", Text(format_bytes(now), NOW), bar(now, now, NOW), _at(estimate))
    compiled = estimate.compiled_peak_bytes
    if compiled is not None and plan.request.executor == "graph":
        table.add_row("with XLA, as fit", Text(format_bytes(compiled), NOW), bar(compiled, now, NOW), _NOT_OF_XLA)
    said = share if saves else "no plan saves much here"
    table.add_row("peak planned", Text(format_bytes(planned), f"bold {style}"), bar(planned, now, style), said)
    cost = Text(f"{plan.step_overhead:+.1%}", COST if plan.step_overhead else "")
    table.add_row("step time", cost, bar(plan.step_overhead, 1.0, COST), _work(plan))
    return table


def _grid() -> Table:
    """Return a table of names, figures, bars, and texts that are shortened."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    return table


def _at(estimate: Estimate) -> RenderableType:
    return Name(f"at {estimate.peak_at}") if estimate.peak_at else ""


def _work(plan: Plan) -> RenderableType:
    count = len(plan.recomputed_units)
    return Name(f"{count} of {_units(plan, len(plan.labels))} recomputed" if count else "nothing is recomputed")


def _units(plan: Plan, count: int) -> str:
    """Return a number of units in few words: there is no room for ``layers and groups of operations``."""
    return plan.units_in_words(count) if plan.is_by_layers else f"{count} units"


# Where the bytes are --------------------------------------------------------------------------------------------------


def _kinds(estimate: Estimate) -> Table:
    """Return what the memory is for, in bytes; not all of it is live at the peak."""
    table, peak = _grid(), estimate.peak_bytes
    slots = f"optimizer slots ({estimate.optimizer_slots:.1f} × trained weights)"
    for what, count in (
        ("activations kept for the backward pass", estimate.activation_bytes),
        ("weights and other state", estimate.parameter_bytes),
        ("gradients of the weights", estimate.gradient_bytes),
        (slots, estimate.optimizer_bytes),
        ("input batch and targets", estimate.input_bytes),
    ):
        table.add_row(what, format_bytes(count), bar(count, peak, NOW), share_of(count, peak))
    if estimate.data_bytes:
        share = share_of(estimate.data_bytes, peak)
        table.add_row(DATA_IN_MEMORY, format_bytes(estimate.data_bytes), bar(estimate.data_bytes, peak, NOW), share)
    if estimate.uncounted_bytes:
        table.add_row(_NOT_COUNTED, format_bytes(estimate.uncounted_bytes))
    return table


_NOT_COUNTED = "not counted on a CPU: below 256 KiB"


def _largest_blocks(estimate: Estimate, plan: Plan) -> Table:
    blocks = [
        _Block(name=name, layers=len(places), bytes=sum(estimate.units[place].kept_bytes for place in places))
        for name, places in folded([unit.label for unit in estimate.units])
    ]
    kinds = {unit.label: unit.kind for unit in estimate.units}
    top = _largest(blocks)
    table = Rows()
    table.add_name("largest activations")
    table.add_column("kind")
    table.add_figures("bytes", "of peak")
    table.add_bars()
    most = max((block.bytes for block in top), default=0)
    for block in top:
        what = _units(plan, block.layers) if block.layers > 1 else kinds[block.name]
        share = share_of(block.bytes, estimate.peak_bytes)
        table.add_row(block.name, Name(what, MINOR), format_bytes(block.bytes), share, bar(block.bytes, most, NOW))
    table.set_caption(f"{_left_out(blocks, top)} (--all); the command plan says what to recompute")
    return table


def _recomputed_blocks(plan: Plan) -> Table:
    layers = plan.layers
    blocks = [_Block.of(name, [layers[place] for place in places]) for name, places in folded(plan.labels)]
    top = _largest(blocks)
    table = Rows()
    table.add_name("largest activations")
    table.add_figures("recomputed", "bytes")
    table.add_bars()
    most = max((block.bytes for block in top), default=0)
    for block in top:
        kept = block.bytes - block.recomputed_bytes
        drawn = bar_of_two(block.recomputed_bytes, kept, most, (PLANNED, NOW))
        table.add_row(block.name, f"{block.recomputed} of {block.layers}", format_bytes(block.bytes), drawn)
    table.set_caption(f"{_left_out(blocks, top)} (--all shows segments); █ is recomputed, ░ kept")
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Layers that belong together: how many, and the bytes of their activations, all and those of recomputed ones."""

    name: str
    layers: int
    bytes: int
    recomputed: int = 0
    recomputed_bytes: int = 0

    @classmethod
    def of(cls, name: str, layers: Sequence[PlannedLayer]) -> _Block:
        dropped = [each for each in layers if each.decision == "recomputed"]
        return cls(
            name=name,
            layers=len(layers),
            bytes=sum(each.activation_bytes or 0 for each in layers),
            recomputed=len(dropped),
            recomputed_bytes=sum(each.activation_bytes or 0 for each in dropped),
        )


def _largest(blocks: Sequence[_Block]) -> list[_Block]:
    return sorted((block for block in blocks if block.bytes), key=lambda block: -block.bytes)[:MOST_ROWS]


def _left_out(blocks: Sequence[_Block], top: Sequence[_Block]) -> str:
    layers, count = (sum(map(of, blocks)) - sum(map(of, top)) for of in (_layers_of, _bytes_of))
    return f"and {layers} more, {format_bytes(count)}" if layers else "all layers"


def _layers_of(block: _Block) -> int:
    return block.layers


def _bytes_of(block: _Block) -> int:
    return block.bytes
