"""What a ``train_step`` trains: which of its calls of layers can be planned for, and why not others.

Networks are planned layer by layer. Of other layers those that are called one after another, or the blocks inside of
them, are replayed as a whole or not at all, as in a model's own ``call`` (``traced_layers.sections_of``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tf_memsaver.compat import keras_calls, keras_models, keras_training, keras_variables
from tf_memsaver.compat.graphs import FuncGraph, led_to, makers
from tf_memsaver.compat.messages import first_line
from tf_memsaver.compat.released import gradients_end_with_graphs, release
from tf_memsaver.errors import MemsaverError, UnsupportedModelError
from tf_memsaver.program.boundaries import Boundaries
from tf_memsaver.program.data import Batch
from tf_memsaver.program.layer_program import is_network
from tf_memsaver.program.model_call import CallArguments, takes_any_number
from tf_memsaver.program.signature import Given, tensors_in
from tf_memsaver.program.single_call import CallProgram
from tf_memsaver.program.traced_layers import Recorder, TracedLayer, sections_of
from tf_memsaver.program.train_step import TapeNotes, left_as_it_was, run_train_step, what_is_traced

NO_GRADIENT = "no gradient is taken through it"
"""Why a call is not planned for that keeps no activations, either."""

TWICE = "has a gradient that another gradient is taken of"

_SOURCE_INSIDE = "a gradient is taken with respect to a tensor inside it, which it does not return"

_OTHER_ARGUMENTS = "is given a structure that mixes tensors with other values, or takes any number of arguments"

_FROZEN_IN_CALL = "its weights are not trainable while it is called, but trained: set trainable before the call"
"""What is replayed gives gradients for the weights that are trainable when it is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeardCall:
    """A call that a ``train_step`` makes of a layer: its name, such as ``decoder#2``, and what it is called with.

    ``given`` is how a network is called; None for other layers, and for calls that no trace stands for. ``closed`` is
    the program of a call that is replayed as a whole. ``plain`` says why it cannot be planned for, or is empty.
    ``is_recorded`` tells that a gradient may be taken of it, as far as can be seen while it is made. ``frozen`` are the
    variables that are not trainable then; ``keeps_for_others`` tells that code around a network's call reads what it
    does not return; ``draws_after_others`` that it draws random numbers without a seed, and the step has drawn some
    before; ``in_function`` that a ``tf.function`` of the step makes the call, with the tape outside; ``has_masks`` that
    tensors which it is given have Keras's masks.
    """

    layer: Any
    path: str
    given: Given | None
    closed: CallProgram | None
    plain: str
    is_recorded: bool
    frozen: tuple[Any, ...]
    keeps_for_others: bool
    draws_after_others: bool
    in_function: bool
    has_masks: bool

    @classmethod
    def of(cls, call: TracedLayer, boundaries: Boundaries, given: Given | None, **fields: Any) -> HeardCall:
        """Return what of a traced call is kept; ``given`` is how it is called if it is a network's."""
        is_network = given is not None
        return cls(
            layer=call.layer,
            path=call.path,
            given=given,
            frozen=call.frozen,
            keeps_for_others=is_network and boundaries.keeps_for_others(call),
            draws_after_others=is_network and boundaries.draws_after_others(call),
            in_function=call.in_function,
            has_masks=call.has_masks,
            **fields,
        )

    @property
    def is_as_at_rest(self) -> bool:
        """Whether a trace of the layer as it is between steps is good for the call."""
        frozen = {id(variable) for variable in self.layer.variables if not variable.trainable}
        return set(map(id, self.frozen)) == frozen


Chosen = Callable[[Any, TracedLayer, TapeNotes], Iterable[HeardCall]]
"""Tells which of the calls in a traced step are units: of its graph, what was called, and what the tapes did."""

_ADVICE = "Compile the model first, and give the data that fit gets."


def heard_calls(model: Any, specs: Batch, chosen: Chosen | None = None, advice: str = _ADVICE) -> tuple[HeardCall, ...]:
    """Trace the ``train_step`` of a model, which is left as it was, and return the calls of layers that it makes.

    ``chosen`` tells which those are; ``advice`` is for a step that cannot be traced.

    Raises:
      UnsupportedModelError: it cannot be traced.
    """
    graph, notes, root = FuncGraph("heard_step"), TapeNotes(), TracedLayer(layer=None, path="", start=0)
    recorder = Recorder(root, graph, of_model=False)
    try:
        with gradients_end_with_graphs(), left_as_it_was(model) as optimizers, graph.as_default():
            for optimizer in optimizers:
                keras_training.leave_out_updates(optimizer)
            run_train_step(model, specs, _placeholders, recorder, notes)
        return tuple((chosen or _of_model)(graph, root, notes))
    except MemsaverError:
        raise
    except Exception as error:  # Whatever a train_step that somebody wrote may raise.
        raise UnsupportedModelError(
            f"{what_is_traced(model)} cannot be traced on its data ({first_line(error)}). {advice}"
        ) from error
    finally:
        release(graph)


def _placeholders(specs: Sequence[tf.TensorSpec]) -> list[Any]:
    return [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs]


def _of_model(graph: Any, root: TracedLayer, notes: TapeNotes) -> Iterator[HeardCall]:
    """Yield the calls that a step consists of, in order."""
    networks = {id(call): _given(call) for call in root.children if _is_callable_network(call.layer)}
    networks = {key: found for key, found in networks.items() if found is not None}
    others = [call for call in root.children if id(call) not in networks]
    inside = sections_of(TracedLayer(layer=None, path="", start=0, children=others))
    networks |= {id(call): found for call in inside if is_network(call.layer) and (found := _given(call)) is not None}
    calls = sorted(
        [*(call for call in root.children if id(call) in networks and call not in inside), *inside], key=_start
    )
    boundaries = Boundaries(graph, notes)
    for call, reason in zip(calls, _gradients_through(graph, calls, notes), strict=True):
        given, closed, plain = networks.get(id(call)), None, reason
        if given is None and not plain:
            plain = boundaries.reason(call)
            closed = None if plain else CallProgram(call)
        yield HeardCall.of(call, boundaries, given, closed=closed, plain=plain, is_recorded=call.may_be_differentiated)


def whole_networks(
    graph: Any, root: TracedLayer, notes: TapeNotes, left_out: Callable[[Any], str]
) -> Iterator[HeardCall]:
    """Yield the calls that a step makes, where no other than those of whole networks can run by a plan.

    ``left_out`` says why a network is not planned for, or returns an empty string.
    """
    reasons, boundaries = _gradients_through(graph, root.children, notes), Boundaries(graph, notes)
    for call, reason in zip(root.children, reasons, strict=True):
        is_callable = _is_callable_network(call.layer)
        given = _given(call) if is_callable else None
        plain = "" if is_callable else "is no network (keras.Model)"
        plain = plain or reason or left_out(call.layer) or ("" if given else _OTHER_ARGUMENTS)
        yield HeardCall.of(call, boundaries, given, closed=None, plain=plain, is_recorded=call.may_be_differentiated)


def _start(call: TracedLayer) -> int:
    return call.start


def _is_callable_network(layer: Any) -> bool:
    return isinstance(layer, keras.Model) and not keras_models.has_no_call(layer)


def _given(call: TracedLayer) -> Given | None:
    """Return how a network is called; None if something that it is given has tensors among what is none."""
    if takes_any_number(call.layer):
        return None
    named = keras_calls.accepted_arguments(call.layer, call.kwargs)
    inputs, training, tensors, others = CallArguments.of(call.layer, call.args, named)
    # A network that takes no ``training`` passes it on to its layers.
    training = call.kwargs.get("training") if training is None else training
    leaves = tensors_in((inputs, tensors))
    are_tensors = all(isinstance(leaf, tf.Tensor) and leaf.shape.rank is not None for leaf in leaves)
    if not tensors_in(inputs) or not are_tensors or isinstance(training, tf.Tensor):
        return None
    if keras_models.inner_functional(call.layer) is not None:
        # It passes masks on to its layers, which no trace of it does.
        others, tensors = others | tensors, {}
    training = call.training if training is None else training
    arguments = others if training is None else {"training": training, **others}
    return Given(inputs, arguments, tensors).mapped(lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype))


def _gradients_through(graph: Any, calls: Sequence[TracedLayer], notes: TapeNotes) -> list[str]:
    """Return for each call why no gradient is taken through it that a replay can give, or an empty string."""
    operations = graph.get_operations()
    owner = {
        id(operation): place for place, call in enumerate(calls) for operation in operations[call.start : call.stop]
    }
    # Tapes differentiate more than they are asked for, which graph optimisation takes out.
    wanted = _ancestors(result for taken in notes.taken for result in taken.results)
    through: dict[int, set[int]] = {}
    for each in notes.operations:
        place = owner.get(id(each.operation))
        if place is not None and any(id(added) in wanted for added in operations[each.start : each.stop]):
            passes = (number for number, taken in enumerate(notes.taken) if taken.start <= each.start < taken.stop)
            through.setdefault(place, set()).update(passes)
    asked_for = [{id(getattr(source, "handle", source)) for source in taken.sources} for taken in notes.taken]
    all_asked_for = set[int]().union(*asked_for)

    def reason(place: int, call: TracedLayer) -> str:
        if place not in through:
            return NO_GRADIENT
        if any(notes.taken[number].nested for number in through[place]):
            return TWICE
        made = {id(tensor) for operation in operations[call.start : call.stop] for tensor in operation.outputs}
        if made & all_asked_for - set(map(id, call.returned)):
            return _SOURCE_INSIDE
        frozen = {id(keras_variables.local_variable(variable).handle) for variable in call.frozen}
        return _FROZEN_IN_CALL if any(frozen & asked_for[number] for number in through[place]) else ""

    return [reason(place, call) for place, call in enumerate(calls)]


def _ancestors(tensors: Iterable[Any]) -> set[int]:
    """Return the ids of the operations that tensors are made of."""
    parts = (part for tensor in tensors for part in tf.nest.flatten(tensor, expand_composites=True))
    return led_to((part.op for part in parts if part is not None), makers)
