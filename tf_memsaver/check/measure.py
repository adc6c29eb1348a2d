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
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tf_memsaver.check.tether import tether
from tf_memsaver.check.training_step import KeptState, OwnTrainStep, TrainingStep
from tf_memsaver.compat import keras_copies, keras_models
from tf_memsaver.compat.keras_training import own_optimizer
from tf_memsaver.errors import InvalidRequestError, MeasurementError
from tf_memsaver.files.writing import scratch_folder
from tf_memsaver.options.table import MeasureOptions
from tf_memsaver.options.verbs import takes
from tf_memsaver.program import batch
from tf_memsaver.program.batch import Told, told_of
from tf_memsaver.program.data import Batch
from tf_memsaver.program.loop import Loop
from tf_memsaver.program.signature import batch_of_json, batch_to_json, inputs_to_json, is_planned_as_a_step
from tf_memsaver.units import format_bytes

if TYPE_CHECKING:
    from typing_extensions import Unpack


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


@takes(MeasureOptions)
def measure(model: Any, **options: Unpack[MeasureOptions]) -> Measurement:
    """Run training steps of ``model`` on a batch of its data, or on a made-up one, and return what they took.

    A compiled model runs its loss and its optimizer's update, another one the gradients of the mean square of its
    outputs; where the compiled loss cannot be computed on made-up targets, that stands in for it, and the log says so.
    With data, a model with a ``train_step`` of its own runs that. With ``step`` that runs, in this process
    (``isolate=False``), and calls the model that is given here, plain or optimized, by whichever name it knows it. The
    model, its variables and its optimizer are as before when this returns.

    Args:
      model: a plain or optimized model; with ``step`` as in ``optimize``.
      steps: how many steps to time after the warm-up.

    Raises:
      InvalidRequestError: an argument has no meaning.
      MeasurementError: the process failed; the message carries the end of its log.
      OutputError: there is no room for temporary files.
    """
    told, mode, steps = told_of(model, options), options["mode"], options["steps"]
    model = told.model
    if isinstance(model, Loop) and options["isolate"]:
        raise InvalidRequestError(
            "step= is measured in this process: a function of your own cannot be sent to another one. Pass "
            "isolate=False."
        )
    batch.batch_specs(model, told.batch_size)
    if options["isolate"]:
        return _measure_in_process(model, told, mode, steps)
    return _measure_here(model, told, mode, steps)


def _measure_in_process(model: Any, told: Told, mode: str, steps: int) -> Measurement:
    with scratch_folder(tempfile.gettempdir()) as folder, tether() as stdin:
        path = os.path.join(folder, "model.keras")
        (given,) = told.batches(model, 1)
        batch.needs_stand_in(model, told.batch_size, given)  # For its warning: the log of the process is not shown.
        try:
            model.save(path)
        except Exception as error:  # Whatever a layer or an optimizer that somebody wrote may raise.
            raise MeasurementError(
                f"model '{model.name}' cannot be saved for a process of its own ({batch.first_line(error)}). "
                f"Pass isolate=False to measure it here, or give its custom objects a get_config()."
            ) from error
        job = {
            "model": path,
            "inputs": inputs_to_json(model),
            "data": _write_batch(given, folder) if told.has_batches else None,
            "batch_size": told.batch_size,
            "mode": mode,
            "steps": steps,
            "safe_mode": keras_copies.loads_in_safe_mode(),
            "custom_objects": [dataclasses.asdict(each) for each in custom_objects(model, path)],
        }
        result = os.path.join(folder, "result.json")
        done = subprocess.run(
            [*_worker_command(), json.dumps(job), result, *(p for p in sys.path if isinstance(p, str))],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            # What it leaves behind when it is killed goes with the folder.
            env={**os.environ, "TMPDIR": os.fspath(folder)},
        )
        if done.returncode:
            tail = " | ".join(done.stderr.strip().splitlines()[-3:])
            raise MeasurementError(
                f"the measuring process ended with code {done.returncode}: {tail}. A negative code means that the "
                f"system killed it, mostly for memory. If a custom class could not be found there, define it in an "
                f"importable module and register it with keras.saving.register_keras_serializable, or pass "
                f"isolate=False (which a Lambda layer needs, too)."
            )
        with open(result, encoding="utf-8") as file:
            return Measurement(**json.load(file))


def _write_batch(given: Batch, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Write a batch into a folder; return what ``read_batch`` needs, as plain JSON data."""
    files = []
    for number, leaf in enumerate(given.leaves):
        files.append(os.path.join(folder, f"batch_{number}"))
        tf.io.write_file(files[-1], tf.io.serialize_tensor(leaf))
    return {"specs": batch_to_json(given.mapped(tf.TensorSpec.from_tensor)), "files": files}


def read_batch(written: Mapping[str, Any]) -> Batch:
    """Return the batch that ``_write_batch`` wrote."""
    specs = batch_of_json(written["specs"])
    pairs = zip(written["files"], specs.leaves, strict=True)
    return specs.filled([tf.io.parse_tensor(tf.io.read_file(file), spec.dtype) for file, spec in pairs])


def _worker_command() -> list[str]:
    """Return the start of the worker's command line: its arguments are the job, the result's path, and ``sys.path``.

    The worker searches the folders that this process does, in the same order, from its first import on: ``python -m``
    would put the working folder in front.
    """
    steps = (
        "import sys; job, result, *sys.path = sys.argv[1:]",
        "from tf_memsaver.check.tether import end_with_parent; end_with_parent()",
        "from tf_memsaver.check.worker import main; main(job, result)",
    )
    return [sys.executable, *(["-I"] if sys.flags.isolated else []), "-c", "; ".join(steps)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomObject:
    """A class or function that a saved model needs: what Keras knows it by, and where Python finds it."""

    registered_name: str
    module: str
    qualified_name: str
    folder: str | None

    @classmethod
    def of(cls, registered_name: str, found: Any) -> CustomObject:
        """Describe a class or function of this process; ``folder`` is where its module's package was found."""
        top = sys.modules.get(found.__module__.partition(".")[0])
        place = next(iter(getattr(top, "__path__", ())), None) or getattr(top, "__file__", None)
        folder = None if place is None else os.path.dirname(os.path.abspath(place))
        return cls(
            registered_name=registered_name,
            module=found.__module__,
            qualified_name=found.__qualname__,
            folder=folder,
        )


def custom_objects(model: Any, path: str) -> list[CustomObject]:
    """Return what this process has for the names in the ``.keras`` file at ``path``, which ``model`` was saved to.

    They are the registered classes and functions, and the classes of the model's own parts. What the file says of
    modules is not read: whoever wrote a file would say what is imported.
    """
    classes = set(map(keras_models.own_class, keras_copies.parts_of(model)))
    live = {keras.saving.get_registered_name(each): each for each in classes}
    live.update(keras.saving.get_custom_objects())
    with zipfile.ZipFile(path) as archive:
        names = set(_texts(json.loads(archive.read("config.json"))))
    return [
        CustomObject.of(name, found)
        for name, found in sorted(live.items(), key=lambda item: item[0])
        if name in names and hasattr(found, "__qualname__") and found.__module__.partition(".")[0] != "keras"
    ]


def _texts(item: Any) -> Iterator[str]:
    if isinstance(item, str):
        yield item
    elif isinstance(item, (dict, list)):
        for each in item.values() if isinstance(item, dict) else item:
            yield from _texts(each)


def _measure_here(model: Any, told: Told, mode: str, steps: int) -> Measurement:
    device = device_name()
    (given,) = told.batches(model, 1)
    with KeptState(model):
        step = _step_of(model, told, mode, given)
        started = time.perf_counter()
        step.trace(given)
        trace_seconds = time.perf_counter() - started
        step.run(given)
        peaks, lives, seconds = [], [], []
        for _ in range(steps):
            gc.collect()
            lives.append(tf.config.experimental.get_memory_info(device)["current"])
            tf.config.experimental.reset_memory_stats(device)
            started = time.perf_counter()
            step.run(given)
            seconds.append(time.perf_counter() - started)
            peaks.append(tf.config.experimental.get_memory_info(device)["peak"])
    largest = max(range(steps), key=peaks.__getitem__)
    return Measurement(
        device=device,
        mode=mode,
        batch_size=told.batch_size,
        peak_bytes=peaks[largest],
        live_bytes=lives[largest],
        gradient_bytes=step.gradient_bytes,
        step_seconds=statistics.median(seconds),
        trace_seconds=0.0 if mode == "eager" else trace_seconds,
        steps=steps,
    )


def _step_of(model: Any, told: Told, mode: str, given: Batch) -> OwnTrainStep | TrainingStep:
    if is_planned_as_a_step(model):
        return OwnTrainStep(model, mode, given)
    optimizer = own_optimizer(model)
    stand_in = batch.needs_stand_in(model, told.batch_size, given)
    return TrainingStep(model, mode, given, optimizer=optimizer, gradients=optimizer is None, stand_in=stand_in)


def device_name() -> str:
    """Return the device whose memory is counted: ``"GPU:0"`` when there is one, else ``"CPU:0"``."""
    return "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
