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
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tf_memsaver.capture import batch
from tf_memsaver.capture.signature import inputs_to_json
from tf_memsaver.errors import InvalidRequestError, MeasurementError
from tf_memsaver.files import scratch_folder
from tf_memsaver.keras_compat import own_optimizer
from tf_memsaver.tether import tether
from tf_memsaver.training_step import KeptState, TrainingStep, check_mode
from tf_memsaver.units import format_bytes


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
      OutputError: there is no room for temporary files.
    """
    batch_size = batch.check_batch_size(batch_size)
    batch.input_specs(model, batch_size)
    check_mode(mode)
    if steps < 1:
        raise InvalidRequestError(f"steps must be at least 1, got {steps!r}")
    if isolate:
        return _measure_in_process(model, batch_size, mode, steps)
    return _measure_here(model, batch_size, mode, steps)


def _measure_in_process(model: Any, batch_size: int, mode: str, steps: int) -> Measurement:
    with scratch_folder(tempfile.gettempdir()) as folder, tether() as stdin:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        job = {"model": path, "inputs": inputs_to_json(model), "batch_size": batch_size, "mode": mode, "steps": steps}
        result = os.path.join(folder, "result.json")
        done = subprocess.run(
            [sys.executable, "-m", "tf_memsaver.measurement_worker", json.dumps(job), result],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            # What it leaves behind when it is killed goes with the folder.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TMPDIR": os.fspath(folder)},
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
        optimizer = own_optimizer(model)
        step = TrainingStep(model, mode, (x, y), optimizer=optimizer, gradients=optimizer is None)
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
