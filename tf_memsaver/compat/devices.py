"""Whether there is a GPU, how large a processor's last cache is, and how much memory a device has left.

The limit of a GPU is what TensorFlow lists of its local devices (TensorFlow 2.20 and 2.21:
``tensorflow/python/client/device_lib.py``, ``core/common_runtime/gpu/gpu_device.cc``). On Linux the system tells the
memory of the CPU: ``MemAvailable`` of ``/proc/meminfo`` (man 5 proc) and, in a container, the limit of its control
group (the kernel's ``Documentation/admin-guide/cgroup-v2.rst``).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import tensorflow as tf
from tensorflow.python.client import device_lib

_LEVEL3_CACHE_SIZE = 194
"""``_SC_LEVEL3_CACHE_SIZE`` of glibc's ``bits/confname.h``, for which Python has no name."""

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def has_gpu() -> bool:
    """Whether TensorFlow sees a GPU."""
    return bool(tf.config.list_physical_devices("GPU"))


def reserves_gpu() -> bool:
    """Whether this process takes all memory of a GPU, as TensorFlow does by default: another one finds none there.

    ``TF_FORCE_GPU_ALLOW_GROWTH`` in the environment decides before all else (``gpu_bfc_allocator.cc``).
    """
    forced = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH")
    if forced in ("true", "false"):
        return forced == "false" and has_gpu()
    return any(
        not tf.config.experimental.get_memory_growth(gpu) and not _has_limit(gpu)
        for gpu in tf.config.list_physical_devices("GPU")
    )


def _has_limit(gpu: tf.config.PhysicalDevice) -> bool:
    parts = tf.config.get_logical_device_configuration(gpu) or ()
    return any(part.memory_limit is not None for part in parts)


def last_cache_bytes() -> int:
    """Return the size of the processor's last cache as glibc has it, who asks the processor like Eigen; 0 if unknown.

    Eigen: ``Eigen/src/Core/util/Memory.h``. The system may tell of less, which is one machine's of several.
    """
    try:
        return max(0, os.sysconf(_LEVEL3_CACHE_SIZE))
    except (OSError, ValueError):
        return 0


def bytes_left() -> int | None:
    """Return how many bytes more the first GPU or, without one, this machine can hold; None if nothing tells."""
    if has_gpu():
        limits = [device.memory_limit for device in device_lib.list_local_devices() if device.device_type == "GPU"]
        return int(limits[0] - tf.config.experimental.get_memory_info("GPU:0")["current"]) if limits else None
    found = [each for each in (_left_on_machine(), _left_in_group()) if each is not None]
    return min(found, default=None)


def _left_on_machine() -> int | None:
    match = re.search(r"^MemAvailable:\s*(\d+) kB", _text(_MEMINFO), re.MULTILINE)
    return None if match is None else int(match[1]) << 10


def _left_in_group() -> int | None:
    most, now = _text(_GROUP / "memory.max").strip(), _text(_GROUP / "memory.current").strip()
    return int(most) - int(now) if most.isdecimal() and now.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
