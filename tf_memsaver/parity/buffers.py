"""Which tensors share a buffer, once the graph is optimised."""

from __future__ import annotations

from typing import Any

from tf_memsaver.cost import rules
from tf_memsaver.parity.grappler import unchanged_operand


def viewed_input(operation: Any, place: int) -> Any | None:
    """Return the input whose buffer output ``place`` of an operation shares, or None if it has one of its own."""
    if operation.type in rules.MULTI_VIEWS:
        return operation.inputs[place]
    if operation.type in rules.VIEWS:
        return operation.inputs[0]
    return unchanged_operand(operation)


def buffer_of(tensor: Any) -> Any:
    """Return the tensor that first had the buffer of this one; segments inside pass on what they read and make."""
    while (source := viewed_input(tensor.op, tensor.value_index)) is not None:
        tensor = source
    return tensor
