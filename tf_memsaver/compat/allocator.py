"""Whether TensorFlow counts what is allocated, and how to have a CPU's memory counted.

A GPU's allocator counts. A CPU's does where TensorFlow takes oneDNN's kernels by itself, which bring an allocator of
their own: on processors with instructions made for neural networks, such as AVX512-VNNI
(``tensorflow/core/util/util.cc``, ``IsMKLEnabled``, TensorFlow 2.21). Elsewhere, on AMD's processors before Zen 4 among
others, it takes the system's allocator, which does not count, unless an environment variable asks for the one that GPUs
have (``core/common_runtime/process_state.cc``). That is read when the first operation makes the device. The kernels
and their results are the same with either.
"""

from __future__ import annotations

import os

import tensorflow as tf
from tensorflow.python.util import _pywrap_util_port

from tf_memsaver.errors import MeasurementError

VARIABLE = "TF_CPU_ALLOCATOR_USE_BFC"


def takes_onednn() -> bool:
    """Return whether TensorFlow takes oneDNN's kernels in this process."""
    return bool(_pywrap_util_port.IsMklEnabled())


def count_memory() -> None:
    """Have the CPU's memory counted in a process of our own, before its first operation."""
    if not takes_onednn():
        os.environ.setdefault(VARIABLE, "1")


def check_counted(device: str) -> None:
    """Raise ``MeasurementError``, with what to do, if nothing counts the memory of a device such as ``"CPU:0"``."""
    try:
        tf.config.experimental.get_memory_info(device)
    except ValueError as error:
        raise MeasurementError(
            f"TensorFlow does not count what it allocates on {device}: on this processor it takes the system's "
            f"allocator. Set the environment variable {VARIABLE}=1 before Python starts, or "
            f'os.environ["{VARIABLE}"] = "1" before the first TensorFlow operation; results stay the same. '
            f"(tf_memsaver.measure counts in a process of its own, unless it is told isolate=False.)"
        ) from error
