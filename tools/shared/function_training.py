"""Train a function of tensors for a few steps and keep every number, with TensorFlow alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tools.shared.records import Record, array_of


def free_spec(tensor: Any) -> tf.TensorSpec:
    """Return the shape and dtype of a tensor, with any number of examples."""
    return tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype)


def train_function(
    function: Callable[..., Any],
    variables: Sequence[Any],
    arguments: Sequence[Any],
    *,
    steps: int = 2,
    free_batch: bool = True,
    begin_step: Callable[[], None] = lambda: None,
) -> Record:
    """Return losses, results, gradients and variables of some steps in a tf.function; the variables are put back.

    The loss is the sum of the mean squares of all floating results.
    """
    weights = [v for v in variables if v.trainable]

    @tf.function(input_signature=[free_spec(t) for t in arguments] if free_batch else None, autograph=False)
    def step(*batch: Any) -> Any:
        with tf.GradientTape() as tape:
            results = [t for t in tf.nest.flatten(function(*batch)) if t is not None and t.dtype.is_floating]
            loss = tf.add_n([tf.reduce_mean(tf.square(tf.cast(t, tf.float32))) for t in results])
        return loss, results, tape.gradient(loss, weights)

    before = [v.numpy() for v in variables]
    record: Record = {}
    for number in range(steps):
        begin_step()
        loss, results, gradients = step(*arguments)
        record["loss", number] = array_of(loss)
        record |= {("output", place, number): array_of(result) for place, result in enumerate(results)}
        for place, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            record["gradient", place, number] = array_of(gradient)
            if gradient is not None:
                weight.assign_sub(0.1 * tf.cast(tf.convert_to_tensor(gradient), weight.dtype))
        record |= {("variable", place, number): array_of(v) for place, v in enumerate(variables)}
        del loss, results, gradients
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)
    return record
