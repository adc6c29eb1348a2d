"""Extra readers: they keep TensorFlow's graph optimizer from fusing segments otherwise than the plain step.

The optimizer ("remapper") fuses a chain of operations, such as a matrix product, its bias and a GELU, where the values
in between have no other reader ("fan-out"); the fused kernel rounds otherwise. In the plain step backward operations
are such readers. A first run has no backward pass, and a replay lacks the operations that nobody needs: in both, values
would be fused that are not fused in the plain step. An *extra reader* reads one element of such a value, in the place
of the reader that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_memsaver.compat.graphs import led_to
from tf_memsaver.cost.rules import MATRIX_OPS, METADATA_READERS
from tf_memsaver.parity.buffers import buffer_of
from tf_memsaver.parity.gates import Gates
from tf_memsaver.parity.gradient_reads import read_by_gradients
from tf_memsaver.parity.grappler import (
    BIAS,
    FIRST_RUN_GRADIENTS,
    FUSED_WHATEVER_READS_IT,
    FUSED_WITH_PADS_ALONE,
    FUSED_WITH_READER,
    PADS,
    SIZES_READ_BY_GRADIENT,
    SQUARED_BY_GRADIENT,
    SUMS,
)
from tf_memsaver.parity.readers import (
    EXTRA_READERS,
    is_extra,
    readers_among,
    readers_by_source,
    readers_of,
    source_of,
)
from tf_memsaver.parity.sums import read_after_sums
from tf_memsaver.tfgraph.operations import LOOPS, called_functions, inside_branches


class FirstRunReads:
    """What a first run lacks: readers of the values that the plain step's backward operations read."""

    def __init__(self, operations: Sequence[Any], sources: Iterable[Any], results: Sequence[Any]) -> None:
        """Look at a first run.

        Args:
          operations: what it added to its graph, in order.
          sources: the tensors that gradients are taken for.
          results: the tensors that gradients come from.
        """
        # Those of segments inside are for their gradients, which nobody takes here.
        self._operations = [operation for operation in operations if not is_extra(operation)]
        self._results = results
        read = list(read_by_gradients(self._operations, sources, results))
        self._needed = [each.tensor for each in read]
        kept = [each.tensor for each in read if each.is_kept]
        self._kept = {id(tensor) for tensor in kept}
        self._buffers = {id(buffer_of(tensor)) for tensor in kept}

    def values(self) -> list[tf.Tensor]:
        """Return the values that backward operations read and that have one reader here, which may be fused with it.

        Where they read only sizes that are not known, these are returned: an element would be read too late for a sum
        that takes the value's buffer if nobody else holds it.
        """
        readers = readers_by_source(self._operations)

        def may_be_fused(tensor: Any) -> bool:
            source = source_of(tensor)
            only = readers.get(id(source), [])
            return len(only) == 1 and (only[0].type not in FUSED_WITH_PADS_ALONE or source.op.type in PADS)

        return [
            tensor if id(tensor) in self._kept else _open_size_of(tensor)
            for tensor in self._needed
            if may_be_fused(tensor)
        ]

    def squares_of_cubes(self, forward_first: bool | None) -> Iterator[tf.Tensor]:
        """Yield the squares that the gradients of cubes compute, added here.

        Graph optimisation takes such a square for the forward pass as well, and folds constants by its name. Of two
        equal operations it keeps the one that it finds last as it goes back from what is read, the last input first
        (``grappler/optimizers/model_pruner.cc``, ``common_subgraph_elimination.cc``): so read these first.
        """
        power, three = SQUARED_BY_GRADIENT
        for operation in self._operations:
            # An exponent may have several elements: frequencies are often powers of two.
            if operation.type == power and np.all(tf.get_static_value(operation.inputs[1]) == three):
                with tf.name_scope(f"{FIRST_RUN_GRADIENTS[forward_first]}/{operation.name}_grad/"):
                    # No constant, so that it is not taken for a square of the forward pass before others are.
                    exponent = operation.inputs[1]
                    two = tf.raw_ops.Sub(x=exponent, y=tf.constant(1, exponent.dtype), name="sub")
                    yield tf.raw_ops.Pow(x=operation.inputs[0], y=two, name="Pow")

    def terms(self, gates: Gates) -> Iterator[tf.Tensor]:
        """Read, after each sum, those of its terms that backward operations need."""
        return read_after_sums(self._operations, readers_among(self._operations), self._buffers, gates)

    def needed_results(self) -> tuple[tf.Tensor, ...]:
        """Return the results that backward operations need."""
        return tuple(tensor for tensor in self._results if id(buffer_of(tensor)) in self._buffers)


def _open_size_of(tensor: tf.Tensor) -> tf.Tensor:
    """Return a size of a tensor that is not known, as a number of floating point; or the tensor, if none is open."""
    sizes = tensor.shape.as_list() if tensor.shape.rank is not None else []
    if None not in sizes:
        return tensor
    with tf.name_scope(EXTRA_READERS):
        return tf.cast(tf.shape(tensor)[sizes.index(None)], tf.float32)


def read_convolutions(operations: Sequence[Any], inputs: Iterable[Any], gates: Gates) -> tuple[tf.Tensor, ...]:
    """Read convolutions once more after a LeakyRelu, where somebody waits for the LeakyRelu in the plain step.

    They are joined if nobody waits for it, which fails if others read it (``FUSED_WHATEVER_READS_IT``). In the plain
    step the sizes for the gradient of a convolution after the LeakyRelu wait for it, once graph optimisation knows
    them.

    Args:
      operations: those of a first run, with all that reads its results.
      inputs: what the segment reads; its sizes are read after a gate.
      gates: what reads single elements.

    Returns:
      What was read, as float32 vectors.
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
    if operation.type not in FUSED_WHATEVER_READS_IT or not operation.outputs[0].shape.is_fully_defined():
        return None
    source = source_of(operation.inputs[0])
    convolved = source_of(source.op.inputs[0]) if source.op.type == BIAS else source
    return source if convolved.op.type == FUSED_WHATEVER_READS_IT[operation.type] else None


def may_round_otherwise(kind: str, bodies: Iterable[Any]) -> bool:
    """Whether an operation that calls ``bodies`` may round otherwise in a first run: there are no extra readers inside.

    That is so of what a branch adds up, which is put in another order, and of a GELU right after a product and its bias
    in a loop, which are made one.
    """
    bodies = list(bodies)
    summed = (each for each in inside_branches(kind, bodies) if each.type in SUMS | MATRIX_OPS)
    return any(each.outputs[0].dtype.is_floating for each in summed) or (kind in LOOPS and any(map(_has_gelu, bodies)))


def _has_gelu(body: Any) -> bool:
    """Whether a function, or one that it calls, has a GELU that is made one with the product in front of it."""
    operations = body.get_operations()
    kinds = {operation.type for operation in operations}
    if not kinds.isdisjoint(("Erf", "Erfc")) or kinds.issuperset(("Pow", "Tanh")):
        biases = (operation for operation in operations if operation.type == BIAS)
        if any(source_of(bias.inputs[0]).op.type in FUSED_WITH_READER for bias in biases):
            return True
    return any(_has_gelu(inner) for operation in operations for inner in called_functions(operation, body))


def values_that_lose_readers(
    replayed: Sequence[Any], needed: Collection[int], outputs: Sequence[Any], arrived: Iterable[int]
) -> list[tf.Tensor]:
    """Return the replayed values that lose a reader: an operation that is not needed, or one after the segment.

    What leads nowhere reads nothing in the plain step, either: ``tf.custom_gradient`` adds such an Identity.

    Args:
      replayed: what a replay added to its graph, in order.
      needed: the ids of the operations that its gradients are made of.
      outputs: what it returned.
      arrived: the places of those that are read after the segment.
    """
    here, led_on = {id(operation) for operation in replayed}, needed_for(outputs, replayed)
    unneeded = [each for each in replayed if id(each) in led_on and id(each) not in needed]
    lost = [tensor for operation in unneeded for tensor in _read_by(operation)]
    read_after = [outputs[place] for place in arrived]
    lost += [tensor for tensor in read_after if sum(id(reader) in needed for reader in tensor.consumers()) == 1]
    return [tensor for tensor in lost if id(tensor.op) in needed and id(tensor.op) in here]


def _read_by(operation: Any) -> list[Any]:
    """Return what an operation reads, but for tensors of whose sizes alone it asks: graph optimisation knows these."""
    sizes = operation.type in METADATA_READERS
    return [tensor for tensor in operation.inputs if not (sizes and tensor.shape.is_fully_defined())]


def needed_for(
    results: Iterable[Any], operations: Iterable[Any], reads: Callable[[Any], Iterable[Any]] = _read_by
) -> set[int]:
    """Return the ids of those of the operations that results are made of, by what each ``reads``."""
    own = {id(operation) for operation in operations}

    def before(operation: Any) -> list[Any]:
        return [tensor.op for tensor in reads(operation) if id(tensor.op) in own]

    return led_to((tensor.op for tensor in results if id(tensor.op) in own), before)


def first_elements(tensors: Iterable[Any], gates: Gates) -> tuple[tf.Tensor, ...]:
    """Return the first element of each floating tensor, in one float32 vector, if there is one."""
    unique = {id(tensor): tensor for tensor in tensors if tensor.dtype.is_floating}
    if not unique:
        return ()
    with tf.name_scope(EXTRA_READERS):
        return (gates.first_elements(list(unique.values())),)
