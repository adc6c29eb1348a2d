"""What a model is called with and what it returns: what is known of a Functional model, and must be told of others."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_memsaver.compat import keras_calls, keras_models, keras_training
from tf_memsaver.compat.graphs import FuncGraph
from tf_memsaver.compat.messages import first_line
from tf_memsaver.compat.released import gradients_end_with_graphs, release
from tf_memsaver.errors import InvalidRequestError, UnsupportedModelError
from tf_memsaver.program.data import Batch, of_size, with_free_batch
from tf_memsaver.program.model_check import check_model
from tf_memsaver.program.train_step import has_own_step, has_own_train_step
from tf_memsaver.units import shown


class Signature(NamedTuple):
    """Structures of tensors or specs, whose first dimension is the batch; ``names`` are those of the outputs.

    The batch size is known where the model can be called with no other one.
    """

    inputs: Any
    outputs: Any
    names: Sequence[str]


class Given(NamedTuple):
    """How a model is called: with tensors of these specs, and constants beside them.

    ``inputs`` is the first argument; ``tensors`` are others, by name, in which there are tensors and None alone.
    """

    inputs: Any
    arguments: Mapping[str, Any]
    tensors: Mapping[str, Any] = {}

    @property
    def specs(self) -> list[tf.TensorSpec]:
        """The specs of all tensors, flat."""
        return tensors_in((self.inputs, self.tensors))

    def mapped(self, function: Callable[[tf.TensorSpec], Any]) -> Given:
        """Return this with a function's results in the place of the specs."""
        inputs, tensors = keras.tree.map_structure(function, (self.inputs, self.tensors), none_is_leaf=False)
        return self._replace(inputs=inputs, tensors=tensors)

    def difference(self, inputs: Any, tensors: Mapping[str, Any]) -> str:
        """Return in what a call with other tensors is another kind of call, or an empty string."""
        planned = keras.tree.flatten_with_path((self.inputs, self.tensors))
        made = keras.tree.flatten_with_path((inputs, tensors))
        if [(path, leaf is None) for path, leaf in planned] != [(path, leaf is None) for path, leaf in made]:
            return "with tensors in another structure"
        for (_, spec), (_, tensor) in zip(planned, made, strict=True):
            if spec is not None and _kind(spec.dtype) != _kind(tensor.dtype):
                return f"with {tf.as_dtype(tensor.dtype).name} in the place of {spec.dtype.name}"
            if keras_calls.get_keras_mask(tensor) is not None:
                return "with a tensor that has a Keras mask"
        return ""

    def called(self, model: Any, flat: Sequence[Any]) -> Any:
        """Return what a model makes of flat tensors."""
        rest = iter(flat)
        given = self.mapped(lambda _: next(rest))
        return model(given.inputs, **given.tensors, **self.arguments)


def _kind(dtype: Any) -> tuple[bool, bool]:
    """Return what tells numbers of floating point, whole numbers and truth values apart: Keras casts the first."""
    dtype = tf.as_dtype(dtype)
    return dtype.is_floating, dtype.is_bool


def tensors_in(structure: Any) -> list[Any]:
    """Return the leaves of a structure that are not None."""
    return [leaf for leaf in keras.tree.flatten(structure) if leaf is not None]


class _TrainedOn(NamedTuple):
    """The specs of a batch, with a free first dimension; ``size`` is the batch size if all batches have it."""

    specs: Batch
    size: int | None


_NOTED: weakref.WeakKeyDictionary[Any, Signature] = weakref.WeakKeyDictionary()
_TRAINED_ON: weakref.WeakKeyDictionary[Any, _TrainedOn] = weakref.WeakKeyDictionary()


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
        elif _knows_batch(functional.input) and all(map(is_dense, keras.tree.flatten(functional.input))):
            own = keras.tree.map_structure(_spec, _single(functional.input))
            given = callable_as(model, Given(own, usual_arguments(model)))
            _NOTED[model] = _of_graph(functional)._replace(inputs=given.inputs)
    if model in _NOTED:
        return _NOTED[model]
    if functional is not None:
        return _of_graph(functional)
    raise UnsupportedModelError(
        f"model '{model.name}' ({type(model).__name__}) has its own call(), so its inputs are not known. Give data= "
        "(your training data, as for fit: a dataset, a batch or specs), or give optimize its inputs, such as "
        "inputs=tf.TensorSpec((None, 224, 224, 3))."
    )


def knows_inputs(model: Any) -> bool:
    """Whether it is known what a model is called with, by its graph or since that was noted."""
    return model in _NOTED or _graph_of(model) is not None


def note_inputs(model: Any, inputs: Any) -> None:
    """Take down what a model is called with: a structure of specs, or a batch. A model of its own ``call`` is built.

    A Functional model knows its inputs, but for dimensions that its ``keras.Input`` left open, which are told here.

    Raises:
      InvalidRequestError: something in it has no shape and dtype, does not fit the model, or is known.
      UnsupportedModelError: no Keras model, or its call cannot be traced with this.
    """
    check_model(model)
    specs = keras.tree.map_structure(_spec, inputs)
    functional = _graph_of(model)
    if functional is not None:
        specs = _completed(model, _single(functional.input), specs)
    (specs, *_), outputs = _callable_with(model, Given(specs, usual_arguments(model)))
    numbered = [f"output_{number}" for number in range(len(keras.tree.flatten(outputs)))]
    names = numbered if functional is None else functional.output_names
    _NOTED[model] = Signature(specs, outputs, _output_names(outputs, names))


def callable_as(model: Any, given: Given) -> Given:
    """Return how a model's call can be traced: as is given with a free batch or, if that fails, with the batch given.

    Code that reads the batch size in Python runs where all batches of the data have one size, and there alone.

    Raises:
      UnsupportedModelError: it can be traced with neither.
    """
    return _callable_with(model, given)[0]


def _callable_with(model: Any, given: Given) -> tuple[Given, Any]:
    """Return what ``callable_as`` does, and the specs of what the call returns then."""
    size = given.specs[0].shape[:1]

    # Of other arguments, those for the samples of a batch have as many rows as the first one.
    like_first = given.mapped(lambda spec: _free(spec) if spec.shape[:1] == size else spec)
    free = like_first._replace(inputs=given.mapped(_free).inputs)
    if not any(getattr(layer, "stateful", False) for layer in keras_models.all_layers(model)):
        try:
            return free, _outputs_for(model, free)
        except UnsupportedModelError as error:
            if free == given:
                raise UnsupportedModelError(f"{error}{_advice(error)}") from error
    return given, _outputs_for(model, given)


def _advice(error: UnsupportedModelError) -> str:
    """Return what to do where a call cannot be traced since the batch size is open, or an empty string."""
    if "NoneType" not in str(error):
        return ""
    return (
        ". If it computes with the batch size in Python, give data whose batches all have one size, such as a dataset "
        "made with batch(..., drop_remainder=True)"
    )


def _outputs_for(model: Any, given: Given) -> Any:
    """Return the specs of what such a call of a model returns."""
    found: list[Any] = []

    def traced(*flat: Any) -> Any:
        outputs = given.called(model, flat)
        found.append(keras.tree.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), outputs))
        return keras.tree.flatten(outputs)

    release(trace_call(model, traced, given.specs).graph)
    return found[-1]


def has_one_batch_size(model: Any) -> bool:
    """Whether a model can be called with batches of one size alone.

    Raises:
      UnsupportedModelError: its inputs are not known.
    """
    return _knows_batch(signature_of(model).inputs)


def note_batch(model: Any, specs: Batch, size: int | None = None) -> None:
    """Take down what a model is trained on: the specs of a batch, as ``fit`` is given it (see ``data.Data``).

    ``size`` is the batch size if all batches are known to have it, so that code may read it in Python.

    Raises:
      InvalidRequestError: the model does not take such inputs.
      UnsupportedModelError: no Keras model, or its call cannot be traced with this.
    """
    check_model(model, needs_call=not has_own_train_step(model))
    functional, trained_on = _graph_of(model), _TrainedOn(specs, size)
    if has_own_train_step(model):
        # What its networks are called with is heard in the step.
        pass
    elif functional is None:
        note_inputs(model, _as_traced(trained_on).x)
    else:
        taken = _taken_by(model, functional, specs.x)
        if not _are_known(keras.tree.flatten(functional.input)):
            note_inputs(model, taken)
    _TRAINED_ON[model] = trained_on


def trained_on(model: Any) -> Batch | None:
    """Return the specs of the batches that a model is trained on, with a free batch size, if they were noted."""
    return _TRAINED_ON[model].specs if model in _TRAINED_ON else None


def traced_for(model: Any) -> Batch | None:
    """Return the specs that ``fit`` traces a model's step for, if they were noted."""
    return _as_traced(_TRAINED_ON[model]) if model in _TRAINED_ON else None


def _as_traced(noted: _TrainedOn) -> Batch:
    return noted.specs if noted.size is None else noted.specs.mapped(functools.partial(of_size, noted.size))


def is_planned_as_a_step(model: Any) -> bool:
    """Whether a plan is for a model's whole step, since that or its ``compute_loss`` is its own, not for its call."""
    return has_own_step(keras_models.own_class(model)) and trained_on(model) is not None


def _of_graph(functional: Any) -> Signature:
    outputs = _single(functional.output)
    return Signature(_single(functional.input), outputs, _output_names(outputs, functional.output_names))


def _knows_batch(inputs: Any) -> bool:
    """Whether a batch size is among the shapes of inputs: that of a ``keras.Input``, or of a first call."""
    return any(tensor.shape[:1] not in ((), (None,)) for tensor in map(_spec, keras.tree.flatten(inputs)))


def is_dense(tensor: Any) -> bool:
    """Whether an input that ``keras.Input`` made, or the spec of one, is neither sparse nor ragged."""
    return not getattr(tensor, "sparse", False) and not getattr(tensor, "ragged", False)


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
    """Return the specs that ``note_inputs`` took as plain JSON data, or None if there were none, or no need of them."""
    functional = _graph_of(model)
    if model not in _NOTED or (functional is not None and _are_known(keras.tree.flatten(functional.input))):
        return None
    return _to_json(_NOTED[model].inputs)


def note_inputs_of_json(model: Any, data: Any) -> None:
    """Note what ``inputs_to_json`` returned for a model, unless it has been noted."""
    if data is not None and model not in _NOTED:
        note_inputs(model, _of_json(data))


def trained_on_to_json(model: Any) -> Any | None:
    """Return what ``note_batch`` took as plain JSON data, or None if it took nothing."""
    noted = _TRAINED_ON.get(model)
    return None if noted is None else [*batch_to_json(noted.specs), noted.size]


def note_batch_of_json(model: Any, data: Any) -> None:
    """Note what ``trained_on_to_json`` returned for a model, unless it has been noted."""
    if data is not None and model not in _TRAINED_ON:
        # Files of version 0.1 have no batch size at the end.
        note_batch(model, batch_of_json(data[:3]), *data[3:])


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


def _spec(given: Any) -> tf.TensorSpec:
    shape, dtype = getattr(given, "shape", None), getattr(given, "dtype", None)
    if shape is None or dtype is None or tf.TensorShape(shape).rank is None:
        raise InvalidRequestError(
            f"inputs: expected specs such as tf.TensorSpec((None, 8)), or a batch of arrays, got {shown(given)}"
        )
    return tf.TensorSpec(shape, dtype, getattr(given, "name", None))


def _free(spec: tf.TensorSpec) -> tf.TensorSpec:
    """Return the spec of an input with a free batch size; a network in somebody's own step may be given a number."""
    return tf.TensorSpec(with_free_batch(spec).shape, spec.dtype, spec.name)
