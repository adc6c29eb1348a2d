"""Work in processes of its own: what it returns, raises, and when it is ended."""

from __future__ import annotations

import math
import os
import time
from concurrent.futures.process import BrokenProcessPool

import pytest

from tools.shared.processes import in_own_process


def test_what_a_function_returns_or_raises() -> None:
    assert in_own_process(math.sqrt, 4.0) == 2.0
    with pytest.raises(ValueError, match=r"math domain error|nonnegative"):
        in_own_process(math.sqrt, -1.0, timeout=60)


def test_what_takes_too_long_is_ended() -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match="more than 1 seconds"):
        in_own_process(time.sleep, 300, timeout=1)
    assert time.monotonic() - begun < 200, "it was not waited for"


def test_a_process_that_dies_is_an_error() -> None:
    with pytest.raises(BrokenProcessPool):
        in_own_process(os._exit, 3)
