"""One call of a layer as a program: it is a segment by itself or none, and is made when it comes.

The same runtime as for the layers of a Functional model, between tensors that the code around it passes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_memsaver.compat import keras_calls
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.plan.plan import Plan
from tf_memsaver.program.calls import CallSequence
from tf_memsaver.program.handed_on import handed_on
from tf_memsaver.program.layer_calls import LayerCall, Slot
from tf_memsaver.program.program import ModelProgram, SegmentedCalls, Segmenter, TrainingCall
from tf_memsaver.program.traced_layers import TracedLayer

_SEGMENTS = (Segment(start=0, stop=1, mode=SegmentMode.RECOMPUTE), Segment(start=1, stop=2, mode=SegmentMode.STORE))


class CallProgram(ModelProgram):
    """A layer's call as it is made by code: with any arguments, among them tensors in any place."""

    replaces_whole_call = True

    def __init__(self, traced: TracedLayer) -> None:
        """List a call that was traced; nothing of the trace is kept."""
        given, arguments = _with_slots(traced.args, traced.kwargs)
        made = keras.tree.flatten(traced.outputs)
        self._outputs = keras.tree.map_structure(lambda _: None, traced.outputs, none_is_leaf=False)
        signature = f"{type(traced.layer).__name__}({_specs(given)}) -> {_specs(made)}"
        self.sequence = _sequence(traced.layer, "", arguments, len(given), len(made), signature)

    def enter_call(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the tensors among the arguments."""
        del model
        return _with_slots(args, kwargs)[0]

    def enter(self, inputs: Any) -> list[Any]:
        """Return the tensors of the only argument."""
        return self.enter_call(None, (inputs,), {})

    def finish(self, flat: Sequence[Any]) -> Any:
        """Return what the layer returns."""
        return keras.tree.pack_sequence_as(self._outputs, list(flat))

    def in_segments(self, plan: Plan, segmenter: Segmenter) -> TrainingCall:
        """Return the layer's call as a segment."""
        del plan
        replayed = Replayed("", self._outputs, segmenter)

        def call(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shared: Any = None) -> Any:
            return replayed.run(model, args, kwargs, shared or segmenter.begin())

        return call


def _specs(tensors: Sequence[Any]) -> str:
    return " ".join(f"{tensor.dtype.name}{tensor.shape}" for tensor in tensors)


def _with_slots(args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """Return the tensors among arguments and keyword arguments, and both with slots in their places."""
    tensors = [leaf for leaf in keras.tree.flatten((args, kwargs)) if isinstance(leaf, tf.Tensor)]
    slots = iter(range(len(tensors)))

    def to_slot(leaf: Any) -> Any:
        return Slot(next(slots)) if isinstance(leaf, tf.Tensor) else leaf

    return tensors, keras.tree.map_structure(to_slot, (args, kwargs))


def _sequence(layer: Any, label: str, arguments: Any, given: int, made: int, signature: str) -> CallSequence:
    """Return one call of a layer, with so many tensors, which makes so many; code reads them."""
    call = LayerCall(
        number=0,
        operation=layer,
        label=label,
        args=arguments[0],
        kwargs=arguments[1],
        inputs=tuple(range(given)),
        outputs=tuple(range(given, given + made)),
        enclosing=(),
        home=None,
        signature=signature,
    )
    return handed_on(CallSequence(calls=(call,), inputs=call.inputs, outputs=call.outputs, slot_count=given + made))


class Replayed:
    """One call of a layer, as a segment."""

    def __init__(self, label: str, outputs: Any, segmenter: Segmenter) -> None:
        """Take the call's name, the structure of what it returns, and how calls run in segments."""
        self._label, self._outputs, self._segmenter = label, outputs, segmenter
        self._prepared: _Prepared | None = None

    def run(self, layer: Any, args: Any, kwargs: Any, shared: Any) -> Any:
        """Return what the layer returns."""
        tensors, arguments = _with_slots(args, kwargs)
        if self._prepared is None or not self._prepared.fits(layer, arguments):
            self._prepared = self._prepare(layer, arguments, len(tensors))
        made = self._prepared.calls(tensors, training=keras_calls.training_of_call(), shared=shared)
        return keras.tree.pack_sequence_as(self._outputs, made)

    def _prepare(self, layer: Any, arguments: Any, count: int) -> _Prepared:
        sequence = _sequence(layer, self._label, arguments, count, len(keras.tree.flatten(self._outputs)), "")
        return _Prepared(layer, arguments, self._segmenter.prepare(sequence, _SEGMENTS))


class _Prepared(NamedTuple):
    """A segment for arguments of one structure, with the same constants among them."""

    layer: Any
    arguments: Any
    calls: SegmentedCalls

    def fits(self, layer: Any, arguments: Any) -> bool:
        mine, theirs = (keras.tree.flatten_with_path(each) for each in (self.arguments, arguments))
        return layer is self.layer and len(mine) == len(theirs) and all(map(_same_leaf, mine, theirs))


def _same_leaf(mine: tuple[Any, Any], theirs: tuple[Any, Any]) -> bool:
    (place, a), (other_place, b) = mine, theirs
    is_equal = type(a) is type(b) and isinstance(a, (Slot, bool, int, float, str)) and a == b
    return place == other_place and (a is b or is_equal)
