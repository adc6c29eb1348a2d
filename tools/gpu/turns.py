"""Steps of several trainings that are timed one training at a time."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import keras


class TakesTurns(keras.callbacks.Callback):
    """Waits after the first step, which compiles and tries algorithms out, until no other training is in its steps.

    It goes in front of a callback that times the steps, so that the wait is in none of them.
    """

    def __init__(self, path: str) -> None:
        """Take a file that all trainings lock."""
        super().__init__()
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
        self._steps = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Wait in front of the second step."""
        self._steps += 1
        if self._steps == 2:
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def on_train_end(self, logs: Any = None) -> None:
        """Let the next one go."""
        self._file.close()
