"""The process that ``measure`` starts: load the model, measure it here, write the figures.

The file is loaded in Keras's safe mode, with the classes and functions that the caller names: they were loaded in the
caller's process. Nothing that a file names is imported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras

from tf_memsaver.check.measurement import measure_here
from tf_memsaver.check.running import How
from tf_memsaver.check.worker_job import read_told
from tf_memsaver.compat.counting import count_memory
from tf_memsaver.pace import heard_by
from tf_memsaver.program.signature import note_inputs_of_json
from tf_memsaver.rewrite import optimized_model  # noqa: F401  (registers the class that optimized models are saved as)


def main(job_text: str, result_path: str) -> None:
    """Measure the model that the job, in JSON, names, and write the measurement's fields to ``result_path``."""
    job = json.loads(job_text)
    count_memory()
    if not job["safe_mode"]:
        keras.config.enable_unsafe_deserialization()
    model = keras.saving.load_model(job["model"], custom_objects=found_again(job["custom_objects"]))
    note_inputs_of_json(model, job["inputs"])
    told = read_told(model, job["told"])
    (given,) = told.batches(model, 1)

    def hear(*pace: str | int) -> None:
        Path(job["progress"]).write_text(json.dumps(pace), encoding="utf-8")

    with heard_by(hear):
        measured = measure_here(model, told, given, How(**job["how"]), job["steps"], job["beside_plain"])
    with open(result_path, "w", encoding="utf-8") as file:
        json.dump(measured.to_json(), file)


def found_again(described: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the classes and functions that ``worker_job.CustomObject``s describe, by their registered names.

    One that cannot be found is left out: if it was needed, loading says so by name.
    """
    found = {}
    with _searched_first([each["folder"] for each in described if each["folder"] is not None]):
        for each in described:
            with contextlib.suppress(ImportError, AttributeError):
                module = importlib.import_module(each["module"])
                found[each["registered_name"]] = functools.reduce(getattr, each["qualified_name"].split("."), module)
    return found


@contextlib.contextmanager
def _searched_first(folders: Sequence[str]) -> Iterator[None]:
    """Look in ``folders`` first while this is open: another package may have the name of one of the caller's."""
    before = sys.path[:]
    sys.path[:0] = dict.fromkeys(folders)
    try:
        yield
    finally:
        sys.path[:] = before
