"""docs/adding.md is followed to the letter: each recipe's files and changes, in a copy, then its commands."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "docs" / "adding.md"
RECIPES = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))


def change(path: Path, lines: list[str]) -> None:
    """Change a file where it has the lines without a plus, once: those without a minus stand there then."""
    before, after = ("\n".join(line[1:] for line in lines if line[:1] != sign) for sign in "+-")
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{path.name} has not once:\n{before}"
    path.write_text(text.replace(before, after), encoding="utf-8")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package, of its tests and of what they share."""
    for folder in ("tf_memsaver", "tests", "tools/shared"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "tools/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


WITH_TENSORFLOW = ("A kind of model", "A mode of segments", "A new version of Keras or TensorFlow")
"""Recipes whose tests take long."""


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=pytest.mark.long if name in WITH_TENSORFLOW else ())
        for name, text in RECIPES.items()
        if "```" in text
    ],
)
def test_a_recipe_works(recipe: str, copy: Path) -> None:
    commands = []
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", RECIPES[recipe], flags=re.MULTILINE | re.DOTALL):
        first, *lines = block.splitlines()
        if language == "sh":
            commands.extend(shlex.split(line) for line in (first, *lines))
        elif language == "diff":
            change(copy / first.removeprefix("# "), lines)
        else:
            assert not (copy / first.removeprefix("# ")).exists()
            (copy / first.removeprefix("# ")).write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert commands
    if "# tf_memsaver/" in RECIPES[recipe].partition("```python")[2].partition("```")[0]:
        commands.append(shlex.split("python -m pytest tests/test_stairs.py -k 'room or imports or halves or modules'"))
    for python, *arguments in commands:
        assert python == "python"
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        command = [sys.executable, *arguments, "-p", "no:cacheprovider"]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
