"""The calls that a recurrent layer is, once its time is cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tf_memsaver.compat import keras_calls, keras_recurrent, keras_variables
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.parity.names import Names
from tf_memsaver.program.calls import Reader
from tf_memsaver.program.layer_calls import LayerCall

Span = tuple[int, int]
"""The first time step of a chunk, and the one after its last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartCall:
    """A part of what the call of a layer does (``whole``): it reads the slots ``inputs`` and fills ``outputs``."""

    whole: LayerCall
    part: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def operation(self) -> Any:
        """Nothing that has variables or losses."""
        return None

    @property
    def label(self) -> str:
        """The layer's name and, as for a layer that is called again, what part it is."""
        return f"{self.whole.label}#{self.part}"

    @property
    def kind(self) -> str:
        """The class of the layer."""
        return self.whole.kind

    @property
    def signature(self) -> str:
        """That of the layer's call, and what part of it this is."""
        return f"{self.whole.signature} [{self.part}]"

    @property
    def pinned(self) -> str:
        """Nothing that can be said before the operations are known."""
        return ""

    def readers(self, slot: int) -> list[Reader]:
        """Return the part, if it reads a slot."""
        return [Reader(self.label, "", None)] if slot in self.inputs else []

    def run(self, slots: Sequence[Any], training: bool | None, names: Names) -> list[Any]:
        """Run under the layer's name, and return what goes to ``outputs``."""
        for model, given in self.whole.enclosing:
            training = keras_calls.training_seen_by(model, given, training)
        layer = self.whole.operation
        with names.inside(self.whole.home), tf.name_scope(layer.name):
            return list(self._made(layer, [slots[slot] for slot in self.inputs], training))

    def _made(self, layer: Any, given: list[Any], training: bool | None) -> Iterator[Any]:
        raise NotImplementedError(self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCall(_PartCall):
    """Cuts a sequence, and its mask if there is one, into chunks along time; their gradients are joined in one go."""

    spans: tuple[Span, ...]

    def _made(self, layer: Any, given: list[Any], training: bool | None) -> Iterator[Any]:
        del training
        sequence, *masks = given
        if keras_calls.get_keras_mask(sequence) is not None and not masks:
            raise UnsupportedModelError(
                f"layer '{self.whole.label}' gets a mask that it was not built with, and its plan cuts it along time. "
                f"Make a plan with time_chunks=None."
            )
        if layer.autocast and sequence.dtype.is_floating:
            sequence = keras.ops.cast(sequence, layer.input_dtype)
        for each in (sequence, *masks):
            yield from tf.split(each, [stop - start for start, stop in self.spans], axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCall(_PartCall):
    """Runs a layer over a chunk of the time.

    It reads its part of the sequence, and what the chunk before it has left: states, and the weights (see
    ``keras_recurrent.loop_over_time``). The first chunk has nothing before it, and the last one leaves nothing.
    """

    is_first: bool
    is_last: bool
    is_masked: bool

    @classmethod
    def count_left(cls, whole: LayerCall, is_masked: bool) -> int:
        """Return how many tensors a chunk leaves to the one after it."""
        layer = whole.operation
        return len(layer.state_size) + is_masked + len(layer.cell.variables)

    @property
    def operation(self) -> Any:
        """The layer, where its variables are read: in the first chunk."""
        return self.whole.operation if self.is_first else None

    def _made(self, layer: Any, given: list[Any], training: bool | None) -> Iterator[Any]:
        sequence, *rest = given
        mask, carried = (rest[0], rest[1:]) if self.is_masked else (None, rest)
        if self.is_first:
            states = keras_recurrent.first_states(layer, sequence)
            if self.is_masked:
                # What a layer returns before its first step that counts.
                states.append(keras.ops.zeros_like(states[0]))
            weights = [keras_variables.read_variable(each) for each in layer.cell.variables]
        else:
            count = len(layer.state_size) + self.is_masked
            states, weights = carried[:count], carried[count:]
        output, states, weights = keras_recurrent.loop_over_time(layer, sequence, mask, states, weights, training)
        if layer.return_sequences or self.is_last:
            yield output
        if not self.is_last:
            yield from states
            yield from weights


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinCall(_PartCall):
    """Joins what the chunks return to one sequence, and gives it the mask that it has, which is read last."""

    is_masked: bool

    def _made(self, layer: Any, given: list[Any], training: bool | None) -> Iterator[Any]:
        del layer, training
        joined = tf.concat(given[:-1] if self.is_masked else given, axis=1)
        if self.is_masked:
            keras_calls.set_keras_mask(joined, given[-1])
        yield joined
