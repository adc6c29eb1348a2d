"""Whether TensorFlow counts what is allocated, and how to have a CPU's memory counted.

A GPU's allocator counts. A CPU's does where TensorFlow takes oneDNN's kernels (``compat/onednn.py``), which bring an
allocator of their own, for all buffers from 256 KiB on. Elsewhere, on AMD's processors before Zen 4 among others, it
takes the system's allocator, which does not count, unless an environment variable asks for the one that GPUs have
(TensorFlow 2.21: ``core/common_runtime/process_state.cc``). That is read when the first operation makes the device. The
kernels and their results are the same with either.
"""

from __future__ import annotations

import os

import tensorflow as tf

from tf_memsaver.compat.onednn import takes_onednn
from tf_memsaver.errors import MeasurementError

VARIABLE = "TF_CPU_ALLOCATOR_USE_BFC"


def count_memory() -> None:
    """Have the CPU's memory counted in a process of our own, before its first operation."""
    if not takes_onednn():
        os.environ.setdefault(VARIABLE, "1")


def counts_all() -> bool:
    """Return whether a CPU's memory is counted by the allocator that GPUs have, if it is: small buffers count, too."""
    asked = os.environ.get(VARIABLE, "0" if takes_onednn() else "1")
    return asked.lower() in ("1", "true")


def is_counted(device: str) -> bool:
    """Whether anything counts the memory of a device such as ``"CPU:0"``."""
    try:
        tf.config.experimental.get_memory_info(device)
    except ValueError:
        return False
    return True


def check_counted(device: str) -> None:
    """Raise ``MeasurementError``, with what to do, if nothing counts the memory of a device."""
    if not is_counted(device):
        raise MeasurementError(
            f"TensorFlow does not count the memory that it allocates on {device}, since it uses the system's "
            f"allocator there. Set the environment variable {VARIABLE}=1 before Python starts, or "
            f"os.environ['{VARIABLE}'] = '1' before the first TensorFlow operation; results stay the same. "
            "(tf_memsaver.measure sets it for its own process; with isolate=False it cannot.)"
        )
