"""What a module's text tells of the names in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tf_memsaver.command.sources import top_level_names

BOUND = """
import os.path, json as j
from pathlib import Path as P
if True:
    first = 1
else:
    def second(): inner = 1
for third, (fourth, *fifth) in (): pass
try:
    with open("x") as sixth: seventh: int = 7
except OSError as eighth:
    raise
class Ninth: tenth = 10
while (eleventh := 0): pass
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)

    return write


def test_names_are_those_that_the_module_binds(write) -> None:
    write("bound_names.py", BOUND)
    names = top_level_names("bound_names")
    assert names is not None
    numbers = {"first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "Ninth", "eleventh"}
    assert {each for each in names if not each.startswith("_")} == {"os", "j", "P"} | numbers


@pytest.mark.parametrize(
    "text",
    [
        "from os import *",
        "globals()['x'] = 1",
        "def __getattr__(name): return 1",
        "exec('x = 1')",
        "def set_it():\n    global x\n    x = 1\nset_it()",
        "import sys\nsetattr(sys.modules[__name__], 'x', 1)",
        "this is no Python",
    ],
)
def test_what_a_text_cannot_tell_is_left_to_the_import(write, text: str) -> None:
    write("open_ended.py", text)
    assert top_level_names("open_ended") is None


def test_modules_in_packages_are_read_and_nothing_is_imported(write) -> None:
    write("some_package/__init__.py", "raise RuntimeError")
    write("some_package/part.py", "x = 1")
    assert "x" in (top_level_names("some_package.part") or ())
    # Submodules may become names of a package.
    assert top_level_names("some_package") is None
    assert top_level_names("some_package.missing") is None and top_level_names("no_such_module_at_all") is None


def test_what_is_no_text_is_left_to_the_import() -> None:
    assert top_level_names("math") is None and top_level_names("sys") is None
