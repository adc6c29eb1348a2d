"""What the allocator and the clock say of training steps, step by step."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tf_memsaver.compat.counting import check_counted
from tf_memsaver.compat.devices import has_gpu
from tf_memsaver.pace import report_progress


def device_name() -> str:
    """Return the device whose memory is counted: ``"GPU:0"`` when there is one, else ``"CPU:0"``."""
    return "GPU:0" if has_gpu() else "CPU:0"


@dataclass(slots=True)
class Steps:
    """The figures of some steps: bytes that were most in use during each and in use before it, and seconds."""

    peaks: list[int] = field(default_factory=list)
    lives: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class StepWatch(keras.callbacks.Callback):
    """Takes down the figures of each step of ``fit`` (of each batch, or of as many as ``steps_per_execution`` says).

    It sets the allocator's peak back before every step.
    """

    def __init__(self, total: int = 0) -> None:
        """Begin with no step of ``total`` (0: unknown); raise ``MeasurementError`` if nothing counts the memory."""
        super().__init__()
        self._total = total
        self.device, self.steps = device_name(), Steps()
        check_counted(self.device)
        self._begun = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begin to count."""
        tf.config.experimental.reset_memory_stats(self.device)
        self.steps.lives.append(tf.config.experimental.get_memory_info(self.device)["current"])
        self._begun = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Take down what was counted."""
        self.steps.seconds.append(time.perf_counter() - self._begun)
        self.steps.peaks.append(tf.config.experimental.get_memory_info(self.device)["peak"])
        report_progress("steps", len(self.steps.seconds), self._total)
