"""Run one operation of another graph in the current graph, recorded on the gradient tapes that are active here.

An operation that is copied by its definition alone (``import_graph_def``) is on no tape: gradients would come out as
``None``. Here every copy is recorded with the gradient function registered for it, as ``tf.gradients`` looks it up, so
that custom gradients of SavedModels are found too. The backward operations take the names that TensorFlow gives to
those of a function (``gradients/…_grad/…``): graph optimisation sorts the terms of a sum by name, and their order is
part of the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, function_pb2
from tensorflow.python.eager import record
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import ops
from tensorflow.python.ops import handle_data_util

CUSTOM_GRADIENT = "_gradient_op_type"
"""The attribute that names an operation's own gradient function."""

_NOT_COPIED = ("_class", "_output_shapes")
"""Attributes that speak of the graph that the operation comes from."""


Gradient = Callable[..., Any]
"""Takes the gradients of an operation's outputs and returns those of its inputs."""


def emit(operation: Any, inputs: Sequence[Any], name: str, gradient: Gradient | None = None) -> list[tf.Tensor]:
    """Add a copy of ``operation`` that reads ``inputs`` to the current graph; return its outputs.

    ``gradient`` stands in for the registered gradient function.

    Raises:
      LookupError: (when a gradient is asked for) the operation has no gradient.
    """
    graph = tf.compat.v1.get_default_graph()
    attributes = {key: value for key, value in operation.node_def.attr.items() if key not in _NOT_COPIED}
    if gradient is not None:
        attributes.pop(CUSTOM_GRADIENT, None)
    attributes = _functions_brought(operation.graph, graph, attributes)
    made = graph._create_op_internal(
        operation.type,
        list(inputs),
        [tensor.dtype for tensor in operation.outputs],
        name=name,
        attrs=attributes,
        op_def=operation.op_def,
    )
    outputs = list(made.outputs)
    for source, copy in zip(operation.outputs, outputs, strict=True):
        if source.dtype in (tf.resource, tf.variant):
            handle_data_util.copy_handle_data(source, copy)
    if any(tensor.dtype.is_floating or tensor.dtype == tf.variant for tensor in outputs):
        _record(made, list(inputs), outputs, name, gradient)
    return outputs


def _functions_brought(source: Any, target: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    """Add the functions that attributes name to the library of the target graph, and return the attributes.

    The gradient of a loop or a branch rewrites its functions under names made from theirs: each copy gets its own.
    """
    found = {}
    for key, value in attributes.items():
        copy = attr_value_pb2.AttrValue()
        copy.CopyFrom(value)
        for named in [copy.func] if copy.HasField("func") else copy.list.func:
            function = _library_function(source, named.name)
            if function is not None:
                target._add_function_recursive(function)
                definition = function_pb2.FunctionDef()
                definition.CopyFrom(function.cached_definition)
                definition.signature.name = named.name = f"{named.name}_{ops.uid()}"
                target._add_function(atomic_function.from_function_def(definition, function.function_type))
        found[key] = copy
    return found


def _library_function(graph: Any, name: str) -> Any | None:
    while graph is not None:
        function = graph._get_function(name)
        if function is not None:
            return function
        graph = getattr(graph, "outer_graph", None)
    return None


def _record(operation: Any, inputs: list[Any], outputs: list[tf.Tensor], name: str, gradient: Gradient | None) -> None:
    function = gradient
    if function is None:
        try:
            registered = ops.get_gradient_function(operation)
        except LookupError:
            # As in TensorFlow: an error only if a gradient is asked for.
            def registered(*_: Any) -> Any:
                raise LookupError(f"operation '{operation.name}' of type {operation.type} has no gradient")

        if registered is None:
            return
        function = functools.partial(registered, operation)

    def backward(*upstream: Any) -> list[Any]:
        with tf.name_scope(f"gradients/{name}_grad/"):
            found = function(*upstream)
        return list(found) if isinstance(found, (list, tuple)) else [found]

    record.record_operation(operation.type, outputs, inputs, backward)
