"""Shapes and made-up contents of one training batch: what capture traces with, and measure and verify run on."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_memsaver.errors import InvalidRequestError, UnknownDimensionError
from tf_memsaver.program.data import Batch, of_size
from tf_memsaver.program.signature import is_dense, signature_of, trained_on


def input_specs(model: Any, batch_size: int) -> list[tf.TensorSpec]:
    """Return a fully known spec for each flat input of the model.

    Raises:
      UnknownDimensionError: a dimension other than the batch is unknown.
      InvalidRequestError: an input has a fixed batch size other than ``batch_size``.
    """
    specs = []
    for number, tensor in enumerate(keras.tree.flatten(signature_of(model).inputs)):
        shape, name = tuple(tensor.shape), tensor.name or f"input_{number}"
        if not is_dense(tensor):
            raise InvalidRequestError(
                f"input '{name}' is sparse or ragged: its size depends on the data, so no plan can be made. "
                f"Convert it to a dense tensor before the model."
            )
        if any(dim is None for dim in shape[1:]):
            raise UnknownDimensionError(name, shape)
        if shape and shape[0] not in (None, batch_size):
            raise InvalidRequestError(
                f"input '{name}' has the fixed batch size {shape[0]}, which a layer needs, but batch_size={batch_size} "
                f"was given. Give batch_size={shape[0]}, or make the model for batches of {batch_size}."
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
        tf.TensorSpec(with_batch(tensor.shape, batch_size)[:-1], "int32")
        if classes
        else tf.TensorSpec(with_batch(tensor.shape, batch_size), tensor.dtype)
        for tensor, classes in _outputs_with_classes(model)
    ]
    return Batch(pack_inputs(model, flat), keras.tree.pack_sequence_as(signature_of(model).outputs, targets))


def _sized(batch_size: int, spec: tf.TensorSpec) -> tf.TensorSpec:
    """Return a spec of known dimensions.

    Raises:
      UnknownDimensionError: another dimension than the batch is unknown.
    """
    sized = of_size(batch_size, spec)
    if not sized.shape.is_fully_defined():
        raise UnknownDimensionError(spec.name or "of the data", tuple(spec.shape))
    return sized


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
    return specs.filled([tf.constant(made_up(generator, *pair)) for pair in pairs])


def _classes(model: Any, specs: Batch) -> list[int]:
    """Return for each part of a batch the number of classes that it may name, or 0."""
    known = [classes for _, classes in _outputs_with_classes(model)]
    inputs, targets, weights = (len(Batch(part).leaves) for part in specs)
    return [0] * inputs + (known if targets == len(known) else [0] * targets) + [0] * weights


def made_up(generator: np.random.Generator, spec: tf.TensorSpec, classes: int) -> Any:
    """Return random numbers for one part of a batch; ``classes`` is how many it may name, or 0."""
    shape = tuple(spec.shape)
    if spec.dtype == tf.string:
        return np.full(shape, "a", dtype=object)
    if classes:
        return generator.integers(0, classes, shape).astype(spec.dtype.as_numpy_dtype)
    if spec.dtype.is_floating or spec.dtype.is_complex:
        return generator.standard_normal(shape).astype(np.float32).astype(spec.dtype.as_numpy_dtype)
    return generator.integers(0, 2, shape).astype(spec.dtype.as_numpy_dtype)


def with_batch(shape: Sequence[int | None], batch_size: int) -> tuple[int | None, ...]:
    """Return a shape with its first dimension known."""
    return tuple(batch_size if place == 0 else dim for place, dim in enumerate(shape))
