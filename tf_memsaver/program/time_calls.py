"""The calls that a recurrent layer is, once its time is cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tf_memsaver.compat import keras_calls, keras_recurrent, keras_variables
from tf_memsaver.compat.keras_recurrent import Carried
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.parity.names import Names
from tf_memsaver.program.calls import Reader
from tf_memsaver.program.layer_calls import LayerCall

Span = tuple[int, int]
"""The first time step of a chunk, and the one after its last."""

Slots = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """What a call does with a recurrent layer: it reads a sequence, maybe its mask and states, and fills ``outputs``.

    ``call`` is that of the layer, or of what the layer is a part of. ``scope`` is where the plain step has its
    operations.
    """

    call: LayerCall
    layer: Any
    label: str
    scope: str
    sequence: int
    mask: Slots
    states: Slots
    outputs: Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartCall:
    """A part of what a call does with a recurrent layer (``whole``)."""

    whole: Recurrence
    part: str

    @property
    def operation(self) -> Any:
        """Nothing that has variables or losses."""
        return None

    @property
    def label(self) -> str:
        """The layer's name and, as for a layer that is called again, which part it is."""
        return f"{self.whole.label}#{self.part}"

    @property
    def kind(self) -> str:
        """The class of the layer."""
        return type(self.whole.layer).__name__

    @property
    def signature(self) -> str:
        """That of the layer's call, and which part of it this is."""
        return f"{self.whole.call.signature} {type(self).__name__}({self.part})"

    @property
    def pinned(self) -> str:
        """Nothing that can be said before the operations are known."""
        return ""

    @property
    def inputs(self) -> Slots:
        """The slots that it reads."""
        raise NotImplementedError(self.part)

    @property
    def outputs(self) -> Slots:
        """The slots that it fills."""
        raise NotImplementedError(self.part)

    def readers(self, slot: int) -> list[Reader]:
        """Return the part, if it reads a slot."""
        return [Reader(self.label, "", None)] if slot in self.inputs else []

    def run(self, slots: Sequence[Any], training: bool | None, names: Names) -> list[Any]:
        """Run below the layer's scope, and return what goes to ``outputs``."""
        call = self.whole.call
        for operation, given in (*call.enclosing, (call.operation, call.kwargs)):
            training = keras_calls.training_seen_by(operation, given, training)
        with names.inside(call.home), tf.name_scope(f"{self.whole.scope}/part"):
            return list(self._made(slots, training))

    def _made(self, slots: Sequence[Any], training: bool | None) -> Iterator[Any]:
        raise NotImplementedError(self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCall(_PartCall):
    """Cuts a sequence, and its mask if there is one, into chunks along time; their gradients are joined in one go."""

    spans: tuple[Span, ...]
    parts: Slots
    mask_parts: Slots

    @property
    def inputs(self) -> Slots:
        """The sequence, and its mask."""
        return (self.whole.sequence, *self.whole.mask)

    @property
    def outputs(self) -> Slots:
        """The parts of both."""
        return (*self.parts, *self.mask_parts)

    def _made(self, slots: Sequence[Any], training: bool | None) -> Iterator[Any]:
        del training
        sequence, layer = slots[self.whole.sequence], self.whole.layer
        if keras_calls.get_keras_mask(sequence) is not None and not self.whole.mask:
            raise UnsupportedModelError(
                f"layer '{self.whole.label}' gets a mask that it was not built with, and its plan divides it along "
                "time. Make a plan with time_chunks=None."
            )
        if layer.autocast and sequence.dtype.is_floating:
            sequence = keras.ops.cast(sequence, layer.input_dtype)
        for each in (sequence, *(slots[mask] for mask in self.whole.mask)):
            yield from tf.split(each, [stop - start for start, stop in self.spans], axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The slots of what a chunk leaves to the one after it (``keras_recurrent.Carried``); empty after the last one."""

    states: Slots = ()
    last: Slots = ()
    weights: Slots = ()

    @property
    def slots(self) -> Slots:
        """All of them."""
        return (*self.states, *self.last, *self.weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCall(_PartCall):
    """Runs a layer over a chunk of the time.

    It reads its part of the sequence and of the mask, what the chunk ``before`` has left, and what the first chunk has
    drawn to drop out (``dropout``), which fills these slots. The first chunk reads the weights from their variables.
    """

    part_slot: int
    mask_slot: Slots
    dropout: Slots
    before: Left | None
    after: Left
    made: Slots

    @property
    def operation(self) -> Any:
        """The layer, where its variables are read: in the first chunk."""
        return self.whole.layer if self.before is None else None

    @property
    def inputs(self) -> Slots:
        """The slots that it reads."""
        earlier = self.whole.states if self.before is None else (*self.dropout, *self.before.slots)
        return tuple(dict.fromkeys((self.part_slot, *self.mask_slot, *earlier)))

    @property
    def outputs(self) -> Slots:
        """The slots that it fills."""
        return (*self.made, *self.after.slots, *(self.dropout if self.before is None else ()))

    def _made(self, slots: Sequence[Any], training: bool | None) -> Iterator[Any]:
        layer, sequence = self.whole.layer, slots[self.part_slot]
        mask = slots[self.mask_slot[0]] if self.mask_slot else None
        carried, drawn = self._begin(slots, sequence)
        # Nobody asks for the gradient of what is dropped out.
        dropout = [tf.stop_gradient(each) for each in drawn]
        output, left = keras_recurrent.loop_over_time(layer, sequence, mask, carried, dropout, training)
        if self.made:
            yield output
        yield from left.states[: len(self.after.states)]
        yield from left.last[: len(self.after.last)]
        yield from left.weights[: len(self.after.weights)]
        if self.before is None:
            yield from drawn

    def _begin(self, slots: Sequence[Any], sequence: Any) -> tuple[Carried, Sequence[Any]]:
        """Return what the chunk begins with, and what is dropped out in all of them."""
        if self.before is not None:
            before = self.before
            of = ([slots[slot] for slot in each] for each in (before.states, before.last, before.weights, self.dropout))
            states, last, weights, drawn = map(tuple, of)
            return Carried(states=states, last=last, weights=weights), drawn
        layer = self.whole.layer
        given = [slots[slot] for slot in self.whole.states] or keras_recurrent.first_states(layer, sequence)
        states = tuple(keras.ops.convert_to_tensor(each, dtype=layer.cell.compute_dtype) for each in given)
        drawn = keras_recurrent.draw_dropout(layer, sequence, states) if self.dropout else ()
        last = (keras_recurrent.first_output(layer, sequence, states),) if self.needs_last(self.whole) else ()
        weights = tuple(keras_variables.read_variable(each) for each in layer.cell.weights)
        return Carried(states=states, last=last, weights=weights), drawn

    @staticmethod
    def needs_last(whole: Recurrence) -> bool:
        """Whether a step that is masked returns again what the one before it has returned."""
        return bool(whole.mask) and not whole.layer.zero_output_for_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeCall(_PartCall):
    """Merges what the two layers of a ``Bidirectional``, which is the layer here, return."""

    parts: Slots

    @property
    def inputs(self) -> Slots:
        """What the two return, and the mask."""
        return (*self.parts, *self.whole.mask)

    @property
    def outputs(self) -> Slots:
        """What the layer returns."""
        return self.whole.outputs

    def _made(self, slots: Sequence[Any], training: bool | None) -> Iterator[Any]:
        del training
        layer = self.whole.layer
        for made in keras_recurrent.merged(layer, *(slots[part] for part in self.parts)):
            for mask in self.whole.mask if layer.return_sequences else ():
                keras_calls.set_keras_mask(made, slots[mask])
            yield made


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinCall(_PartCall):
    """Joins what the chunks return to one sequence, which has the mask of the one that was read."""

    parts: Slots
    joined: int

    @property
    def inputs(self) -> Slots:
        """The parts, and the mask."""
        return (*self.parts, *self.whole.mask)

    @property
    def outputs(self) -> Slots:
        """The sequence."""
        return (self.joined,)

    def _made(self, slots: Sequence[Any], training: bool | None) -> Iterator[Any]:
        del training
        joined = tf.concat([slots[part] for part in self.parts], axis=1)
        for mask in self.whole.mask:
            keras_calls.set_keras_mask(joined, slots[mask])
        yield joined
