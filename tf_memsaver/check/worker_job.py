"""What ``measure`` hands to a process of its own (``worker``), and gets back.

The model goes in a file, in Keras's format, and the batch beside it. All else is JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tf_memsaver.check.measurement import Measurement
from tf_memsaver.check.running import How
from tf_memsaver.check.tether import tether
from tf_memsaver.compat import keras_copies, keras_models
from tf_memsaver.compat.messages import first_line
from tf_memsaver.errors import MeasurementError, OutputError
from tf_memsaver.files.writing import scratch_folder
from tf_memsaver.pace import report_progress
from tf_memsaver.program.data import Batch, Data
from tf_memsaver.program.signature import batch_of_json, batch_to_json, inputs_to_json, note_batch
from tf_memsaver.program.told import Told


def measure_in_process(model: Any, told: Told, given: Batch, how: How, steps: int, beside_plain: bool) -> Measurement:
    """Measure in a process of its own; see ``measure``."""
    with scratch_folder(tempfile.gettempdir()) as folder, tether() as stdin:
        path, progress = (os.path.join(folder, name) for name in ("model.keras", "progress.json"))
        try:
            model.save(path)
        except Exception as error:  # Whatever a layer or an optimizer that somebody wrote may raise.
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutputError(os.fspath(folder), error.strerror or str(error)) from error
            raise MeasurementError(
                f"model '{model.name}' cannot be saved for the measuring process ({first_line(error)}). Pass "
                "isolate=False to measure in this process, or give its custom objects a get_config()."
            ) from error
        job = {
            "model": path,
            "inputs": inputs_to_json(model),
            "told": _write_told(told, given, folder),
            "how": dataclasses.asdict(how),
            "steps": steps,
            "progress": progress,
            "beside_plain": beside_plain,
            "safe_mode": keras_copies.loads_in_safe_mode(),
            "custom_objects": [dataclasses.asdict(each) for each in custom_objects(model, path)],
        }
        result = os.path.join(folder, "result.json")
        done = _run_and_listen(
            [*_worker_command(), json.dumps(job), result, *(p for p in sys.path if isinstance(p, str))],
            progress,
            stdin=stdin,
            # What it leaves behind when it is killed goes with the folder.
            env={**os.environ, "TMPDIR": os.fspath(folder)},
        )
        if done.returncode:
            tail = " | ".join(done.stderr.strip().splitlines()[-3:])
            raise MeasurementError(
                f"the measuring process ended with code {done.returncode}: {tail}. A negative code means that the "
                "system killed it, mostly because memory ran out. If the process did not find a custom class, "
                "define it in an importable module and register it with keras.saving.register_keras_serializable, "
                "or pass isolate=False (Lambda layers need it, too)."
            )
        with open(result, encoding="utf-8") as file:
            return Measurement.from_json(json.load(file))


_BETWEEN_LOOKS = 0.2
"""Seconds between two looks at how far a process is."""


def _run_and_listen(command: list[str], progress: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a command, and tell meanwhile what it writes of its own loops into the file ``progress``."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **how) as process:
        try:
            while True:
                try:
                    _, stderr = process.communicate(timeout=_BETWEEN_LOOKS)
                    return subprocess.CompletedProcess(command, process.returncode, stderr=stderr)
                except subprocess.TimeoutExpired:
                    # Not there yet, or being written.
                    with contextlib.suppress(OSError, ValueError), open(progress, encoding="utf-8") as file:
                        report_progress(*json.load(file))
        except BaseException:
            process.kill()
            raise


def _write_told(told: Told, given: Batch, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Write a batch into a folder; return what ``read_told`` needs, as plain JSON data."""
    written: dict[str, Any] = {"batch_size": told.batch_size, "specs": None}
    if told.data is not None and told.has_batches:
        files = [os.path.join(folder, f"batch_{number}") for number in range(len(given.leaves))]
        for file, leaf in zip(files, given.leaves, strict=True):
            try:
                tf.io.write_file(file, tf.io.serialize_tensor(leaf))
            except tf.errors.ResourceExhaustedError as error:
                raise OutputError(os.fspath(folder), first_line(error)) from error
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
    note_batch(model, specs, size if written["fixed_batch"] else None)
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
