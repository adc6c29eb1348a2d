"""The networks that a ``train_step`` trains: which of its calls of layers can be planned for, and why not others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tf_memsaver.compat import keras_models
from tf_memsaver.compat.graphs import FuncGraph
from tf_memsaver.compat.released import gradients_end_with_graphs, release
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.program.data import Batch
from tf_memsaver.program.layer_paths import LayerPaths
from tf_memsaver.program.model_call import arguments_of
from tf_memsaver.program.train_step import TapeNotes, left_as_it_was, run_train_step


@dataclass(frozen=True, slots=True, kw_only=True)
class HeardCall:
    """A call that a ``train_step`` makes of a layer: its name, such as ``decoder#2``, and what it is called with.

    ``inputs`` are the specs of the first argument. ``plain`` says why it cannot be planned for, or is empty.
    """

    layer: Any
    path: str
    inputs: Any
    plain: str


def heard_calls(model: Any, specs: Batch) -> tuple[HeardCall, ...]:
    """Trace the ``train_step`` of a model, which is left as it was, and return the calls of layers that it makes.

    Raises:
      UnsupportedModelError: it cannot be traced.
    """
    graph, notes = FuncGraph("heard_step"), TapeNotes()
    hearing = LayerHearing(graph)
    try:
        with gradients_end_with_graphs(), left_as_it_was(model), graph.as_default():
            run_train_step(model, specs, _placeholders, hearing, notes)
        through = _gradients_through(graph, hearing, notes)
        return tuple(
            HeardCall(layer=call.layer, path=call.path, inputs=call.inputs, plain=call.plain or reason)
            for call, reason in zip(hearing.calls, through, strict=True)
        )
    except Exception as error:  # Whatever a train_step that somebody wrote may raise.
        raise UnsupportedModelError(
            f"the train_step of model '{model.name}' cannot be traced on its data ({type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]}). Compile the model first, and give the data that fit gets."
        ) from error
    finally:
        release(graph)


def _placeholders(specs: Sequence[tf.TensorSpec]) -> list[Any]:
    return [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs]


@dataclass(kw_only=True)
class _Call:
    """A call of a layer in a trace: its operations are those from ``start`` to ``stop``."""

    layer: Any
    path: str
    inputs: Any
    plain: str
    start: int
    stop: int = 0


class LayerHearing:
    """Handles calls of layers in a graph: notes those that no other layer makes."""

    def __init__(self, graph: Any) -> None:
        """Listen to what is called in a graph."""
        self._graph, self._paths = graph, LayerPaths()
        self.calls: list[_Call] = []

    def __call__(self, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make the call of a layer (see ``keras_calls.layer_calls_go_to``)."""
        if tf.compat.v1.get_default_graph() is not self._graph:
            return call(*args, **kwargs)
        with self._paths.outermost(layer) as path:
            if path is None:
                return call(*args, **kwargs)
            inputs, plain = _arguments(layer, args, kwargs)
            noted = _Call(layer=layer, path=path, inputs=inputs, plain=plain, start=self._graph.num_operations())
            made = call(*args, **kwargs)
            noted.stop = self._graph.num_operations()
            self.calls.append(noted)
            return made


def _arguments(layer: Any, args: Any, kwargs: Any) -> tuple[Any, str]:
    """Return the specs of the first argument, and why a call of a layer cannot be planned for."""
    if not isinstance(layer, keras.Model) or keras_models.has_no_call(layer):
        return None, "is a layer and no network (keras.Model)"
    inputs, *others = arguments_of(layer, args, kwargs).items()
    leaves = keras.tree.flatten(inputs[1])
    if not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
        return None, "is called with something that is no tensor"
    if any(isinstance(leaf, tf.Tensor) for _, value in others for leaf in keras.tree.flatten(value)):
        return None, "is called with several tensors that are arguments of their own"
    return keras.tree.map_structure(lambda each: tf.TensorSpec(each.shape, each.dtype), inputs[1]), ""


def _gradients_through(graph: Any, hearing: LayerHearing, notes: TapeNotes) -> list[str]:
    """Return for each call why no gradient is taken through it that a replay can give, or an empty string."""
    operations = graph.get_operations()
    owner = {
        id(operation): place
        for place, call in enumerate(hearing.calls)
        for operation in operations[call.start : call.stop]
    }
    nested = [(taken.start, taken.stop) for taken in notes.taken if taken.nested]
    # Tapes differentiate more than they are asked for, which graph optimisation takes out.
    wanted = _behind(result for taken in notes.taken for result in taken.results)
    through: set[int] = set()
    twice: set[int] = set()
    for each in notes.operations:
        place = owner.get(id(each.operation))
        if place is not None and any(id(added) in wanted for added in operations[each.start : each.stop]):
            through.add(place)
            if any(start <= each.start < stop for start, stop in nested):
                twice.add(place)
    reasons = {False: "no gradient is taken through it", True: ""}
    return [
        "a gradient is taken of its gradient" if place in twice else reasons[place in through]
        for place in range(len(hearing.calls))
    ]


def _behind(tensors: Iterable[Any]) -> set[int]:
    """Return the ids of the operations that tensors are made of."""
    found: set[int] = set()
    stack = [
        part.op for tensor in tensors for part in tf.nest.flatten(tensor, expand_composites=True) if part is not None
    ]
    while stack:
        operation = stack.pop()
        if id(operation) not in found:
            found.add(id(operation))
            stack.extend(tensor.op for tensor in operation.inputs)
    return found
