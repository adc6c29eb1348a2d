"""A child process that ends when its parent does, however that ends, without a signal handler in either.

The child's stdin is a pipe that nobody writes to. The system closes the parent's end with the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator

_PR_SET_PDEATHSIG = 1
"""linux/prctl.h: the signal that the kernel sends to this process when the thread that started it ends."""


@contextlib.contextmanager
def tether() -> Iterator[int]:
    """Yield a descriptor for a child's stdin; what the child reads there ends with the block, or with this process."""
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(read)
        os.close(write)


def end_with_parent() -> None:
    """In the child: end this process as soon as stdin does, if that is a pipe. Returns at once."""
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(0).st_mode):
            if sys.platform == "linux":
                # At once: the thread below waits while an import or an operation holds the interpreter's lock.
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            threading.Thread(target=_end_with_stdin, daemon=True, name="tether").start()


def _end_with_stdin() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
