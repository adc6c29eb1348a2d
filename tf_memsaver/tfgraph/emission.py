"""Run one operation of another graph in the current graph, recorded on the gradient tapes that are active here.

An operation that is copied by its definition alone (``import_graph_def``) is on no tape: gradients would come out as
``None``. Here every copy is recorded with the gradient function registered for it, as ``tf.gradients`` looks it up, so
that custom gradients of SavedModels are found too.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_memsaver.compat import graphs
from tf_memsaver.compat.tapes import could_possibly_record, followed, record_operation
from tf_memsaver.tfgraph.operations import (
    FUNCTION_CALLS,
    bytes_made,
    called_function,
    functions_in,
    has_gradients,
    implements,
    library_function,
    only_reads,
    own_outputs,
    rivals,
    trip_count,
)
from tf_memsaver.tfgraph.sizes import NOT_SIZED, SIZED, Called, Size, SizedFunction, Sizes, note_call

AttrValue, NameAttrList = tf.compat.v1.AttrValue, tf.compat.v1.NameAttrList

_OUTPUT_SHAPES = "output_shapes"
"""The attribute of a loop or a branch that has the shapes of what comes out of it."""

_NOT_COPIED = (graphs.COLOCATED, graphs.KNOWN_SHAPES)
"""Attributes that speak of the graph that the operation comes from."""


Gradient = Callable[..., Any]
"""Takes an operation (None when it is being saved) and the gradients of its outputs; returns those of its inputs."""


_sizes: contextvars.ContextVar[Sizes | None] = contextvars.ContextVar("sizes", default=None)


@contextlib.contextmanager
def sizes_worked_out() -> Iterator[None]:
    """Work out the sizes inside of loops and branches, and of what comes out of them, in a graph that is made here."""
    token = _sizes.set(Sizes())
    try:
        yield
    finally:
        _sizes.reset(token)


class Template:
    """An operation as it stood when it was listed; it does not keep its graph.

    TensorFlow rewrites a loop in place when its gradient is taken, and drops graphs that nobody keeps. ``only_reads``
    tells that it has no state but variables, which it does not set.
    """

    __slots__ = (
        "_definition",
        "_functions",
        "_gradient",
        "_handles",
        "_rivals",
        "_steps",
        "attributes",
        "dtypes",
        "name",
        "only_reads",
        "read_dtypes",
        "shapes",
        "type",
    )

    def __init__(self, operation: Any) -> None:
        """Take down what ``emit`` needs of ``operation``."""
        self.type: str = operation.type
        self.name: str = operation.name
        self.attributes = {k: v for k, v in operation.node_def.attr.items() if k not in _NOT_COPIED}
        outputs = own_outputs(operation)
        self._gradient = graphs.own_gradient_function(operation)
        called = called_function(operation)
        if called is not None:
            types = AttrValue.ListValue(type=[tensor.dtype.as_datatype_enum for tensor in outputs])
            self.attributes["Tout"] = AttrValue(list=types)
            name = NameAttrList(name=called.name)
            self.attributes["f"] = AttrValue(func=name)
        self.read_dtypes = [tensor.dtype for tensor in operation.inputs]
        self.dtypes = [tensor.dtype for tensor in outputs]
        self.shapes = [tensor.shape for tensor in outputs]
        self._definition = operation.op_def
        self.only_reads = only_reads(operation, operation.graph)
        self._steps = trip_count(operation) or 1
        named = [func.name for value in self.attributes.values() for func in functions_in(value)]
        self._functions = {name: library_function(operation.graph, name) for name in named}
        self._rivals = [rival for function in self._functions.values() for rival in rivals(operation.graph, function)]
        self._handles = [
            graphs.get_handle_data(tensor) if tensor.dtype in (tf.resource, tf.variant) else None for tensor in outputs
        ]

    @property
    def names_functions(self) -> bool:
        """Whether an attribute names a function."""
        return bool(self._functions)

    @property
    def bodies(self) -> list[Any]:
        """The graphs of the functions that attributes name."""
        return [graph for graph in map(graphs.traced_by, self._functions.values()) if graph is not None]

    @property
    def bytes_made(self) -> int:
        """The bytes of activations that it makes, with all that it calls, for a batch of one."""
        made = zip(self.shapes, self.dtypes, strict=True)
        here = sum(math.prod(size or 1 for size in shape) * t.size for shape, t in made if t.is_floating and shape.rank)
        return here + self._steps * sum(
            bytes_made(each, body) for body in self.bodies for each in body.get_operations()
        )

    @property
    def is_stateful(self) -> bool:
        """Whether the operation is declared to have state or effects."""
        return bool(self._definition.is_stateful)

    def emit(
        self,
        inputs: Sequence[Any],
        name: str,
        gradient: Gradient | None = None,
        of_tape: bool = False,
        backward_scope: Callable[[str], str] = str,
    ) -> list[tf.Tensor]:
        """Add a copy that reads ``inputs`` to the current graph; return its outputs.

        ``gradient`` stands in for the registered gradient function. With ``of_tape`` it is told what nobody wants of
        it, as by a tape. ``backward_scope`` gives the name scope of the backward operations, by the name of the copy;
        it is empty where they have none of their own.

        Raises:
          LookupError: (when a gradient is asked for) the operation has no gradient.
        """
        graph = tf.compat.v1.get_default_graph()
        sizes, called = _sizes.get(), NOT_SIZED
        if sizes is not None and self.type in SIZED:
            called = sizes.called(self.type, self.attributes, inputs, self._functions.get)
        attributes = self._functions_brought(graph, called) if self.names_functions else self.attributes
        if gradient is not None:
            attributes = {**attributes, graphs.CUSTOM_GRADIENT: AttrValue(s=registered(gradient).encode())}
        made = self._made(graph, inputs, name, attributes)
        if self._gradient is not None and gradient is None:
            graphs.set_own_gradient_function(made, self._gradient)
        outputs = list(made.outputs)
        for handle, shape, output in zip(self._handles, self.shapes, outputs, strict=True):
            if handle is not None:
                graphs.set_handle_data(output, handle)
            if shape.rank is not None:
                _set_shape(output, shape)
        if sizes is not None:
            sizes.note(made, called.results)
        differentiable = inputs and any(has_gradients(dtype) or dtype == tf.variant for dtype in self.dtypes)
        if differentiable and could_possibly_record():
            if of_tape:
                # A tape tells gradient functions what nobody wants of them.
                unwanted = tuple(place for place, wanted in enumerate(followed(inputs)) if not wanted)
                graphs.set_unwanted_gradients(made, unwanted)
            own_gradient = graphs.CUSTOM_GRADIENT in attributes or self._gradient is not None
            _record(made, list(inputs), outputs, backward_scope(made.name), own_gradient, is_sized=sizes is not None)
        return outputs

    def copy(self, graph: Any, inputs: Sequence[Any], name: str) -> Any:
        """Add a copy, to the graph that the operation is of itself, that is on no tape; return the operation."""
        return self._made(graph, inputs, name, self.attributes)

    def _made(self, graph: Any, inputs: Sequence[Any], name: str, attributes: dict[str, Any]) -> Any:
        return graphs.add_operation(graph, self.type, inputs, self.dtypes, name, attributes, self._definition)

    def _functions_brought(self, graph: Any, called: Called) -> dict[str, Any]:
        """Add the functions that attributes name to the library of a graph, and return the attributes.

        The gradient of a loop or a branch rewrites its functions under names made from theirs: each copy gets its own,
        with the sizes that are known of what it is ``called`` with.
        """
        for function in filter(None, (*self._functions.values(), *self._rivals)):
            graphs.add_function(graph, function)
        if self.type in FUNCTION_CALLS:
            return self.attributes
        found = {}
        for key, value in self.attributes.items():
            found[key] = copy.deepcopy(value)
            for named in functions_in(found[key]):
                function = self._functions[named.name]
                if graphs.traced_by(function) is not None:
                    named.name = _copied_function(function, graph, called.functions.get(named.name)).name
        if called.results and _OUTPUT_SHAPES in found:
            found[_OUTPUT_SHAPES].CopyFrom(_shapes_attribute(called.results))
        return found


def _set_shape(output: tf.Tensor, shape: tf.TensorShape) -> None:
    """Tell what the source knew of a shape beyond what can be inferred: gradients are made by what is known."""
    if not output.shape.is_fully_defined() and (output.shape.rank is None or list(shape) != list(output.shape)):
        output.set_shape(shape)


def _copied_function(function: Any, graph: Any, sized: SizedFunction | None) -> Any:
    """Add a copy of a function, under a name of its own, and of those that it calls, to the library of a graph.

    ``sized`` has the sizes in it where they are known.
    """
    definition = copy.deepcopy(graphs.definition_of(function))
    children = []
    for node in definition.node_def:
        called = sized.calls.get(node.name, NOT_SIZED) if sized else NOT_SIZED
        for value in node.attr.values():
            for named in functions_in(value):
                inner = library_function(function.graph, named.name)
                # What is one of several implementations is found by its name.
                if graphs.traced_by(inner) is not None and not implements(inner):
                    children.append(_copied_function(inner, graph, called.functions.get(named.name)))
                    named.name = children[-1].name
    definition.signature.name = f"{definition.signature.name}_{graphs.unique_number()}"
    _note_shapes(definition, function.graph, sized)
    return graphs.add_function_definition(graph, definition, function, children)


def _note_shapes(definition: Any, graph: Any, sized: SizedFunction | None) -> None:
    """Note in a function's definition the shapes that its graph knows, also of variables that it is given.

    Not all of them can be inferred anew, and the gradient of a loop is made by what is known in the graph that
    TensorFlow makes of the definition.
    """
    for place, (argument, tensor) in enumerate(zip(definition.signature.input_arg, graph.inputs, strict=False)):
        handle = graphs.get_handle_data(tensor) if tensor.dtype == tf.resource else None
        if handle is not None and handle.is_set and not argument.handle_data:
            argument.handle_data.add(dtype=handle.shape_and_type[0].dtype, shape=handle.shape_and_type[0].shape)
        if sized is not None and tensor.dtype not in (tf.resource, tf.variant):
            known = definition.arg_attr[place].attr[graphs.KNOWN_SHAPES]
            known.CopyFrom(_shapes_attribute([sized.arguments[place]]))
    for node in definition.node_def:
        outputs = graph.get_operation_by_name(node.name).outputs
        if outputs:
            shapes = sized.operations[node.name] if sized else [Size.of(tensor.shape) for tensor in outputs]
            node.attr[graphs.KNOWN_SHAPES].CopyFrom(_shapes_attribute(shapes))


def _shapes_attribute(sizes: Sequence[Size]) -> Any:
    shapes = [tf.TensorShape(size.shape).as_proto() for size in sizes]
    return AttrValue(list=AttrValue.ListValue(shape=shapes))


SEGMENT = "MemsaverSegment-"


def registered(gradient: Gradient, prefix: str = "MemsaverGradient-") -> str:
    """Register a gradient function, as ``tf.custom_gradient`` does for each of its calls, and return its name.

    A tape outside a tf.function asks the registry; it does not see what is recorded inside.
    """
    name = f"{prefix}{graphs.unique_number()}"
    tf.RegisterGradient(name)(gradient)
    return name


def registered_segment(gradient: Gradient) -> str:
    """Register the gradient function of a segment, whose operations have gradients of their own in the plain step.

    A SavedModel traces it as a ``tf.function``; AutoGraph would run the test of a ``while`` once more, in a scratch
    graph, and with it the segments inside a segment.
    """
    return registered(tf.autograph.experimental.do_not_convert(gradient), SEGMENT)


def ends_segment(operation: Any) -> bool:
    """Whether an operation has a gradient function that ``registered_segment`` registered."""
    attribute = operation.node_def.attr.get(graphs.CUSTOM_GRADIENT)
    return attribute is not None and attribute.s.decode().startswith(SEGMENT)


def _record(
    operation: Any, inputs: list[Any], outputs: list[tf.Tensor], scope: str, custom: bool, is_sized: bool
) -> None:
    try:
        function = graphs.gradient_function(operation) if custom else graphs.gradient_function_of_type(operation.type)
    except LookupError:
        # As in TensorFlow: an error only if a gradient is asked for.
        def function(*_: Any) -> Any:
            raise LookupError(f"operation '{operation.name}' of type {operation.type} has no gradient")

    if function is None:
        return

    def backward(*upstream: Any) -> list[Any]:
        with tf.name_scope(f"{scope}/") if scope else contextlib.nullcontext():
            made = function(operation, *upstream)
        found = list(made) if isinstance(made, (list, tuple)) else [made]
        if is_sized and operation.type in FUNCTION_CALLS:
            note_call(operation, found)
        return found

    record_operation(operation.type, outputs, inputs, backward)
