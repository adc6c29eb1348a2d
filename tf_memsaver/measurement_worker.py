"""The process that ``measure`` starts: load the model, measure it here, write the figures.

Run as ``python -m tf_memsaver.measurement_worker JOB RESULT``, with the job as JSON and the result as a path.
"""

from __future__ import annotations

import importlib
import json
import sys
import zipfile
from typing import Any

from tf_memsaver.tether import end_with_parent


def main(job_text: str, result_path: str) -> None:
    """Measure the model that the job names, and write the measurement's fields to ``result_path``."""
    import dataclasses

    import keras

    from tf_memsaver.capture.signature import note_inputs_of_json
    from tf_memsaver.measurement import measure
    from tf_memsaver.rewrite import keras_model  # noqa: F401  (registers the class that optimized models are saved as)

    job = json.loads(job_text)
    import_custom_modules(job["model"])
    model = keras.saving.load_model(job["model"], safe_mode=False)
    note_inputs_of_json(model, job["inputs"])
    measured = measure(model, batch_size=job["batch_size"], mode=job["mode"], steps=job["steps"], isolate=False)
    with open(result_path, "w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(measured), file)


def import_custom_modules(path: str) -> None:
    """Import the modules that a ``.keras`` file's classes come from, so that they register themselves.

    A module that cannot be imported is left out: if its class was needed, loading says so by name.
    """
    with zipfile.ZipFile(path) as archive:
        stack: list[Any] = [json.loads(archive.read("config.json"))]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            module = item.get("module")
            if isinstance(module, str) and module.split(".")[0] not in ("keras", "builtins", "__main__"):
                try:
                    importlib.import_module(module)
                except ImportError:
                    continue
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


if __name__ == "__main__":
    end_with_parent()
    main(sys.argv[1], sys.argv[2])
