"""Measure a training step for real: peak bytes by ``tf.config.experimental.get_memory_info``, seconds by the clock.

Each variant runs in a process of its own, because the allocator's peak and its cached buffers outlive a model. The
first step warms up; the figures are the largest peak and the median time of the steps after it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import tensorflow as tf
from absl import logging

from tf_memsaver.check.running import How, Runner, runner_of
from tf_memsaver.check.tether import tether
from tf_memsaver.check.training_step import KeptState
from tf_memsaver.check.watch import device_name
from tf_memsaver.compat import keras_copies, keras_models
from tf_memsaver.compat.keras_variables import bytes_of, is_trained
from tf_memsaver.errors import InvalidRequestError, MeasurementError
from tf_memsaver.files.writing import scratch_folder
from tf_memsaver.options.table import MeasureOptions
from tf_memsaver.options.verbs import takes
from tf_memsaver.program import batch
from tf_memsaver.program.batch import Told, told_of
from tf_memsaver.program.data import Batch, Data
from tf_memsaver.program.signature import batch_of_json, batch_to_json, inputs_to_json, note_batch
from tf_memsaver.rewrite.optimized_model import is_optimized, strip
from tf_memsaver.units import format_bytes

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one variant's training steps took. Bytes are the device allocator's own count.

    ``peak_bytes`` is the largest peak of ``steps`` whole steps: weights, optimizer slots, batch, gradients,
    activations, scratch; ``least_peak_bytes`` the smallest. ``live_bytes`` was live before the steps (the least of
    them: on a busy machine a step may begin before the last one's buffers are free), ``gradient_bytes`` is the size of
    the weights' gradients, and ``activation_bytes`` what remains of the peak without both. ``step_seconds`` is the
    median step; the middle half of the steps took ``step_seconds_range``. ``trace_seconds`` is the time to trace the
    step (0 in eager mode; with XLA it includes the compilation).

    Where plain steps ran in between, ``plain_step_seconds`` is their median, and ``slowdown_range`` the least and the
    largest of what ``ROUNDS`` rounds of both say: how much longer a step is than a plain one, as a share.
    """

    device: str
    mode: str
    batch_size: int
    peak_bytes: int
    least_peak_bytes: int
    live_bytes: int
    gradient_bytes: int
    step_seconds: float
    step_seconds_range: tuple[float, float]
    trace_seconds: float
    steps: int
    plain_step_seconds: float | None = None
    slowdown_range: tuple[float, float] | None = None

    @property
    def activation_bytes(self) -> int:
        """Peak less what was live before the step and less the weights' gradients."""
        return self.peak_bytes - self.live_bytes - self.gradient_bytes

    @property
    def slowdown(self) -> float | None:
        """How much longer a step is than a plain one, as a share of it; None where no plain steps ran in between."""
        return None if self.plain_step_seconds is None else self.step_seconds / self.plain_step_seconds - 1

    def to_json(self) -> dict[str, Any]:
        """Return the fields, ``activation_bytes`` and ``slowdown`` as plain JSON data."""
        data = dataclasses.asdict(self)
        return {**data, "activation_bytes": self.activation_bytes, "slowdown": self.slowdown}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        """Return what ``to_json`` described."""
        fields: dict[str, Any] = {field.name: data[field.name] for field in dataclasses.fields(cls)}
        for name in ("step_seconds_range", "slowdown_range"):
            fields[name] = None if fields[name] is None else tuple(fields[name])
        return cls(**fields)

    def __str__(self) -> str:
        text = (
            f"{self.mode} on {self.device}: peak {format_bytes(self.peak_bytes)} (smallest of {self.steps} steps "
            f"{format_bytes(self.least_peak_bytes)}), activations {format_bytes(self.activation_bytes)}, step "
            f"{self.step_seconds:.3f} s"
        )
        if self.slowdown_range is None:
            return text
        least, most = self.slowdown_range
        return f"{text}, {self.slowdown:+.0%} of a plain one ({least:+.0%} to {most:+.0%})"


ROUNDS = 4
"""How often plain and optimized steps take turns: what else the machine does meets both."""


@takes(MeasureOptions)
def measure(model: Any, **options: Unpack[MeasureOptions]) -> Measurement:
    """Run training steps of ``model`` on a batch of its data, or on a made-up one, and return what they took.

    A compiled model is trained by Keras's own ``fit``; one that is not computes the gradients of the mean square of its
    outputs. Where the compiled loss cannot be computed on made-up targets, that stands in for it, in a step of our own,
    and the log says so. With ``step`` that runs, in this process (``isolate=False``), and calls the model that is given
    here, plain or optimized, by whichever name it knows it. The model, its variables and its optimizer are as before
    when this returns.

    A step's peak differs from that of the next where threads race. Below 16 MiB of activations the figures say little,
    since the allocator of CPUs does not count small buffers: a warning says so.

    Args:
      model: a plain or optimized model; with ``step`` as in ``optimize``.
      steps: how many steps to measure after the first one, which warms up.

    Raises:
      InvalidRequestError: an argument has no meaning.
      MeasurementError: the process failed; the message carries the end of its log.
      OutputError: there is no room for temporary files.
    """
    told = told_of(model, options)
    model = told.model
    if options["step"] is not None and options["isolate"]:
        raise InvalidRequestError(
            "step= is measured in this process: a function of your own cannot be sent to another one. Pass "
            "isolate=False."
        )
    if options["beside_plain"] and not is_optimized(model):
        raise InvalidRequestError("beside_plain compares an optimized model with its plain form: this one is plain.")
    batch.batch_specs(model, told.batch_size)
    (given,) = told.batches(model, 1)
    how = How.of(model, told, given, options["mode"])
    measured = (_measure_in_process if options["isolate"] else measure_here)(
        model, told, given, how, options["steps"], options["beside_plain"]
    )
    if measured.activation_bytes < LEAST_BYTES:
        logging.warning(
            "model '%s': measured activations of %s say little: below %s most buffers are too small to be counted.",
            model.name,
            format_bytes(measured.activation_bytes),
            format_bytes(LEAST_BYTES),
        )
    return measured


LEAST_BYTES = 16 << 20
"""Where measured activations begin to mean something: the CPU's pool counts buffers of 256 KiB and more."""


def _measure_in_process(model: Any, told: Told, given: Batch, how: How, steps: int, beside_plain: bool) -> Measurement:
    with scratch_folder(tempfile.gettempdir()) as folder, tether() as stdin:
        path = os.path.join(folder, "model.keras")
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
            "told": _write_told(told, given, folder),
            "how": dataclasses.asdict(how),
            "steps": steps,
            "beside_plain": beside_plain,
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
            return Measurement.from_json(json.load(file))


def _write_told(told: Told, given: Batch, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Write a batch into a folder; return what ``read_told`` needs, as plain JSON data."""
    written: dict[str, Any] = {"batch_size": told.batch_size, "specs": None}
    if told.data is not None and told.has_batches:
        files = [os.path.join(folder, f"batch_{number}") for number in range(len(given.leaves))]
        for file, leaf in zip(files, given.leaves, strict=True):
            tf.io.write_file(file, tf.io.serialize_tensor(leaf))
        written |= {"specs": batch_to_json(told.data.specs), "fixed_batch": told.data.fixed_batch, "files": files}
    return written


def read_told(model: Any, written: Mapping[str, Any]) -> Told:
    """Return what ``_write_told`` wrote, and note it of the model."""
    size = written["batch_size"]
    if written["specs"] is None:
        return Told(model, size, None)
    specs = batch_of_json(written["specs"])
    pairs = zip(written["files"], specs.leaves, strict=True)
    given = specs.filled([tf.io.parse_tensor(tf.io.read_file(file), spec.dtype) for file, spec in pairs])
    note_batch(model, specs)
    batches = functools.partial(itertools.repeat, given)
    return Told(model, size, Data(specs=specs, batch_size=size, batches=batches, fixed_batch=written["fixed_batch"]))


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


def measure_here(model: Any, told: Told, given: Batch, how: How, steps: int, beside_plain: bool) -> Measurement:
    """Measure in this process, where buffers of other work may be counted; see ``measure``."""
    plain = strip(model) if beside_plain else None
    with KeptState(*filter(None, (model, plain))), runner_of(model, told, given, how) as runner:
        first, found = runner.run(1), runner.run(steps)
        beside = None
        if plain is not None:
            with runner_of(plain, told, given, how) as other:
                beside = _in_turns(runner, other, max(2, steps // ROUNDS))
    seconds = statistics.median(found.seconds) if beside is None else beside.seconds
    quartiles = statistics.quantiles(found.seconds, n=4) if steps > 1 else found.seconds * 3
    return Measurement(
        device=device_name(),
        mode=how.mode,
        batch_size=told.batch_size,
        peak_bytes=max(found.peaks),
        least_peak_bytes=min(found.peaks),
        live_bytes=min(found.lives),
        gradient_bytes=sum(bytes_of(v) for v in model.trainable_variables if is_trained(v)),
        step_seconds=seconds,
        step_seconds_range=(quartiles[0], quartiles[-1]),
        trace_seconds=0.0 if how.mode == "eager" else max(0.0, first.seconds[0] - seconds),
        steps=steps,
        plain_step_seconds=None if beside is None else beside.plain_seconds,
        slowdown_range=None if beside is None else beside.slowdown_range,
    )


class _Beside(NamedTuple):
    """Medians of steps that ran in turns with plain ones, in seconds, and the range of their ratio less one."""

    seconds: float
    plain_seconds: float
    slowdown_range: tuple[float, float]


def _in_turns(runner: Runner, plain: Runner, count: int) -> _Beside:
    """Run some steps of both in turns, in ``ROUNDS`` rounds; the first step of each turn does not count."""
    plain.run(1)
    rounds = [[each.run(1 + count).seconds[1:] for each in (plain, runner)] for _ in range(ROUNDS)]
    theirs, ours = zip(*rounds, strict=True)
    ratios = [statistics.median(b) / statistics.median(a) - 1 for a, b in rounds]
    return _Beside(
        seconds=statistics.median(itertools.chain(*ours)),
        plain_seconds=statistics.median(itertools.chain(*theirs)),
        slowdown_range=(min(ratios), max(ratios)),
    )
