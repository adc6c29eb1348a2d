"""Write a SavedModel with its plans, whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tf_memsaver.errors import OutputError
from tf_memsaver.files.targets import EXTRA_FOLDER, Target
from tf_memsaver.files.writing import written


def write_saved_model(root: Any, target: Target, signatures: Any, extra: Mapping[str, Any]) -> None:
    """Save ``root`` at ``target``, with the JSON data of ``extra`` in files of these names in ``assets.extra``.

    Raises:
      OutputExistsError: somebody else wrote there in the meantime.
      OutputError: a file could not be written, such as on a full disk.
    """
    with written(target) as fresh:
        try:
            tf.saved_model.save(root, os.fspath(fresh), signatures=signatures)
        except tf.errors.OpError as error:
            reason = str(error).strip().partition("\n")[0]
            raise OutputError(str(target.path), reason or type(error).__name__) from error
        folder = fresh / EXTRA_FOLDER
        folder.mkdir(exist_ok=True)
        for name, data in extra.items():
            (folder / name).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
