"""The graph of a training step, and all that decides what its operations compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tools.shared.training import batch_for


def described(graph: Any) -> list[Any]:
    """Everything of a graph's operations that decides what is computed."""
    found = []
    for each in graph.get_operations():
        attributes = {k: str(v) for k, v in each.node_def.attr.items() if k != "_gradient_op_type"}
        controls = sorted(before.name for before in each.control_inputs)
        found.append((each.name, each.type, [t.name for t in each.inputs], controls, attributes))
    return found


def gradient_graph(function: Callable[..., Any], variables: Any, *specs: Any) -> Any:
    @tf.function(autograph=False)
    def step(*arguments: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(function(*arguments))
            loss = tf.add_n([tf.reduce_sum(tf.square(tf.cast(output, tf.float32))) for output in outputs])
        return tape.gradient(loss, variables)

    return step.get_concrete_function(*specs).graph


def model_graph(model: Any) -> Any:
    x = tf.nest.map_structure(lambda t: tf.TensorSpec((None, *t.shape[1:]), t.dtype), batch_for(model))
    return gradient_graph(lambda x: model(x, training=True), model.trainable_variables, x)
