"""Sizes inside loops and branches, worked out from what these are given.

The functions of a loop or a branch that was traced for a free batch size know no sizes, and TensorFlow does not look
into them for the shapes of what they return, nor for those of the elements of a list. Where the sizes of a graph's
inputs are known, all of this is inferred here, function by function, as the graph is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from tf_memsaver.compat import graphs
from tf_memsaver.tfgraph.operations import (
    BRANCHES,
    FUNCTION_CALLS,
    LOOPS,
    called_functions,
    functions_in,
    given_for_free,
    in_order,
    known_shape,
    library_function,
)

SIZED = BRANCHES | FUNCTION_CALLS | LOOPS
"""Operations whose results are as large as those of the functions that they call."""

_MADE = dict.fromkeys(LOOPS, "T") | dict.fromkeys(BRANCHES | FUNCTION_CALLS, "Tout")
"""The attributes of these that have the types of what comes out of them."""

_WRITERS = {"TensorListPushBack": 1, "TensorListSetItem": 2}
"""Operations that put an element into a list, and which of their inputs it is."""

_LONGER = {"Identity": 0, "TensorListPopBack": -1, "TensorListPushBack": 1}
"""Operations whose first result is the list that they are given, with so many more elements."""


@dataclasses.dataclass(frozen=True)
class Size:
    """What is known of a tensor: its sizes; for a list, those of each element, and how many there are.

    ``is_empty`` tells of a list that nothing was put into yet.
    """

    shape: tuple[int | None, ...] | None
    elements: tuple[int | None, ...] | None = None
    element_type: tf.DType | None = None
    length: int | None = None
    is_empty: bool = False

    @staticmethod
    def of(shape: tf.TensorShape) -> Size:
        """Return what a shape tells."""
        return Size(None if shape.rank is None else tuple(shape))

    def joined(self, other: Size) -> Size:
        """Return what is known of a tensor that is as this one or as the other one."""
        one, two = (other, other) if self.is_empty else (self, self if other.is_empty else other)
        return Size(
            _joined(self.shape, other.shape),
            _joined(one.elements, two.elements),
            one.element_type,
            self.length if self.length == other.length else None,
            one.is_empty,
        )


@dataclasses.dataclass
class SizedFunction:
    """A function whose arguments have known sizes: those of all that it computes.

    ``operations`` are by the names of its operations; ``calls`` is what they call.
    """

    arguments: list[Size]
    results: list[Size]
    operations: dict[str, list[Size]]
    calls: dict[str, Called]


class Called(NamedTuple):
    """The functions that an operation calls, by name, and the sizes of what comes out of it; empty if not known."""

    functions: Mapping[str, SizedFunction]
    results: Sequence[Size]


NOT_SIZED = Called({}, ())


class Sizes:
    """Works out sizes in one graph, whose inputs have known ones."""

    def __init__(self) -> None:
        """Nothing is known yet beyond what the tensors of the graph tell."""
        self._lists: dict[int, tuple[tf.Tensor, Size]] = {}

    def of(self, tensor: tf.Tensor) -> Size:
        """Return what is known of a tensor."""
        if id(tensor) in self._lists:
            return self._lists[id(tensor)][1]
        size = Size.of(tensor.shape)
        return size if tensor.dtype != tf.variant else Size(size.shape, *_declared(tensor))

    def called(
        self,
        op_type: str,
        attributes: Mapping[str, Any],
        inputs: Sequence[tf.Tensor],
        function_named: Callable[[str], Any | None],
    ) -> Called:
        """Return the functions of an operation in ``SIZED`` with their sizes, and the sizes of what comes out of it."""
        given = [self.of(tensor) for tensor in inputs]
        names = list(dict.fromkeys(func.name for value in attributes.values() for func in functions_in(value)))
        functions = {name: function_named(name) for name in names}
        if None in map(graphs.traced_by, functions.values()):
            return NOT_SIZED
        try:
            if op_type in LOOPS:
                body = attributes["body"].func.name
                given = self._held(functions[body], given)
            elif op_type in BRANCHES:
                given = given[1:]
            sized = {name: self._function(function, given) for name, function in functions.items()}
        except ValueError:
            return NOT_SIZED
        if op_type in LOOPS:
            return Called(sized, given)
        results, *others = [each.results for each in sized.values()]
        for other in others:
            results = [one.joined(two) for one, two in zip(results, other, strict=True)]
        return Called(sized, results)

    def note(self, operation: Any, results: Sequence[Size]) -> None:
        """Tell the results of an operation what is known of them, from its inputs or by ``called``."""
        for tensor, size in zip(operation.outputs, results, strict=False):
            self._tell(tensor, size)
        if not operation.outputs:
            return
        kind, inputs, made = operation.type, operation.inputs, operation.outputs[0]
        if kind in ("EmptyTensorList", "TensorListReserve"):
            length = 0 if kind == "EmptyTensorList" else _constant(inputs[1])
            self._tell(made, Size((), *_declared(made), length, is_empty=True))
        elif kind == "TensorListFromTensor":
            self._tell(made, Size((), *_element_of(inputs[0])))
        elif made.dtype == tf.variant and (kind in _LONGER or kind in _WRITERS):
            found = self.of(inputs[0])
            if kind in _WRITERS:
                element = inputs[_WRITERS[kind]]
                put_in = Size((), Size.of(element.shape).shape, element.dtype, found.length)
                found = found.joined(put_in)
            more = _LONGER.get(kind, 0)
            can_grow = kind == "TensorListSetItem" and operation.get_attr("resize_if_index_out_of_bounds")
            length = None if can_grow or found.length is None else found.length + more
            self._tell(made, dataclasses.replace(found, length=length))
        elif kind == "TensorListStack":
            length = self.of(inputs[0]).length
            if length is not None and made.shape.rank:
                made.set_shape([length, *made.shape[1:]])

    def _tell(self, tensor: tf.Tensor, size: Size) -> None:
        if size.shape is not None:
            tensor.set_shape(size.shape)
        if tensor.dtype != tf.variant:
            return
        self._lists[id(tensor)] = tensor, size
        if size.elements is not None and not size.is_empty and size.element_type is not None:
            declared, _ = _declared(tensor)
            both = None if declared is None else zip(declared, size.elements, strict=True)
            elements = size.elements if both is None else tuple(two if one is None else one for one, two in both)
            if elements != declared:
                graphs.set_handle_data(tensor, graphs.create_handle_data(tf.TensorShape(elements), size.element_type))

    def _held(self, body: Any, given: list[Size]) -> list[Size]:
        """Return what is known of what a loop is given, in all of its steps: less from round to round."""
        while True:
            after = self._function(body, given).results
            held = [one.joined(two) for one, two in zip(given, after, strict=True)]
            if held == given:
                return given
            given = held

    def _function(self, function: Any, given: Sequence[Size]) -> SizedFunction:
        """Return the sizes in a function, made anew, operation by operation, in a graph of its own.

        Raises:
          ValueError: it cannot be given these sizes.
        """
        source, definition, scratch = function.graph, graphs.definition_of(function), tf.Graph()
        nodes = {node.name: node for node in definition.node_def}
        here, made = Sizes(), dict[int, tf.Tensor]()
        sizes, calls = dict[str, list[Size]](), dict[str, Called]()
        with scratch.as_default():
            arguments = source.inputs[: len(definition.signature.input_arg)]
            for tensor, size in zip(arguments, given, strict=True):
                made[id(tensor)] = argument = tf.compat.v1.placeholder(tensor.dtype, tensor.shape)
                handle = graphs.get_handle_data(tensor)
                if handle is not None and handle.is_set:
                    graphs.set_handle_data(argument, handle)
                here._tell(argument, size)
            for operation in in_order(source):
                if operation.name not in nodes or not operation.outputs:
                    continue
                node = nodes[operation.name]
                inputs, outputs = _as_defined(operation, node)
                inputs = [made[id(tensor)] for tensor in inputs]
                if operation.type in SIZED:
                    called = here.called(operation.type, node.attr, inputs, partial(library_function, source))
                    calls[operation.name] = called
                else:
                    called = NOT_SIZED
                dtypes = [tensor.dtype for tensor in outputs]
                copy = graphs.add_operation(
                    scratch, operation.type, inputs, dtypes, operation.name, node.attr, operation.op_def
                )
                for tensor, output in zip(outputs, copy.outputs, strict=True):
                    here._tell(output, self.of(tensor))
                here.note(copy, called.results)
                sizes[operation.name] = [here.of(tensor) for tensor in copy.outputs]
                made.update(zip(map(id, outputs), copy.outputs, strict=True))
        return SizedFunction(
            arguments=[here.of(made[id(tensor)]) for tensor in arguments],
            results=[here.of(made[id(tensor)]) for tensor in source.outputs[: len(definition.signature.output_arg)]],
            operations=sizes,
            calls=calls,
        )


def note_call(call: Any, gradients: Sequence[tf.Tensor | None]) -> None:
    """Tell what taking the gradient of a function's call has made its sizes: what it returns besides, and gradients."""
    free = next((given_for_free(call, body) for body in called_functions(call, call.graph)), None)
    for tensor in call.outputs:
        shape = known_shape(tensor, free)
        if shape is not None:
            tensor.set_shape(shape)
    for tensor, gradient in zip(call.inputs, gradients, strict=True):
        if isinstance(gradient, tf.Tensor) and tensor.dtype != tf.resource:
            gradient.set_shape(tensor.shape)


def _as_defined(operation: Any, node: Any) -> tuple[Sequence[tf.Tensor], Sequence[tf.Tensor]]:
    """Return the inputs and outputs of a function's operation that its definition has.

    In the graph of a function in which a gradient was taken, loops and branches have got more.
    """
    count = sum(not name.startswith("^") for name in node.input)
    made = node.attr[_MADE[operation.type]].list.type if operation.type in _MADE else operation.outputs
    return operation.inputs[:count], operation.outputs[: len(made)]


def _joined(one: tuple[int | None, ...] | None, two: tuple[int | None, ...] | None) -> tuple[int | None, ...] | None:
    """Return the sizes that two shapes have in common."""
    if one is None or two is None or len(one) != len(two):
        return None
    return tuple(a if a == b else None for a, b in zip(one, two, strict=True))


def _declared(tensor: tf.Tensor) -> tuple[tuple[int | None, ...] | None, tf.DType | None]:
    """Return the sizes of the elements of a list, as the list declares them, and their type."""
    handle = graphs.get_handle_data(tensor)
    if handle is None or len(handle.shape_and_type) != 1:
        return None, None
    element = handle.shape_and_type[0]
    return Size.of(tf.TensorShape(element.shape)).shape, tf.as_dtype(element.dtype)


def _element_of(tensor: tf.Tensor) -> tuple[tuple[int | None, ...] | None, tf.DType, int | None]:
    """Return the sizes and the type of what a list has of a tensor, one element for each of its rows, and how many."""
    length, *element = tensor.shape if tensor.shape.rank else (None,)
    return tuple(element) if tensor.shape.rank else None, tensor.dtype, length


def _constant(tensor: tf.Tensor) -> int | None:
    value = graphs.constant_value(tensor)
    return None if value is None else int(value)
