"""Where results lie, and what the figures of a benchmark depend on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
"""The repository, from whose root the tools are run as modules."""

RESULTS = ROOT / "tools" / "results"


def machine() -> dict[str, Any]:
    """Return processor, whose kernels TensorFlow takes on it, cores, memory and versions."""
    from tf_memsaver.compat.onednn import takes_onednn

    cpu = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        cpu = next((line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "kernels": "oneDNN" if takes_onednn() else "Eigen",
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


def error_text(error: Exception, most: int = 200) -> str:
    """Return an error as a row has it, of so many characters at most behind its type."""
    return f"{type(error).__name__}: {str(error)[:most]}"


def write_rows(path: str | Path, rows: Any, **about: Any) -> dict[str, Any]:
    """Write rows as JSON, behind the machine and what else is said about them; return the document."""
    document = {"machine": machine(), **about, "rows": rows}
    write_text(path, json.dumps(document, indent=1) + "\n")
    return document


def machine_line() -> str:
    """Return the machine as a line of Markdown."""
    return f"Machine: `{json.dumps(machine())}`"


_Row = tuple[dict[str, Any], dict[str, Any]]
"""A row, and the machine that it was measured on."""


class KeptRows:
    """The rows of a benchmark in a JSON file, with a table in Markdown beside it.

    Rows that are measured again take the place of the ones before, and the others stay: so parts can be run one by one.
    Where rows are of several machines, each of them is named, and a row says by ``on`` which is its own.
    """

    def __init__(
        self,
        path: str | Path,
        title: str,
        key: Sequence[str],
        summary: Callable[[Sequence[dict[str, Any]]], Iterable[str]],
        table: Callable[[Sequence[dict[str, Any]]], str],
    ) -> None:
        """Read the file if it is there.

        Args:
          path: the JSON file.
          title: the heading of the Markdown.
          key: the fields that tell rows apart.
          summary: returns lines about all rows, which stand in front of the table.
          table: returns rows as a table in Markdown.
        """
        self._path, self._title, self._key = Path(path), title, tuple(key)
        self._summary, self._table = summary, table
        self._rows: dict[tuple[Any, ...], _Row] = {}
        if self._path.exists():
            found = json.loads(self._path.read_text(encoding="utf-8"))
            machines = found.get("machines", [found["machine"]])
            self._take((row, machines[row.pop("on", 0)]) for row in found["rows"])

    def _take(self, rows: Iterable[_Row]) -> None:
        self._rows.update({self._key_of(row): (row, on) for row, on in rows})

    def _key_of(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in self._key)

    def add(self, rows: Iterable[dict[str, Any]], order: Callable[[dict[str, Any]], Any] | None = None) -> None:
        """Take rows in, write both files, and print the rows; ``order`` gives what those of the file are sorted by."""
        rows, here = list(rows), machine()
        self._take((row, here) for row in rows)
        if order is not None:
            self._rows = dict(sorted(self._rows.items(), key=lambda item: order(item[1][0])))
        kept, machines = [row for row, _ in self._rows.values()], [on for _, on in self._rows.values()]
        different = [each for place, each in enumerate(machines) if each not in machines[:place]]
        if len(different) == 1:
            write_rows(self._path, kept)
            lines = [machine_line()]
        else:
            numbered = [row | {"on": different.index(on)} for row, on in zip(kept, machines, strict=True)]
            write_rows(self._path, numbered, machines=different)
            lines = [f"- Machine of {machines.count(each)} rows: `{json.dumps(each)}`" for each in different]
        head = [f"# {self._title}", "", *lines, "", *self._summary(kept), ""]
        write_text(self._path.with_suffix(".md"), "\n".join(head) + "\n" + self._table(kept) + "\n")
        print("\n".join(self._table(rows).splitlines()[2:]), flush=True)

    def print_summary(self) -> None:
        """Print what is said about all rows."""
        print("\n".join(self._summary([row for row, _ in self._rows.values()])))
