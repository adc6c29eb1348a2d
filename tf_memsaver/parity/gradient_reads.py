"""Which values the plain step's backward operations read, told from the forward operations alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tf_memsaver.parity.grappler import (
    ADDITIONS,
    BIAS,
    READS_INPUT,
    READS_OTHER_INPUTS,
    READS_OUTPUT,
    READS_OUTPUT_FOR,
    READS_SIZES_OF_INPUT,
)
from tf_memsaver.parity.sums import is_one_of_many
from tf_memsaver.tfgraph.emission import ends_segment
from tf_memsaver.tfgraph.operations import custom_gradient_bodies, has_custom_gradient, has_gradients


class Read(NamedTuple):
    """A value that a gradient function reads, or only its sizes: then it is not kept, as they are read at once."""

    tensor: Any
    is_kept: bool


def read_by_gradients(operations: Sequence[Any], sources: Iterable[Any], results: Iterable[Any]) -> Iterator[Read]:
    """Yield the values made by ``operations`` that their gradient functions read.

    Args:
      operations: forward operations, in order.
      sources: the tensors that gradients are taken for.
      results: the tensors that gradients come from.
    """
    made = {id(tensor) for operation in operations for tensor in operation.outputs if operation.type != "Const"}
    for operation, wanted in _differentiated(operations, sources, results):
        for place, tensor in enumerate(operation.inputs):
            if id(tensor) in made:
                is_kept = _gradient_reads(operation, place, wanted)
                if is_kept or _reads_sizes(operation, place, wanted):
                    yield Read(tensor, is_kept)
        told = READS_OUTPUT_FOR.get(operation.type)
        if operation.type in READS_OUTPUT or (told is not None and wanted[told]):
            yield from (Read(tensor, is_kept=True) for tensor in operation.outputs)


def _differentiated(
    operations: Sequence[Any], sources: Iterable[Any], results: Iterable[Any]
) -> Iterator[tuple[Any, list[bool]]]:
    """Yield the operations whose gradient function is asked, each with which of its inputs' gradients are wanted."""
    reached = _reached_by_gradients(operations, results) - _inside_custom_gradients(operations)
    followed = {id(tensor) for tensor in sources}
    for operation in operations:
        wanted = [id(tensor) in followed for tensor in operation.inputs]
        if any(wanted) and operation.type != "StopGradient":
            followed.update(id(tensor) for tensor in operation.outputs if has_gradients(tensor.dtype))
            if id(operation) in reached:
                yield operation, wanted


def _gradient_reads(operation: Any, place: int, wanted: Sequence[bool]) -> bool:
    """Whether the gradient function of an operation reads its input ``place``."""
    if operation.type in READS_OTHER_INPUTS and any(each for other, each in enumerate(wanted) if other != place):
        return True
    return operation.type in READS_INPUT and wanted[place]


def _reads_sizes(operation: Any, place: int, wanted: Sequence[bool]) -> bool:
    """Whether the gradient function of an operation reads the sizes of its input ``place``, when the step runs."""
    if operation.type == READS_SIZES_OF_INPUT:
        return wanted[place] and not operation.inputs[place].shape.is_fully_defined()
    tensor = operation.inputs[place]
    if operation.type not in ADDITIONS or tensor.op.type != BIAS or _are_known_equal(operation):
        return False
    # A reader might still hold a term of many when the sum begins, which would then begin with another one.
    return not is_one_of_many(tensor)


def _are_known_equal(addition: Any) -> bool:
    """Whether the shapes of both terms are known and the same; the gradient reads them when the step runs, otherwise.

    So a product with its bias is not fused with the addition in the plain step.
    """
    left, right = (tensor.shape for tensor in addition.inputs)
    return bool(left.is_fully_defined()) and left.as_list() == right.as_list()


def _reached_by_gradients(operations: Sequence[Any], results: Iterable[Any]) -> set[int]:
    """Return the ids of the operations that a gradient of ``results`` arrives at."""
    wanted, reached = {id(tensor) for tensor in results}, set()
    for operation in reversed(operations):
        if operation.type != "StopGradient" and any(id(tensor) in wanted for tensor in operation.outputs):
            reached.add(id(operation))
            wanted.update(id(tensor) for tensor in operation.inputs)
    return reached


def _inside_custom_gradients(operations: Sequence[Any]) -> set[int]:
    """Return the ids of the operations in functions with a gradient of their own, which are not differentiated.

    Segments inside have one too, but not in the plain step.
    """
    reads = [[id(tensor) for tensor in operation.inputs] for operation in operations]
    makes = [[id(tensor) for tensor in operation.outputs] for operation in operations]
    ends = [place for place, each in enumerate(operations) if has_custom_gradient(each) and not ends_segment(each)]
    return {id(operations[place]) for body in custom_gradient_bodies(reads, makes, ends) for place in body}
