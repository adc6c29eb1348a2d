"""Activations as users write them, with constants in their products: a constant must move to the same factor.

Graph optimisation goes by names, by readers, and by what it knows of sizes; an open batch makes it know less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tf_memsaver
from tests.tensorflow.graphs import gradient_graph
from tests.tensorflow.plans import optimized_between_cuts
from tools.shared.training import assert_fit_alike

Activation = Callable[[Any], Any]


def cube_and_tanh(x: Any) -> Any:
    return 0.3 * x**3 + 0.7 * ops.tanh(x) * x


def sigmoid_gate(x: Any) -> Any:
    return 1.7 * ops.sigmoid(x) * x


def soft_ramp(x: Any) -> Any:
    return 0.5 * ops.log1p(ops.exp(-0.4 * x)) * 1.3


def scaled_gelu(x: Any) -> Any:
    return 1.2 * (0.5 * x * (1 + ops.erf(x / 1.414)))


def bell_and_gate(x: Any) -> Any:
    return 0.4 * ops.exp(-ops.square(x) * 0.5) + 0.2 * ops.sigmoid(1.5 * ops.silu(x)) * x


def lifted_gelu(x: Any) -> Any:
    return ops.gelu(x + ops.exp(-0.3 * x), approximate=False)


def wave(x: Any) -> Any:
    return 0.3 * ops.square(x) + 0.7 * ops.sin(x) * x


MIXES = {
    "powers and gates": (cube_and_tanh, sigmoid_gate),
    "logarithms": (soft_ramp, sigmoid_gate),
    "error functions": (scaled_gelu, wave),
    "gelu of a sum": (lifted_gelu,),
    "bells": (bell_and_gate, cube_and_tanh),
}


def mixer(activations: tuple[Activation, ...]) -> Any:
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((64, 48))
    for _ in range(2):
        hidden = layers.Dense(192)(layers.LayerNormalization()(x))
        for activation in activations:
            hidden = activation(hidden)
        x = x + layers.Dense(48)(hidden)
    model = keras.Model(inputs, layers.Dense(4)(x))
    model.compile("rmsprop", "mae", jit_compile=False)
    return model


@pytest.mark.parametrize("how", ["segments of layers", "segments of operations", "least by operations"])
@pytest.mark.parametrize("name", MIXES)
def test_scaled_activations_train_alike_with_a_smaller_last_batch(name: str, how: str) -> None:
    model = mixer(MIXES[name])
    if how == "least by operations":
        optimized = tf_memsaver.optimize(model, batch_size=16, strategy="min_peak", granularity="op")
    else:
        optimized = optimized_between_cuts(model, batch_size=16, granularity="op" if "operations" in how else "layer")
    generator = np.random.default_rng(0)
    x, y = (generator.standard_normal((40, 64, size)).astype("float32") for size in (48, 4))
    assert_fit_alike(model, optimized, x, y, batch_size=16)


@pytest.mark.parametrize("batch_size", [None, 16])
@pytest.mark.parametrize("name", MIXES)
def test_a_scaled_activation_is_not_copied_before_its_gradient_is_there(name: str, batch_size: int | None) -> None:
    # With an open batch, a sum to the shape of the activation is between the products.
    model = optimized_between_cuts(mixer(MIXES[name]), batch_size=16)
    spec = tf.TensorSpec((batch_size, 64, 48))
    graph = gradient_graph(lambda x: model(x, training=True), model.trainable_variables, spec)
    held = [each for each in graph.get_operations() if "held_back" in each.name]
    assert held
    assert all(before.type != "Const" for each in held for before in each.control_inputs)
    assert all(each.name.startswith(each.inputs[0].op.name) for each in held)
