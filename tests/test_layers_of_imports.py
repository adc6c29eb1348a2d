"""The floors of the design (section 1): an import goes to a lower floor, or to a sibling in the same folder."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tf_memsaver

ROOT = Path(tf_memsaver.__file__).parent

# By the first part of a module's path below the package. What stands under no name here is an error of this table.
FLOORS = {
    "backend": 0,
    "errors": 0,
    "files": 0,
    "notices": 0,
    "options": 0,
    "units": 0,
    "ir": 1,
    "cost": 2,
    "plan": 3,
    "capture": 4,
    "export": 4,
    "emission": 4,
    "saving": 4,
    "targets": 0,
    "tether": 0,
    "fan_out": 4,
    "gates": 4,
    "keras_compat": 4,
    "measurement": 4,
    "plain_names": 4,
    "measurement_worker": 4,
    "rewrite": 4,
    "runtime": 4,
    "training_step": 4,
    "twins": 4,
    "verification": 4,
    "api": 5,
    "__init__": 6,
    "__main__": 6,
    "cli": 6,
    "command": 6,
    "report": 6,
}
FRAMEWORKS = {"keras", "tensorflow", "tf_keras"}
FIRST_FLOOR_WITH_TENSORFLOW = 4

MODULES = sorted(ROOT.rglob("*.py"))


def part(path: Path) -> str:
    """The name in ``FLOORS`` that a file belongs to."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports, wherever in the file it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: imports are absolute"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def goes_up(importer: str, imported: str) -> bool:
    """Whether an import within the package, given by parts, leaves its floor upwards.

    Single files of one floor are siblings, since they lie in one folder; so are the files of one package.
    """
    return importer != imported and FLOORS[imported] > FLOORS[importer]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path):
    assert part(path) in FLOORS, f"{path} is on no floor: enter it into the table"
    for line, name in imports(path):
        first, *rest = name.split(".")
        # The package's version is a constant of its root, for every floor to read.
        if first == "tf_memsaver" and rest and not rest[0].startswith("__version"):
            target = rest[0] if rest[0] in FLOORS else "__init__"
            assert not goes_up(part(path), target), f"{path}:{line} imports {name}, which is on a higher floor"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_lower_floors_import_no_framework(path: Path):
    if FLOORS[part(path)] < FIRST_FLOOR_WITH_TENSORFLOW:
        for line, name in imports(path):
            assert name.split(".")[0] not in FRAMEWORKS, f"{path}:{line} imports {name} below floor 4"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_keras_internals_are_touched_in_one_module(path: Path):
    if part(path) != "keras_compat":
        for line, name in imports(path):
            assert not name.startswith("keras.src"), f"{path}:{line} imports {name}"


@pytest.mark.parametrize(
    ("importer", "imported", "up"),
    [
        ("plan", "ir", False),
        ("plan", "plan", False),
        ("ir", "plan", True),
        ("errors", "units", False),
        ("units", "ir", True),
        ("plan", "runtime", True),
        ("capture", "keras_compat", False),
        ("rewrite", "api", True),
        ("api", "cli", True),
        ("plan", "__init__", True),
    ],
)
def test_the_rule_itself(importer: str, imported: str, up: bool):
    assert goes_up(importer, imported) is up


def test_every_module_is_seen():
    seen = {str(path.relative_to(ROOT)) for path in MODULES}
    assert {"errors.py", "ir/graph.py", "plan/solve.py", "keras_compat.py"} <= seen
