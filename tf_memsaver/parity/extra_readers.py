"""Extra readers: they keep TensorFlow's graph optimizer from fusing segments otherwise than the plain step.

The optimizer ("remapper") fuses a chain of operations, such as a matrix product, its bias and a GELU, where the values
in between have no other reader ("fan-out"); the fused kernel rounds otherwise. In the plain step backward operations
are such readers. A first run has no backward pass, and a replay lacks the operations that nobody needs: in both, values
would be fused that are not fused in the plain step. An *extra reader* reads one element of such a value, in the place
of the reader that is missing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_memsaver.cost.rules import METADATA_READERS
from tf_memsaver.parity.buffers import buffer_of
from tf_memsaver.parity.gates import Gates
from tf_memsaver.parity.gradient_reads import read_by_gradients
from tf_memsaver.parity.grappler import FUSED_WITH_PADS_ALONE, PADS, SIZES_READ_BY_GRADIENT
from tf_memsaver.parity.readers import (
    EXTRA_READERS,
    is_extra,
    readers_among,
    readers_by_source,
    readers_of,
    source_of,
)
from tf_memsaver.parity.sums import read_after_sums, read_after_sums_of_replay


def read_in_first_run(
    operations: Sequence[Any], sources: Iterable[Any], results: Sequence[Any], gradient_scope: str, gates: Gates
) -> tuple[tf.Tensor | None, tuple[tf.Tensor, ...]]:
    """Add a reader to every value that the plain step's backward operations read and that has one reader here.

    The square that the gradient of a cube computes is added, too: graph optimisation takes it for the forward pass as
    well, and folds constants by its name.

    Args:
      operations: what a first run added to its graph, in order.
      sources: the tensors that gradients are taken for.
      results: the tensors that gradients come from.
      gradient_scope: where names sort, relative to those of the operations, as in the plain step's backward pass.
      gates: what reads single elements.

    Returns:
      What was read, as one float32 vector, or None if nothing was. What is run must depend on it by data: where a
      control dependency is all, the graph optimizer takes the readers out. And those of the results whose values the
      plain step's backward operations read (``sums.read_after_later_sums``).
    """
    # Those of segments inside are for their gradients, which nobody takes here.
    operations = [operation for operation in operations if not is_extra(operation)]
    readers = readers_by_source(operations)

    def may_be_fused(tensor: Any) -> bool:
        source = source_of(tensor)
        only = readers.get(id(source), [])
        return len(only) == 1 and (only[0].type not in FUSED_WITH_PADS_ALONE or source.op.type in PADS)

    needed = list(read_by_gradients(operations, sources, results))
    read = [tensor for tensor in needed if may_be_fused(tensor)]
    buffers = {id(buffer_of(tensor)) for tensor in needed}
    after_sums = read_after_sums(operations, readers_among(operations), buffers, gates)
    extra = _first_elements([*read, *_squares_of_cubes(operations, gradient_scope), *after_sums], gates)
    return extra, tuple(tensor for tensor in results if id(buffer_of(tensor)) in buffers)


def _squares_of_cubes(operations: Sequence[Any], gradient_scope: str) -> Iterator[tf.Tensor]:
    for operation in operations:
        if operation.type == "Pow" and tf.get_static_value(operation.inputs[1]) == 3:
            with tf.name_scope(f"{gradient_scope}/{operation.name}_grad/"):
                yield tf.raw_ops.Pow(x=operation.inputs[0], y=tf.constant(2, operation.inputs[1].dtype), name="Pow")


def read_convolutions(operations: Sequence[Any], inputs: Iterable[Any], gates: Gates) -> tuple[tf.Tensor, ...]:
    """Read convolutions once more after a LeakyRelu, where somebody waits for the LeakyRelu in the plain step.

    The remapper (``FindContractionWithActivation``) joins a convolution with a LeakyRelu that nobody waits for,
    whatever else reads the convolution. It fails then, and nothing is fused in the whole graph. In the plain step the
    sizes for the gradient of a convolution after the LeakyRelu wait for it, once graph optimisation knows them.

    Args:
      operations: those of a first run, with all that reads its results.
      inputs: what the segment reads; its sizes are read after a gate.
      gates: what reads single elements.

    Returns:
      What was read, as ``read_in_first_run``.
    """
    read = []
    for operation in (*operations, *(source_of(tensor).op for tensor in inputs)):
        convolved = _activated_convolution(operation)
        if convolved is None or operation.graph is not tf.compat.v1.get_default_graph():
            continue
        if any(reader.type in SIZES_READ_BY_GRADIENT for reader in readers_of(operation.outputs[0])):
            with tf.control_dependencies([operation]), tf.name_scope(EXTRA_READERS):
                read.append(gates.first_elements([convolved]))
    return tuple(read)


def _activated_convolution(operation: Any) -> Any | None:
    """Return what a LeakyRelu of known sizes reads, if that is a convolution, with its bias or without; or None."""
    if operation.type != "LeakyRelu" or not operation.outputs[0].shape.is_fully_defined():
        return None
    source = source_of(operation.inputs[0])
    convolved = source_of(source.op.inputs[0]) if source.op.type == "BiasAdd" else source
    return source if convolved.op.type == "Conv2D" else None


def read_in_replay(
    replayed: Sequence[Any],
    added: Sequence[Any],
    outputs: Sequence[Any],
    arrived: Collection[int],
    gradients: Iterable[Any],
    gates: Gates,
) -> tf.Tensor | None:
    """Add a reader to every replayed value that loses one: an operation that is not needed, or one after the segment.

    Args:
      replayed: what a replay added to its graph, in order.
      added: the same with the backward operations after it.
      outputs: what the replay returned.
      arrived: the places of those that a gradient arrived for: others have no reader after the segment.
      gradients: what the backward operations are there for.
      gates: what reads single elements.

    Returns:
      As ``read_in_first_run``.
    """
    needed = _needed_for(gradients, added)
    here = {id(operation) for operation in replayed}
    unneeded = [operation for operation in replayed if id(operation) not in needed]
    lost = [tensor for operation in unneeded for tensor in operation.inputs]
    left = [outputs[place] for place in arrived]
    lost += [tensor for tensor in left if sum(id(reader) in needed for reader in tensor.consumers()) == 1]
    read = [tensor for tensor in lost if id(tensor.op) in needed and id(tensor.op) in here]
    return _first_elements([*read, *read_after_sums_of_replay(replayed, needed, outputs, gates)], gates)


def _needed_for(results: Iterable[Any], operations: Iterable[Any]) -> set[int]:
    """Return the ids of those of the operations that results are made of."""
    own, needed = {id(operation) for operation in operations}, set[int]()
    stack = [tensor.op for tensor in results]
    while stack:
        operation = stack.pop()
        if id(operation) in own and id(operation) not in needed:
            needed.add(id(operation))
            # Graph optimisation knows the sizes of the others.
            sizes = operation.type in METADATA_READERS
            stack.extend(tensor.op for tensor in operation.inputs if not (sizes and tensor.shape.is_fully_defined()))
    return needed


def _first_elements(tensors: Iterable[Any], gates: Gates) -> tf.Tensor | None:
    unique = {id(tensor): tensor for tensor in tensors if tensor.dtype.is_floating}
    if not unique:
        return None
    with tf.name_scope(EXTRA_READERS):
        return gates.first_elements(list(unique.values()))
