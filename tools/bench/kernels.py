"""What a CPU's kernels take for one number: ``python -m tools.bench.kernels``.

Prints a line for each type of operation in ``cost/rules.py: SCALAR_OPERATIONS``: nanoseconds for each number of the
result, times the operations that the device is said to do in one, and in brackets what the table has. Two million
numbers of a normal distribution, the median of nine runs on an idle machine, for each type of float.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import app

from tf_memsaver.cost.device import CPU
from tf_memsaver.cost.rules import SCALAR_OPERATIONS

_ROWS, _COLUMNS = 2048, 1024
_RUNS = 9
_RANDOM: dict[str, Callable[..., Any]] = {
    "StatelessRandomUniformV2": tf.random.stateless_uniform,
    "StatelessRandomNormalV2": tf.random.stateless_normal,
    "StatelessTruncatedNormalV2": tf.random.stateless_truncated_normal,
}
_ARGUMENTS = ("x y", "x", "y dy", "features", "gradients features", "gradients outputs", "logits")
"""What raw operations call their tensors, the first that one takes."""


def kernel_of(kind: str, dtype: tf.DType) -> Callable[[], Any] | None:
    """Return a function that runs one operation, or None for a type that has a twin in the table."""
    if kind in _RANDOM:
        return lambda: _RANDOM[kind]((_ROWS, _COLUMNS), (1, 2), dtype=dtype)
    numbers = tf.cast(tf.random.normal((_ROWS, _COLUMNS), seed=1), dtype)
    positive, run = tf.abs(numbers), getattr(tf.raw_ops, kind)
    if kind == "SelectV2":
        return lambda: run(condition=numbers > 0, t=numbers, e=positive)
    if kind in ("Cumsum", "Cumprod"):
        return lambda: run(x=numbers, axis=tf.constant(1))
    if any(word in kind for word in ("Random", "Normal", "Stateful")):
        return None
    for names in _ARGUMENTS:
        arguments = dict.fromkeys(names.split(), positive if kind in ("Log", "Log1p", "Pow") else numbers)
        try:
            run(**arguments)
        except TypeError:
            continue
        return functools.partial(run, **arguments)
    raise ValueError(f"how '{kind}' is called is not known: add its arguments to _ARGUMENTS")


def nanoseconds(run: Callable[[], Any]) -> float:
    """Return what a run takes for each number, after two that do not count."""
    times = []
    for _ in range(_RUNS + 2):
        begin = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times[2:]) / (_ROWS * _COLUMNS)


def main(_: list[str]) -> None:
    """Print the table."""
    each = CPU.scalar_operations_per_second / 1e9
    for kind, told in SCALAR_OPERATIONS.items():
        runs = [kernel_of(kind, dtype) for dtype in (tf.float32, tf.bfloat16, tf.float16)]
        seen = [f"{each * nanoseconds(run):6.1f} ({of_type})" for run, of_type in zip(runs, told, strict=True) if run]
        if seen:
            print(f"{kind:28}", *seen, flush=True)


if __name__ == "__main__":
    app.run(main)
