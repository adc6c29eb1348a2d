"""Recompute one segment in the backward pass: the contract of ``tf.recompute_grad``, kept where that one does not.

``recompute`` runs a function without recording it and, when its gradient is asked for, runs it again under a tape.
``tf.recompute_grad`` (TensorFlow 2.21) does the same, but fails silently in the cases below, each shown in
``tests/tensorflow/test_traps.py`` or measured in ``tools/results/runtime.md``:

* it copies every argument before the replay, so that passing the weights as arguments copies them all;
* its replay waits for the gradient of the first output only: here for one element of every gradient, by data, because
  XLA ignores control dependencies, and by control dependency too, so that work on weights alone does not start early;
* it adds 0.0 to the arguments, which turns -0.0 into 0.0: here 0.0 is subtracted, which changes nothing;
* unconnected gradients come back as zeros: here as ``None``, as without a segment;
* integer, boolean and state tensors cannot be arguments: here they are *held* from the first run and given to the
  replay;
* a second derivative gives a wrong number or an obscure error: here ``SecondDerivativeError``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_memsaver.compat.gradient_terms import forget_number, last_sum, note_sums
from tf_memsaver.compat.tapes import VariableWatcher, followed, stop_recording
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.runtime.backward import gradients_of
from tf_memsaver.runtime.first_run import FirstRun
from tf_memsaver.runtime.own_gradients import note_gradient, with_gradient
from tf_memsaver.runtime.replayable import Replayable, Shared, Tensors


def recompute(function: Replayable, inputs: Tensors, weights: Tensors, shared: Shared | None = None) -> list[tf.Tensor]:
    """Return ``function``'s outputs, keeping only ``inputs``, ``weights`` and what it holds for the backward pass.

    Args:
      function: what to run; it is run once now, and once more for every gradient taken, unless a twin's is copied.
      inputs: floating tensors that the outputs depend on; the replay reads them after the gate.
      weights: floating tensors of variables; never copied.
      shared: what it has in common with the other segments of the same forward pass.

    Raises:
      SecondDerivativeError: (when it is asked for) on the gradient of a gradient.
    """
    shared = shared or Shared()
    first = FirstRun(function=function, inputs=inputs, weights=weights, wanted=followed([*inputs, *weights]))
    with stop_recording(), VariableWatcher() as watcher:
        first.run(shared)
    if not first.outputs:
        return []
    first.add_reads(function.read_again())
    reached: dict[int, tuple[tf.Tensor, ...]] = {}

    def gradient(*upstream: tf.Tensor) -> list[Any]:
        connected = sorted(reached) if reached else range(len(first.outputs))
        arrived = {
            place: tuple(map(tf.convert_to_tensor, first.arriving(place, upstream[place], reached.get(place))))
            for place in connected
        }
        reached.clear()
        gradients = gradients_of(first, arrived, shared)
        # Variables reach the segment as tensors; of those listed here a gradient would be lost.
        _refuse_trained(watcher.watched_variables())
        return gradients

    note_sums(gradient, shared.parity.to_be_added)
    outputs = _with_terms_noted(first, with_gradient(first.outputs, first.places, gradient), reached, shared)
    if not tf.executing_eagerly():
        shared.read_by_makers.update(id(each) for each, own in zip(outputs, first.term_by_term, strict=True) if own)
    return outputs


def _with_terms_noted(
    first: FirstRun, outputs: list[tf.Tensor], reached: dict[int, tuple[tf.Tensor, ...]], shared: Shared
) -> list[tf.Tensor]:
    """Return outputs whose gradients are noted in ``reached`` as they arrive, in terms where they are sums of some."""
    function = first.function
    if len(outputs) == 1 and not first.term_by_term[0]:
        return outputs
    notes = [functools.partial(_note_terms, first, reached, place) for place in range(len(outputs))]
    noted = [note_gradient(output, note) for output, note in zip(outputs, notes, strict=True)]
    if tf.executing_eagerly() or len(outputs) == 1:
        return noted
    return [
        shared.parity.result(tensor, function.is_one_of_several(place), notes[place])
        if function.may_be_term(place)
        else tensor
        for place, tensor in enumerate(noted)
    ]


def _note_terms(first: FirstRun, reached: dict[int, tuple[tf.Tensor, ...]], place: int, gradient: tf.Tensor) -> None:
    """Note the terms of a gradient, unless it was told before, by what passes the output on under another name."""
    if place in reached:
        return
    reached[place] = last_sum(gradient)
    if first.term_by_term[place] and len(reached[place]) > 1:
        forget_number(gradient)


def _refuse_trained(variables: Sequence[Any]) -> None:
    """Check that the segment has read no trainable variable on its own.

    Raises:
      UnsupportedModelError: it names the variable.
    """
    for variable in variables:
        if variable.trainable:
            raise UnsupportedModelError(
                f"variable '{variable.name}' is read inside a recomputed segment in a way that cannot be repeated, "
                "such as from a tf.function or as a tf.Variable. Name its layer in keep=, and make a new plan."
            )
