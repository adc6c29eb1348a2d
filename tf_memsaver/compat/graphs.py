"""Graphs and operations of TensorFlow: making them by definition, their functions, what has no public way in or out.

Read from TensorFlow 2.20 and 2.21, in which these files are the same: ``tensorflow/python/framework/ops.py``,
``func_graph.py``, ``tensorflow/python/eager/polymorphic_function/concrete_function.py`` and ``atomic_function.py``,
``tensorflow/python/ops/handle_data_util.py``. Read from 2.21: ``attributes.py`` beside the second,
``tensorflow/core/function/polymorphism/function_type.py``, ``tensorflow/python/framework/function_def_to_graph.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager.polymorphic_function.atomic_function import from_function_def
from tensorflow.python.framework import op_def_registry, ops
from tensorflow.python.framework.auto_control_deps import AutomaticControlDependencies
from tensorflow.python.framework.smart_cond import smart_constant_value
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.ops.control_flow_v2_func_graphs import WhileBodyFuncGraph
from tensorflow.python.ops.handle_data_util import create_handle_data as create_handle_data
from tensorflow.python.ops.handle_data_util import get_handle_data as get_handle_data
from tensorflow.python.ops.handle_data_util import set_handle_data as set_handle_data

FuncGraph = tf.__internal__.FuncGraph
"""The graph of a function, by itself."""


class ListenedGraph(tf.__internal__.FuncGraph):
    """Calls ``before(type, whether it has state, inputs)`` and ``after(operation)`` around the adding of an operation.

    All are added by ``FuncGraph._create_op_internal`` (``tensorflow/python/framework/func_graph.py``).
    """

    def __init__(
        self, name: str, before: Callable[[str, bool, Sequence[Any]], None], after: Callable[[Any], None]
    ) -> None:
        """Take who is told."""
        super().__init__(name)
        self._before, self._after = before, after

    def _create_op_internal(self, op_type: str, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        definition = op_def_registry.get(op_type)
        self._before(op_type, definition is None or definition.is_stateful, inputs)
        operation = super()._create_op_internal(op_type, inputs, *args, **kwargs)
        self._after(operation)
        return operation


AutoTrackable = tf.__internal__.tracking.AutoTrackable
"""A bare object, of which a SavedModel keeps what is set as its attributes; a ``tf.Module`` has some of its own."""

CUSTOM_GRADIENT = "_gradient_op_type"
"""The attribute that names an operation's own gradient function (``ops.py``)."""

AWAITED = "_has_manual_control_dependencies"
"""The attribute of an operation that others wait for by control edges (``ops.py: Graph.control_dependencies``)."""

COLOCATED = "_class"
"""The attribute that names the operations on whose device one is to run (``ops.py: Operation.colocation_groups``)."""

KNOWN_SHAPES = "_output_shapes"
"""The attribute of a function's operation that has the shapes of its outputs (``function_def_to_graph.py``)."""

COMPILED_BY_XLA = "_XlaMustCompile"
"""The attribute of the call of a function that XLA compiles (``attributes.py``)."""

SLICES = "_memsaver_slices"
"""The attribute of an ``Unpack`` that stands for slices of the plain step."""

constant_value = smart_constant_value
"""Returns the value of a tensor that shapes and constants tell, else None; ``tf.get_static_value`` sees less."""

unique_number = ops.uid
"""Returns another number each time, of those that TensorFlow makes its own unique names of."""


def add_operation(
    graph: Any, op_type: str, inputs: Sequence[Any], dtypes: Sequence[Any], name: str, attributes: Any, definition: Any
) -> Any:
    """Add an operation to a graph as ``import_graph_def`` does, but on given inputs (``Graph._create_op_internal``)."""
    return graph._create_op_internal(op_type, list(inputs), dtypes, name=name, attrs=attributes, op_def=definition)


def place_of(operation: Any) -> int:
    """Return a number that is the larger the later an operation was added to its graph."""
    return int(operation._id)


def set_attribute(operation: Any, name: str, value: Any) -> None:
    """Set an attribute of an operation that is in a graph already."""
    operation._set_attr(name, value)


def attributes_in(definition: Any) -> Hashable:
    """Return the attributes in a ``NodeDef``, but for the mark that others wait for it, as something to compare."""
    found = sorted(definition.attr.items(), key=lambda item: item[0])
    return tuple((name, value.SerializeToString(deterministic=True)) for name, value in found if name != AWAITED)


def makers(operation: Any) -> list[Any]:
    """Return the operations that make what an operation reads."""
    return [tensor.op for tensor in operation.inputs]


def predecessors(operation: Any) -> list[Any]:
    """Return the operations that an operation runs after: its makers and its control inputs."""
    return [*makers(operation), *operation.control_inputs]


def led_to(operations: Iterable[Any], before: Callable[[Any], Iterable[Any]] = predecessors) -> set[int]:
    """Return the ids of operations and of all that come before them, by what ``before`` says of each."""
    pending, found = list(operations), set[int]()
    while pending:
        operation = pending.pop()
        if id(operation) not in found:
            found.add(id(operation))
            pending += before(operation)
    return found


def wait_for(operation: Any, other: Any) -> None:
    """Give an operation another control input."""
    operation._add_control_input(other)


def wait_for_only(operation: Any, others: Iterable[Any]) -> None:
    """Give an operation these control inputs instead of those that it has."""
    operation._remove_all_control_inputs()
    operation._add_control_inputs(list(others))


def read_instead(operation: Any, place: int, tensor: tf.Tensor) -> None:
    """Give an operation another tensor as the input at a place; its outputs keep their shapes."""
    operation._update_input(place, tensor)


def run_steps_in_turn(loop: Any) -> None:
    """Let a step of a while loop begin when the one before is over; by itself, TensorFlow runs up to 32 at once."""
    loop._set_attr("parallel_iterations", attr_value_pb2.AttrValue(i=1))


@functools.cache
def traced_graphs_go_to(note: Callable[[Any, list[Any]], None]) -> None:
    """Tell ``note`` from now on of each graph that a ``tf.function`` has traced to its end and may still be added to.

    That is when TensorFlow has put operations with side effects in order (``tensorflow/python/framework/
    auto_control_deps.py``, which is the same in 2.20 and 2.21). It is told the graph, and the operations that the graph
    is run for: those that make its results and those with side effects.
    """
    leave = AutomaticControlDependencies.__exit__

    @functools.wraps(leave)
    def left(manager: Any, kind: Any, error: Any, traceback: Any) -> Any:
        result = leave(manager, kind, error, traceback)
        if error is None and not tf.executing_eagerly():
            returned = (each.op for each in tf.nest.flatten(list(manager._returned_tensors), expand_composites=True))
            note(tf.compat.v1.get_default_graph(), [*manager.ops_which_must_run, *returned])
        return result

    AutomaticControlDependencies.__exit__ = left


def is_compiled_by_xla(graph: Any) -> bool:
    """Whether what is traced into a graph will be compiled by XLA (``tensorflow/python/ops/control_flow_util.py``).

    ``tf.function(jit_compile=True)`` traces in a control flow context that says so, and Keras's ``fit`` uses it.
    """
    return bool(GraphOrParentsInXlaContext(graph))


def is_in_a_loop(graph: Any) -> bool:
    """Whether a graph is, or is traced inside of, the body of a while loop (``control_flow_v2_func_graphs.py``)."""
    while graph is not None:
        if isinstance(graph, WhileBodyFuncGraph):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def has_control_dependencies(graph: Any) -> bool:
    """Whether a ``tf.control_dependencies`` is open in a graph."""
    return bool(graph._current_control_dependencies())


def own_gradient_function(operation: Any) -> Any | None:
    """Return the gradient function that an operation has itself, which goes before those of the registry."""
    return operation._gradient_function


def set_own_gradient_function(operation: Any, function: Any) -> None:
    """Set what ``own_gradient_function`` returns."""
    operation._gradient_function = function


def set_unwanted_gradients(operation: Any, places: tuple[int, ...]) -> None:
    """Tell an operation's gradient function, as a tape does, of which inputs nobody wants the gradient."""
    operation.skip_input_indices = places


def gradient_function(operation: Any) -> Any:
    """Return the gradient function of an operation: its own, one named by an attribute, or the one of its type.

    Raises:
      LookupError: there is none.
    """
    return ops.get_gradient_function(operation)


def gradient_function_of_type(op_type: str) -> Any:
    """Return the gradient function of a type of operations; None says that there is no gradient.

    Raises:
      LookupError: none is registered.
    """
    return ops.gradient_registry.lookup(op_type)


def called_by_gradient(function: Any) -> Any | None:
    """Return the function whose call has this gradient function (``_DelayedRewriteGradientFunctions``), if any."""
    return getattr(getattr(function, "__self__", None), "_inference_function", None)


def function_named(graph: Any, name: str) -> Any | None:
    """Return a function of a graph's own library."""
    return graph._get_function(name)


def traced_by(function: Any) -> Any | None:
    """Return the graph in which a function of a library was traced; None for those of TensorFlow 1.

    Such are the loops of ``tf.nn.ctc_loss`` (``_DefinedFunction`` in tensorflow/python/framework/function.py).
    """
    return getattr(function, "graph", None)


def functions_of(graph: Any) -> list[Any]:
    """Return the functions of a graph's own library."""
    return list(graph._functions.values())


def add_function(graph: Any, function: Any) -> None:
    """Add a function, and those that it calls, to a graph's library, if they are not there."""
    graph._add_function_recursive(function)


def definition_of(function: Any) -> Any:
    """Return the definition of a function of a graph's library, which is its own: to be copied before it is changed."""
    return function.cached_definition


def add_function_definition(graph: Any, definition: Any, function: Any, called: Sequence[Any] = ()) -> Any:
    """Add a function to a graph's library by its definition, and return it.

    It takes and returns what ``function`` does, and calls the functions in ``called``, which the library has.
    """
    made = from_function_def(definition, function.function_type)
    made._children = list(called)
    graph._add_function(made)
    return made


def flat_arguments(function_type: Any, bound: Any) -> list[Any]:
    """Return the tensors of arguments that were bound to the type of a function (``FunctionType.unpack_inputs``)."""
    return list(function_type.unpack_inputs(bound))


def call_on_flat_tensors(concrete: Any, arguments: Sequence[Any], captures: Sequence[Any]) -> Any:
    """Call a concrete function on flat tensors, which no public call takes; ``captures`` stand in for its own."""
    return concrete._call_flat(arguments, captures)
