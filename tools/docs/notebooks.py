"""Run the notebooks of docs/ and write them anew, with what they print. Needs nbclient and ipykernel.

Usage: python -m tools.docs.notebooks [NAME ...]

Of what a cell prints, standard output and values are kept: warnings and logs name paths of the machine.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from absl import app

from tools.shared.results import ROOT, write_text

NOTEBOOKS = ROOT / "docs" / "notebooks"


def source_of(notebook: Path) -> str:
    """Return the code of a notebook as one program."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code") + "\n"


def kept(output: Any) -> bool:
    """Return whether what a cell gave is for readers."""
    return output["output_type"] == "execute_result" or output.get("name") == "stdout"


def run(path: Path) -> None:
    """Run a notebook in a kernel of its own and write what came out into it."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if kept(output)]
    # A newer Python names itself and its version here.
    notebook.metadata["language_info"] = {"name": "python"}
    write_text(path, nbformat.writes(notebook, indent=1) + "\n")


def main(arguments: list[str]) -> None:
    """Run those that are named, or all."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if path.stem in arguments[1:] or len(arguments) == 1:
            began = time.perf_counter()
            run(path)
            print(f"{path.stem}: {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    app.run(main)
