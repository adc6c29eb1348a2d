"""The loop over time that Keras's recurrent layers run, for a part of the time.

Read from Keras 3.12 to 3.15: ``layers/rnn/rnn.py`` and ``backend/tensorflow/rnn.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend


def may_run_cudnn(layer: Any) -> bool:
    """Whether a layer may leave its whole loop to one kernel of cuDNN (``LSTM.inner_loop``, ``GRU.inner_loop``)."""
    return getattr(layer, "use_cudnn", False) in ("auto", True) and bool(tf.config.list_physical_devices("GPU"))


def first_states(layer: Any, sequences: Any) -> list[Any]:
    """Return the flat states that a layer begins with where it is given none (``RNN.call``)."""
    states = layer.get_initial_state(batch_size=keras.ops.shape(sequences)[0])
    return [keras.ops.convert_to_tensor(state, dtype=layer.cell.compute_dtype) for state in keras.tree.flatten(states)]


def loop_over_time(
    layer: Any, sequences: Any, mask: Any, states: Sequence[Any], weights: Sequence[Any], training: bool | None
) -> tuple[Any, list[Any], list[Any]]:
    """Run a layer's cell over a part of the time, as ``RNN.inner_loop`` does.

    The values of the cell's variables go from step to step with the states. So the gradients that arrive for what comes
    out of them are what those of this part are added to, step by step: the sum over all parts is rounded as one loop's.

    Args:
      layer: a recurrent layer.
      sequences: of shape (batch, time, features).
      mask: of shape (batch, time), or None: what is False is skipped.
      states: the flat states before the first step; with a mask, what was last returned comes after them.
      weights: the values of ``layer.cell.variables``.
      training: what the cell is called with.

    Returns:
      the outputs of all steps if the layer returns sequences, else that of the last one; the states after the last
      step, and the weights.
    """
    cell, count = layer.cell, len(states)
    variables = cell.variables

    def step(inputs: Any, carried: Sequence[Any]) -> tuple[Any, list[Any]]:
        before, values = carried[:count], carried[count:]
        given, kept = (inputs, None) if mask is None else inputs
        own = list(before if kept is None else before[:-1])
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            output, new = cell(given, own, training=training)
        after = keras.tree.flatten(new)
        if kept is not None:
            *after, output = (tf.where(kept, new, old) for new, old in zip([*after, output], before, strict=True))
            after.append(output)
        return output, [*after, *values]

    last, outputs, carried = backend.rnn(
        step,
        sequences if mask is None else (sequences, mask[..., tf.newaxis]),
        [*states, *weights],
        # Of several inputs, Keras cannot tell it itself.
        input_length=sequences.shape[1],
        return_all_outputs=layer.return_sequences,
    )
    return outputs if layer.return_sequences else last, list(carried[:count]), list(carried[count:])
