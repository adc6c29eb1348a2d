"""Sizes that a replay reads in the first run: what it needs no number of is not computed again for its shape alone.

Where sizes are not known, gradient functions ask for them when the step runs: of the terms of a sum, of what was
averaged, or divided by a number. In the plain step that costs nothing, as the tensors are there.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_memsaver.compat.graphs import attributes_in, led_to, read_instead
from tf_memsaver.parity.gates import SHAPES, free
from tf_memsaver.parity.readers import passes_on, source_of

_COMPARES = "BroadcastGradientArgs"
"""It reads two shapes, and graph optimisation takes it out where it knows that they are equal."""

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

    Where two shapes are compared, both are of the first run: graph optimisation then knows as much of them as in the
    plain step.

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
    running = _run_for(results, added) if questions else []
    with_numbers = {id(source_of(tensor)) for each in running if each.type not in SHAPES for tensor in each.inputs}
    with_numbers.update(id(source_of(tensor)) for tensor in results)
    runs = set(map(id, running))
    questions = [each for each in questions if id(each.operation) in runs]
    if all(id(each.tensor) in with_numbers for each in questions):
        return
    known = {id(gated): gated.op.inputs[0] for tensor, gated in entered if gated is not tensor}
    if operations and operations[0].graph is gate.graph:
        known = {**_in_first_run(operations, entered, replayed), **known}
    comparisons = [each for each in running if each.type == _COMPARES]
    freed = {id(each.tensor) for each in questions} & known.keys() - with_numbers
    _compare_in_first_run(comparisons, questions, known, freed)
    for each in questions:
        if id(each.tensor) in freed:
            read_instead(each.operation, each.place, known[id(each.tensor)])
            free(each.operation, gate)


def _compare_in_first_run(
    comparisons: Sequence[Any], questions: Sequence[_Question], known: Mapping[int, tf.Tensor], freed: set[int]
) -> None:
    """Let what compares shapes read none that is ``freed`` (the ids of tensors), or all of them in the first run.

    Where one of them is not known there, all that it is compared with is taken out of ``freed``.
    """
    answers = {(id(each.operation), each.place): each for each in questions}
    asked = [
        [(place, answers[key]) for place, t in enumerate(each.inputs) if (key := (id(t.op), t.value_index)) in answers]
        for each in comparisons
    ]
    for of_one in asked:
        if any(id(each.tensor) not in known for _, each in of_one):
            freed.difference_update(id(each.tensor) for _, each in of_one)
    for comparison, of_one in zip(comparisons, asked, strict=True):
        if not freed.isdisjoint(id(each.tensor) for _, each in of_one):
            for place, each in of_one:
                if id(each.tensor) not in freed:
                    read_instead(comparison, place, _shape_of(known[id(each.tensor)], comparison.inputs[place].dtype))


def _shape_of(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    with tf.control_dependencies(None), tf.name_scope("memsaver_sizes"):
        return tf.raw_ops.Shape(input=tensor, out_type=dtype)


def _run_for(results: Sequence[tf.Tensor], added: Sequence[Any]) -> list[Any]:
    """Return the operations that run for results, if nothing is run for its sizes."""
    own = {id(operation) for operation in added}

    def before(operation: Any) -> list[Any]:
        read = () if operation.type in SHAPES else operation.inputs
        return [tensor.op for tensor in read if id(tensor.op) in own]

    needed = led_to((tensor.op for tensor in results if id(tensor.op) in own), before)
    return [each for each in added if id(each) in needed and not passes_on(each)]


def _in_first_run(operations: Sequence[Any], entered: Entered, replayed: Sequence[Any]) -> dict[int, tf.Tensor]:
    """Return, by replayed tensor (id), the same one of the first run: that was made in the same way of the same."""
    same = {id(gated): source_of(tensor) for tensor, gated in entered}

    def made_by(operation: Any) -> Hashable:
        read = (source_of(tensor) for tensor in operation.inputs)
        return operation.type, attributes_in(operation.node_def), *(id(same.get(id(each), each)) for each in read)

    made = defaultdict[Hashable, deque[Any]](deque)
    for operation in operations:
        if not passes_on(operation):
            made[made_by(operation)].append(operation)
    for operation in replayed:
        if not passes_on(operation) and (alike := made.get(made_by(operation))):
            same.update(zip(map(id, operation.outputs), alike.popleft().outputs, strict=True))
    return same
