"""What can be tested of a GPU without one: the graph that TensorFlow makes for it, and what its kernels keep."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tf_memsaver.parity import gradients
from tf_memsaver.tfgraph.operations import tensor_bytes
from tools.shared.models.real import unet
from tools.shared.step_graphs import Difference, differences, step_graph
from tools.shared.training import batch_for


def _residual() -> Any:
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(8, 3, padding="same")(inputs)
    for _ in range(2):
        x = layers.Add()([x, layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(x)))])
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling2D()(x)))


def _unet() -> Any:
    return unet(levels=3, filters=16, pixels=96)


def _differences(build: Any, batch_size: int, **options: Any) -> list[Difference]:
    def compiled() -> Any:
        keras.backend.clear_session()  # Variables are compared by name.
        model = build()
        model.compile("adam", "mse", jit_compile=False)
        return model

    def step(model: Any) -> Any:
        x, y = batch_for(model, batch_size), tf.zeros((batch_size, *model.output_shape[1:]))
        return step_graph(model, lambda: model.fit(x, y, batch_size=batch_size, verbose=0), on_gpu=True)

    plain = step(compiled())
    optimized = tf_memsaver.optimize(compiled(), batch_size=batch_size, **options)
    assert optimized.memsaver_plan.recomputed_units
    return differences(plain, step(optimized))


@pytest.fixture
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "has_gpu", lambda: True)


@pytest.mark.usefixtures("_a_gpu")
@pytest.mark.parametrize("granularity", ["layer", "op"])
def test_on_a_gpu_means_and_sums_go_over_the_layout_that_they_have_in_the_plain_step(granularity: str) -> None:
    assert not _differences(_residual, 2, granularity=granularity, strategy="recompute_all")


@pytest.mark.usefixtures("_a_gpu")
def test_on_a_gpu_a_unet_has_the_layouts_of_the_plain_step() -> None:
    assert not _differences(_unet, 4)


def test_an_operation_that_no_layout_goes_through_makes_means_go_over_another() -> None:
    """An H100 trained ResNet50 otherwise than plain: 21 of 320 variables were equal."""
    assert any("moments/mean" in each.plain for each in _differences(_unet, 4))


@pytest.mark.parametrize(("mode", "numbers"), [("lstm", 5), ("gru", 6), ("rnn_tanh", 1)])
def test_what_a_recurrent_kernel_of_cudnn_keeps_for_its_gradient_counts(mode: str, numbers: int) -> None:
    steps, batch, units = 48, 64, 96

    def run(x: Any) -> Any:
        state = tf.zeros((1, batch, units))
        return tf.raw_ops.CudnnRNNV3(
            input=x, input_h=state, input_c=state, params=tf.zeros([86784]), rnn_mode=mode,
            sequence_lengths=tf.fill([batch], steps),
        )  # fmt: skip

    graph = tf.function(run).get_concrete_function(tf.TensorSpec((steps, batch, 128))).graph
    kernel = next(each for each in graph.get_operations() if each.type == "CudnnRNNV3")
    assert tensor_bytes(kernel.outputs[3]) == numbers * 4 * steps * batch * units
