"""What a command changes of the process that it runs in, and puts back: the process may go on after ``main(argv)``."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

from absl import flags

from tf_memsaver.files.writing import scratch_folder

LOG_LEVEL, GROWTH = "TF_CPP_MIN_LOG_LEVEL", "TF_FORCE_GPU_ALLOW_GROWTH"
"""What TensorFlow reads of the environment: which of its messages it writes, and whether it takes a GPU bit by bit."""


@contextlib.contextmanager
def variables_kept(*names: str) -> Iterator[None]:
    """Put variables of the environment back as they were before the block."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def verbosity_kept() -> Iterator[None]:
    """Put absl's verbosity back as it was before the block."""
    flag = flags.FLAGS["verbosity"]
    before = flag.value, flag.present, flag.using_default_value
    try:
        yield
    finally:
        flag.value, flag.present, flag.using_default_value = before


@contextlib.contextmanager
def temporary_files_go() -> Iterator[None]:
    """Have all temporary files in one folder that goes at the end: TensorFlow removes its own only at a normal exit."""
    before = tempfile.tempdir
    with scratch_folder(tempfile.gettempdir()) as folder, variables_kept("TMPDIR"):
        os.environ["TMPDIR"] = tempfile.tempdir = os.fspath(folder)
        try:
            yield
        finally:
            tempfile.tempdir = before


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Keep TensorFlow's start-up messages off stderr, unless the caller has set a log level or the import fails.

    The level alone is not enough: TensorFlow 2.21 writes some messages before it reads it, straight to the descriptor.
    """
    if LOG_LEVEL in os.environ:
        yield
        return
    os.environ[LOG_LEVEL] = "2"
    sys.stderr.flush()
    own = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(own, 2)
            held.seek(0)
            os.write(2, held.read())
            raise
        finally:
            os.dup2(own, 2)
            os.close(own)
