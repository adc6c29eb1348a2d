"""Whether there is a GPU, how large a processor's last cache is, and how much memory a device has left.

The limit of a GPU is what TensorFlow lists of its local devices (TensorFlow 2.20 and 2.21:
``tensorflow/python/client/device_lib.py``, ``core/common_runtime/gpu/gpu_device.cc``). On Linux the system tells the
memory of the CPU: ``MemAvailable`` of ``/proc/meminfo`` (man 5 proc) and, in a container or a job, the limits of its
control groups (the kernel's ``Documentation/admin-guide/cgroup-v2.rst`` and ``cgroup-v1/memory.rst``).
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf
from absl import logging
from tensorflow.python.client import device_lib

_LEVEL3_CACHE_SIZE = 194
"""``_SC_LEVEL3_CACHE_SIZE`` of glibc's ``bits/confname.h``, for which Python has no name."""

_DEFAULT_LEVEL3_CACHE = 2 << 20
"""``EIGEN_SET_DEFAULT_L3_CACHE_SIZE`` on x86 (``Eigen/src/Core/products/GeneralBlockPanelKernel.h``)."""

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


class _Files(NamedTuple):
    """Where a version of control groups tells of memory: the folder of all groups, and two files of a group.

    ``kept_files`` is a line of the group's ``memory.stat``: bytes of files that the system gives up when it must.
    """

    folder: Path
    limit: str
    used: str
    kept_files: str


_NVIDIA = (Path("/dev/nvidia0"), Path("/proc/driver/nvidia"))
"""What NVIDIA's driver for Linux makes."""


def has_gpu() -> bool:
    """Whether TensorFlow sees a GPU."""
    return bool(tf.config.list_physical_devices("GPU"))


@functools.cache
def warn_of_unseen_gpu() -> None:
    """Warn, once, if there seems to be a GPU that TensorFlow was built for and does not see: a driver may be broken.

    Whoever hides GPUs by ``CUDA_VISIBLE_DEVICES`` knows.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not any(path.exists() for path in _NVIDIA):
        return
    if tf.test.is_built_with_cuda() and not has_gpu():
        logging.warning(
            "this machine seems to have an NVIDIA GPU, but TensorFlow sees none, so all figures are for the CPU. "
            "To find out why, run: python -c \"import tensorflow as tf; tf.config.list_physical_devices('GPU')\". "
            "CUDA_VISIBLE_DEVICES=-1 hides the GPU and this warning."
        )


def reserves_gpu() -> bool:
    """Whether this process takes all memory of a GPU, as TensorFlow does by default: another one finds none there.

    ``TF_FORCE_GPU_ALLOW_GROWTH`` in the environment decides before all else (``gpu_bfc_allocator.cc``).
    """
    forced = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH")
    return forced != "true" and any(
        not (tf.config.experimental.get_memory_growth(gpu) and forced != "false") and not _has_limit(gpu)
        for gpu in tf.config.get_visible_devices("GPU")
    )


def _has_limit(gpu: tf.config.PhysicalDevice) -> bool:
    parts = tf.config.get_logical_device_configuration(gpu) or ()
    return any(part.memory_limit is not None for part in parts)


def last_cache_bytes() -> int:
    """Return the size of the processor's last cache as glibc has it, who asks the processor like Eigen.

    Eigen: ``Eigen/src/Core/util/Memory.h``. The system may tell of less, which is one machine's of several. Where
    nothing tells, it is what Eigen takes then.
    """
    try:
        found = os.sysconf(_LEVEL3_CACHE_SIZE)
    except (AttributeError, OSError, ValueError):  # The first on systems that have no such function.
        found = 0
    return found if found > 0 else _DEFAULT_LEVEL3_CACHE


def bytes_left() -> int | None:
    """Return how many bytes more the first GPU or, without one, this machine can hold; None if nothing tells."""
    if has_gpu():
        limits = [device.memory_limit for device in device_lib.list_local_devices() if device.device_type == "GPU"]
        return int(limits[0] - tf.config.experimental.get_memory_info("GPU:0")["current"]) if limits else None
    found = [each for each in (_left_on_machine(), _left_in_groups()) if each is not None]
    return min(found, default=None)


def _left_on_machine() -> int | None:
    match = re.search(r"^MemAvailable:\s*(\d+) kB", _text(_MEMINFO), re.MULTILINE)
    return None if match is None else int(match[1]) << 10


def _left_in_groups() -> int | None:
    """Return what the control groups of this process, and those around them, leave it."""
    first = _Files(_GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    second = _Files(_GROUPS, "memory.max", "memory.current", "inactive_file")
    # In a container, the group's own folder may be the one of all groups.
    places = [(first, "/"), (second, "/")]
    for line in _text(_OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            places.append((first if controllers else second, path))
    found: list[int] = []
    for files, path in places:
        inside = Path(path.lstrip("/"))
        for folder in (inside, *inside.parents):
            most, used = (_text(files.folder / folder / name).strip() for name in (files.limit, files.used))
            if most.isdecimal() and used.isdecimal():
                stat = _text(files.folder / folder / "memory.stat")
                kept = re.search(rf"^{files.kept_files} (\d+)", stat, re.MULTILINE)
                found.append(int(most) - int(used) + (int(kept[1]) if kept else 0))
    return min(found, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
