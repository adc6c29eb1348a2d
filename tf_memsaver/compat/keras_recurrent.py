"""The loop over time that Keras's recurrent layers run, for a part of the time.

Read from Keras 3.12 to 3.15: ``layers/rnn/rnn.py``, ``layers/rnn/dropout_rnn_cell.py`` and
``backend/tensorflow/rnn.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.layers.rnn.conv_lstm import ConvLSTM
from keras.src.layers.rnn.dropout_rnn_cell import DropoutRNNCell

from tf_memsaver.compat.devices import has_gpu
from tf_memsaver.compat.graphs import run_steps_in_turn

_DROPOUT = ("_dropout_mask", "_recurrent_dropout_mask")
"""Where a cell keeps what it drops out in all steps of a call (``DropoutRNNCell``)."""


def may_run_cudnn(layer: Any) -> bool:
    """Whether a layer may leave its whole loop to one kernel of cuDNN (``LSTM.inner_loop``, ``GRU.inner_loop``)."""
    return getattr(layer, "use_cudnn", False) in ("auto", True) and has_gpu()


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What a part of the time leaves to the next one: flat states, what was returned last, and weights.

    The last output is known only where steps may be masked.
    """

    states: tuple[Any, ...]
    last: tuple[Any, ...]
    weights: tuple[Any, ...]


def first_states(layer: Any, sequence: Any) -> tuple[Any, ...]:
    """Return the flat states that a layer begins with where it is given none (``RNN.call``)."""
    return tuple(keras.tree.flatten(layer.get_initial_state(batch_size=keras.ops.shape(sequence)[0])))


def first_output(layer: Any, sequence: Any, states: Sequence[Any]) -> Any:
    """Return what a layer returns for steps that are masked before all others: zeros."""
    # In training, the cell would draw what it drops out.
    arguments = {"training": False} if layer.cell._call_has_training_arg else {}
    output, _ = layer.cell(sequence[:, 0], _packed(layer, states), **arguments)
    return tf.zeros_like(output)


def draw_dropout(layer: Any, sequence: Any, states: Sequence[Any]) -> tuple[Any, ...]:
    """Return what a layer drops out in all steps of a call, flat."""
    layer._maybe_config_dropout_masks(layer.cell, sequence[:, 0], _packed(layer, states))
    drawn = keras.tree.flatten([getattr(cell, name, None) for cell in _cells(layer) for name in _DROPOUT])
    layer._maybe_reset_dropout_masks(layer.cell)
    return tuple(each for each in drawn if each is not None)


def count_dropout(layer: Any) -> int:
    """Return how many tensors ``draw_dropout`` returns."""
    return sum(len(keras.tree.flatten(shape)) for cell in _cells(layer) for shape in _dropout_of(cell) if shape)


def _cells(layer: Any) -> Sequence[Any]:
    return getattr(layer.cell, "cells", (layer.cell,))


def _dropout_of(cell: Any) -> list[Any]:
    """Return, for each of ``_DROPOUT``, a structure as that of what is kept there; None if nothing is dropped out."""
    count = getattr(cell, "dropout_mask_count", None)
    rates = (getattr(cell, "dropout", 0), getattr(cell, "recurrent_dropout", 0))
    return [(1 if count is None else [1] * count) if rate else None for rate in rates]


@contextlib.contextmanager
def _dropping_out(layer: Any, drawn: Sequence[Any]) -> Iterator[None]:
    remaining = iter(drawn)
    for cell in _cells(layer):
        for name, shape in zip(_DROPOUT, _dropout_of(cell), strict=True):
            if shape:
                setattr(cell, name, keras.tree.map_structure(lambda _: next(remaining), shape))
    try:
        yield
    finally:
        layer._maybe_reset_dropout_masks(layer.cell)


def _packed(layer: Any, states: Sequence[Any]) -> list[Any]:
    """Return flat states as the cell takes them."""
    return list(keras.tree.pack_sequence_as(_state_structure(layer), list(states)))


def _state_structure(layer: Any) -> Any:
    # The cell of a ConvLSTM has a size that stands for both of its states.
    return [0, 0] if isinstance(layer, ConvLSTM) else layer.state_size


def count_states(layer: Any) -> int:
    """Return how many tensors ``first_states`` returns."""
    return len(keras.tree.flatten(_state_structure(layer)))


def has_other_variables(cell: Any) -> bool:
    """Whether a cell has variables that are not there to be trained, beside the seeds of its dropout."""
    return any(
        layer._non_trainable_variables or (layer._seed_generators and not isinstance(layer, DropoutRNNCell))
        for layer in cell._flatten_layers()
    )


def merged(layer: Any, forward: Any, backward: Any) -> list[Any]:
    """Return what a ``Bidirectional`` makes of what its two layers return (``Bidirectional.call``)."""
    forward, backward = (keras.ops.cast(each, layer.compute_dtype) for each in (forward, backward))
    if layer.return_sequences:
        backward = keras.ops.flip(backward, axis=1)
    merges = {
        "concat": lambda: keras.ops.concatenate([forward, backward], axis=-1),
        "sum": lambda: forward + backward,
        "ave": lambda: (forward + backward) / 2,
        "mul": lambda: forward * backward,
    }
    return [merges[layer.merge_mode]()] if layer.merge_mode else [forward, backward]


def loop_over_time(
    layer: Any, sequence: Any, mask: Any, carried: Carried, dropout: Sequence[Any], training: bool | None
) -> tuple[Any, Carried]:
    """Run a layer's cell over a part of the time, as ``RNN.inner_loop`` does.

    The values of the cell's variables go from step to step with the states. So the gradients that arrive for what comes
    out of them are what those of this part are added to, step by step: the sum over all parts is rounded as one loop's.

    Args:
      layer: a recurrent layer.
      sequence: of shape (batch, time, features).
      mask: of shape (batch, time), or None: steps that are False change no state.
      carried: what the part before has left; ``weights`` are the values of ``layer.cell.weights``.
      dropout: what ``draw_dropout`` returned.
      training: what the cell is called with.

    Returns:
      the outputs of all steps if the layer returns sequences, else that of the last one; and what this part leaves.
    """
    cell, structure = layer.cell, carried
    arguments = {"training": training} if cell._call_has_training_arg else {}

    def step(inputs: Any, flat: Sequence[Any]) -> tuple[Any, list[Any]]:
        before = _unflattened(structure, flat)
        given, kept = (inputs, None) if mask is None else inputs
        with keras.StatelessScope(state_mapping=list(zip(cell.weights, before.weights, strict=True))):
            output, new = cell(given, _packed(layer, before.states), **arguments)
        states = keras.tree.flatten(new)
        if kept is None:
            return output, [*states, *before.weights]
        skipped = tf.zeros_like(output) if layer.zero_output_for_mask else before.last[0]
        output = _where(kept, output, skipped)
        states = [_where(kept, *pair) for pair in zip(states, before.states, strict=True)]
        return output, [*states, *([output] if before.last else []), *before.weights]

    with _dropping_out(layer, dropout):
        last, outputs, flat = backend.rnn(
            step,
            sequence if mask is None else (sequence, mask[..., tf.newaxis]),
            [*carried.states, *carried.last, *carried.weights],
            go_backwards=layer.go_backwards,
            # Of several inputs, Keras cannot tell it itself.
            input_length=sequence.shape[1],
            return_all_outputs=layer.return_sequences,
        )
    _one_by_one(flat[0])
    output = keras.ops.cast(outputs if layer.return_sequences else last, layer.compute_dtype)
    return output, _unflattened(structure, flat)


def _one_by_one(left: Any) -> None:
    """Let the steps of the loop that has left a tensor run one by one, and so those of its gradient.

    Keras lets 32 run side by side. What adds up the gradients of weights then falls behind what makes them, and as many
    of them are in memory.
    """
    if tf.executing_eagerly():
        return
    while left.op.type == "Identity":
        left = left.op.inputs[0]
    if left.op.type in ("StatelessWhile", "While"):
        run_steps_in_turn(left.op)


def _unflattened(structure: Carried, flat: Sequence[Any]) -> Carried:
    first, second = len(structure.states), len(structure.states) + len(structure.last)
    return Carried(states=tuple(flat[:first]), last=tuple(flat[first:second]), weights=tuple(flat[second:]))


def _where(kept: Any, new: Any, old: Any) -> Any:
    """Return ``new`` for the samples whose step counts, else ``old``."""
    missing = new.shape.rank - kept.shape.rank
    return tf.where(tf.reshape(kept, [-1] + [1] * (kept.shape.rank - 1 + missing)), new, old)
