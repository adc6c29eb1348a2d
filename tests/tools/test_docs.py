"""The site: what docs/ needs to be one, and the notebooks, which are run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tf_memsaver
from tools.docs.notebooks import NOTEBOOKS, source_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ALL = sorted(NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.parametrize("notebook", ALL, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    program = tmp_path / f"{notebook.stem}.py"
    program.write_text(source_of(notebook), encoding="utf-8")
    # A process of its own: one of them limits TensorFlow's memory before it starts.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    if notebook.stem == "unet":
        assert "ResourceExhaustedError: OOM" in ran.stdout and "bit-identical" in ran.stdout


@pytest.mark.parametrize("notebook", ALL, ids=lambda path: path.stem)
def test_a_notebook_is_as_it_was_run(notebook: Path) -> None:
    text = notebook.read_text(encoding="utf-8")
    saved = json.loads(text)
    assert saved["nbformat"] == 4
    identities = [cell["id"] for cell in saved["cells"]]
    assert len({*identities}) == len(identities)
    counts = [cell["execution_count"] for cell in saved["cells"] if cell["cell_type"] == "code"]
    assert counts == [*range(1, len(counts) + 1)]
    assert not re.search(r"/(?:home|root|work|tmp|Users)/", text)


@pytest.mark.parametrize("notebook", ALL, ids=lambda path: path.stem)
def test_a_notebook_is_linked(notebook: Path) -> None:
    assert any(f"notebooks/{notebook.name}" in page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))


def test_the_site_shows_every_page() -> None:
    shown = (ROOT / "tools" / "docs" / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (*DOCS.glob("*.md"), *(path.with_suffix(".md") for path in ALL)):
        assert f" {page.relative_to(DOCS).as_posix()}\n" in shown, page


def test_the_reference_has_every_name() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    names = " ".join(re.findall(r"<!-- api: (.*?) -->", text)).replace(".", " ").split()
    assert [name for name in tf_memsaver.__all__ if name not in names and name != "__version__"] == []


MKDOCS = shutil.which("mkdocs", path=str(ROOT / ".venv-docs" / "bin")) or shutil.which("mkdocs")


@pytest.mark.skipif(MKDOCS is None, reason="needs MkDocs: tools/docs/build installs it")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [str(MKDOCS), "build", "--strict", "--config-file", "tools/docs/mkdocs.yml", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    assert "max_overhead" in (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
