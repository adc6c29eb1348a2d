"""Where results lie, and what the figures of a benchmark depend on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
"""The repository, from whose root the tools are run as modules."""

RESULTS = ROOT / "tools" / "results"


def machine() -> dict[str, Any]:
    """Return processor, cores, memory and versions."""
    cpu = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        cpu = next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("tensorflow", "keras", "numpy")},
    }
