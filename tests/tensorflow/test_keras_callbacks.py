"""Keras's own callbacks do with an optimized model what they do with the plain one, and files go both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tf_memsaver

X = np.random.default_rng(0).standard_normal((96, 32)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 96)


def classifier() -> Any:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((32,))
    x = layers.Dense(32, "gelu")(inputs)
    for seed in range(2):
        x = layers.Dropout(0.2, seed=seed)(layers.Dense(32, "gelu")(x))
    x = layers.BatchNormalization()(x)
    model = keras.Model(inputs, layers.Dense(3)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.05), loss, metrics=["accuracy"], jit_compile=False)
    return model


def both() -> tuple[Any, Any]:
    """Return the plain model, and an optimized one of its own."""
    optimized = tf_memsaver.optimize(classifier(), batch_size=32, strategy="min_peak")
    assert optimized.memsaver_plan.recomputed
    return classifier(), optimized


def fitted(model: Any, *callbacks: Any, epochs: int = 6) -> dict[str, list[float]]:
    keras.utils.set_random_seed(1)
    history = model.fit(
        X, Y, batch_size=32, epochs=epochs, verbose=0, validation_split=0.25, callbacks=list(callbacks)
    ).history
    return {name: [float(value) for value in values] for name, values in history.items()}


def state(model: Any) -> list[bytes]:
    return [each.numpy().tobytes() for each in (*model.variables, *model.optimizer.variables)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.callbacks.EarlyStopping(patience=1, restore_best_weights=True),
        lambda: keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.3),
        lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / (1 + epoch)),
        lambda: keras.callbacks.SwapEMAWeights(),
    ],
    ids=["EarlyStopping", "ReduceLROnPlateau", "LearningRateScheduler", "SwapEMAWeights"],
)
def test_what_changes_training_changes_it_alike(make: Any) -> None:
    plain, optimized = both()
    if isinstance(make(), keras.callbacks.SwapEMAWeights):
        for model in (plain, optimized):
            model.optimizer.use_ema = True
    assert fitted(plain, make()) == fitted(optimized, make())
    assert state(plain) == state(optimized)


@pytest.mark.parametrize("whole", [False, True])
def test_checkpoints_of_the_best_epoch(tmp_path: Path, whole: bool) -> None:
    plain, optimized = both()
    ending = ".keras" if whole else ".weights.h5"
    files = [tmp_path / f"{name}{ending}" for name in ("plain", "optimized")]
    for model, file in zip((plain, optimized), files, strict=True):
        fitted(model, keras.callbacks.ModelCheckpoint(file, save_best_only=True, save_weights_only=not whole))
    if whole:
        loaded = [keras.models.load_model(file) for file in files]
        assert tf_memsaver.strip(loaded[1]) is not loaded[1]
    else:
        # Each file goes into the other kind of model.
        loaded = list(both())
        for model, file in zip(loaded, reversed(files), strict=True):
            model.load_weights(file)
    assert state(loaded[0]) == state(loaded[1])
    assert fitted(loaded[0], epochs=1) == fitted(loaded[1], epochs=1)


def test_a_training_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    class CutOff(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise KeyboardInterrupt

    ends = []
    for place, make in enumerate((lambda: both()[0], lambda: both()[1])):
        folder = tmp_path / str(place)
        with pytest.raises(KeyboardInterrupt):
            fitted(make(), keras.callbacks.BackupAndRestore(folder), CutOff())
        model = make()
        history = fitted(model, keras.callbacks.BackupAndRestore(folder), epochs=4)
        assert len(history["loss"]) == 2
        ends.append((history, state(model)))
    assert ends[0] == ends[1]


def test_the_line_in_the_middle_of_a_training() -> None:
    """A model that was trained plain goes on by a plan as it would have gone on without."""
    plain, other = classifier(), classifier()
    for model in (plain, other):
        fitted(model, epochs=2)
    optimized = tf_memsaver.optimize(other, batch_size=32, strategy="min_peak")
    assert fitted(plain, epochs=2) == fitted(optimized, epochs=2)
    assert state(plain) == state(optimized) == state(other)


def test_a_learning_rate_set_by_hand() -> None:
    plain, optimized = both()
    for model in (plain, optimized):
        fitted(model, epochs=1)
        model.optimizer.learning_rate = 0.002
    assert fitted(plain, epochs=1) == fitted(optimized, epochs=1)
    assert state(plain) == state(optimized)
