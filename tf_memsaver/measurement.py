"""Measure a training step for real: peak bytes by ``tf.config.experimental.get_memory_info``, seconds by the clock.

Each variant runs in a process of its own, because the allocator's peak and its cached buffers outlive a model. The
first step warms up; the figures are the largest peak and the median time of the steps after it.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tf_memsaver.capture import batch
from tf_memsaver.capture.layer_calls import check_supported
from tf_memsaver.errors import InvalidRequestError, MeasurementError
from tf_memsaver.keras_compat import is_trained
from tf_memsaver.units import format_bytes

MODES = ("eager", "graph", "xla")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one variant's training step took. Bytes are the device allocator's own count.

    ``peak_bytes`` is the peak of a whole step: weights, optimizer slots, batch, gradients, activations, scratch.
    ``live_bytes`` was live before the step, ``gradient_bytes`` is the size of the weights' gradients, and
    ``activation_bytes`` what remains of the peak without both. ``step_seconds`` is the median of ``steps`` steps;
    ``trace_seconds`` is the time to trace the step (0 in eager mode; with XLA it includes the compilation).
    """

    device: str
    mode: str
    batch_size: int
    peak_bytes: int
    live_bytes: int
    gradient_bytes: int
    step_seconds: float
    trace_seconds: float
    steps: int

    @property
    def activation_bytes(self) -> int:
        """Peak less what was live before the step and less the weights' gradients."""
        return self.peak_bytes - self.live_bytes - self.gradient_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the fields and ``activation_bytes`` as plain JSON data."""
        return {**dataclasses.asdict(self), "activation_bytes": self.activation_bytes}

    def __str__(self) -> str:
        return (
            f"{self.mode} on {self.device}: peak {format_bytes(self.peak_bytes)}, activations "
            f"{format_bytes(self.activation_bytes)}, step {self.step_seconds:.3f} s"
        )


def measure(model: Any, *, batch_size: int, mode: str = "graph", steps: int = 3, isolate: bool = True) -> Measurement:
    """Run training steps of ``model`` on made-up data and return what they took.

    A compiled model runs its loss and its optimizer's update, another one the gradients of the mean square of its
    outputs. The model's variables are as before when this returns.

    Args:
      model: a plain or optimized Functional or Sequential model.
      batch_size: samples in the batch.
      mode: ``"eager"``, ``"graph"`` (tf.function) or ``"xla"`` (tf.function with jit_compile).
      steps: how many steps to time after the warm-up.
      isolate: measure in a fresh process (the model travels as a ``.keras`` file). ``False`` measures here, where
        buffers of other work may be counted; custom classes that are defined in ``__main__`` need it.

    Raises:
      InvalidRequestError: an unknown mode, or no steps.
      MeasurementError: the process failed; the message carries the end of its log.
    """
    check_supported(model)
    batch_size = batch.check_batch_size(batch_size)
    batch.input_specs(model, batch_size)
    check_mode(mode)
    if steps < 1:
        raise InvalidRequestError(f"steps must be at least 1, got {steps!r}")
    if isolate:
        return _measure_in_process(model, batch_size, mode, steps)
    return _measure_here(model, batch_size, mode, steps)


def check_mode(mode: str) -> None:
    """Check the name of a mode.

    Raises:
      InvalidRequestError: it is none of ``MODES``.
    """
    if mode not in MODES:
        raise InvalidRequestError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")


def _measure_in_process(model: Any, batch_size: int, mode: str, steps: int) -> Measurement:
    with tempfile.TemporaryDirectory(prefix="tf_memsaver_") as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        job = {"model": path, "batch_size": batch_size, "mode": mode, "steps": steps, "path": sys.path}
        result = os.path.join(folder, "result.json")
        done = subprocess.run(
            [sys.executable, "-m", "tf_memsaver.measurement_worker", json.dumps(job), result],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        if done.returncode:
            tail = " | ".join(done.stderr.strip().splitlines()[-3:])
            raise MeasurementError(
                f"the measuring process ended with code {done.returncode}: {tail}. A negative code means that the "
                f"system killed it, mostly for memory. If a custom class could not be found there, define it in an "
                f"importable module and register it with keras.saving.register_keras_serializable, or pass "
                f"isolate=False."
            )
        with open(result, encoding="utf-8") as file:
            return Measurement(**json.load(file))


def _measure_here(model: Any, batch_size: int, mode: str, steps: int) -> Measurement:
    device = device_name()
    x, y = batch.synthetic_batch(model, batch_size)
    with KeptState(model):
        step = TrainingStep(model, mode)
        started = time.perf_counter()
        step.trace(x, y)
        trace_seconds = time.perf_counter() - started
        step.run(x, y)
        peaks, lives, seconds = [], [], []
        for _ in range(steps):
            gc.collect()
            lives.append(tf.config.experimental.get_memory_info(device)["current"])
            tf.config.experimental.reset_memory_stats(device)
            started = time.perf_counter()
            step.run(x, y)
            seconds.append(time.perf_counter() - started)
            peaks.append(tf.config.experimental.get_memory_info(device)["peak"])
    largest = max(range(steps), key=peaks.__getitem__)
    return Measurement(
        device=device,
        mode=mode,
        batch_size=batch_size,
        peak_bytes=peaks[largest],
        live_bytes=lives[largest],
        gradient_bytes=step.gradient_bytes,
        step_seconds=statistics.median(seconds),
        trace_seconds=0.0 if mode == "eager" else trace_seconds,
        steps=steps,
    )


def device_name() -> str:
    """Return the device whose memory is counted: ``"GPU:0"`` when there is one, else ``"CPU:0"``."""
    return "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"


class KeptState:
    """Context that puts all variables of a model and its optimizer back as they were, in place."""

    def __init__(self, model: Any) -> None:
        optimizer = getattr(model, "optimizer", None)
        variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
        self._variables = {id(v): v for v in variables}.values()

    def __enter__(self) -> KeptState:
        self._values = [v.numpy() for v in self._variables]
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Assign the values of the start now."""
        for variable, value in zip(self._variables, self._values, strict=True):
            variable.assign(value)


class TrainingStep:
    """One training step of a model as people write it: a tape, the loss, gradients, and the update when compiled."""

    def __init__(self, model: Any, mode: str, optimizer: Any = None) -> None:
        self._model = model
        self._weights = [v for v in model.trainable_variables if is_trained(v)]
        self._optimizer = optimizer if optimizer is not None else _own_optimizer(model)
        if self._optimizer is not None and not self._optimizer.built:
            self._optimizer.build(self._weights)
        self._function: Callable[..., Any] = self._step
        if mode != "eager":
            self._function = tf.function(self._step, jit_compile=mode == "xla")
        self._traces = mode == "graph"
        self.gradient_bytes = sum(v.value.shape.num_elements() * v.value.dtype.size for v in self._weights)

    def _step(self, x: Any, y: Any) -> tuple[Any, list[Any]]:
        with tf.GradientTape() as tape:
            outputs = self._model(x, training=True)
            loss = batch.training_loss(self._model, x, y, outputs)
            scaled = loss if self._optimizer is None else self._optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, [v.value for v in self._weights])
        if self._optimizer is not None:
            pairs = zip(gradients, self._weights, strict=True)
            self._optimizer.apply_gradients([(g, v) for g, v in pairs if g is not None])
            return loss, []
        return loss, gradients

    def trace(self, x: Any, y: Any) -> None:
        """Trace (graph mode) or trace and compile (XLA) the step."""
        if self._traces:
            self._function.get_concrete_function(x, y)  # type: ignore[attr-defined]
        else:
            self._function(x, y)

    def run(self, x: Any, y: Any) -> tuple[Any, list[Any]]:
        """Run one step to its end; return the loss and, without an optimizer, the gradients."""
        loss, gradients = self._function(x, y)
        loss.numpy()
        return loss, gradients


def _own_optimizer(model: Any) -> Any | None:
    return model.optimizer if getattr(model, "compiled", False) else None
