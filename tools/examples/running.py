"""Train an example, plain or with the one line, and say what came out."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

Made = tuple[Any, Any]
"""A compiled model, and the data to fit it on."""

EPOCHS = 5
_MEMSAVER = flags.DEFINE_bool("memsaver", False, "train in less memory")


@dataclass(slots=True)
class Outcome:
    """What twenty steps of ``fit`` came to; bytes are the device allocator's, the largest of all steps."""

    losses: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: int = 0
    live_bytes: int = 0
    step_seconds: float = 0.0
    optimize_seconds: float = 0.0
    predicted_bytes: int = 0
    plain_predicted_bytes: int = 0
    variables: list[Any] = field(default_factory=list)


class _Watch(keras.callbacks.Callback):
    """Takes down memory and time of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.peaks: list[int] = []
        self.lives: list[int] = []
        self.seconds: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begin to count."""
        tf.config.experimental.reset_memory_stats("CPU:0")
        self.lives.append(tf.config.experimental.get_memory_info("CPU:0")["current"])
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Take down what was counted."""
        self.seconds.append(time.perf_counter() - self._begin)
        self.peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"])


def train(make: Callable[[], Made], *, memsaver: bool, **options: Any) -> Outcome:
    """Return what comes out of training an example; ``options`` go to ``tf_memsaver.optimize``."""
    keras.utils.set_random_seed(0)
    model, data = make()
    outcome, watch = Outcome(), _Watch()
    if memsaver:
        import tf_memsaver

        begin = time.perf_counter()
        model = tf_memsaver.optimize(model, data=data, **options)
        outcome.optimize_seconds = time.perf_counter() - begin
        outcome.predicted_bytes = model.memsaver_plan.peak_bytes
        outcome.plain_predicted_bytes = model.memsaver_plan.plain_peak_bytes
    history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[watch])
    outcome.losses = {name: [float(value) for value in values] for name, values in history.history.items()}
    outcome.peak_bytes, outcome.live_bytes = max(watch.peaks), max(watch.lives)
    outcome.step_seconds = statistics.median(watch.seconds[1:])
    outcome.variables = [np.asarray(variable) for variable in model.variables]
    return outcome


def run(make: Callable[[], Made]) -> None:
    """Train an example as the command line says, and print what came out."""

    def main(_: list[str]) -> None:
        outcome = asdict(train(make, memsaver=_MEMSAVER.value))
        del outcome["variables"]
        print(json.dumps(outcome, indent=1))

    app.run(main)
