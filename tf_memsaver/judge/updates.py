"""The updates of a step: which of them end it, and which run together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tf_memsaver.ir.graph import Graph, Op, Phase


def last_updates(ops: Sequence[Op]) -> list[Op]:
    """Return the updates that a step ends with."""
    updates = itertools.takewhile(lambda op: op.phase is Phase.UPDATE, reversed(ops))
    return [*updates][::-1]


def update_groups(graph: Graph) -> dict[int, int]:
    """Return for each update, by the index of its op, the number of its group: they wait for the same gradient.

    What waits for none is of the group that reads it, such as a decay of weights. Alone are updates that several groups
    read, and those that wait for several gradients, as all do that are clipped by a norm of all.
    """
    updates = [op for op in graph.ops if op.phase is Phase.UPDATE]
    readers: dict[int, list[int]] = {op.index: [] for op in updates}
    waits: dict[int, set[int]] = {}
    """The ops whose gradients each update waits for; two at most, which tell as much as all."""
    for op in updates:
        found: set[int] = set()
        for maker in {graph.producers[value] for value in op.inputs}:
            if maker in waits:
                found |= waits[maker]
                readers[maker].append(op.index)
            elif maker is not None and graph.ops[maker].phase is Phase.BACKWARD:
                found.add(maker)
        waits[op.index] = set(itertools.islice(found, 2))
    groups: dict[int, int] = {}
    for op in reversed(updates):
        its = waits[op.index] or {groups[reader] for reader in readers[op.index]}
        groups[op.index] = its.pop() if len(its) == 1 else op.index
    return groups
