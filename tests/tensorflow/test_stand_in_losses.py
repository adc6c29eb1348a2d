"""Losses whose targets cannot be made up: the mean square of the outputs stands in for them, with a warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tf_memsaver
from tf_memsaver.errors import InvalidRequestError, MeasurementError
from tools.shared.training import assert_fit_alike


def _dense(loss: Any, shape: tuple[int, ...] = (24, 16), classes: int = 10) -> keras.Model:
    hidden = [layers.Dense(32, activation="gelu") for _ in range(3)]
    model = keras.Sequential([keras.Input(shape), *hidden, layers.Dense(classes)])
    model.compile("adam", loss)
    return model


def _two_outputs(is_dict: bool = False, **compiled: Any) -> keras.Model:
    inputs = keras.Input((32,))
    x = layers.Dense(32, activation="gelu")(layers.Dense(32, activation="gelu")(inputs))
    outputs = {"a": layers.Dense(3, name="a", activation="softmax")(x), "b": layers.Dense(5, name="b")(x)}
    model = keras.Model(inputs, outputs if is_dict else list(outputs.values()))
    model.compile("adam", **compiled)
    return model


class Classes(keras.losses.Loss):
    """Takes classes of (batch, time), which nothing says."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(ops.cast(y_true, "int32"), y_pred, from_logits=True)


def beside_each_other(y_true: Any, y_pred: Any) -> Any:
    """Take targets and their weights in one array."""
    return ops.mean(y_true[..., 10:] * ops.square(y_true[..., :10] - y_pred))


def with_a_mistake(y_true: Any, y_pred: Any) -> Any:
    """Fail for a reason of its own."""
    raise KeyError("a mistake")


def with_an_assertion(y_true: Any, y_pred: Any) -> Any:
    """Fail when it is computed, not when it is traced."""
    tf.debugging.assert_less(tf.reduce_max(y_true), -100.0, message="targets below -100")
    return ops.mean(ops.square(y_true - y_pred))


LOSSES: dict[str, tuple[Callable[[], Any], str]] = {
    "ctc": (keras.losses.CTC, "'ctc' cannot be computed on made-up targets (ValueError: Targets"),
    "classes": (lambda: Classes(name="classes"), "'classes' cannot be computed"),
    "beside": (lambda: beside_each_other, "'beside_each_other' cannot be computed"),
    "mistake": (
        lambda: with_a_mistake,
        "'with_a_mistake' cannot be computed on made-up targets (KeyError: 'a mistake')",
    ),
}


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says, but for what a plan saves, and that so small a model shows little."""
    said = [record.getMessage() for record in caplog.records if record.name == "absl"]
    return [each for each in said if "saves no memory" not in each and "not reliable" not in each]


def _all_verbs(model: keras.Model) -> None:
    built = model._compile_loss.built
    assert tf_memsaver.estimate(model, batch_size=4).activation_bytes
    optimized = tf_memsaver.optimize(model, batch_size=4, strategy="min_peak")
    assert tf_memsaver.verify(model, optimized, batch_size=4, steps=1).identical
    tf_memsaver.measure(model, batch_size=4, steps=1, isolate=False)
    assert not built and not model._compile_loss.built and not optimized._compile_loss.built


@pytest.mark.parametrize("name", LOSSES)
def test_the_mean_square_stands_in(name: str, caplog: pytest.LogCaptureFixture) -> None:
    loss, said = LOSSES[name]
    model = _dense(loss())
    _all_verbs(model)
    warnings = _warnings(caplog)
    assert len(warnings) == 4 and all(said in warning for warning in warnings)
    assert all("the memory of the loss itself is not counted" in warning for warning in warnings)


def test_fit_is_not_run_with_another_loss() -> None:
    with pytest.raises(InvalidRequestError, match="Give data="):
        tf_memsaver.measure(_dense(beside_each_other), batch_size=4, mode="fit", steps=1)


def test_a_loss_that_fails_on_values_is_planned_with_and_not_run(caplog: pytest.LogCaptureFixture) -> None:
    model = _dense(with_an_assertion)
    optimized = tf_memsaver.optimize(model, batch_size=4, strategy="min_peak")
    assert not caplog.records
    assert tf_memsaver.verify(model, optimized, batch_size=4, steps=1).identical
    assert "InvalidArgumentError: assertion failed: [targets below -100]" in caplog.text


@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # An output without a loss: Keras says so in fit.
@pytest.mark.parametrize(
    ("is_dict", "compiled"),
    [
        (
            False,
            {
                "loss": ["sparse_categorical_crossentropy", "mse"],
                "loss_weights": [1.0, 0.5],
                "metrics": [["accuracy"], []],
            },
        ),
        (False, {"loss": {"a": "mse", "b": "mse"}, "loss_weights": {"a": 1.0, "b": 0.5}}),
        (False, {"loss": [None, "mse"]}),
        (False, {"loss": ["sparse_categorical_crossentropy", None], "metrics": [["accuracy"], None]}),
        (True, {"loss": {"a": "sparse_categorical_crossentropy", "b": "mse"}, "metrics": {"a": ["accuracy"]}}),
        (True, {"loss": {"a": None, "b": "mse"}}),
        (True, {"loss": {"b": "mse"}, "weighted_metrics": {"b": ["mae"]}}),
        (False, {"loss": "mse", "metrics": [["mae"], ["mae"]]}),
    ],
)
def test_losses_of_some_outputs_need_no_stand_in(
    is_dict: bool, compiled: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    _all_verbs(_two_outputs(is_dict, **compiled))
    assert not _warnings(caplog)


class LossOfExamples(layers.Layer):
    """Adds a loss of shape (batch, 1), as the CTC of keras.io's captcha reader does, and hands on what it was given."""

    def call(self, x: Any) -> Any:
        self.add_loss(ops.mean(ops.square(x), axis=-1, keepdims=True))
        return x


def test_a_layer_may_add_a_loss_for_each_example() -> None:
    def made() -> keras.Model:
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        hidden = [layers.Dense(256, activation="gelu") for _ in range(4)]
        model = keras.Sequential([keras.Input((16,)), *hidden, LossOfExamples()])
        model.compile("adam", jit_compile=False)
        return model

    x = np.random.default_rng(0).normal(size=(300, 16)).astype(np.float32)
    optimized = tf_memsaver.optimize(made(), data=x, batch_size=128, strategy="min_peak")
    assert optimized.memsaver_plan.recomputed
    assert_fit_alike(made(), optimized, x, None, batch_size=128)


def test_nothing_stands_in_for_the_losses_that_layers_add() -> None:
    """What no added loss depends on gets no gradient: Keras trains such a model on the added losses alone."""

    def peak(loss: str | None) -> int:
        inputs = keras.Input((16,))
        x = LossOfExamples()(layers.Dense(256, activation="gelu")(inputs))
        for _ in range(4):
            x = layers.Dense(256, activation="gelu", kernel_regularizer="l2")(x)
        model = keras.Model(inputs, x)
        model.compile("sgd", loss, jit_compile=False)
        return tf_memsaver.estimate(model, batch_size=4096).peak_bytes

    assert peak(None) < 0.5 * peak("mse")


def test_a_model_is_trained_as_ever_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    model = _dense(Classes())
    optimized = tf_memsaver.optimize(model, batch_size=4)
    assert "replaces it" in caplog.text
    history = optimized.fit(np.ones((8, 24, 16), "float32"), np.ones((8, 24), "int32"), verbose=0, epochs=2)
    assert history.history["loss"][1] < history.history["loss"][0]


def test_a_model_that_cannot_be_saved_is_measured_here() -> None:
    class Unsaved(keras.optimizers.SGD):
        def get_config(self) -> dict[str, Any]:
            raise NotImplementedError

    model = _dense("mse")
    model.compile(Unsaved(0.1), "mse")
    with pytest.raises(MeasurementError, match=r"cannot be saved .* Pass isolate=False"):
        tf_memsaver.measure(model, batch_size=4, steps=1)
