"""Shapes that the data alone tells: a text that is split inside a model is as long as the longest one of its batch.

What a step makes of its data before the first variable comes in is such text, indices and masks; TensorFlow knows some
of their shapes only as the step runs. All activations have their size from them. So where an operation that cannot be
worked out beforehand, such as the read of an embedding, is given a tensor of unknown shape, that shape is worked out on
one batch of the data. What lies before stays as ``fit`` traces it.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tf_memsaver.capture.step import TracedStep
from tf_memsaver.compat.graphs import ListenedGraph, led_to, makers
from tf_memsaver.compat.messages import first_line
from tf_memsaver.compat.released import release
from tf_memsaver.ir.graph import Phase
from tf_memsaver.tfgraph.emission import Template
from tf_memsaver.tfgraph.operations import called_functions, given_for_free

Shape = tuple[int, ...]

_LOOKUPS = frozenset({"LookupTableFindV2", "LookupTableSizeV2"})
"""Operations on vocabularies, which no step changes: they have state, and give the same each time."""

_SIZELESS = (tf.resource, tf.string, tf.variant)


class DataShapes:
    """Tells the tensors of a graph that are made of data alone their shapes, where others need them.

    ``found`` are those shapes, in the order in which they were needed. ``fixed_batch`` says that all batches are of one
    size, for which ``fit`` traces its step.
    """

    def __init__(
        self,
        batch: Callable[[], Sequence[Any]] | None = None,
        known: Sequence[Shape] = (),
        *,
        fixed_batch: bool = False,
    ) -> None:
        """Take what returns the flat tensors of a batch, and the shapes that were found when the step was planned."""
        self.fixed_batch = fixed_batch
        self._batch, self._known = batch, known
        self._worked_out: dict[int, bool] = {}
        self.found: list[Shape] = []

    def graph(self, name: str) -> ListenedGraph:
        """Return a graph to trace the step in; its placeholders are for the batch."""
        return ListenedGraph(name, self._needs, self._made)

    def forget_data(self) -> None:
        """Hold the batch no longer, nor what it is read from: the graph of the step may live as long as the process."""
        self._batch = None

    def _can_be_worked_out(self, op_type: str, is_stateful: bool, inputs: Sequence[Any]) -> bool:
        """Whether what an operation makes is made of data and constants alone."""
        if is_stateful and op_type not in _LOOKUPS:
            return False
        return all(id(tensor) in self._worked_out or not tf.is_symbolic_tensor(tensor) for tensor in inputs)

    def _needs(self, op_type: str, is_stateful: bool, inputs: Sequence[Any]) -> None:
        """Complete the shapes that an operation needs which cannot be worked out itself."""
        if self._can_be_worked_out(op_type, is_stateful, inputs):
            return
        for tensor in inputs:
            is_open = self._worked_out.get(id(tensor), False) and not tensor.shape.is_fully_defined()
            if is_open and tensor.dtype not in _SIZELESS:
                self._complete(tensor)

    def _made(self, operation: Any) -> None:
        """Note what can be worked out, and whether the data is part of it."""
        inputs = operation.inputs
        if self._can_be_worked_out(operation.type, operation.op_def.is_stateful, inputs):
            is_data = operation.type == "Placeholder" or any(
                self._worked_out.get(id(tensor), False) for tensor in inputs
            )
            self._worked_out.update((id(tensor), is_data) for tensor in operation.outputs)

    def _complete(self, tensor: Any) -> None:
        if len(self.found) < len(self._known):
            shape = self._known[len(self.found)]
        elif self._batch is None:
            return
        else:
            try:
                # What is set for tracing the step is not for this.
                with tf.init_scope():
                    shape = contextvars.Context().run(_shape_of, tensor, self._batch())
            except Exception as error:  # Whatever reading data or an operation on it may raise.
                logging.debug("the shape of %s is not known before the step runs: %s", tensor.name, first_line(error))
                return
        if tensor.shape.is_compatible_with(shape):
            self.found.append(shape)
            tensor.set_shape(shape)


def _shape_of(tensor: Any, batch: Sequence[Any]) -> Shape:
    """Return the shape of a tensor of a graph, worked out for a batch that the graph's placeholders stand for."""
    graph = tensor.graph
    captured = {id(internal): external for external, internal in graph.captures}
    operations = graph.get_operations()
    placeholders = [each.outputs[0] for each in operations if each.type == "Placeholder"]
    given = [id(each) for each in placeholders if id(each) not in captured]
    wanted = led_to([tensor.op], makers)

    def shape(*leaves: Any) -> Any:
        made = {**captured, **dict(zip(given, leaves, strict=True))}
        for operation in operations:
            if id(operation) in wanted and operation.type != "Placeholder":
                copies = Template(operation).emit([made[id(each)] for each in operation.inputs], operation.name)
                made.update(zip(map(id, operation.outputs), copies, strict=True))
        return tf.shape(made[id(tensor)], tf.int64)

    function = tf.function(shape, autograph=False).get_concrete_function(*batch)
    found = tuple(map(int, function(*batch).numpy()))
    release(function.graph)
    return found


def uncounted(step: TracedStep) -> int | None:
    """Return the first unit with an activation of unknown shape that the backward pass reads; None without.

    What a loop or a branch computes is such where the backward pass reads anything that comes out of it.
    """
    phases = {id(op): owner[0] for op, owner in zip(step.graph.get_operations(), step.owners, strict=True)}
    for operation, (phase, unit) in zip(step.graph.get_operations(), step.owners, strict=True):
        if phase is Phase.FORWARD and unit is not None:
            read = [
                tensor
                for tensor in operation.outputs
                if any(phases.get(id(each)) is Phase.BACKWARD for each in tensor.consumers())
            ]
            if any(map(_is_open, read)) or (read and _is_open_inside(operation, step.graph)):
                return unit
    return None


def _is_open(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating and not tensor.shape.is_fully_defined())


def _is_open_inside(operation: Any, graph: Any) -> bool:
    """Whether the functions that an operation calls make activations of unknown shape: arguments are made outside.

    What is of any size in a function, since that was traced so, is as large as what it is called with.
    """
    return any(
        (inner.type != "Placeholder" and any(map(_is_open, inner.outputs))) or _is_open_inside(inner, body)
        for body in called_functions(operation, graph)
        if given_for_free(operation, body) is None
        for inner in body.get_operations()
    )
