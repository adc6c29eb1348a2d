"""Order, liveness and articulation points of the forward pass: linear sweeps over the op list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tf_memsaver.ir.graph import Cut, Op, Phase, Unit, Value


def unit_positions(ops: Sequence[Op], value_count: int, unit_count: int) -> list[int | None]:
    """Return, for each value, the position (1-based unit) at which the forward pass makes it.

    0 for what is made before the first unit (input conversion), ``unit_count + 1`` for what is made outside units after
    it (the loss); ``None`` for values that no forward op makes.
    """
    positions: list[int | None] = [None] * value_count
    for op, position in _forward_positions(ops, unit_count):
        for value in op.outputs:
            positions[value] = position
    return positions


def last_forward_reads(ops: Sequence[Op], roots: Sequence[int], unit_count: int) -> list[int]:
    """Return, for each buffer, the last position whose forward ops read it or a view of it.

    ``unit_count + 1`` when the loss or another op after the last unit reads it; 0 when nothing reads it.
    """
    last = [0] * len(roots)
    for op, position in _forward_positions(ops, unit_count):
        for value in op.inputs:
            root = roots[value]
            last[root] = max(last[root], position)
    return last


def _forward_positions(ops: Sequence[Op], unit_count: int) -> Iterator[tuple[Op, int]]:
    outside = 0
    for op in ops:
        if op.phase is Phase.FORWARD:
            if op.unit is not None:
                outside = unit_count + 1
            yield op, outside if op.unit is None else op.unit + 1


def find_cuts(
    ops: Sequence[Op],
    values: Sequence[Value],
    roots: Sequence[int],
    units: Sequence[Unit],
) -> tuple[Cut, ...]:
    """Return a cut for every interior position, with the buffers live across it, in one sweep.

    Only activations count as live: weights and the input batch are resident. Positions at which nothing is live, and
    positions whose live set repeats the one before (a unit without ops, such as a view), are left out.
    """
    count = len(units)
    positions = unit_positions(ops, len(values), count)
    last = last_forward_reads(ops, roots, count)
    born: list[list[int]] = [[] for _ in range(count + 2)]
    dies: list[list[int]] = [[] for _ in range(count + 2)]
    for value in values:
        position = positions[value.index]
        if position is None or roots[value.index] != value.index or value.kind.resident or not value.nbytes:
            continue
        if last[value.index] > position:
            born[position].append(value.index)
            dies[last[value.index]].append(value.index)
    live: dict[int, None] = {}
    cuts: list[Cut] = []
    for position in range(count):
        for value_index in dies[position]:
            live.pop(value_index, None)
        for value_index in born[position]:
            live[value_index] = None
        if position > 0 and live:
            crossing = tuple(live)
            if not cuts or cuts[-1].live != crossing:
                cuts.append(Cut(position=position, label=units[position - 1].label, live=crossing))
    return tuple(cuts)


def articulation_points(cuts: Sequence[Cut]) -> tuple[Cut, ...]:
    """Return the cuts that exactly one value crosses."""
    return tuple(cut for cut in cuts if cut.is_articulation)
