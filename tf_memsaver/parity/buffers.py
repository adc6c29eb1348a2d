"""Which tensors share a buffer, once the graph is optimised."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tf_memsaver.cost import rules
from tf_memsaver.parity.grappler import unchanged_operand
from tf_memsaver.tfgraph.loops import held_in_branch, held_in_loop
from tf_memsaver.tfgraph.operations import BRANCHES, called_functions, function_graph, is_loop


def viewed_input(operation: Any, place: int) -> Any | None:
    """Return the input whose buffer output ``place`` of an operation shares, or None if it has one of its own.

    A loop or a branch keeps for its gradient also what another of its outputs is: then that one is returned.
    """
    if operation.type in rules.MULTI_VIEWS:
        return operation.inputs[place]
    if operation.type in rules.VIEWS:
        return operation.inputs[0]
    if is_loop(operation):
        body = function_graph(operation.graph, operation.get_attr("body").name)
        return None if body is None else _outside(operation, body, held_in_loop(body, place), 0)
    if operation.type in BRANCHES:
        bodies = called_functions(operation, operation.graph)
        found = (_outside(operation, body, held_in_branch(body, place), 1) for body in bodies)
        return next((tensor for tensor in found if tensor is not None), None)
    return unchanged_operand(operation)


def views_among(outputs: Iterable[Any], tensor: Any) -> Iterator[Any]:
    """Yield those outputs of an operation that share the buffer of this input."""
    return (each for each in outputs if viewed_input(each.op, each.value_index) is tensor)


def _outside(operation: Any, body: Any, held: Any | None, first: int) -> Any | None:
    """Return the input or output of an operation that is this one of its body; ``first`` is its first input there."""
    if held is None:
        return None
    for place, tensor in enumerate(body.inputs):
        if tensor is held:
            return operation.inputs[first + place]
    outputs = zip(operation.outputs, body.outputs, strict=False)
    return next((outer for outer, tensor in outputs if tensor is held), None)


def buffer_of(tensor: Any) -> Any:
    """Return the tensor that first had the buffer of this one; segments inside pass on what they read and make."""
    while (source := viewed_input(tensor.op, tensor.value_index)) is not None:
        tensor = source
    return tensor
