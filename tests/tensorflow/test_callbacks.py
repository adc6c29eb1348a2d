"""``callbacks``: what ``fit`` is called on trains by a plan, and is itself left as it is; and memory in the logs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from keras import layers

import tf_memsaver
from tf_memsaver.callbacks import MemoryMonitor, Optimize
from tf_memsaver.errors import InfeasibleBudgetError, InvalidRequestError
from tf_memsaver.rewrite.optimized_model import is_optimized
from tools.shared.memory import peak_over_live

X = np.random.default_rng(0).standard_normal((2560, 64)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 2560)


def classifier() -> Any:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((64,))
    x = layers.Dense(256, "gelu")(inputs)
    for _ in range(5):
        x = layers.Dropout(0.1, seed=1)(layers.Dense(256, "gelu")(x))
    model = keras.Model(inputs, layers.Dense(3)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
    return model


class Autoencoder(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((64,)), *(layers.Dense(256, "gelu") for _ in range(4))])
        self.decoder = keras.Sequential([keras.Input((256,)), layers.Dense(256, "gelu"), layers.Dense(64)])
        self.total = keras.metrics.Mean(name="loss")

    def train_step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.decoder(self.encoder(x, training=True), training=True) - x) ** 2)
        weights = [each.value for each in self.trainable_variables]
        self.optimizer.apply(tape.gradient(loss, weights), self.trainable_variables)
        self.total.update_state(loss)
        return {"loss": self.total.result()}


def trained(model: Any, *callbacks: Any, epochs: int = 2) -> tuple[dict[str, Any], list[Any]]:
    history = model.fit(
        X, Y, batch_size=1024, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks), validation_split=0.1
    ).history
    return history, [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


def test_fit_trains_by_the_plan_with_the_same_results() -> None:
    plain, model = classifier(), classifier()
    callback = Optimize(batch_size=1024, strategy="min_peak")
    (plain_history, plain_state), (history, state) = trained(plain), trained(model, callback)
    assert callback.plan.recomputed and not is_optimized(model) and callback.model is model
    assert history == plain_history
    assert all(np.array_equal(a, b) for a, b in zip(plain_state, state, strict=True))
    # The next fit is plain again, and begins where this one ended.
    assert trained(model, epochs=1)[0] == trained(plain, epochs=1)[0]


class Stop(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("new", [False, True], ids=["the_same_callback", "a_new_callback"])
def test_a_fit_that_was_interrupted_is_forgotten_when_the_next_one_has_ended(new: bool) -> None:
    model, callback = classifier(), Optimize(batch_size=1024, strategy="min_peak")
    with pytest.raises(KeyboardInterrupt):
        trained(model, callback, Stop())
    by_plan = model.train_function
    trained(model, Optimize(batch_size=1024, strategy="min_peak") if new else callback, epochs=1)
    assert model.train_function is not by_plan
    plain = model.train_function
    trained(model, epochs=1)
    assert model.train_function is plain


def test_what_an_interrupted_fit_left_is_not_given_to_another_compile_or_model() -> None:
    callback = Optimize(batch_size=1024, strategy="min_peak")
    model, other = classifier(), classifier()
    with pytest.raises(KeyboardInterrupt):
        trained(model, callback, Stop())
    first = vars(model.train_function)["memsaver_plain"]
    model.compile(keras.optimizers.SGD(1e-4), model.loss, jit_compile=False)
    trained(model, callback, epochs=1)
    assert model.train_function is not first
    with pytest.raises(KeyboardInterrupt):
        trained(model, callback, Stop())
    before = [each.numpy().tobytes() for each in model.variables]
    trained(other, callback, epochs=1)
    trained(other, epochs=1)
    assert [each.numpy().tobytes() for each in model.variables] == before


def test_fit_takes_less_memory() -> None:
    def peak(*callbacks: Any) -> int:
        model = classifier()
        trained(model, *callbacks, epochs=1)
        return peak_over_live(lambda: trained(model, *callbacks))

    assert peak(Optimize(batch_size=1024, strategy="min_peak")) < 0.85 * peak()


def test_a_train_step_of_ones_own() -> None:
    def after(*callbacks: Any) -> list[Any]:
        keras.utils.set_random_seed(0)
        model = Autoencoder()
        model.compile("adam", jit_compile=False)
        found = model.fit(batches, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks)).history["loss"]
        return [*found, *(v.numpy() for v in model.variables)]

    batches = tf.data.Dataset.from_tensor_slices(X).batch(512)
    callback = Optimize(data=batches, strategy="recompute_all")
    optimized = after(callback)
    assert callback.plan.recomputed
    assert all(np.array_equal(a, b) for a, b in zip(after(), optimized, strict=True))


def test_what_cannot_be_planned_is_said_before_anything_is_trained() -> None:
    with pytest.raises(InvalidRequestError, match="budget"):
        Optimize(budget="six")
    model = classifier()
    before = [v.numpy() for v in model.weights]
    with pytest.raises(InfeasibleBudgetError):
        trained(model, Optimize(batch_size=1024, budget="1MiB"))
    assert all(np.array_equal(a, v.numpy()) for a, v in zip(before, model.weights, strict=True))


# MemoryMonitor


class Noted(keras.callbacks.Callback):  # type: ignore[misc]
    """Takes down the logs of steps, as they reach a callback behind the monitor."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, Any]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps.append(dict(logs))


def test_the_logs_tell_the_memory_of_training() -> None:
    model, noted = classifier(), Noted()
    history, _ = trained(model, MemoryMonitor(every=2), noted)
    assert len(history["peak_bytes"]) == len(history["current_bytes"]) == 2
    assert all(0 < now < peak for peak, now in zip(history["peak_bytes"], history["current_bytes"], strict=True))
    told = [logs["peak_bytes"] for logs in noted.steps if "peak_bytes" in logs]
    assert len(noted.steps) == 6 and len(told) == 2 and max(told) <= max(history["peak_bytes"])
    # Without its plan, no step is above one.
    least, _ = trained(tf_memsaver.optimize(classifier(), batch_size=1024, strategy="min_peak"), MemoryMonitor())
    assert max(least["peak_bytes"]) < max(history["peak_bytes"])


def test_the_first_step_above_what_its_plan_allows_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *rest: said.append(text % rest))
    model = classifier()
    plan = tf_memsaver.search_plan(model, batch_size=1024, strategy="min_peak")
    within_budget = replace(plan, peak_bytes=1000, request=replace(plan.request, budget_bytes=10**12))
    for allowed in (replace(plan, peak_bytes=1000, highest_peak_bytes=10**12), within_budget):
        trained(model, MemoryMonitor(plan=allowed))
        assert said == []
    trained(model, MemoryMonitor(plan=replace(plan, peak_bytes=1000, highest_peak_bytes=2000)))
    assert len(said) == 1 and "step 0 took" in said[0] and "above the 1.95 KiB that" in said[0]
    trained(model, MemoryMonitor(plan=replace(plan, request=replace(plan.request, budget_bytes=1000))))
    assert len(said) == 2 and "above the 1000 B of its plan's budget" in said[1]


def test_on_a_gpu_the_step_that_tries_out_algorithms_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 took 1.2 GiB more in the first step of ResNet50 than in any later one."""
    said: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *rest: said.append(text % rest))
    model = classifier()
    plan = tf_memsaver.search_plan(model, batch_size=1024, strategy="min_peak")
    monitor = MemoryMonitor(plan=replace(plan, peak_bytes=1000, highest_peak_bytes=2000))
    monitor.set_model(model)
    device, monitor.device = monitor.device, "GPU:0"
    monitor.on_train_begin()
    monitor.device = device
    for batch in range(2):
        monitor.on_train_batch_begin(batch)
        monitor.on_train_batch_end(batch)
        assert len(said) == batch
    assert "step 1 took" in said[0]


@pytest.mark.parametrize("every", [0, 1.5, "2"])
def test_a_monitor_of_no_number_of_steps(every: Any) -> None:
    with pytest.raises(InvalidRequestError, match="every must be a whole number of 1 or more"):
        MemoryMonitor(every=every)
