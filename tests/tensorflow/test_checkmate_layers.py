"""Checkmate's sizes and costs of Keras layers, against figures worked out by hand."""

from __future__ import annotations

import keras
import pytest
from keras import layers

from tools.published.checkmate_graphs import Node, network_of


def small() -> keras.Model:
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same", name="conv")(inputs)
    y = layers.BatchNormalization(name="norm")(x)
    x = layers.Add(name="add")([x, layers.ReLU(name="relu")(y)])
    x = layers.DepthwiseConv2D(3, name="depthwise")(layers.MaxPooling2D(name="pool")(x))
    x = layers.UpSampling2D(2, name="up")(x)
    x = layers.Conv2DTranspose(5, 2, strides=2, name="transposed")(x)
    return keras.Model(inputs, layers.Dense(7, name="dense")(layers.Flatten(name="flat")(x)))


def test_bytes_and_costs_of_layers():
    network = network_of(small())
    by_name = {node.name: node for node in network.nodes}
    found = {name: (node.nbytes, node.cost) for name, node in by_name.items()}
    assert found == {
        "conv": (4 * 256, 3 * 3 * 3 * 256),
        "norm": (4 * 256, 4 * 256),
        "relu": (4 * 256, 256),
        "add": (4 * 256, 2 * 256),
        "pool": (4 * 64, 0),
        "depthwise": (4 * 16, 3 * 3 * 16),
        "up": (4 * 64, 64),
        "transposed": (4 * 320, 4 * 320),
        "flat": (4 * 320, 0),
        "dense": (4 * 7, 320 * 7),
    }
    assert network.parameter_bytes == 4 * (3 * 3 * 3 * 4 + 4 + 4 * 4 + 3 * 3 * 4 + 4 + 2 * 2 * 5 * 4 + 5 + 320 * 7 + 7)


def test_wiring_of_layers():
    network = network_of(small())
    names = [node.name for node in network.nodes]

    def sources(node: Node) -> set[str]:
        return {names[index] for index in node.inputs}

    assert {node.name: sources(node) for node in network.nodes if node.name in ("conv", "norm", "add")} == {
        "conv": set(),
        "norm": {"conv"},
        "add": {"conv", "relu"},
    }


def test_a_layer_without_a_cost_is_refused():
    model = keras.Sequential([keras.Input((4, 4, 2)), layers.LayerNormalization(name="unheard_of")])
    with pytest.raises(ValueError, match="no cost for layer 'unheard_of' of type LayerNormalization"):
        network_of(model)


def test_a_shared_layer_is_refused():
    shared = layers.Dense(4, name="shared")
    inputs = keras.Input((4,))
    with pytest.raises(ValueError, match="'shared' is called more than once"):
        network_of(keras.Model(inputs, shared(shared(inputs))))
