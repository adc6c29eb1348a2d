"""Recurrent layers in chunks of time: each chunk is a call, and carries the state on to the next one.

A loop over time keeps what each of its steps has made. Once its time is cut into chunks, a segment may end between two
of them: then the states there are all that is kept, and a chunk is replayed in the backward pass. With about √T chunks
of √T steps, a layer takes memory as √T and not as T.

Layers that read each other's sequences are cut at the same steps. Their calls come chunk by chunk, so that a segment
holds one chunk of all of them, and the sequences between them are not kept either.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import keras

from tf_memsaver.compat import keras_recurrent
from tf_memsaver.options.table import TimeChunks
from tf_memsaver.program.calls import Call, CallSequence
from tf_memsaver.program.layer_calls import LayerCall, Slot
from tf_memsaver.program.time_calls import ChunkCall, JoinCall, Left, Recurrence, Slots, Span, SplitCall

_LAYERS = (
    keras.layers.ConvLSTM1D,
    keras.layers.ConvLSTM2D,
    keras.layers.ConvLSTM3D,
    keras.layers.GRU,
    keras.layers.LSTM,
    keras.layers.RNN,
    keras.layers.SimpleRNN,
)
"""The layers whose call is the loop of ``RNN`` over their cell, and nothing else."""

_NAMED = 3
"""Layers that a note names."""


def in_time_chunks(sequence: CallSequence, steps: TimeChunks) -> CallSequence:
    """Return calls in which those of recurrent layers are cut into chunks of ``steps`` time steps.

    Those that cannot be cut stay as they are. ``note`` tells what was cut, and why other layers were not.
    """
    if steps is None:
        return sequence
    found: list[Recurrence] = []
    whole: dict[str, str] = {}
    for call in sequence.calls:
        if isinstance(call, LayerCall) and isinstance(call.operation, (keras.layers.RNN, keras.layers.Bidirectional)):
            why = _why_whole(call, sequence)
            if why:
                whole[call.label] = why
            else:
                found.append(_recurrence(call))
    builder = _Builder(sequence, steps)
    for stack in _stacks(sequence, found):
        builder.add(stack)
    return replace(builder.made(), note=_note(len(found), whole))


def _note(count: int, whole: dict[str, str]) -> str:
    if not whole:
        return "" if count else "there is no recurrent layer to cut along time"
    told = [f"'{label}' {why}" for label, why in list(whole.items())[:_NAMED]]
    more = f", and {len(whole) - _NAMED} more" if len(whole) > _NAMED else ""
    return f"not cut along time: {', '.join(told)}{more}"


def _why_whole(call: LayerCall, sequence: CallSequence) -> str:
    """Return why a recurrent layer's call cannot be cut along time, or an empty string."""
    layer = call.operation
    if type(layer) not in _LAYERS:
        return f"is a {type(layer).__name__}"
    shape = sequence.shapes[call.args[0].index] if _reads_slots(call) else ()
    cell = layer.cell
    reasons = {
        "is called with something else than tensors": not shape,
        "has a number of steps that is open": bool(shape) and (len(shape) < 2 or shape[1] is None),
        "is stateful": layer.stateful,
        "is unrolled": layer.unroll,
        "has a penalty on what it returns": layer.activity_regularizer is not None,
        "has a cell that is no layer": not isinstance(cell, keras.layers.Layer),
        "has a cell with a state of its own": _has_own_state(cell),
        "has a cell with states within states": any(map(keras.tree.is_nested, layer.state_size)),
        "may be one kernel of cuDNN": keras_recurrent.may_run_cudnn(layer),
    }
    return next((why for why, holds in reasons.items() if holds), "")


def _has_own_state(cell: Any) -> bool:
    """Whether a cell has variables that are not trained, beside the seeds of its dropout."""
    seeds = {id(getattr(each, "state", None)) for each in vars(cell).values()}
    return any(id(variable) not in seeds for variable in cell.non_trainable_variables if variable.trainable is False)


def _reads_slots(call: LayerCall) -> bool:
    others = {name: value for name, value in call.kwargs.items() if name not in ("training", "mask", "initial_state")}
    given = [*call.args, *keras.tree.flatten(call.kwargs.get("initial_state") or [])]
    is_plain = len(call.args) == 1 and all(value is None for value in others.values())
    return is_plain and all(isinstance(each, Slot) for each in given)


def _recurrence(call: LayerCall) -> Recurrence:
    mask = call.kwargs.get("mask")
    states = keras.tree.flatten(call.kwargs.get("initial_state") or [])
    return Recurrence(
        call=call,
        layer=call.operation,
        label=call.label,
        scope=call.operation.name,
        sequence=call.args[0].index,
        mask=(mask.index,) if isinstance(mask, Slot) else (),
        states=tuple(state.index for state in states),
        outputs=call.outputs,
    )


def _stacks(sequence: CallSequence, found: Sequence[Recurrence]) -> list[list[Recurrence]]:
    """Return layers that are cut together: each but the first is all that reads the sequence of the one before it.

    It is called with nothing else than that, so that it may run where the first one runs.
    """
    reads = Counter(slot for call in sequence.calls for slot in call.inputs)
    reads.update(sequence.outputs)
    ends: dict[int, list[Recurrence]] = {}
    stacks = []
    for each in found:
        stack = ends.pop(each.sequence, [])
        if not stack or stack[0].mask != each.mask or each.states or each.layer.go_backwards:
            stack = []
            stacks.append(stack)
        stack.append(each)
        if each.layer.return_sequences and reads[each.outputs[0]] == 1:
            ends[each.outputs[0]] = stack
    return stacks


def _spans(length: int, steps: int | str) -> tuple[Span, ...]:
    """Return the chunks of so many steps: the last one may be shorter."""
    each = math.ceil(math.sqrt(length)) if isinstance(steps, str) else steps
    return tuple((start, min(start + each, length)) for start in range(0, length, each))


class _Builder:
    """Puts the calls of chunks in the place of those of layers."""

    def __init__(self, sequence: CallSequence, steps: int | str) -> None:
        self._sequence, self._steps = sequence, steps
        self._slot_count = sequence.slot_count
        self._instead: dict[int, list[Call]] = {}

    def made(self) -> CallSequence:
        """Return the calls with those of chunks among them."""
        calls = [made for call in self._sequence.calls for made in self._instead.get(id(call), [call])]
        return replace(self._sequence, calls=tuple(calls), slot_count=self._slot_count)

    def add(self, stack: Sequence[Recurrence]) -> None:
        """Cut layers that read each other's sequences; their chunks come where the first of them was."""
        length = self._sequence.shapes[stack[0].sequence][1]
        assert length is not None, "a layer whose steps are open stays whole"
        spans = _spans(length, self._steps)
        if len(spans) > 1:
            self._instead.update((id(each.call), []) for each in stack)
            self._instead[id(stack[0].call)] += self._calls(stack, spans)

    def _calls(self, stack: Sequence[Recurrence], spans: tuple[Span, ...]) -> Iterator[Call]:
        first, last = stack[0], stack[-1]
        parts = self._slots(len(spans))
        masks = self._slots(len(spans)) if first.mask else ()
        yield SplitCall(whole=first, part="split", spans=spans, parts=parts, mask_parts=masks)
        before: list[Left | None] = [None] * len(stack)
        dropout = [self._slots(keras_recurrent.count_dropout(each.layer)) for each in stack]
        ends: list[int] = []
        in_order = list(zip(spans, parts, masks or spans, strict=True))
        for (start, stop), read, mask in in_order[::-1] if first.layer.go_backwards else in_order:
            is_last = len(ends) == len(spans) - 1
            for place, each in enumerate(stack):
                returns = each.layer.return_sequences
                chunk = ChunkCall(
                    whole=each,
                    part=f"{start}:{stop}",
                    part_slot=read,
                    mask_slot=(mask,) if first.mask else (),
                    dropout=dropout[place],
                    before=before[place],
                    after=Left(states=each.outputs[1:]) if is_last else self._left(each),
                    made=self._slots(1) if returns else each.outputs[:1] if is_last else (),
                )
                before[place] = chunk.after
                read = chunk.made[0] if chunk.made else -1
                yield chunk
            ends.append(read)
        if last.layer.return_sequences:
            yield JoinCall(whole=last, part="join", parts=tuple(ends), joined=last.outputs[0])

    def _left(self, each: Recurrence) -> Left:
        return Left(
            states=self._slots(len(each.layer.state_size)),
            last=self._slots(int(ChunkCall.needs_last(each))),
            weights=self._slots(len(each.layer.cell.variables)),
        )

    def _slots(self, count: int) -> Slots:
        first = self._slot_count
        self._slot_count += count
        return tuple(range(first, first + count))
