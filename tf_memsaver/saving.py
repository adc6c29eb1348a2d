"""Write a folder of models whole or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from tf_memsaver.errors import OutputError
from tf_memsaver.files import written_beside


@contextlib.contextmanager
def output_folder(target: Path) -> Iterator[Path]:
    """Yield a fresh folder that takes the place of ``target`` when the block ends well, and else disappears.

    Raises:
      OutputError: a file could not be written, such as on a full disk.
    """
    try:
        with written_beside(target) as fresh:
            yield fresh
    except (OSError, tf.errors.OpError) as error:
        text = str(error).strip()
        raise OutputError(str(target), text.splitlines()[0] if text else type(error).__name__) from error
