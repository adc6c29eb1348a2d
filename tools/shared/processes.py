"""Work in fresh processes, from the repository's root."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from tools.shared.results import ROOT


def in_own_process(task: Callable[..., Any], *arguments: Any, timeout: float | None = None) -> Any:
    """Return what a function of a module returns in a fresh process; what it raises is raised here.

    Raises:
      TimeoutError: it took more than ``timeout`` seconds; the process is ended.
    """
    pool, is_over = _own_process(), True
    try:
        process = pool.submit(os.getpid).result()
        running = pool.submit(task, *arguments)
        try:
            return running.result(timeout)
        except futures.TimeoutError as error:
            if running.done():
                raise
            os.kill(process, signal.SIGKILL)
            is_over = False  # It may take minutes to end in the driver of a GPU.
            raise TimeoutError(f"it took more than {timeout:.0f} seconds") from error
    finally:
        pool.shutdown(wait=is_over)


def in_workers(count: int, task: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in the first of several fresh processes that all run it.

    They are the workers of a cluster of TensorFlow's on this machine, by their ``TF_CONFIG``.
    """
    cluster = {"worker": free_addresses(count)}
    with ExitStack() as stack:
        results = []
        for number in range(count):
            config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": number}})
            pool = stack.enter_context(_own_process(_set_config, config))
            results.append(pool.submit(task, *arguments))
        first, *_ = [each.result() for each in results]
        return first


def _set_config(config: str) -> None:
    os.environ["TF_CONFIG"] = config


def _own_process(begin: Callable[..., Any] | None = None, *arguments: Any) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=begin, initargs=arguments)


def free_addresses(count: int) -> list[str]:
    """Return addresses on this machine that are free now."""
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    found = [f"localhost:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return found


@contextmanager
def busy_machine() -> Iterator[None]:
    """Keep as many processes busy meanwhile as the machine has cores, so that threads take turns otherwise."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def run_module(name: str, *arguments: object, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a module as a program."""
    return _run("-m", name, *arguments, timeout=timeout)


def run_code(code: str, *arguments: object, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program given as text."""
    return _run("-c", textwrap.dedent(code), *arguments, timeout=timeout)


def _run(*arguments: object, timeout: float | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *(str(argument) for argument in arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=timeout,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2")},
    )
