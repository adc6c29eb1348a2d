"""A model with a ``call`` of its own as a program: its sublayers are calls, and the Python code between them.

In training that code runs, and the sublayers that a plan replays are run in segments. Each such call of a layer is a
segment of its own, made when it comes: the same runtime as for the layers of a Functional model, between tensors that
Python code passes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from absl import logging

from tf_memsaver.compat import keras_calls
from tf_memsaver.errors import PlanMismatchError, UnsupportedModelError
from tf_memsaver.ir.graph import Unit
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.parity.names import Names
from tf_memsaver.plan.plan import Plan
from tf_memsaver.program.calls import CallSequence, Reader
from tf_memsaver.program.layer_calls import LayerCall, Slot
from tf_memsaver.program.layer_paths import LayerPaths
from tf_memsaver.program.model_call import plain_call
from tf_memsaver.program.model_function import TracedProgram
from tf_memsaver.program.program import SegmentedCalls, Segmenter, TrainingCall
from tf_memsaver.program.sublayer_calls import SublayerCalls

_SEGMENTS = (Segment(start=0, stop=1, mode=SegmentMode.RECOMPUTE), Segment(start=1, stop=2, mode=SegmentMode.STORE))


class SublayerProgram(TracedProgram):
    """The sublayers that a model's own ``call`` calls, and the code between them."""

    def __init__(self, model: Any) -> None:
        """Trace ``model``.

        Raises:
          UnsupportedModelError: its inputs are not known, or its call cannot be traced.
        """
        self._traced = SublayerCalls(model)
        super().__init__(model, self._traced)

    def check_units(self, units: Sequence[Unit]) -> None:
        """Say in the log if the model calls a whole network, which is replayed as one or not at all.

        Raises:
          UnsupportedModelError: nothing can be replayed.
        """
        nested = self._traced.nested
        if all(unit.pinned for unit in units):
            raise _nothing_to_replay(self.model, units, nested)
        if nested:
            logging.warning(
                "model '%s' calls a whole network, which a plan for the model replays as one or not at all. %s",
                self.model.name,
                _by_itself(self.model, nested),
            )

    def in_segments(self, plan: Plan, segmenter: Segmenter) -> TrainingCall:
        """Return the model's own call, in which some layers run as segments.

        Raises:
          PlanMismatchError: the plan replays code between layers.
        """
        labels, outputs = self.sequence.labels, self._traced.outputs
        # By place: layers that Keras names have other names in another copy of the model.
        replayed = [labels[unit] for unit in plan.recomputed_units]
        code = [label for label in replayed if label not in outputs]
        if code:
            raise PlanMismatchError(f"it replays '{code[0]}', which is Python code between layers")
        return _SublayersInSegments(
            {label: _Replayed(label, outputs[label], segmenter) for label in replayed}, segmenter
        )


def _by_itself(model: Any, nested: Mapping[str, Any]) -> str:
    """Return the advice to optimize networks inside a model instead of it."""
    names = {id(value): f"self.{name}" for name, value in vars(model).items() if isinstance(value, keras.Model)}
    found = [names.get(id(network), f"network '{path}'") for path, network in nested.items()]
    target = found[0] if found[0] in names.values() else "network"
    return (
        f"Optimize {' and '.join(found)} by itself, where the model makes it: "
        f"{target} = tf_memsaver.optimize({target}, batch_size=...)"
    )


def _nothing_to_replay(model: Any, units: Sequence[Unit], nested: Mapping[str, Any]) -> UnsupportedModelError:
    if nested:
        return UnsupportedModelError(
            f"model '{model.name}' ({type(model).__name__}) computes in its own call(), and hands on what it gets to a "
            f"whole network. {_by_itself(model, nested)}."
        )
    layers = [unit for unit in units if unit.kind != "Python"]
    found = "".join(f" Layer '{unit.label}' {unit.pinned}." for unit in layers[:3])
    return UnsupportedModelError(
        f"model '{model.name}' ({type(model).__name__}) computes in its own call(), and none of the layers that it "
        f"calls can be replayed.{found or ' It calls none.'} Put what repeats into layers "
        f"(keras.layers.Layer) that get their tensors as arguments and return them, or cut between operations: "
        f"tf_memsaver.optimize(..., granularity='op')."
    )


class _SublayersInSegments:
    """A model's own call, in which some layers run as segments."""

    def __init__(self, replayed: dict[str, _Replayed], segmenter: Segmenter) -> None:
        self._replayed, self._segmenter = replayed, segmenter

    def __call__(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with keras_calls.layer_calls_go_to(_Handler(self._replayed, self._segmenter.begin())):
            return plain_call(model, args, kwargs)


class _Handler:
    """Makes the calls of layers in one call of the model (see ``keras_calls.layer_calls_go_to``)."""

    def __init__(self, replayed: dict[str, _Replayed], shared: Any) -> None:
        self._replayed, self._paths, self._shared = replayed, LayerPaths(), shared

    def __call__(self, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._paths.entered(layer) as path:
            if path not in self._replayed:
                return call(*args, **kwargs)
            with keras_calls.layer_calls_go_to(None):
                return self._replayed[path].run(layer, args, kwargs, self._shared)


class _Replayed:
    """One call of a layer, as a segment."""

    def __init__(self, label: str, outputs: Any, segmenter: Segmenter) -> None:
        self._label, self._outputs, self._segmenter = label, outputs, segmenter
        self._prepared: _Prepared | None = None

    def run(self, layer: Any, args: Any, kwargs: Any, shared: Any) -> Any:
        """Return what the layer returns."""
        tensors = [leaf for leaf in keras.tree.flatten((args, kwargs)) if isinstance(leaf, tf.Tensor)]
        slots = iter(range(len(tensors)))

        def to_slot(leaf: Any) -> Any:
            return Slot(next(slots)) if isinstance(leaf, tf.Tensor) else leaf

        arguments = keras.tree.map_structure(to_slot, (args, kwargs))
        if self._prepared is None or not self._prepared.fits(layer, arguments):
            self._prepared = self._prepare(layer, arguments, len(tensors))
        made = self._prepared.calls(tensors, training=keras_calls.training_of_call(), shared=shared)
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
