"""Which tensors share a buffer, once the graph is optimised."""

from __future__ import annotations

from typing import Any

from tf_memsaver.cost import rules
from tf_memsaver.parity.grappler import unchanged_operand
from tf_memsaver.tfgraph.loops import is_handed_through
from tf_memsaver.tfgraph.operations import function_graph, is_loop


def viewed_input(operation: Any, place: int) -> Any | None:
    """Return the input whose buffer output ``place`` of an operation shares, or None if it has one of its own."""
    if operation.type in rules.MULTI_VIEWS:
        return operation.inputs[place]
    if operation.type in rules.VIEWS:
        return operation.inputs[0]
    if is_loop(operation):
        body = function_graph(operation.graph, operation.get_attr("body").name)
        return operation.inputs[place] if body is not None and is_handed_through(body, place) else None
    return unchanged_operand(operation)


def buffer_of(tensor: Any) -> Any:
    """Return the tensor that first had the buffer of this one; segments inside pass on what they read and make."""
    while (source := viewed_input(tensor.op, tensor.value_index)) is not None:
        tensor = source
    return tensor
