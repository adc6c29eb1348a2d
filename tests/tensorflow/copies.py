"""Copies of traced functions, made operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tf_memsaver.tfgraph.emission import Template

Function = Callable[..., Any]


def traced(function: Function, *tensors: Any, free: bool = False) -> Any:
    """A concrete function of arguments like these tensors; with ``free``, of any first size."""
    arrays = [np.asarray(tensor) for tensor in tensors]
    specs = [tf.TensorSpec((None, *a.shape[1:]) if free else a.shape, a.dtype) for a in arrays]
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def copy_of(concrete: Any, **emitted: Any) -> Function:
    """A function that emits a copy of each operation of a traced one, under its name."""
    templates = [
        (Template(operation), [id(t) for t in operation.inputs], [id(t) for t in operation.outputs])
        for operation in concrete.graph.get_operations()
        if operation.type != "Placeholder"
    ]
    arguments, results = ([id(t) for t in tensors] for tensors in (concrete.graph.inputs, concrete.graph.outputs))

    def copy(*tensors: Any) -> list[Any]:
        made = dict(zip(arguments, tensors, strict=True))
        for template, inputs, outputs in templates:
            copies = template.emit([made[key] for key in inputs], template.name, **emitted)
            made.update(zip(outputs, copies, strict=True))
        return [made[key] for key in results]

    return copy


def with_gradients(function: Function) -> Function:
    """A function that returns what another one does, and the gradients of the sum of squares of its float results."""

    def step(*tensors: Any) -> Any:
        floats = [tensor for tensor in tensors if tensor.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(floats)
            results = tf.nest.flatten(function(*tensors))
            loss = tf.add_n([tf.reduce_sum(t**2) for t in results if t.dtype.is_floating] or [tf.constant(0.0)])
        return results, [g for g in tape.gradient(loss, floats) if g is not None]

    return step
