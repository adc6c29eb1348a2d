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

import keras

from tf_memsaver.compat import keras_recurrent
from tf_memsaver.options.table import TimeChunks
from tf_memsaver.program.calls import Call, CallSequence
from tf_memsaver.program.layer_calls import LayerCall, Slot
from tf_memsaver.program.time_calls import ChunkCall, JoinCall, Span, SplitCall

_LAYERS = (keras.layers.LSTM, keras.layers.GRU, keras.layers.SimpleRNN)
"""The layers whose cells have nothing but weights, so that states are all that a step hands on."""


def in_time_chunks(sequence: CallSequence, steps: TimeChunks) -> CallSequence:
    """Return calls in which those of recurrent layers are cut into chunks of ``steps`` time steps.

    Those that cannot be cut stay as they are, and ``note`` says why.
    """
    if steps is None:
        return sequence
    recurrent = [call for call in sequence.calls if isinstance(call, LayerCall) and _is_recurrent(call)]
    whole = {call.label: why for call in recurrent if (why := _why_whole(call, sequence))}
    chunked = [call for call in recurrent if call.label not in whole]
    note = _note(whole)
    if not chunked:
        return replace(sequence, note=note)
    builder = _Builder(sequence, steps)
    for stack in _stacks(sequence, chunked):
        builder.add(stack)
    return replace(builder.made(), note=note)


def _note(whole: dict[str, str]) -> str:
    told = "; ".join(f"'{label}' {why}" for label, why in whole.items())
    return f"not cut along time: {told}" if told else ""


def _why_whole(call: LayerCall, sequence: CallSequence) -> str:
    """Return why a recurrent layer's call cannot be cut along time, or an empty string."""
    layer = call.operation
    reasons = {
        "is a layer of a kind of its own": type(layer) not in _LAYERS,
        "begins with states that it is given": not _reads_one_sequence(call),
        "returns its states": len(call.outputs) != 1,
        "has a number of steps that is open": _length(call, sequence) is None,
        "is stateful": layer.stateful,
        "is unrolled": layer.unroll,
        "goes backwards": layer.go_backwards,
        "returns zeros where steps are masked": layer.zero_output_for_mask,
        "drops out": any(getattr(layer, name, 0) for name in ("dropout", "recurrent_dropout")),
        "has a penalty on what it returns": layer.activity_regularizer is not None,
        "may be one kernel of cuDNN": keras_recurrent.may_run_cudnn(layer),
    }
    return next((why for why, holds in reasons.items() if holds), "")


def _reads_one_sequence(call: LayerCall) -> bool:
    given = [value for name, value in call.kwargs.items() if name not in ("training", "mask")]
    return len(call.args) == 1 and isinstance(call.args[0], Slot) and all(value is None for value in given)


def _is_recurrent(call: LayerCall) -> bool:
    return isinstance(call.operation, (keras.layers.RNN, keras.layers.Bidirectional))


def _length(call: LayerCall, sequence: CallSequence) -> int | None:
    """Return the number of steps of the sequence that a call reads, if it is known."""
    shape = sequence.shapes[call.inputs[0]]
    return shape[1] if len(shape) > 1 else None


def _mask_of(call: LayerCall) -> tuple[int, ...]:
    """Return the slot of the mask that a call reads, if there is one."""
    mask = call.kwargs.get("mask")
    return (mask.index,) if isinstance(mask, Slot) else ()


def _stacks(sequence: CallSequence, chunked: Sequence[LayerCall]) -> list[list[LayerCall]]:
    """Return layers that are cut together: each but the first is all that reads the sequence of the one before it."""
    reads = Counter(slot for call in sequence.calls for slot in call.inputs)
    reads.update(sequence.outputs)
    ends: dict[int, list[LayerCall]] = {}
    stacks = []
    for call in chunked:
        stack = ends.pop(call.inputs[0], [])
        if not stack or _mask_of(stack[0]) != _mask_of(call):
            stack = []
            stacks.append(stack)
        stack.append(call)
        if call.operation.return_sequences and reads[call.outputs[0]] == 1:
            ends[call.outputs[0]] = stack
    return stacks


def _spans(length: int, steps: TimeChunks) -> list[Span]:
    """Return the chunks of so many steps: the last one may be shorter."""
    each = max(2, math.ceil(math.sqrt(length))) if steps == "auto" else steps
    return [(start, min(start + each, length)) for start in range(0, length, each)]


class _Builder:
    """Puts the calls of chunks in the place of those of layers."""

    def __init__(self, sequence: CallSequence, steps: TimeChunks) -> None:
        self._sequence, self._steps = sequence, steps
        self._slot_count = sequence.slot_count
        self._instead: dict[int, list[Call]] = {}

    def made(self) -> CallSequence:
        """Return the calls with those of chunks among them."""
        calls = [made for call in self._sequence.calls for made in self._instead.get(id(call), [call])]
        return replace(self._sequence, calls=tuple(calls), slot_count=self._slot_count)

    def add(self, stack: Sequence[LayerCall]) -> None:
        """Cut layers that read each other's sequences; their chunks come where the first of them was."""
        first, last = stack[0], stack[-1]
        spans = _spans(_length(first, self._sequence), self._steps)
        if len(spans) > 1:
            self._instead.update((id(call), []) for call in stack)
            self._instead[id(first)] = list(self._calls(stack, spans, last.outputs))

    def _calls(self, stack: Sequence[LayerCall], spans: Sequence[Span], outputs: tuple[int, ...]) -> Iterator[Call]:
        mask = _mask_of(stack[0])
        read = (stack[0].args[0].index, *mask)
        parts = [self._slots(len(spans)) for _ in read]
        yield SplitCall(whole=stack[0], part="split", inputs=read, outputs=sum(parts, ()), spans=tuple(spans))
        carried: list[tuple[int, ...]] = [()] * len(stack)
        ends = []
        for span, part, *masks in zip(spans, *parts, strict=True):
            read = part
            for place, call in enumerate(stack):
                is_last, returns = span is spans[-1], call.operation.return_sequences
                made = self._slots(1) if returns else outputs if is_last else ()
                left = () if is_last else self._slots(ChunkCall.count_left(call, bool(mask)))
                yield ChunkCall(
                    whole=call,
                    part=f"{span[0]}:{span[1]}",
                    inputs=(read, *masks, *carried[place]),
                    outputs=(*made, *left),
                    is_first=span is spans[0],
                    is_last=is_last,
                    is_masked=bool(mask),
                )
                carried[place] = left
                read = made[0] if made else -1
            ends.append(read)
        if stack[-1].operation.return_sequences:
            yield JoinCall(whole=stack[-1], part="join", inputs=(*ends, *mask), outputs=outputs, is_masked=bool(mask))

    def _slots(self, count: int) -> tuple[int, ...]:
        first = self._slot_count
        self._slot_count += count
        return tuple(range(first, first + count))
