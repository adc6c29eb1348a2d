"""Exported SavedModels: what is in the folder, and what they compute when loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tests.tensorflow.plans import optimized_between_cuts, optimized_by_hand
from tf_memsaver.errors import InvalidRequestError, OutputExistsError
from tf_memsaver.files.targets import EXPORTED_PLAN, EXTRA_FOLDER
from tf_memsaver.plan.plan import Plan
from tools.shared.models import small as models
from tools.shared.training import batch_for, kept_state


@pytest.fixture
def optimized() -> Any:
    return optimized_between_cuts(models.residual_net())


def test_the_plan_lies_beside_the_model(tmp_path: Path, optimized: Any) -> None:
    tf_memsaver.export_saved_model(optimized, tmp_path / "saved")
    assert Plan.load(tmp_path / "saved" / EXTRA_FOLDER / EXPORTED_PLAN) == optimized.memsaver_plan
    assert sorted(p.name for p in tmp_path.iterdir()) == ["saved"]


def test_an_existing_folder_is_left_alone(tmp_path: Path, optimized: Any) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "mine").write_text("precious")
    with pytest.raises(OutputExistsError, match="saved"):
        tf_memsaver.export_saved_model(optimized, tmp_path / "saved")
    assert (tmp_path / "saved" / "mine").read_text() == "precious"
    with pytest.raises(OutputExistsError, match="'mine'"):
        tf_memsaver.export_saved_model(optimized, tmp_path / "saved", overwrite=True)
    assert (tmp_path / "saved" / "mine").read_text() == "precious"


def test_a_saved_model_is_replaced_with_leave(tmp_path: Path, optimized: Any) -> None:
    optimized.export(tmp_path / "saved", verbose=False)
    assert not (tmp_path / "saved" / EXTRA_FOLDER / EXPORTED_PLAN).exists()
    with pytest.raises(OutputExistsError, match="overwrite=True"):
        tf_memsaver.export_saved_model(optimized, tmp_path / "saved")
    for _ in range(2):
        tf_memsaver.export_saved_model(optimized, tmp_path / "saved", overwrite=True)
        assert (tmp_path / "saved" / EXTRA_FOLDER / EXPORTED_PLAN).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("path", ["", "/", ".", "..", None])
def test_a_folder_in_use_is_never_replaced(
    tmp_path: Path, optimized: Any, monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(InvalidRequestError, match="output path"):
            tf_memsaver.export_saved_model(optimized, path, overwrite=overwrite)
    assert not list(tmp_path.iterdir())


def test_a_plain_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="no plan"):
        tf_memsaver.export_saved_model(models.chain(), tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_inference_and_training_of_the_loaded_model(tmp_path: Path, optimized: Any) -> None:
    tf_memsaver.export_saved_model(optimized, tmp_path / "saved")
    loaded = tf.saved_model.load(tmp_path / "saved")
    for size in (2, 5):
        x = batch_for(optimized, size)
        np.testing.assert_allclose(loaded(x, training=False), optimized(x, training=False), atol=1e-6)
        np.testing.assert_allclose(loaded.serve(x), optimized(x, training=False), atol=1e-6)
        served = loaded.signatures["serving_default"](image=x)
        np.testing.assert_allclose(served["head"], optimized(x, training=False), atol=1e-6)
    assert len(loaded.variables) == len(optimized.variables)
    assert len(loaded.trainable_variables) == len(optimized.trainable_variables)
    before = [v.numpy().copy() for v in loaded.variables]
    loaded.train(batch_for(optimized))
    changed = sum(not np.array_equal(a, b) for a, b in zip(before, loaded.variables, strict=True))
    assert changed == len(optimized.non_trainable_variables)


def test_losses_that_layers_add_are_exported(tmp_path: Path) -> None:
    x = inputs = keras.Input((5,))
    x = layers.Dense(5, kernel_regularizer="l2", name="d0")(x)
    x = models.AddsLoss(name="adds")(x)
    x = layers.Dense(5, name="d1")(x)
    model = keras.Model(inputs, layers.Dense(2, name="head")(x))
    optimized = optimized_by_hand(model, ("d0", "d1"))
    tf_memsaver.export_saved_model(optimized, tmp_path / "saved")
    loaded = tf.saved_model.load(tmp_path / "saved")
    x = batch_for(model)
    with tf.GradientTape() as tape:
        results = loaded.train_with_losses(x)
        total = tf.add_n([*results["losses"], *(loss() for loss in loaded.regularization_losses)])
    gradients = tape.gradient(total, loaded.trainable_variables)
    with kept_state(model), tf.GradientTape() as tape:
        model(x, training=True)
        expected = tf.add_n(model.losses)
    wanted = tape.gradient(expected, [v.value for v in model.trainable_variables])
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    for gradient, other in zip(gradients, wanted, strict=True):
        # A function that was saved knows no None: what its caller does not use has gradient zero.
        expected = tf.zeros_like(gradient) if other is None else other
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["two_by_two", "text_attention", "siamese"])
def test_models_of_other_shapes(tmp_path: Path, name: str) -> None:
    model = getattr(models, name)()
    tf_memsaver.export_saved_model(optimized_between_cuts(model, length=2), tmp_path / "saved")
    loaded = tf.saved_model.load(tmp_path / "saved")
    x = batch_for(model)
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), loaded(x, training=False), model(x, training=False)
    )
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(tf.square(y)) for y in tf.nest.flatten(loaded(x, training=True))])
    assert all(g is not None for g in tape.gradient(loss, loaded.trainable_variables))


def test_as_a_keras_layer(tmp_path: Path, optimized: Any) -> None:
    tf_memsaver.export_saved_model(optimized, tmp_path / "saved")
    layer = keras.layers.TFSMLayer(tmp_path / "saved", call_endpoint="serve", call_training_endpoint="train")
    x = batch_for(optimized)
    np.testing.assert_allclose(layer(x, training=False), optimized(x, training=False), atol=1e-6)
