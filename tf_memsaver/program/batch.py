"""Shapes and made-up contents of one training batch: what capture traces with, and measure and verify run on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_memsaver.compat import keras_training
from tf_memsaver.compat.released import gradients_end_with_graphs, release
from tf_memsaver.errors import InvalidRequestError, UnknownDimensionError, UnsupportedModelError
from tf_memsaver.program.kept_objects import KeptObjects
from tf_memsaver.program.signature import signature_of


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


def target_specs(model: Any, batch_size: int) -> list[tuple[tf.TensorSpec, int]]:
    """Return, for each flat output, the spec of its target and its number of classes (0 for a dense target).

    A sparse categorical loss takes integer classes without the last axis; every other loss a target like the output.
    """
    signature = signature_of(model)
    outputs = keras.tree.flatten(signature.outputs)
    losses = _flat_losses(model, signature.names, len(outputs))
    specs = []
    for tensor, loss in zip(outputs, losses, strict=True):
        shape = _with_batch(tensor.shape, batch_size)
        sparse = _is_sparse(loss)
        spec_shape = shape[:-1] if sparse else shape
        dtype = "int32" if sparse else tensor.dtype
        specs.append((tf.TensorSpec(spec_shape, dtype), int(shape[-1] or 0) if sparse else 0))
    return specs


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


def pack_targets(model: Any, flat: list[Any]) -> Any:
    """Return flat targets in the structure of the model's outputs."""
    return keras.tree.pack_sequence_as(signature_of(model).outputs, flat)


def synthetic_batch(model: Any, batch_size: int, seed: int = 0) -> tuple[Any, Any]:
    """Return ``(x, y)``, a batch of random tensors that fits the model's inputs and compiled losses.

    Floats are standard normal, integers and booleans 0 or 1 (valid for every vocabulary), class targets uniform.
    """
    generator = np.random.default_rng(seed)
    inputs = [tf.constant(_random(generator, spec, 0)) for spec in input_specs(model, batch_size)]
    targets = [tf.constant(_random(generator, spec, classes)) for spec, classes in target_specs(model, batch_size)]
    return pack_inputs(model, inputs), pack_targets(model, targets)


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


def training_loss(model: Any, x: Any, y: Any, outputs: Any, *, stand_in: bool = False) -> tf.Tensor:
    """Return the scalar loss of a training step: the compiled loss, else the mean square of every output.

    With ``stand_in`` the mean square takes the place of a compiled loss, too. Losses added by layers and regularizers
    count in all cases, in the order in which Keras sums them.
    """
    if _has_loss(model) and not stand_in:
        return model.compute_loss(x=x, y=y, y_pred=outputs, training=True)
    terms = mean_squares(keras.tree.flatten(outputs))
    terms += [tf.cast(loss, tf.float32) for loss in model.losses]
    if not terms:
        raise no_gradient(model.name)
    return tf.add_n(terms)


def needs_stand_in(model: Any, batch_size: int, *, run: bool = False) -> bool:
    """Whether the compiled loss cannot be computed on made-up targets; the log says why.

    The loss is traced by itself, for outputs of the model's shapes and, with ``run``, computed on made-up ones. The
    model is left as it was.
    """
    if not _has_loss(model):
        return False
    targets = target_specs(model, batch_size)
    parts = [input_specs(model, batch_size), [spec for spec, _ in targets], _output_specs(model, batch_size)]
    packs = (pack_inputs, pack_targets, pack_targets)

    def computed(*given: Any) -> Any:
        x, y, outputs = (pack(model, list(part)) for pack, part in zip(packs, given, strict=True))
        return training_loss(model, x, y, outputs)

    keras_training.clear_losses(model)
    try:
        with tf.init_scope(), KeptObjects(*keras_training.compiled_parts(model)), gradients_end_with_graphs():
            signature = [[_free(spec) if run else spec for spec in part] for part in parts]
            concrete = tf.function(computed, autograph=False, input_signature=signature).get_concrete_function()
            if run:
                generator = np.random.default_rng(0)
                classes = [[0] * len(parts[0]), [count for _, count in targets], [0] * len(parts[2])]
                pairs = (zip(*each, strict=True) for each in zip(parts, classes, strict=True))
                concrete(*(tf.constant(_random(generator, *pair)) for part in pairs for pair in part))
            release(concrete.graph)
    except Exception as error:  # Whatever a loss that somebody wrote may raise.
        logging.warning(
            "model '%s': its loss %s cannot be computed on made-up targets (%s). The mean square of the outputs stands "
            "in for it, and the bytes that the loss itself takes are not counted.",
            model.name,
            ", ".join(_loss_names(model)),
            first_line(error),
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
    return tf.TensorSpec((None, *spec.shape[1:]), spec.dtype)


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
