"""Order by data: a *gate* is a zero that is known only when others are, and what it is added to waits for them.

Compilers and graph optimisation drop control dependencies where they see no need for them; data they must wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_memsaver.compat.graphs import wait_for_only
from tf_memsaver.tfgraph.operations import has_gradients

_GATE = "memsaver_gate"
"""Name scope of gates."""


class Constants(NamedTuple):
    """What all gates of a graph read: vectors of one element, an integer and a float zero, and the shape ``[-1]``."""

    zero: tf.Tensor
    one: tf.Tensor
    axis: tf.Tensor
    nothing: tf.Tensor
    flat: tf.Tensor


class Gates:
    """Makes the gates of one forward pass and its backward pass, with one set of constants in each graph."""

    def __init__(self) -> None:
        self._constants: dict[int, Constants] = {}

    def constants(self) -> Constants:
        """Return those of the current graph."""
        graph = tf.compat.v1.get_default_graph()
        if id(graph) not in self._constants:
            with tf.control_dependencies(None), tf.name_scope("memsaver_constants"):
                made = (tf.constant(value) for value in ([0], [1], 0, 0.0, [-1]))
                self._constants[id(graph)] = Constants(*made)
        return self._constants[id(graph)]

    def first_elements(self, tensors: Sequence[tf.Tensor], gate: tf.Tensor | None = None) -> tf.Tensor:
        """Return the first element of each tensor as float32, in one vector; an empty tensor has none.

        They are not read before ``gate`` is known.
        """
        constants = self.constants()
        begin = constants.zero
        if gate is not None:
            begin = tf.raw_ops.AddV2(x=begin, y=tf.raw_ops.Cast(x=gate, DstT=tf.int32))
        read = []
        for tensor in tensors:
            vector = tf.raw_ops.Reshape(tensor=tensor, shape=constants.flat)
            element = tf.raw_ops.StridedSlice(input=vector, begin=begin, end=constants.one, strides=constants.one)
            read.append(element if element.dtype == tf.float32 else tf.raw_ops.Cast(x=element, DstT=tf.float32))
        return self._joined(read)

    def gate(self, vectors: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return a float32 scalar that is always 0.0 and known only when every one of the float32 vectors is.

        Through a cast to bool, so that NaN and infinity in a gradient do not get into the replay; a minimum rather than
        a product, because compilers fold products with zero.
        """
        constants = self.constants()
        with tf.name_scope(_GATE):
            known = tf.raw_ops.Cast(x=self._joined(vectors), DstT=tf.bool)
            number = tf.raw_ops.Cast(x=tf.raw_ops.Any(input=known, axis=constants.zero), DstT=tf.float32)
            return tf.raw_ops.Minimum(x=number, y=constants.nothing)

    def _joined(self, vectors: Sequence[Any]) -> tf.Tensor:
        if len(vectors) == 1:
            return vectors[0]
        return tf.raw_ops.ConcatV2(values=list(vectors), axis=self.constants().axis)


def is_gate(operation: Any) -> bool:
    """Whether an operation makes a gate."""
    return operation.type == "Minimum" and _GATE in operation.name


def after(gate: tf.Tensor | None, tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
    """Return ``tensor`` unchanged, but not before ``gate`` is known; it stays where no arithmetic is defined on it."""
    is_number = has_gradients(tensor.dtype) or tensor.dtype.is_integer
    if gate is None or not (is_number or tensor.dtype.is_bool):
        return tf.identity(tensor, name=name)
    zero = tf.cast(gate, tensor.dtype)
    return tf.math.logical_xor(tensor, zero) if tensor.dtype.is_bool else tf.subtract(tensor, zero, name=name)


def free_constants(operations: Iterable[Any], gate: tf.Tensor) -> None:
    """Let constants not wait for the gate: graph optimisation moves only free ones through chains of products and sums.

    Those of gradient functions, which wait for the gradient that arrives, do so in the plain step, too.
    """
    for operation in operations:
        if operation.type == "Const" and gate.op in operation.control_inputs:
            free(operation, gate)


def free(operation: Any, gate: tf.Tensor) -> None:
    """Let an operation not wait for the gate."""
    wait_for_only(operation, [each for each in operation.control_inputs if each is not gate.op])


SHAPES = frozenset("Rank Shape ShapeN Size".split())
"""Ops that read the shape of a tensor,"""

_OF_SHAPES = frozenset("Cast ConcatV2 GatherV2 Maximum Minimum Mul Pack Prod Reshape Slice StridedSlice Sub".split())
"""and those by which shapes are made of shapes."""


def is_of_shapes(tensor: tf.Tensor) -> bool:
    """Whether a tensor of a graph is made of shapes and constants only.

    Such a tensor waits for nothing: it is tiny, and graph optimisation, which reads shapes off it, does not see through
    a gate.
    """
    seen: set[int] = set()
    pending = [tensor.op]
    while pending:
        operation = pending.pop()
        if operation.type in SHAPES or id(operation) in seen:
            continue
        if operation.type in _OF_SHAPES:
            pending.extend(each.op for each in operation.inputs)
        elif operation.type != "Const" or operation is tensor.op:
            return False
        seen.add(id(operation))
    return True
