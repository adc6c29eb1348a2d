"""Train an example, plain or with the one line, and say what came out."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, runtime_checkable

import keras
import numpy as np
from absl import app, flags

from tf_memsaver.check.watch import StepWatch
from tf_memsaver.compat.counting import count_memory

Made = tuple[Any, Any]
"""A compiled model, and the data to fit it on; or a ``Loop`` and its data."""

EPOCHS = 5
_MEMSAVER = flags.DEFINE_bool("memsaver", False, "train in less memory")


@runtime_checkable
class Loop(Protocol):
    """A training loop of one's own."""

    def step(self, *element: Any) -> Any:
        """Train on an element of the data; return the loss."""

    def save_memory(self, dataset: Any, **options: Any) -> Any:
        """Have the loop train in less memory; return the plan."""

    @property
    def variables(self) -> list[Any]:
        """All that training changes."""
        ...


@dataclass(slots=True)
class Outcome:
    """What twenty steps of ``fit`` or a loop came to; bytes are the device allocator's, the largest of all steps.

    ``later_bytes`` leave out the first step, and ``live_bytes`` are those before a step. On a CPU they have the dataset
    and the batches that are ready, too, which on a GPU are elsewhere.
    """

    losses: dict[str, list[float]] = field(default_factory=dict)
    peak_bytes: int = 0
    live_bytes: int = 0
    later_bytes: int = 0
    step_seconds: float = 0.0
    optimize_seconds: float = 0.0
    predicted_bytes: int = 0
    plain_predicted_bytes: int = 0
    warns: bool = False
    variables: list[Any] = field(default_factory=list)


def train(make: Callable[[], Made], *, memsaver: bool, callbacks: Sequence[Any] = (), **options: Any) -> Outcome:
    """Return what comes out of training an example; ``callbacks`` are for ``fit``, ``options`` for ``optimize``."""
    count_memory()
    keras.utils.set_random_seed(0)
    model, data = make()
    outcome, watch = Outcome(), StepWatch()
    if memsaver:
        import tf_memsaver

        begin = time.perf_counter()
        if isinstance(model, Loop):
            plan = model.save_memory(data, **options)
        else:
            model = tf_memsaver.optimize(model, data=data, **options)
            plan = model.memsaver_plan
        outcome.optimize_seconds = time.perf_counter() - begin
        outcome.predicted_bytes, outcome.plain_predicted_bytes = plan.peak_bytes, plan.plain_peak_bytes
        outcome.warns = bool(plan.advice)
    if isinstance(model, Loop):
        outcome.losses = _looped(model, data, watch)
    else:
        outcome.losses = _fitted(model, data, [*callbacks, watch])
    outcome.peak_bytes, outcome.later_bytes = max(watch.steps.peaks), max(watch.steps.peaks[1:])
    outcome.live_bytes = max(watch.steps.lives)
    outcome.step_seconds = statistics.median(watch.steps.seconds[1:])
    outcome.variables = [np.asarray(variable) for variable in model.variables]
    return outcome


def _fitted(model: Any, data: Any, callbacks: Sequence[Any]) -> dict[str, list[float]]:
    history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[*callbacks])
    return {name: [float(value) for value in values] for name, values in history.history.items()}


def _looped(loop: Loop, data: Any, watch: StepWatch) -> dict[str, list[float]]:
    losses: list[float] = []
    for _ in range(EPOCHS):
        for element in data:
            watch.on_train_batch_begin(len(losses))
            losses.append(float(loop.step(*element)))
            watch.on_train_batch_end(len(losses))
    return {"loss": losses}


def run(make: Callable[[], Made]) -> None:
    """Train an example as the command line says, and print what came out."""

    def main(_: list[str]) -> None:
        outcome = asdict(train(make, memsaver=_MEMSAVER.value))
        del outcome["variables"]
        print(json.dumps(outcome, indent=1))

    app.run(main)
