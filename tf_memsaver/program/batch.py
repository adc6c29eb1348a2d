"""Shapes and made-up contents of one training batch: what capture traces with, and measure and verify run on."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_memsaver.compat import keras_training
from tf_memsaver.compat.released import gradients_end_with_graphs, release
from tf_memsaver.errors import InvalidRequestError, UnknownDimensionError, UnsupportedModelError
from tf_memsaver.program.data import Batch, Data, data_of
from tf_memsaver.program.kept_objects import KeptObjects
from tf_memsaver.program.loop import Loop, loop_of
from tf_memsaver.program.signature import (
    check_model,
    is_planned_as_a_step,
    note_batch,
    note_inputs,
    signature_of,
    trained_on,
)


class Told(NamedTuple):
    """What a caller tells of the batches that a model is trained on; ``data`` is None where only their size is told.

    ``model`` is what is trained: the model, or with ``step`` the loop that calls it.
    """

    model: Any
    batch_size: int
    data: Data | None

    @property
    def has_batches(self) -> bool:
        """Whether there are real batches."""
        return self.data is not None and self.data.batches is not None

    def batches(self, model: Any, count: int) -> list[Batch]:
        """Return batches of this size for a model: real ones where there are any, or else made-up ones.

        Samples of a real batch come again where more are asked for.
        """
        if self.data is None or not self.has_batches:
            return [synthetic_batch(model, self.batch_size, seed=number) for number in range(count)]
        return [batch.mapped(self._cut) for batch in self.data.first(count)]

    def _cut(self, tensor: tf.Tensor) -> tf.Tensor:
        assert self.data is not None
        size = self.data.batch_size
        if size is None or not tensor.shape.rank or tensor.shape[0] != size:
            return tensor
        times = -(-self.batch_size // size)
        return tf.concat([tensor] * times, 0)[: self.batch_size] if times > 1 else tensor[: self.batch_size]


def told_of(model: Any, options: Mapping[str, Any]) -> Told:
    """Note what the options ``data``, ``inputs`` and ``step`` tell of a model's batches; return it with their size.

    Raises:
      InvalidRequestError: the batch size is not told, or the data is not what the model takes.
      UnsupportedModelError: no Keras model, or its call cannot be traced with this.
    """
    model = subject_of(model, options)
    check_model(model, needs_call=options["data"] is None)
    given, size = options["data"], options["batch_size"]
    if options.get("inputs") is not None:
        note_inputs(model, options["inputs"])
    if given is None:
        if size is None:
            raise InvalidRequestError(
                "give data=, what fit is given (a dataset, or a batch), or batch_size=: bytes depend on the batch."
            )
        return Told(model, size, None)
    if isinstance(model, Loop):
        # What a loop's step is given is what one of the replicas gets.
        data, replicas = model.data_of(given), 1
    else:
        data, replicas = data_of(given, keras_training.preprocessing_of(model)), keras_training.replicas_of(model)
    if size is None:
        if data.batch_size is None:
            raise InvalidRequestError("data leaves the batch size open: give batch_size=, too.")
        # ``fit`` parts a batch among the replicas.
        size = max(1, data.batch_size // replicas)
    note_batch(model, data.specs)
    return Told(model, size, data)


def subject_of(model: Any, options: Mapping[str, Any]) -> Any:
    """Return what is trained: the model that was given or, with the option ``step``, the loop that calls it or them.

    Raises:
      InvalidRequestError: the step is no function, or there is no data to trace it on.
      UnsupportedModelError: something in it is no Keras model.
    """
    step = options.get("step")
    if step is None:
        return model
    if options["data"] is None:
        raise InvalidRequestError("step= needs data=: the dataset that your loop goes over, or a batch of it.")
    if options.get("inputs") is not None:
        raise InvalidRequestError("leave inputs= out: what the step calls the model with is seen when it is traced.")
    return loop_of(model, step)


def input_specs(model: Any, batch_size: int) -> list[tf.TensorSpec]:
    """Return a fully known spec for each flat input of the model.

    Raises:
      UnknownDimensionError: a dimension other than the batch is unknown.
      InvalidRequestError: an input has a fixed batch size other than ``batch_size``.
    """
    specs = []
    for number, tensor in enumerate(keras.tree.flatten(signature_of(model).inputs)):
        shape, name = tuple(tensor.shape), tensor.name or f"input_{number}"
        if getattr(tensor, "sparse", False) or getattr(tensor, "ragged", False):
            raise InvalidRequestError(
                f"input '{name}' is sparse or ragged: its size depends on the data, so no plan can be made. "
                f"Convert it to a dense tensor before the model."
            )
        if any(dim is None for dim in shape[1:]):
            raise UnknownDimensionError(name, shape)
        if shape and shape[0] not in (None, batch_size):
            raise InvalidRequestError(
                f"input '{name}' has the fixed batch size {shape[0]}, but batch_size={batch_size} was asked for."
            )
        specs.append(tf.TensorSpec((batch_size, *shape[1:]), tensor.dtype, name=name))
    return specs


def batch_specs(model: Any, batch_size: int) -> Batch:
    """Return the specs of one training batch: as the model's data has them, if it was told of, or else made up.

    Made-up targets are like the outputs, but for a sparse categorical loss: that takes integers without the last axis.

    Raises:
      UnknownDimensionError: a dimension other than the batch is unknown.
      InvalidRequestError: an input has a fixed batch size other than ``batch_size``.
    """
    known = trained_on(model)
    if known is not None:
        return known.mapped(functools.partial(_sized, batch_size))
    flat = input_specs(model, batch_size)
    targets = [
        tf.TensorSpec(_with_batch(tensor.shape, batch_size)[:-1], "int32")
        if classes
        else tf.TensorSpec(_with_batch(tensor.shape, batch_size), tensor.dtype)
        for tensor, classes in _outputs_with_classes(model)
    ]
    return Batch(pack_inputs(model, flat), keras.tree.pack_sequence_as(signature_of(model).outputs, targets))


def _sized(batch_size: int, spec: tf.TensorSpec) -> tf.TensorSpec:
    """Return a spec of known dimensions.

    Raises:
      UnknownDimensionError: another dimension than the batch is unknown.
    """
    shape = _with_batch(spec.shape, batch_size) if spec.shape.rank and spec.shape[0] is None else tuple(spec.shape)
    if None in shape:
        raise UnknownDimensionError(spec.name or "of the data", tuple(spec.shape))
    return tf.TensorSpec(shape, spec.dtype, name=spec.name)


def _outputs_with_classes(model: Any) -> list[tuple[Any, int]]:
    """Return the flat outputs, each with the number of its classes if its loss takes the number of one, or 0."""
    signature = signature_of(model)
    outputs = keras.tree.flatten(signature.outputs)
    losses = _flat_losses(model, signature.names, len(outputs))
    pairs = zip(outputs, losses, strict=True)
    return [(tensor, int(tensor.shape[-1] or 0) if _is_sparse(loss) else 0) for tensor, loss in pairs]


def _flat_losses(model: Any, names: Sequence[str], count: int) -> list[Any]:
    if not getattr(model, "compiled", False) or model.loss is None:
        return [None] * count
    loss = model.loss
    if isinstance(loss, dict):
        flat = [loss.get(name) for name in names]
    elif isinstance(loss, (list, tuple)):
        flat = list(keras.tree.flatten(loss))
    else:
        flat = [loss] * count
    return flat if len(flat) == count else [None] * count


def _is_sparse(loss: Any) -> bool:
    if isinstance(loss, str):
        return loss in ("sparse_categorical_crossentropy", "SparseCategoricalCrossentropy")
    sparse_kinds = (keras.losses.SparseCategoricalCrossentropy,)
    return isinstance(loss, sparse_kinds) or loss is keras.losses.sparse_categorical_crossentropy


def pack_inputs(model: Any, flat: list[Any]) -> Any:
    """Return flat input tensors in the structure that the model is called with."""
    return keras.tree.pack_sequence_as(signature_of(model).inputs, flat)


def synthetic_batch(model: Any, batch_size: int, seed: int = 0) -> Batch:
    """Return a batch of random tensors that fits the model's inputs and compiled losses.

    Floats are standard normal, integers and booleans 0 or 1 (valid for every vocabulary), class targets uniform.
    """
    generator = np.random.default_rng(seed)
    specs = batch_specs(model, batch_size)
    pairs = zip(specs.leaves, _classes(model, specs), strict=True)
    return specs.filled([tf.constant(_random(generator, *pair)) for pair in pairs])


def _classes(model: Any, specs: Batch) -> list[int]:
    """Return for each part of a batch the number of classes that it may name, or 0."""
    known = [classes for _, classes in _outputs_with_classes(model)]
    inputs, targets, weights = (len(Batch(part).leaves) for part in specs)
    return [0] * inputs + (known if targets == len(known) else [0] * targets) + [0] * weights


def _random(generator: np.random.Generator, spec: tf.TensorSpec, classes: int) -> Any:
    shape = tuple(spec.shape)
    if spec.dtype == tf.string:
        return np.full(shape, "a", dtype=object)
    if classes:
        return generator.integers(0, classes, shape).astype(spec.dtype.as_numpy_dtype)
    if spec.dtype.is_floating or spec.dtype.is_complex:
        return generator.standard_normal(shape).astype(np.float32).astype(spec.dtype.as_numpy_dtype)
    return generator.integers(0, 2, shape).astype(spec.dtype.as_numpy_dtype)


def mean_squares(tensors: Iterable[Any]) -> list[tf.Tensor]:
    """Return the mean square of every floating tensor: what stands in for a loss."""
    return [tf.reduce_mean(tf.square(tf.cast(t, tf.float32))) for t in tensors if t.dtype.is_floating]


def training_loss(model: Any, given: Batch, outputs: Any, *, stand_in: bool = False) -> tf.Tensor:
    """Return the scalar loss of a training step: the compiled loss, else the mean square of every output.

    With ``stand_in`` the mean square takes the place of a compiled loss, too. Losses added by layers and regularizers
    count in all cases, in the order in which Keras sums them.
    """
    if _has_loss(model) and not stand_in:
        x, y, weight = given
        return model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weight, training=True)
    terms = mean_squares(keras.tree.flatten(outputs))
    terms += [tf.cast(loss, tf.float32) for loss in model.losses]
    if not terms:
        raise no_gradient(model.name)
    return tf.add_n(terms)


def needs_stand_in(model: Any, batch_size: int, given: Batch | None = None) -> bool:
    """Whether the compiled loss cannot be computed on the model's targets, or made-up ones; the log says why.

    The loss is traced by itself, for outputs of the model's shapes and, for a given batch, computed on made-up ones.
    The model is left as it was.
    """
    if is_planned_as_a_step(model) or not _has_loss(model):
        return False
    specs, outputs = batch_specs(model, batch_size), _output_specs(model, batch_size)

    def computed(*flat: Any) -> Any:
        made = keras.tree.pack_sequence_as(signature_of(model).outputs, list(flat[: len(outputs)]))
        return training_loss(model, specs.filled(flat[len(outputs) :]), made)

    keras_training.clear_losses(model)
    try:
        with tf.init_scope(), KeptObjects(*keras_training.compiled_parts(model)), gradients_end_with_graphs():
            flat = [*outputs, *specs.leaves]
            signature = flat if given is None else [_free(spec) for spec in flat]
            concrete = tf.function(computed, autograph=False).get_concrete_function(*signature)
            if given is not None:
                generator = np.random.default_rng(0)
                concrete(*(tf.constant(_random(generator, spec, 0)) for spec in outputs), *given.leaves)
            release(concrete.graph)
    except Exception as error:  # Whatever a loss that somebody wrote may raise.
        logging.warning(
            "model '%s': its loss %s cannot be computed on %s (%s). The mean square of the outputs stands in for it, "
            "and the bytes that the loss itself takes are not counted.%s",
            model.name,
            ", ".join(_loss_names(model)),
            "the targets of data" if trained_on(model) else "made-up targets",
            first_line(error),
            "" if trained_on(model) else " Give data=, what fit is given.",
        )
        return True
    finally:
        keras_training.clear_losses(model)
    return False


def first_line(error: Exception) -> str:
    """Return the reason that an error gives, in one line, with its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, tf.errors.OpError):
        # TensorFlow says where it happened, then what did, then which node it was (``[[{{node …}}]]``).
        node = next((place for place, line in enumerate(lines) if line.startswith("[[{{")), 0)
        lines = lines[max(0, node - 1) :]
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _has_loss(model: Any) -> bool:
    return bool(getattr(model, "compiled", False)) and model.loss is not None


def _loss_names(model: Any) -> list[str]:
    losses = [loss for loss in keras.tree.flatten(model.loss) if loss is not None]
    return [loss if isinstance(loss, str) else f"'{_name_of(loss)}'" for loss in losses]


def _name_of(loss: Any) -> str:
    return str(getattr(loss, "name", None) or getattr(loss, "__name__", None) or type(loss).__name__)


def _free(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec((None, *spec.shape[1:]), spec.dtype) if spec.shape.rank else spec


def _output_specs(model: Any, batch_size: int) -> list[tf.TensorSpec]:
    outputs = keras.tree.flatten(signature_of(model).outputs)
    return [tf.TensorSpec(_with_batch(tensor.shape, batch_size), tensor.dtype) for tensor in outputs]


def _with_batch(shape: Sequence[int | None], batch_size: int) -> tuple[int | None, ...]:
    return tuple(batch_size if place == 0 else dim for place, dim in enumerate(shape))


def no_gradient(name: str) -> UnsupportedModelError:
    """Return the error for a model whose loss does not depend on its weights."""
    return UnsupportedModelError(
        f"no weight of '{name}' gets a gradient: what it returns does not depend on them in a way that can be "
        f"differentiated (integers, such as those of argmax, cannot). Give it an output of floating-point numbers, "
        f"such as the logits."
    )
