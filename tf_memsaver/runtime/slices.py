"""Sparse gradients (``tf.IndexedSlices``) as their values, which is what is named, gated and passed on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices"
Gradients: TypeAlias = "list[Gradient | None]"


def values_of(gradients: Sequence[Gradient | None]) -> list[tf.Tensor | None]:
    """Return the gradients with the values of sparse ones in their places."""
    return [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients]


def with_values(gradients: Sequence[Gradient | None], values: Sequence[tf.Tensor | None]) -> Gradients:
    """Return what ``values_of`` was made of, with other values of the same shapes."""
    return [
        tf.IndexedSlices(new, old.indices, old.dense_shape) if isinstance(old, tf.IndexedSlices) else new
        for old, new in zip(gradients, values, strict=True)
    ]


def changed(gradients: Sequence[Gradient | None], change: Callable[[list[tf.Tensor]], Sequence[Any]]) -> Gradients:
    """Return the gradients with what ``change`` makes of the values of those that are not None."""
    values = values_of(gradients)
    made = iter(change([each for each in values if each is not None]))
    return with_values(gradients, [None if each is None else next(made) for each in values])


def flattened(gradients: Sequence[Gradient | None]) -> list[tf.Tensor | None]:
    """Return three places for each gradient: its values, and the indices and the shape of a sparse one."""
    flat: list[tf.Tensor | None] = []
    for each in gradients:
        if isinstance(each, tf.IndexedSlices):
            flat += [each.values, each.indices, each.dense_shape]
        else:
            flat += [each, None, None]
    return flat


def unflattened(flat: Sequence[tf.Tensor | None]) -> Gradients:
    """Return what ``flattened`` was made of."""
    triples = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    return [
        values if indices is None else tf.IndexedSlices(values, indices, shape) for values, indices, shape in triples
    ]
