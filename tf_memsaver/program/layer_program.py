"""A Functional or Sequential model as a program: each call of a layer is a call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_memsaver.compat import keras_calls, keras_models, keras_training
from tf_memsaver.options.table import TimeChunks
from tf_memsaver.plan.plan import Plan
from tf_memsaver.program.handed_on import handed_on
from tf_memsaver.program.layer_calls import list_layer_calls
from tf_memsaver.program.model_call import arguments_of
from tf_memsaver.program.program import ModelProgram, SegmentedCalls, Segmenter, TrainingCall, Wanted
from tf_memsaver.program.time_chunks import in_time_chunks


def runs_layer_by_layer(model: Any) -> bool:
    """Whether the layers that Keras knows of ``model`` are what its segments are best made of.

    That is not so for a model with a ``call`` of its own, nor for a Functional one where a layer of a user's, one of
    its kind, holds the blocks (an encoder) or a whole network: what their code calls is found by running it.
    """
    if keras_models.inner_functional(model) is None:
        return False
    layers = [call.operation for call in list_layer_calls(model).calls]
    kinds = Counter(type(layer) for layer in {id(layer): layer for layer in layers}.values())
    return not any(kinds[type(layer)] == 1 and _holds_blocks(layer) for layer in layers)


def is_network(layer: Any) -> bool:
    """Whether a layer inside a model is a plain network of several layers, which can be opened."""
    if not isinstance(layer, keras.Model) or keras_models.own_class(layer) is not type(layer):
        return False
    functional = keras_models.inner_functional(layer)
    return functional is not None and len(keras_models.nodes_in_order(functional)) > 2 and runs_layer_by_layer(layer)


def _holds_blocks(layer: Any) -> bool:
    if not _is_users_own(layer):
        return False
    inside = [each for each in keras_models.sublayers(layer) if keras_models.sublayers(each)]
    kinds = Counter(type(each) for each in inside if _is_users_own(each))
    return max(kinds.values(), default=0) > 1 or any(is_network(each) or _holds_blocks(each) for each in inside)


def _is_users_own(layer: Any) -> bool:
    return isinstance(layer, keras.layers.Layer) and not keras_models.is_built_in(layer)


class LayerProgram(ModelProgram):
    """The layer calls of a model, and the conversion of inputs around them."""

    cuts_time = True

    def __init__(self, model: Any, is_handed_on: bool = False, time_chunks: TimeChunks = None) -> None:
        """List the calls of ``model``; ``is_handed_on`` says that its results go to code, and to no loss."""
        self._model = model
        sequence = in_time_chunks(list_layer_calls(model), time_chunks)
        self.sequence = handed_on(sequence) if is_handed_on else sequence

    @classmethod
    def of(cls, model: Any, wanted: Wanted) -> Any:
        """Return the program of ``model``, whose recurrent layers may be cut into chunks of time."""
        return cls(model, time_chunks=wanted.time_chunks)

    def enter(self, inputs: Any) -> list[Any]:
        """Return the flat inputs, converted as the model's call does."""
        return keras_models.standardize_inputs(keras_models.inner_functional(self._model), inputs)

    def finish(self, flat: Sequence[Any]) -> Any:
        """Return the outputs in the structure of the model's."""
        return keras_models.pack_outputs(keras_models.inner_functional(self._model), list(flat))

    def seen_through(self, output: Any) -> list[Any]:
        """Return the logits that a Keras loss takes instead of ``output``: it looks through softmax and sigmoid."""
        logits = keras_training.get_logits(output)
        if logits is not None:
            return [logits]
        last = output.op if isinstance(output, tf.Tensor) else None
        return [last.inputs[0]] if last is not None and last.type in ("Softmax", "Sigmoid") else []

    def in_segments(self, plan: Plan, segmenter: Segmenter) -> TrainingCall:
        """Return the call in which layers run in segments."""
        return _LayersInSegments(segmenter.prepare(self.sequence, plan.segments))


class _LayersInSegments:
    """A model's training call, whose layers run in segments."""

    def __init__(self, calls: SegmentedCalls) -> None:
        self._calls = calls

    def __call__(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shared: Any = None) -> Any:
        given = arguments_of(model, args, kwargs)
        functional = keras_models.inner_functional(model)
        flat = keras_models.standardize_inputs(functional, given["inputs"])
        if given["mask"] is not None:
            for tensor, its_mask in zip(flat, keras.tree.flatten(given["mask"]), strict=False):
                if its_mask is not None:
                    keras_calls.set_keras_mask(tensor, its_mask)
        return keras_models.pack_outputs(functional, self._calls(flat, training=given["training"], shared=shared))
