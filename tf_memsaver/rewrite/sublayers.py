"""Run a model's own ``call``, with the sublayers that a plan replays in segments.

Each such call of a layer is a segment of its own, made when it comes: the same runtime as for the layers of a
Functional model, between tensors that Python code passes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_memsaver.compat import keras_calls
from tf_memsaver.errors import PlanMismatchError
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.parity.names import Names
from tf_memsaver.plan.plan import Plan
from tf_memsaver.program.calls import CallSequence, Reader
from tf_memsaver.program.layer_calls import LayerCall, Slot
from tf_memsaver.program.sublayer_calls import LayerPaths, SublayerCalls
from tf_memsaver.rewrite.segments import SegmentedForward
from tf_memsaver.runtime.recompute import Shared

_SEGMENTS = (Segment(start=0, stop=1, mode=SegmentMode.RECOMPUTE), Segment(start=1, stop=2, mode=SegmentMode.STORE))


class SublayerSegments:
    """What a plan replays of a model with a ``call`` of its own."""

    def __init__(self, model: Any, plan: Plan) -> None:
        """Prepare to train ``model`` by ``plan``.

        Raises:
          PlanMismatchError: the plan was made for another model.
          UnsupportedModelError: the model's inputs are not known.
        """
        traced = SublayerCalls(model)
        sequence = traced.calls.sequence
        labels = [call.label for call in sequence.calls]
        plan.check_matches(sequence.signatures, labels)
        # By place: layers that Keras names have other names in another copy of the model.
        replayed = [labels[unit] for unit in plan.recomputed_units]
        code = [label for label in replayed if label not in traced.outputs]
        if code:
            raise PlanMismatchError(f"it replays '{code[0]}', which is Python code between layers")
        self._replayed = {label: _Replayed(label, traced.outputs[label]) for label in replayed}

    def run(self, call: Callable[[], Any]) -> Any:
        """Return what ``call``, the model's own, returns."""
        with keras_calls.layer_calls_go_to(_Handler(self._replayed)):
            return call()


class _Handler:
    """Makes the calls of layers in one call of the model (see ``keras_calls.layer_calls_go_to``)."""

    def __init__(self, replayed: dict[str, _Replayed]) -> None:
        self._replayed, self._paths, self._shared = replayed, LayerPaths(), Shared()

    def __call__(self, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._paths.entered(layer) as path:
            if path not in self._replayed:
                return call(*args, **kwargs)
            with keras_calls.layer_calls_go_to(None):
                return self._replayed[path].run(layer, args, kwargs, self._shared)


class _Replayed:
    """One call of a layer, as a segment."""

    def __init__(self, label: str, outputs: Any) -> None:
        self._label, self._outputs = label, outputs
        self._prepared: _Prepared | None = None

    def run(self, layer: Any, args: Any, kwargs: Any, shared: Shared) -> Any:
        """Return what the layer returns."""
        tensors = [leaf for leaf in keras.tree.flatten((args, kwargs)) if isinstance(leaf, tf.Tensor)]
        slots = iter(range(len(tensors)))

        def to_slot(leaf: Any) -> Any:
            return Slot(next(slots)) if isinstance(leaf, tf.Tensor) else leaf

        arguments = keras.tree.map_structure(to_slot, (args, kwargs))
        if self._prepared is None or not self._prepared.fits(layer, arguments):
            self._prepared = self._prepare(layer, arguments, len(tensors))
        # Names are those of the scope that the layer is called in.
        made = self._prepared.forward(
            tensors, training=keras_calls.training_of_call(), shared=replace(shared, names=Names.of_model())
        )
        return keras.tree.pack_sequence_as(self._outputs, made)

    def _prepare(self, layer: Any, arguments: Any, count: int) -> _Prepared:
        made = tuple(range(count, count + len(keras.tree.flatten(self._outputs))))
        call = LayerCall(
            number=0,
            operation=layer,
            label=self._label,
            args=arguments[0],
            kwargs=arguments[1],
            inputs=tuple(range(count)),
            outputs=made,
            enclosing=(),
            home=None,
            signature="",
        )
        # What reads the outputs is not known; it is not the loss, or the layer would be pinned.
        passed = tuple(slot + len(made) for slot in made)
        behind = _Behind(inputs=made, outputs=passed)
        sequence = CallSequence(
            calls=(call, behind), inputs=call.inputs, outputs=passed, slot_count=count + 2 * len(made)
        )
        return _Prepared(layer, arguments, SegmentedForward(sequence, _SEGMENTS))


class _Prepared(NamedTuple):
    """A segment for arguments of one structure, with the same constants among them."""

    layer: Any
    arguments: Any
    forward: SegmentedForward

    def fits(self, layer: Any, arguments: Any) -> bool:
        mine, theirs = (keras.tree.flatten_with_path(each) for each in (self.arguments, arguments))
        return layer is self.layer and len(mine) == len(theirs) and all(map(_same_leaf, mine, theirs))


def _same_leaf(mine: tuple[Any, Any], theirs: tuple[Any, Any]) -> bool:
    (place, a), (other_place, b) = mine, theirs
    is_equal = type(a) is type(b) and isinstance(a, (Slot, bool, int, float, str)) and a == b
    return place == other_place and (a is b or is_equal)


class _Behind:
    """A call that stands for the Python code behind a segment, and changes nothing."""

    operation: Any = None
    label = kind = "Python"
    signature = pinned = ""

    def __init__(self, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
        self.inputs, self.outputs = inputs, outputs

    def readers(self, slot: int) -> list[Reader]:
        return [Reader("", "", None)] if slot in self.inputs else []

    def run(self, slots: Sequence[Any], training: bool | None, names: Names) -> list[Any]:
        del training, names
        return [slots[slot] for slot in self.inputs]
