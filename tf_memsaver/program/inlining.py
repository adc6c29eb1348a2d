"""The operations of a traced function and of those that it calls, listed in order as single calls."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_memsaver.compat.graphs import COMPILED_BY_XLA, CUSTOM_GRADIENT, FuncGraph, gradient_function
from tf_memsaver.compat.released import gradients_end_with_graphs, release
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.parity.grappler import ADDITIONS
from tf_memsaver.program.op_calls import Constant, CustomGradient, Gathering, OpCall, without
from tf_memsaver.tfgraph.emission import Template
from tf_memsaver.tfgraph.operations import (
    FUNCTION_CALLS,
    called_function,
    called_functions,
    has_custom_gradient,
    implements,
    in_order,
    library_function,
    own_outputs,
)

LARGEST_REPEATED_CONSTANT = 16384
"""Bytes. Smaller constants are made anew where they are read, so that shapes stay known inside segments."""


class Inliner:
    """Numbers the tensors of a function and of those that it calls, and lists their operations in order.

    ``calls`` are the operations, ``outputs`` the slots of the function's results, ``slots`` those of the tensors (ids)
    of the function itself, and ``slot_count`` is how many there are; those of the arguments and captured tensors come
    first.
    """

    def __init__(
        self,
        graph: Any,
        variable_of: Mapping[int, tf.Variable],
        scope: str | None,
        unscoped: Collection[str],
        outputs: int,
    ) -> None:
        """Take in a graph of so many outputs; where its gradient was taken, it has got more after them.

        ``unscoped`` are the names of its operations that have no name scope of their own.
        """
        self.calls: list[OpCall] = []
        self._scope, self._unscoped = scope, unscoped
        self._variable_of = variable_of
        self.slot_count = 0
        self._constant_of: dict[int, Constant] = {}
        self._sums: dict[int, bool] = {}
        self.slots = slots = {id(tensor): self._new() for tensor in graph.inputs}
        self._walk(graph, "", slots)
        self.outputs = [slots[id(tensor)] for tensor in graph.outputs[:outputs]]
        for slot in self.outputs:
            if slot in self._constant_of:
                self._add(self._constant_of.pop(slot).operation, "", [], [slot])

    def _new(self) -> int:
        self.slot_count += 1
        return self.slot_count - 1

    def _label(self, prefix: str, operation: Any) -> str:
        return without(self._scope or "", f"{prefix}{operation.name}")

    def _walk(self, graph: Any, prefix: str, slots: dict[int, int]) -> tuple[int | Gathering, ...]:
        """List the operations of a graph; return what who waits for its end waits for."""
        gathered: dict[int, Gathering] = {}
        for operation in in_order(graph):
            outputs = own_outputs(operation)
            if operation.type == "NoOp" or (outputs and id(outputs[0]) in slots):
                continue
            inputs = [slots[id(tensor)] for tensor in operation.inputs]
            body = _inlined_body(operation, graph)
            if body is not None:
                inner = {id(tensor): slot for tensor, slot in zip(body.inputs, inputs, strict=True)}
                scope = f"{prefix}{operation.name}/"
                after = self._walk(body, scope, inner)
                label = without(self._scope or "", f"{scope}output_control_node")
                gathered[id(operation)] = Gathering(label=label, after=after)
                pairs = zip(outputs, body.outputs[: len(outputs)], strict=True)
                slots.update({id(tensor): inner[id(made)] for tensor, made in pairs})
                continue
            if operation.type not in FUNCTION_CALLS:
                # A call keeps the function itself, and its gradient with it.
                _check_gradients_inside(operation, graph)
            made = [self._new() for _ in outputs]
            slots.update({id(tensor): slot for tensor, slot in zip(outputs, made, strict=True)})
            template = Template(operation)
            if operation.type == "Const" and _constant_bytes(operation) <= LARGEST_REPEATED_CONSTANT:
                self._constant_of[made[0]] = Constant(operation=template, label=self._label(prefix, operation))
            else:
                after = self._awaited(operation.control_inputs, prefix, slots, gathered)
                gradient = self._custom_gradient(operation, slots)
                self._add(template, prefix, inputs, made, after, gradient)
        return self._awaited(getattr(graph, "control_outputs", ()), prefix, slots, gathered)

    def _awaited(
        self, operations: Iterable[Any], prefix: str, slots: dict[int, int], gathered: dict[int, Gathering]
    ) -> tuple[int | Gathering, ...]:
        """Return what stands for operations to wait for; ``gathered`` are the NoOps and calls of their graph so far."""
        found: list[int | Gathering] = []
        for each in operations:
            if each.type == "NoOp" and id(each) not in gathered:
                after = self._awaited(each.control_inputs, prefix, slots, gathered)
                gathered[id(each)] = Gathering(label=self._label(prefix, each), after=after)
            if id(each) in gathered:
                found.append(gathered[id(each)])
            elif each.outputs and id(each.outputs[0]) in slots:
                slot = slots[id(each.outputs[0])]
                found.extend([slot] if slot not in self._constant_of else [])
        return tuple(found)

    def _add(
        self,
        operation: Template,
        prefix: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        after: tuple[int | Gathering, ...] = (),
        gradient: CustomGradient | None = None,
    ) -> None:
        # Of a sum, whether something between it and here waits for more than its data.
        waits = [self._sums[slot] or bool(after) for slot in inputs if slot in self._sums]
        if operation.type in ADDITIONS or (operation.type == "Identity" and waits):
            self._sums[outputs[0]] = operation.type == "Identity" and any(waits)
        self.calls.append(
            OpCall(
                operation=operation,
                label=self._label(prefix, operation),
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                constants=tuple(self._constant_of.get(slot) for slot in inputs),
                variables=tuple(self._variable_of[slot] for slot in inputs if slot in self._variable_of),
                after=after,
                gradient=gradient,
                passes_lists=tf.variant in (*operation.read_dtypes, *operation.dtypes),
                waits_for_others=operation.type in ADDITIONS and any(waits),
                of_tape=self._scope is not None,
                own_scope=bool(prefix) or operation.name not in self._unscoped,
            )
        )

    def _custom_gradient(self, operation: Any, slots: dict[int, int]) -> CustomGradient | None:
        """Return the gradient that an operation brings along, listed as calls like the function itself."""
        if not has_custom_gradient(operation):
            return None
        with operation.graph.as_default(), gradients_end_with_graphs():
            graph = FuncGraph("gradient")
            with graph.as_default():
                upstream = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in operation.outputs]
                try:
                    found = gradient_function(operation)(operation, *upstream)
                except NotImplementedError:
                    # tf.recompute_grad has no second derivative. A copy has the same gradient function, which says so.
                    release(graph)
                    return None
                results = [None if t is None else tf.convert_to_tensor(t) for t in found]
        # A variable that the gradient reads: the function has captured it, too.
        pairs = operation.graph.captures
        captures = {id(external): slots[id(internal)] for external, internal in pairs if id(internal) in slots}
        slot_of = ChainMap(slots, captures)
        missing = [external for external, _ in graph.captures if id(external) not in slot_of]
        if missing:
            # Eager tensors, such as the value of a variable, have no names.
            read = missing[0].name if tf.is_symbolic_tensor(missing[0]) else f"a {missing[0].dtype.name} tensor"
            raise UnsupportedModelError(
                f"the custom gradient of '{operation.name}' reads {read}, which lies outside the function. "
                f"Pass it to the function with the custom gradient as an argument."
            )
        inner = {id(internal): slot_of[id(external)] for external, internal in graph.captures}
        captured = tuple(slot for slot in dict.fromkeys(inner.values()) if slot not in self._constant_of)
        inner.update({id(tensor): self._new() for tensor in upstream})
        outer_calls, self.calls = self.calls, []
        self._walk(graph, "", inner)
        calls, self.calls = self.calls, outer_calls
        own = [each for each in graph.get_operations() if each.type not in ("Const", "Identity", "Placeholder")]
        function = own[0].name if len(own) == 1 and own[0].type in FUNCTION_CALLS else ""
        made_of = tuple(None if tensor is None else inner[id(tensor)] for tensor in results)
        release(graph)
        return CustomGradient(
            calls=tuple(calls),
            function=function,
            captured=captured,
            upstream=tuple(inner[id(tensor)] for tensor in upstream),
            results=made_of,
        )


def _inlined_body(operation: Any, graph: Any) -> Any | None:
    """Return the graph of the function that an operation calls, if nothing is lost by inlining it."""
    attributes = operation.node_def.attr
    if operation.type not in FUNCTION_CALLS or CUSTOM_GRADIENT in attributes or COMPILED_BY_XLA in attributes:
        return None
    function = called_function(operation) or library_function(graph, operation.get_attr("f").name)
    return None if implements(function) else getattr(function, "graph", None)


def _check_gradients_inside(operation: Any, graph: Any) -> None:
    """Check that the functions of a loop or a branch, which are copied by their definitions, keep their gradients.

    Raises:
      UnsupportedModelError: a custom gradient reads tensors of the function that it was traced in.
    """
    for body in called_functions(operation, graph):
        for inner in body.get_operations():
            if has_custom_gradient(inner) and _reads_where_it_was_traced(inner):
                raise UnsupportedModelError(
                    f"a tf.custom_gradient is called inside of '{operation.name}', a loop or branch of the graph, and "
                    "its gradient reads tensors from there, which a copy of the loop or branch does not have. Plan by "
                    "layers (granularity='layer'), or write the loop in Python, so that it is unrolled."
                )
            _check_gradients_inside(inner, body)


def _reads_where_it_was_traced(operation: Any) -> bool:
    """Whether the gradient of a copy of an operation still reads tensors of the graph that the operation is of."""
    with gradients_end_with_graphs():
        graph = FuncGraph("copy")
        with graph.as_default():
            inputs = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in operation.inputs]
            copied = Template(operation).copy(graph, inputs, operation.name)
            upstream = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in operation.outputs]
            gradient_function(operation)(copied, *upstream)
    reads = any(getattr(external, "graph", None) is operation.graph for external, _ in graph.captures)
    release(graph)
    return reads


def _constant_bytes(operation: Any) -> int:
    tensor = operation.outputs[0]
    return (tensor.shape.num_elements() or 0) * max(1, tensor.dtype.size or 1)
