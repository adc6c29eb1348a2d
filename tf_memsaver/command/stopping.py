"""End the command on SIGINT, SIGTERM and SIGHUP: at once, with one line, and with nothing left behind.

The handler removes what is unfinished and ends the process. It raises nothing: an exception out of nowhere is swallowed
by some code, and made another error by other code. Python runs handlers in the main thread, between operations; where
one operation takes long, a thread does the same after some seconds. The library itself handles no signals: they belong
to the program.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from tf_memsaver.command.flags import PROGRAM
from tf_memsaver.files.writing import drop_unfinished

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
_GRACE_SECONDS = 2.0
_CLEAR_LINE, _SHOW_CURSOR = "\r\x1b[2K", "\x1b[?25h"


@contextlib.contextmanager
def stopped_by_signals(*, restore: bool) -> Iterator[None]:
    """End the process when a signal asks for it while the block runs.

    Signals that were ignored before (``nohup``, jobs in the background) stay ignored. In threads other than the main
    one this does nothing. ``restore`` says whether the old handlers come back after the block; if not, these stay, as
    suits a process that is about to exit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stop = _Stop()
    try:
        yield
    finally:
        if restore:
            stop.close()


class _Stop:
    """Handlers for the signals, from when it is made until it is closed."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._ending = threading.Lock()
        self._closed = threading.Event()
        # While TensorFlow is imported, descriptor 2 is not the user's.
        self._stderr = os.dup(2)
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
        self._before = {number: signal.getsignal(number) for number in numbers}
        self._numbers = [number for number in numbers if self._before[number] not in (signal.SIG_IGN, None)]
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="tf-memsaver-stop")
        self._watcher.start()
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in self._numbers:
            signal.signal(number, self._handle)
        _at_forks()
        _OPEN.append(self)

    def close(self) -> None:
        if os.getpid() != self._process:
            return
        _OPEN.remove(self)
        for number in self._numbers:
            signal.signal(number, self._before[number])
        signal.set_wakeup_fd(self._wakeup)
        self._closed.set()
        os.write(self._write, b"\0")
        self._watcher.join()
        for descriptor in (self._read, self._write, self._stderr):
            os.close(descriptor)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        for each in self._numbers:
            signal.signal(each, signal.SIG_IGN)
        self._finish(number)
        # The shell sees which signal it was.
        signal.signal(number, signal.SIG_DFL)
        os.kill(self._process, number)

    def _watch(self) -> None:
        """Wait for the byte that C writes as soon as a signal comes, whatever the main thread does."""
        while not self._closed.is_set():
            number = os.read(self._read, 1)[0]
            if number in self._numbers and not self._closed.wait(_GRACE_SECONDS):
                self._finish(number)
                os._exit(128 + number)

    def _finish(self, number: int) -> None:
        # One of both threads does it, and the other one gives it some time.
        if not self._ending.acquire(timeout=_GRACE_SECONDS):
            return
        drop_unfinished()
        clear = _CLEAR_LINE + _SHOW_CURSOR if os.isatty(self._stderr) else ""
        with contextlib.suppress(OSError):
            # A terminal that hung up.
            os.write(self._stderr, f"{clear}{PROGRAM}: stopped by {signal.Signals(number).name}.\n".encode())

    def forget(self) -> None:
        """In a process that the user's code forks: handlers, pipe and unfinished results are the parent's."""
        signal.set_wakeup_fd(-1)
        for number in self._numbers:
            signal.signal(number, self._before[number])


_OPEN: list[_Stop] = []
"""Those that are not closed, the last one last."""


@functools.cache
def _at_forks() -> None:
    """Have forks forget what is open then. Python keeps what it is to call there for good, so this is done once."""
    os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    while _OPEN:
        _OPEN.pop().forget()
