"""Work in fresh processes, from the repository's root."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from tools.shared.results import ROOT


def in_own_process(task: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function of a module returns in a fresh process; what it raises is raised here."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(task, *arguments).result()


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
