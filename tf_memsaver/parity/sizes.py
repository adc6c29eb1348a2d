"""Sizes that a replay reads in the first run: what it needs no number of is not computed again for its shape alone.

Where sizes are not known, gradient functions ask for them when the step runs: of the terms of a sum, of what was
averaged, or divided by a number. In the plain step that costs nothing, as the tensors are there.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_memsaver.compat.graphs import attributes_in, read_instead
from tf_memsaver.parity.extra_readers import needed_for
from tf_memsaver.parity.gates import SHAPES, free
from tf_memsaver.parity.readers import passes_on, source_of
from tf_memsaver.parity.symbols import symbol_of

Entered = Sequence[tuple[tf.Tensor, tf.Tensor]]
"""What a first run read, each with what its replay reads: the same, or what ``after`` made of it."""


class _Question(NamedTuple):
    """An operation that asks for sizes that are not known, and the input of whose sizes it asks."""

    operation: Any
    place: int

    @property
    def tensor(self) -> tf.Tensor:
        """What it asks about."""
        return source_of(self.operation.inputs[self.place])


def free_sizes(
    operations: Sequence[Any],
    entered: Entered,
    replayed: Sequence[Any],
    added: Sequence[Any],
    results: Sequence[tf.Tensor],
    gate: tf.Tensor,
) -> None:
    """Let a replay read the sizes of what it needs no number of in the first run, before the gate is known.

    What graph optimisation knows of sizes stays as it is: a size of the first run may have another symbol
    (``symbol_of``), and is read only if no number is needed of what has that of the replay. If the first run is in
    another graph, this one has only what entered.

    Args:
      operations: those of the first run.
      entered: what it read.
      replayed: what the replay added to its graph, in order.
      added: the same, and what its gradients added.
      results: the gradients.
      gate: the gate of the replay.
    """
    questions = [
        _Question(each, place)
        for each in added
        if each.type in SHAPES
        for place, tensor in enumerate(each.inputs)
        if not tensor.shape.is_fully_defined()
    ]
    if not questions:
        return
    needed = needed_for(results, added, _read_for_numbers)
    running = (each for each in added if id(each) in needed and not passes_on(each))
    with_numbers = [*results, *(tensor for each in running for tensor in _read_for_numbers(each))]
    numbers = {id(source_of(tensor)): tensor for tensor in with_numbers}
    questions = [each for each in questions if id(each.operation) in needed and id(each.tensor) not in numbers]
    if not questions:
        return
    known = {id(gated): gated.op.inputs[0] for tensor, gated in entered if gated is not tensor}
    if operations and operations[0].graph is gate.graph:
        known = {**_in_first_run(operations, entered, replayed), **known}
    here = {id(each) for each in replayed}
    symbols = {symbol_of(tensor) for tensor in numbers.values() if id(tensor.op) in here}
    for each in questions:
        first, symbol = known.get(id(each.tensor)), symbol_of(each.tensor)
        if first is not None and (symbol == symbol_of(first) or symbol not in symbols):
            read_instead(each.operation, each.place, first)
            free(each.operation, gate)


def _read_for_numbers(operation: Any) -> Sequence[tf.Tensor]:
    """Return what an operation reads more of than its sizes."""
    return () if operation.type in SHAPES else operation.inputs


def _in_first_run(operations: Sequence[Any], entered: Entered, replayed: Sequence[Any]) -> dict[int, tf.Tensor]:
    """Return, by replayed tensor (id), the same one of the first run: that was made in the same way of the same."""
    same = {id(gated): source_of(tensor) for tensor, gated in entered}

    def made_by(operation: Any) -> Hashable:
        read = (source_of(tensor) for tensor in operation.inputs)
        return operation.type, attributes_in(operation.node_def), *(id(same.get(id(each), each)) for each in read)

    made: dict[Hashable, Any] = {}
    for operation in operations:
        if not passes_on(operation):
            alike = made.setdefault(made_by(operation), operation)
            same.update(zip(map(id, operation.outputs), alike.outputs, strict=True))
    for operation in replayed:
        if not passes_on(operation) and (alike := made.get(made_by(operation))) is not None:
            same.update(zip(map(id, operation.outputs), alike.outputs, strict=True))
    return same
