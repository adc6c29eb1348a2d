"""Whether TensorFlow takes oneDNN's kernels on this processor, and for which types.

It does by itself on processors with instructions made for neural networks, such as AVX512-VNNI, and elsewhere where
``TF_ENABLE_ONEDNN_OPTS=1`` says so (``tensorflow/core/util/util.cc``: ``IsMKLEnabled``, TensorFlow 2.21).
"""

from __future__ import annotations

import platform
import re
from pathlib import Path

from tensorflow.python.util import _pywrap_util_port

_CPUINFO = Path("/proc/cpuinfo")


def takes_onednn() -> bool:
    """Return whether TensorFlow takes oneDNN's kernels in this process."""
    return bool(_pywrap_util_port.IsMklEnabled())


def has_onednn_for(dtype: str) -> bool:
    """Return whether oneDNN's kernels compute a type such as ``"bfloat16"`` here; Eigen's do where they do not.

    ``IsDataTypeSupportedByOneDNNOnThisCPU`` in the same file: by the processor's flags, as Linux lists them.
    """
    if not takes_onednn() or dtype not in ("float32", "bfloat16", "float16"):
        return False
    if dtype == "float32" or platform.machine() not in ("x86_64", "AMD64"):
        return True
    flags = _flags()
    if dtype == "bfloat16":
        return not flags.isdisjoint({"avx512f", "avx_ne_convert"})
    return "avx_ne_convert" in flags or ("avx512bw" in flags and not flags.isdisjoint({"avx512_fp16", "amx_fp16"}))


def _flags() -> set[str]:
    try:
        found = re.search(r"^flags\s*:(.*)", _CPUINFO.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return set()
    return set(found[1].split()) if found else set()
