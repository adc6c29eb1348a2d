"""Where results lie, and what the figures of a benchmark depend on."""

from __future__ import annotations

import json
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


def write_text(path: str | Path, text: str) -> None:
    """Write a file that is never there by half; its folder is made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def write_rows(path: str | Path, rows: Any, **about: Any) -> dict[str, Any]:
    """Write rows as JSON, behind the machine and what else is said about them; return the document."""
    document = {"machine": machine(), **about, "rows": rows}
    write_text(path, json.dumps(document, indent=1) + "\n")
    return document


def machine_line() -> str:
    """Return the machine as a line of Markdown."""
    return f"Machine: `{json.dumps(machine())}`"
