"""What a model is called with and what it returns: what is known of a Functional model, and must be told of others."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_memsaver.compat import keras_calls, keras_models, keras_training
from tf_memsaver.compat.graphs import FuncGraph
from tf_memsaver.compat.messages import first_line
from tf_memsaver.compat.released import gradients_end_with_graphs, release
from tf_memsaver.errors import InvalidRequestError, UnsupportedModelError
from tf_memsaver.program.data import Batch
from tf_memsaver.program.model_check import check_model
from tf_memsaver.program.train_step import has_own_step, has_own_train_step
from tf_memsaver.units import shown


class Signature(NamedTuple):
    """Structures of tensors or specs, whose first dimension is the batch; ``names`` are those of the outputs."""

    inputs: Any
    outputs: Any
    names: Sequence[str]


class Given(NamedTuple):
    """How a model is called: with tensors of these specs, whose first dimension is free, and constants beside them."""

    inputs: Any
    arguments: Mapping[str, Any]


_NOTED: weakref.WeakKeyDictionary[Any, Signature] = weakref.WeakKeyDictionary()
_TRAINED_ON: weakref.WeakKeyDictionary[Any, Batch] = weakref.WeakKeyDictionary()


def signature_of(model: Any) -> Signature:
    """Return the signature of a Functional or Sequential model, or of one whose inputs were noted.

    Where a Functional model leaves the length of a text open, its own preprocessor (of a KerasHub task) tells it.

    Raises:
      UnsupportedModelError: it is no such model.
    """
    check_model(model)
    functional = _graph_of(model)
    if model not in _NOTED and functional is not None:
        prepared = _prepared_inputs(model, _single(functional.input))
        if prepared is not None:
            note_inputs(model, prepared)
    if model in _NOTED:
        return _NOTED[model]
    if functional is not None:
        outputs = _single(functional.output)
        return Signature(_single(functional.input), outputs, _output_names(outputs, functional.output_names))
    raise UnsupportedModelError(
        f"model '{model.name}' ({type(model).__name__}) has its own call(), so its inputs are not known. Give data= "
        "(your training data, as for fit: a dataset, a batch or specs), or give optimize its inputs, such as "
        "inputs=tf.TensorSpec((None, 224, 224, 3))."
    )


def note_inputs(model: Any, inputs: Any) -> None:
    """Take down what a model is called with: a structure of specs, or a batch. A model of its own ``call`` is built.

    A Functional model knows its inputs, but for dimensions that its ``keras.Input`` left open, which are told here.

    Raises:
      InvalidRequestError: something in it has no shape and dtype, does not fit the model, or is known.
      UnsupportedModelError: no Keras model, or its call cannot be traced with this.
    """
    check_model(model)
    specs = keras.tree.map_structure(_free, inputs)
    functional = _graph_of(model)
    if functional is not None:
        specs = _completed(model, _single(functional.input), specs)
    found: list[Any] = []

    def traced(*flat: Any) -> Any:
        outputs = model(keras.tree.pack_sequence_as(specs, flat), **usual_arguments(model))
        found.append(keras.tree.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), outputs))
        return keras.tree.flatten(outputs)

    release(trace_call(model, traced, keras.tree.flatten(specs)).graph)
    outputs = found[-1]
    numbered = [f"output_{number}" for number in range(len(keras.tree.flatten(outputs)))]
    names = numbered if functional is None else functional.output_names
    _NOTED[model] = Signature(specs, outputs, _output_names(outputs, names))


def note_batch(model: Any, specs: Batch) -> None:
    """Take down what a model is trained on: the specs of a batch, as ``fit`` is given it (see ``data.Data``).

    Raises:
      InvalidRequestError: the model does not take such inputs.
      UnsupportedModelError: no Keras model, or its call cannot be traced with this.
    """
    check_model(model, needs_call=not has_own_train_step(model))
    functional = _graph_of(model)
    if has_own_train_step(model):
        # What its networks are called with is heard in the step.
        pass
    elif functional is None:
        note_inputs(model, specs.x)
    else:
        taken = _taken_by(model, functional, specs.x)
        if not _are_known(keras.tree.flatten(functional.input)):
            note_inputs(model, taken)
    _TRAINED_ON[model] = specs


def trained_on(model: Any) -> Batch | None:
    """Return the specs of the batches that a model is trained on, if they were noted."""
    return _TRAINED_ON.get(model)


def is_planned_as_a_step(model: Any) -> bool:
    """Whether a plan is for a model's whole step, since that or its ``compute_loss`` is its own, not for its call."""
    return has_own_step(keras_models.own_class(model)) and trained_on(model) is not None


def _taken_by(model: Any, functional: Any, given: Any) -> Any:
    """Return the specs of a Functional model's own inputs for those of a batch, which it may name, cast and reshape."""
    graph = FuncGraph("inputs")
    try:
        with graph.as_default():
            tensors = keras.tree.map_structure(lambda spec: tf.compat.v1.placeholder(spec.dtype, spec.shape), given)
            flat = keras_models.standardize_inputs(functional, tensors)
            own = _single(functional.input)
            for mine, tensor in zip(keras.tree.flatten(own), flat, strict=True):
                tf.TensorShape(mine.shape).assert_is_compatible_with(tensor.shape)
            return keras.tree.pack_sequence_as(own, [tf.TensorSpec(t.shape, t.dtype) for t in flat])
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"data: model '{model.name}' takes {_shapes(_single(functional.input))}, but a batch has {_shapes(given)}."
        ) from error
    finally:
        release(graph)


def _shapes(structure: Any) -> Any:
    return keras.tree.map_structure(lambda each: tuple(each.shape), structure)


def _output_names(outputs: Any, names: Sequence[str]) -> list[str]:
    return sorted(outputs) if isinstance(outputs, dict) else list(names)


def _completed(model: Any, known: Any, given: Any) -> Any:
    """Return the inputs that a Functional model knows with the dimensions that are given where they were open."""
    tensors = keras.tree.flatten(known)
    if _are_known(tensors):
        raise InvalidRequestError(f"model '{model.name}' knows its inputs. Leave inputs= out.")
    try:
        keras.tree.assert_same_structure(known, given)
        pairs = list(zip(tensors, keras.tree.flatten(given), strict=True))
        specs = [
            tf.TensorSpec(spec.shape.merge_with(tensor.shape), tensor.dtype, tensor.name) for tensor, spec in pairs
        ]
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"inputs: model '{model.name}' takes {_shapes(known)}, got {_shapes(given)}"
        ) from error
    return keras.tree.pack_sequence_as(known, specs)


def _are_known(tensors: Sequence[Any]) -> bool:
    """Whether all dimensions but the first are known."""
    return all(dim is not None for tensor in tensors for dim in tensor.shape[1:])


def _prepared_inputs(model: Any, known: Any) -> Any | None:
    """Return the inputs with open lengths as the model's preprocessor makes them, or None if it does not say."""
    preprocessor = getattr(model, "preprocessor", None)
    tensors = keras.tree.flatten(known)
    if preprocessor is None or _are_known(tensors):
        return None
    specs = []
    for tensor in tensors:
        part = next((part for part in ("encoder_", "decoder_") if tensor.name.startswith(part)), "")
        length = getattr(preprocessor, f"{part}sequence_length", None)
        if not isinstance(length, int) or None in tuple(tensor.shape[2:]):
            return None
        shape = (
            tensor.shape if len(tensor.shape) < 2 or tensor.shape[1] is not None else (None, length, *tensor.shape[2:])
        )
        specs.append(tf.TensorSpec(shape, tensor.dtype))
    return keras.tree.pack_sequence_as(known, specs)


def share_signature(source: Any, target: Any) -> None:
    """Let a model over the same layers have the same signature."""
    if source in _NOTED:
        _NOTED[target] = _NOTED[source]
    if source in _TRAINED_ON:
        _TRAINED_ON[target] = _TRAINED_ON[source]


def inputs_to_json(model: Any) -> Any | None:
    """Return the specs that ``note_inputs`` took as plain JSON data, or None if there were none."""
    return _to_json(_NOTED[model].inputs) if model in _NOTED else None


def note_inputs_of_json(model: Any, data: Any) -> None:
    """Note what ``inputs_to_json`` returned for a model, unless it has been noted."""
    if data is not None and model not in _NOTED:
        note_inputs(model, _of_json(data))


def note_batch_of_json(model: Any, data: Any) -> None:
    """Note what ``batch_to_json`` returned of what a model is trained on, unless it has been noted."""
    if data is not None and model not in _TRAINED_ON:
        note_batch(model, batch_of_json(data))


def batch_to_json(specs: Batch) -> Any:
    """Return the specs of a batch as plain JSON data."""
    return list(map(_to_json, specs))


def batch_of_json(data: Any) -> Batch:
    """Return the specs that ``batch_to_json`` described."""
    return Batch(*map(_of_json, data))


def _to_json(specs: Any) -> Any:
    return keras.saving.serialize_keras_object(keras.tree.map_structure(_text_of_spec, specs))


def _of_json(data: Any) -> Any:
    return keras.tree.map_structure(_spec_of_text, keras.saving.deserialize_keras_object(data))


def _text_of_spec(spec: tf.TensorSpec | None) -> str | None:
    return None if spec is None else json.dumps([spec.dtype.name, spec.shape.as_list()])


def _spec_of_text(text: str | None) -> tf.TensorSpec | None:
    if text is None:
        return None
    dtype, shape = json.loads(text)
    return tf.TensorSpec(shape, dtype)


def usual_arguments(model: Any) -> dict[str, Any]:
    """Return what ``fit`` calls a model with, beside its inputs: a call that takes no ``training`` is given none."""
    return {"training": True} if keras_training.takes_training(model) else {}


def usual_call(model: Any) -> Given:
    """Return how ``fit`` calls a model.

    Raises:
      UnsupportedModelError: its inputs are not known.
    """
    return Given(signature_of(model).inputs, usual_arguments(model))


def trace_call(model: Any, function: Any, specs: Sequence[tf.TensorSpec]) -> Any:
    """Return the concrete function of a Python function that calls ``model``, which is left as it was.

    Raises:
      UnsupportedModelError: it cannot be traced.
    """
    keras_training.clear_losses(model)
    try:
        left_alone = keras_models.python_values_put_back(model)
        with tf.init_scope(), keras_calls.outside_of_name_scopes(), left_alone, gradients_end_with_graphs():
            return tf.function(function, autograph=False).get_concrete_function(*specs)
    except (TypeError, ValueError, tf.errors.OperatorNotAllowedInGraphError) as error:
        raise UnsupportedModelError(
            f"the call of model '{model.name}' cannot be traced: {first_line(error)}"
        ) from error
    finally:
        keras_training.clear_losses(model)


def _graph_of(model: Any) -> Any | None:
    """Return the Functional graph that says what a model is called with, even where its own ``call`` takes over."""
    return model if isinstance(model, keras_models.Functional) else keras_models.inner_functional(model)


def _single(structure: Any) -> Any:
    """Return the only element of a list: a Functional model is called with that, and returns it."""
    return structure[0] if isinstance(structure, (list, tuple)) and len(structure) == 1 else structure


def _free(given: Any) -> tf.TensorSpec:
    shape, dtype = getattr(given, "shape", None), getattr(given, "dtype", None)
    if shape is None or dtype is None or tf.TensorShape(shape).rank is None:
        raise InvalidRequestError(
            f"inputs: expected specs such as tf.TensorSpec((None, 8)), or a batch of arrays, got {shown(given)}"
        )
    # A network in a step of somebody's own may be given a number beside its batch.
    return tf.TensorSpec((None, *tuple(shape)[1:]) if tf.TensorShape(shape).rank else (), dtype)
