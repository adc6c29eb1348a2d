"""Where the updates of an optimizer stand among the other operations of a step."""

from __future__ import annotations

import dataclasses

from tf_memsaver.ir.graph import Op, Phase


def updates_early(ops: list[Op], value_count: int) -> tuple[Op, ...]:
    """Move every update op to just after the last op that it reads from: the executor runs it when it is ready."""
    ready = [-1] * value_count
    keys: list[tuple[int, int]] = []
    for place, op in enumerate(ops):
        key = place
        if op.phase is Phase.UPDATE:
            key = max((ready[value] for value in op.inputs), default=-1)
            key = key if key >= 0 else place
        for value in op.outputs:
            ready[value] = key
        keys.append((key, place))
    order = sorted(range(len(ops)), key=keys.__getitem__)
    moved = {place: index for index, place in enumerate(order)}
    return tuple(
        dataclasses.replace(ops[place], index=index, after=tuple(sorted(moved[w] for w in ops[place].after)))
        for index, place in enumerate(order)
    )
