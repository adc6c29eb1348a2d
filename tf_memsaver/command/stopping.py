"""End the command on SIGINT, SIGTERM and SIGHUP: soon, with one line, and with nothing left behind.

A signal raises ``Stopped`` in the main thread, so that every ``finally`` on the way runs. While the main thread
computes outside Python that can take long, and code on the way may swallow the exception; so a thread waits for some
seconds, then removes what is unfinished and ends the process. The library itself handles no signals: they belong to the
program.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from tf_memsaver.command.flags import PROGRAM
from tf_memsaver.files import remove_scratch

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
_GRACE_SECONDS = 3.0
_CLEAR_LINE, _SHOW_CURSOR = "\r\x1b[2K", "\x1b[?25h"


class Stopped(BaseException):
    """A signal asked the command to end. No ``Exception``, like KeyboardInterrupt."""


@contextlib.contextmanager
def stopped_by_signals(*, restore: bool) -> Iterator[None]:
    """End the process when a signal asks for it while the block runs.

    Signals that were ignored before (``nohup``, jobs in the background) stay ignored. In threads other than the main
    one this does nothing. ``restore`` says whether the old handlers come back behind the block; if not, the signals
    have their default action from there on, which suits a process that is about to exit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stop = _Stop()
    try:
        try:
            stop.begin_raising()
            yield
        finally:
            stop.raising = False
    except BaseException:
        # An interrupted import or call may have made another error of it.
        stop.end_if_asked()
        stop.close(restore=restore)
        raise
    stop.close(restore=restore)


class _Stop:
    """Handlers for the signals, from when it is made until it is closed."""

    def __init__(self) -> None:
        self.raising = False
        self._asked = 0
        self._said = False
        self._process = os.getpid()
        # While TensorFlow is imported, descriptor 2 is not the user's.
        self._stderr = os.dup(2)
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._closed = threading.Event()
        numbers = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
        self._numbers = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in self._numbers}
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="tf-memsaver-stop")
        self._watcher.start()
        os.register_at_fork(after_in_child=self._forget)

    def begin_raising(self) -> None:
        self.raising = True
        if self._asked:
            raise Stopped

    def end_if_asked(self) -> None:
        if self._asked and os.getpid() == self._process:
            self._end(self._asked)

    def close(self, *, restore: bool) -> None:
        if os.getpid() != self._process:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler if restore else signal.SIG_DFL)
        self.end_if_asked()
        signal.set_wakeup_fd(self._wakeup)
        self._closed.set()
        os.write(self._write, b"\0")
        self._watcher.join()
        for descriptor in (self._read, self._write, self._stderr):
            os.close(descriptor)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        # The first signal alone: what it set going is not to be interrupted.
        if not self._asked:
            self._asked = number
            if self.raising:
                raise Stopped

    def _watch(self) -> None:
        """Wait for the byte that C writes as soon as a signal comes, whatever the main thread does."""
        while not self._closed.is_set():
            number = os.read(self._read, 1)[0]
            if number in self._numbers and not self._closed.wait(_GRACE_SECONDS):
                self._end(number)

    def _end(self, number: int) -> NoReturn:
        remove_scratch()
        if not self._said:
            self._said = True
            clear = _CLEAR_LINE + _SHOW_CURSOR if os.isatty(self._stderr) else ""
            with contextlib.suppress(OSError):
                # A terminal that hung up.
                os.write(self._stderr, f"{clear}{PROGRAM}: stopped by {signal.Signals(number).name}.\n".encode())
        if threading.current_thread() is threading.main_thread():
            # The shell sees which signal it was.
            signal.signal(number, signal.SIG_DFL)
            os.kill(self._process, number)
        os._exit(128 + number)

    def _forget(self) -> None:
        """In a process that the user's code forks: handlers, pipe and unfinished results are the parent's."""
        if not self._closed.is_set():
            signal.set_wakeup_fd(-1)
            for number, handler in self._before.items():
                signal.signal(number, handler)
