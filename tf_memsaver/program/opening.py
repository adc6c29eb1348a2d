"""Networks that a traced call makes calls of, opened: their layers take the place of the operations that they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_memsaver.compat import keras_calls, keras_training
from tf_memsaver.program.calls import Call
from tf_memsaver.program.layer_program import LayerProgram
from tf_memsaver.program.model_call import CallArguments
from tf_memsaver.program.op_calls import GroupCall
from tf_memsaver.program.opened import OpenedCall, Way
from tf_memsaver.program.traced_layers import TracedLayer

_Seen = Callable[[Any], Any]

_SEEN_IN_RESULTS: tuple[_Seen, ...] = (lambda tensor: tensor, keras_calls.get_keras_mask, keras_training.get_logits)
"""What code that gets a tensor may read: the tensor itself, and what Keras hangs on it."""


class Opener:
    """Opens calls of networks in a trace; ``opened`` are those that it could."""

    def __init__(self, slots: Mapping[int, int], resident: frozenset[int], shift: int) -> None:
        """Take the slots of the trace's tensors (ids), those that are always live, and the first slot that is free."""
        self._slots, self._resident, self._shift = slots, resident, shift
        self.opened: list[OpenedCall] = []

    def calls_of(self, traced: TracedLayer, group: GroupCall, start: int) -> list[Call]:
        """Return the calls that a network's call consists of, the first of them number ``start``.

        There are none where it must stay as it was traced, in one ``group``.
        """
        inputs, training = _arguments(traced)
        if inputs is None:
            return []
        leaves = keras.tree.flatten(inputs)
        given = tuple(self._slots.get(id(leaf), -1) for leaf in leaves)
        results = keras.tree.flatten(traced.outputs)
        found = [self._seen_in(results, slot) for slot in group.outputs]
        reads = set(group.inputs)
        if not reads.issuperset(given) or not reads.issubset({*given, *self._resident}) or None in found:
            return []
        # A loss may look through a result to the logits, if it is there for that.
        is_handed_on = all(each is not None and each[1] is not keras_training.get_logits for each in found)
        program = LayerProgram(traced.layer, is_handed_on=is_handed_on)
        opened = OpenedCall(
            path=traced.path,
            network=traced.layer,
            program=program,
            start=start + 1,
            shift=self._shift,
            training=training,
        )
        self._shift += program.sequence.slot_count
        self.opened.append(opened)
        structure = keras.tree.map_structure(lambda _: None, inputs, none_is_leaf=False)

        def enter(tensors: Sequence[Any]) -> list[Any]:
            return program.enter(keras.tree.pack_sequence_as(structure, tensors))

        def leave(tensors: Sequence[Any]) -> list[Any]:
            return [seen(tensors[place]) for place, seen in filter(None, found)]

        way_in = Way(label=f"{traced.path}/enter", inputs=given, outputs=opened.inputs, made=enter)
        way_out = Way(label=f"{traced.path}/leave", inputs=opened.outputs, outputs=group.outputs, made=leave)
        return [way_in, *opened.calls, way_out]

    def _seen_in(self, results: Sequence[Any], slot: int) -> tuple[int, _Seen] | None:
        """Return which result a slot is of, and what of it, or None."""
        for place, result in enumerate(results):
            for seen in _SEEN_IN_RESULTS:
                if isinstance(result, tf.Tensor) and self._slots.get(id(seen(result))) == slot:
                    return place, seen
        return None


def _arguments(traced: TracedLayer) -> tuple[Any, bool | None]:
    """Return the inputs and the ``training`` that a network is called with; no inputs if it is called otherwise."""
    inputs, training, tensors, others = CallArguments.of(traced.layer, traced.args, traced.kwargs)
    leaves = keras.tree.flatten(inputs)
    are_plain = all(isinstance(leaf, tf.Tensor) and keras_calls.get_keras_mask(leaf) is None for leaf in leaves)
    training = traced.training if training is None else training
    if not are_plain or tensors or others or tf.is_tensor(training):
        return None, None
    return (inputs, training) if traced.layer.activity_regularizer is None else (None, None)
