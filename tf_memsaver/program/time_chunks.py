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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras

from tf_memsaver.compat import keras_recurrent
from tf_memsaver.options.table import TimeChunks
from tf_memsaver.plan.advice import CUT_ALONG_TIME
from tf_memsaver.program.calls import Call, CallSequence
from tf_memsaver.program.layer_calls import LayerCall, Slot
from tf_memsaver.program.time_calls import ChunkCall, JoinCall, Left, MergeCall, Recurrence, Slots, Span, SplitCall

_LAYERS = tuple(getattr(keras.layers, name) for name in CUT_ALONG_TIME)

_NAMED = 3
"""Layers that a note names."""


def in_time_chunks(sequence: CallSequence, steps: TimeChunks) -> CallSequence:
    """Return calls in which those of recurrent layers are cut into chunks of ``steps`` time steps.

    Those that cannot be cut stay as they are. ``note`` tells which these are, and why.
    """
    if steps is None:
        return sequence
    builder = _Builder(sequence, steps)
    whole: dict[str, str] = {}
    for call in sequence.calls:
        if isinstance(call, LayerCall) and isinstance(call.operation, (keras.layers.RNN, keras.layers.Bidirectional)):
            why = _why_whole(call, sequence.shapes, steps)
            if why:
                whole[call.label] = why
            else:
                builder.add(_recurrence(call))
    return replace(builder.made(), note=_note(whole, builder.is_empty))


def _note(whole: dict[str, str], is_empty: bool) -> str:
    if not whole:
        return "by whole layers, since none that is recurrent can be cut along time" if is_empty else ""
    told = [f"'{label}' {why}" for label, why in list(whole.items())[:_NAMED]]
    more = f", and {len(whole) - _NAMED} more" if len(whole) > _NAMED else ""
    return f"not cut along time: {', '.join(told)}{more}"


def _why_whole(call: LayerCall, shapes: Mapping[int, Sequence[int | None]], steps: int | str) -> str:
    """Return why a recurrent layer's call cannot be cut along time, or an empty string."""
    if not _reads_slots(call):
        return "is called with something else than tensors of the model"
    shape = shapes[call.args[0].index]
    length = shape[1] if len(shape) > 1 else None
    if length is None:
        return "has a number of steps that is open"
    if len(_spans(length, steps)) < 2:
        return f"has {length} steps, which are one chunk"
    layer = call.operation
    if isinstance(layer, keras.layers.Bidirectional):
        if layer.return_state or call.kwargs.get("initial_state"):
            return "has states of two directions"
        layers = [layer.forward_layer, layer.backward_layer]
    else:
        layers = [layer]
    return next((why for each in layers for why, holds in _obstacles(each) if holds), "")


def _obstacles(layer: Any) -> Iterator[tuple[str, bool]]:
    """Yield what is in the way of cutting a layer along time, and whether it is there."""
    yield f"is of a class of its own, {type(layer).__name__}", type(layer) not in _LAYERS
    yield "is stateful", layer.stateful
    yield "is unrolled", layer.unroll
    yield "has a penalty on what it returns", layer.activity_regularizer is not None
    yield "has a cell that is no layer", not isinstance(layer.cell, keras.layers.Layer)
    yield "has a cell with variables that are not trained", keras_recurrent.has_other_variables(layer.cell)
    yield "has a cell with states that are no vectors", not _has_vectors(layer)
    yield "may be one kernel of cuDNN", keras_recurrent.may_run_cudnn(layer)


def _has_vectors(layer: Any) -> bool:
    """Whether the states of a layer are told by one number each; those of cells on top of each other are in lists."""
    is_stacked = isinstance(layer.cell, keras.layers.StackedRNNCells)
    sizes = keras.tree.flatten(layer.state_size) if is_stacked else layer.state_size
    return all(isinstance(size, int) for size in sizes)


def _reads_slots(call: LayerCall) -> bool:
    """Whether a call gives a layer one sequence, and at most a mask and states, all of them tensors of the model."""
    if len(call.args) != 1 or not {"training", "mask", "initial_state"}.issuperset(call.kwargs):
        return False
    given = keras.tree.flatten([call.args, call.kwargs.get("mask"), call.kwargs.get("initial_state")])
    return isinstance(call.args[0], Slot) and all(each is None or isinstance(each, Slot) for each in given)


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


def _spans(length: int, steps: int | str) -> tuple[Span, ...]:
    """Return the chunks of so many steps: the last one may be shorter."""
    each = math.ceil(math.sqrt(length)) if isinstance(steps, str) else steps
    return tuple((start, min(start + each, length)) for start in range(0, length, each))


class _Builder:
    """Puts the calls of chunks in the place of those of layers."""

    def __init__(self, sequence: CallSequence, steps: int | str) -> None:
        self._sequence, self._steps = sequence, steps
        self._slot_count = sequence.slot_count
        self._found: list[Recurrence] = []
        self._merges: dict[int, MergeCall] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to cut."""
        return not self._found

    def add(self, whole: Recurrence) -> None:
        """Take a layer to be cut, the calls of a model coming in order."""
        if not isinstance(whole.layer, keras.layers.Bidirectional):
            self._found.append(whole)
            return
        layers = {"forward": whole.layer.forward_layer, "backward": whole.layer.backward_layer}
        both = [
            replace(
                whole,
                layer=layer,
                label=f"{whole.label}#{name}",
                scope=f"{whole.scope}/{layer.name}",
                outputs=self._slots(1),
            )
            for name, layer in layers.items()
        ]
        self._found += both
        parts = tuple(each.outputs[0] for each in both)
        self._merges[id(whole.call)] = MergeCall(whole=whole, part="merge", parts=parts)

    def made(self) -> CallSequence:
        """Return the calls with those of chunks among them: they come where the first of a stack was."""
        instead: dict[int, list[Call]] = {id(each.call): [] for each in self._found}
        for stack in self._stacks():
            instead[id(stack[0].call)] += self._calls(stack)
        for call, merge in self._merges.items():
            instead[call].append(merge)
        calls = [made for call in self._sequence.calls for made in instead.get(id(call), [call])]
        return replace(self._sequence, calls=tuple(calls), slot_count=self._slot_count)

    def _stacks(self) -> list[list[Recurrence]]:
        """Return layers that are cut together: each but the first is all that reads the sequence of the one before it.

        It is called with nothing else, so that it may run where the first one runs.
        """
        cut = {id(each.call) for each in self._found}
        reads = Counter(slot for call in self._sequence.calls if id(call) not in cut for slot in call.inputs)
        reads.update(slot for each in self._found for slot in (each.sequence, *each.states))
        reads.update(self._sequence.outputs)
        ends: dict[int, list[Recurrence]] = {}
        stacks: list[list[Recurrence]] = []
        for each in self._found:
            stack = ends.get(each.sequence)
            if stack is None or stack[0].mask != each.mask or each.states or each.layer.go_backwards:
                stack = []
                stacks.append(stack)
            stack.append(each)
            if each.layer.return_sequences and reads[each.outputs[0]] == 1:
                ends[each.outputs[0]] = stack
        return stacks

    def _calls(self, stack: Sequence[Recurrence]) -> Iterator[Call]:
        first, last = stack[0], stack[-1]
        length = self._sequence.shapes[first.sequence][1]
        assert length is not None, "a layer whose steps are open stays whole"
        spans = _spans(length, self._steps)
        parts = self._slots(len(spans))
        masks = self._slots(len(spans)) if first.mask else ()
        yield SplitCall(whole=first, part="split", spans=spans, parts=parts, mask_parts=masks)
        before: list[Left | None] = [None] * len(stack)
        dropout = [self._slots(keras_recurrent.count_dropout(each.layer)) for each in stack]
        ends: list[int] = []
        in_order = list(zip(spans, parts, ((mask,) for mask in masks) if masks else [()] * len(spans), strict=True))
        for (start, stop), read, mask in in_order[::-1] if first.layer.go_backwards else in_order:
            is_last = len(ends) == len(spans) - 1
            for place, each in enumerate(stack):
                returns = each.layer.return_sequences
                chunk = ChunkCall(
                    whole=each,
                    part=f"{start}:{stop}",
                    part_slot=read,
                    mask_slot=mask,
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
            states=self._slots(keras_recurrent.count_states(each.layer)),
            last=self._slots(int(ChunkCall.needs_last(each))),
            weights=self._slots(len(each.layer.cell.weights)),
        )

    def _slots(self, count: int) -> Slots:
        first = self._slot_count
        self._slot_count += count
        return tuple(range(first, first + count))
