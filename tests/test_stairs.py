"""The house's stairs: every import goes down, room by room and file by file, wherever in a file it stands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

import tf_memsaver
from tools.shared.processes import run_code

ROOT = Path(tf_memsaver.__file__).parent
TESTS = Path(__file__).parent
TOOLS = TESTS.parent / "tools"
PACKAGE = "tf_memsaver"

LOOSE = ("errors", "units", "summary", "pace", "options", "callbacks", "cli", "__init__", "__main__")
"""The only modules that are in no room."""

PLANNING = ("ir", "cost", "judge", "plan", "search", "planners", "oracle")
"""The rooms that never import TensorFlow, lowest first."""

TENSORFLOW = ("compat", "tfgraph", "parity", "program", "capture", "runtime", "rewrite", "check", "saved")
"""The rooms that handle TensorFlow's objects, lowest first."""

FLOORS = (
    *("units", "summary", "pace", "errors", "options", "files"),
    *PLANNING,
    *TENSORFLOW,
    *("display", "api", "callbacks", "__init__", "command", "cli", "__main__"),
)
"""All there is, lowest first: an import goes to the left. This is the one table of the house."""

SHARED = {"units", "summary", "pace", "errors", "options", "files", "ir", "cost", "plan"}
"""All that TensorFlow's rooms know of what lies below them."""

FRAMEWORKS = {"keras", "tensorflow", "tf_keras"}
PRIVATE = ("keras.src", "tensorflow.python", "tensorflow.core", "tensorflow.compiler")

Imports = Mapping[str, Iterable[str]]
"""By module, the modules that it imports; names are those below the package."""


def name_of(path: Path) -> str:
    """The dotted name of a file below the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a file imports, lazily and for type checkers, too.

    Where a file imports by name, what it has of names of ours, as strings, is what it imports.
    """
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    by_name = any(isinstance(node, ast.Attribute) and node.attr == "import_module" for node in nodes)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: imports are absolute"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif by_name and re.fullmatch(rf"{PACKAGE}(\.\w+)+", _text(node)):
            yield node.lineno, _text(node)


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def own_imports(modules: Mapping[str, Path]) -> Imports:
    """The imports within the package."""
    found: dict[str, list[str]] = {}
    for module, path in modules.items():
        names = [name.removeprefix(PACKAGE).lstrip(".") for _, name in imported(path) if name.split(".")[0] == PACKAGE]
        found[module] = [target for name in names if (target := _module(name, modules)) != module]
    return found


def _module(name: str, modules: Iterable[str]) -> str:
    """The module that a name is in: the name itself, or the longest part of it that is one."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or "__init__"


def room(module: str) -> str:
    """The name in ``FLOORS`` that a module belongs to."""
    return module.split(".")[0]


def upward(imports: Imports) -> list[tuple[str, str]]:
    """The imports that lead to a higher room."""
    return [
        (module, target)
        for module, targets in imports.items()
        for target in targets
        if FLOORS.index(room(target)) > FLOORS.index(room(module))
    ]


def circles(imports: Imports) -> list[set[str]]:
    """The largest sets of modules that reach each other."""
    reached: dict[str, set[str]] = {}
    for module in imports:
        seen, waiting = set[str](), list(imports[module])
        while waiting:
            target = waiting.pop()
            if target not in seen:
                seen.add(target)
                waiting.extend(imports.get(target, ()))
        reached[module] = seen
    found = {frozenset(m for m in reached[module] if module in reached[m]) for module in imports}
    return sorted((set(circle) for circle in found if circle), key=len, reverse=True)


@pytest.fixture(scope="module")
def house() -> Imports:
    return own_imports(MODULES)


def test_imports_by_name_are_seen(house: Imports):
    assert "api" in house["command.model_source"]
    assert {"callbacks", "planners.largest", "rewrite.optimized_model"} <= set(house["__init__"])


def test_every_module_is_in_a_room():
    for module in MODULES:
        assert room(module) in FLOORS, f"{module} is in no room: enter it into FLOORS"
        assert "." in module or module in LOOSE or (ROOT / module).is_dir(), f"{module} lies loose: it needs a room"


def test_every_room_says_what_lives_there_and_what_does_not():
    for folder in (path for path in ROOT.iterdir() if (path / "__init__.py").exists()):
        doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
        assert "Not here: " in doc, f"{folder.name}/__init__.py does not say what lives elsewhere"


def test_imports_go_down(house: Imports):
    assert upward(house) == []


def test_no_modules_import_each_other(house: Imports):
    assert circles(house) == []


def test_the_two_halves_meet_in_a_few_rooms(house: Imports):
    for module in house:
        if room(module) in TENSORFLOW:
            outside = {target for target in house[module] if room(target) not in (*TENSORFLOW, *SHARED)}
            assert not outside, f"{module} imports {sorted(outside)}; only api joins planning and TensorFlow"


@pytest.mark.parametrize("module", MODULES)
def test_what_comes_from_elsewhere(module: str):
    below = FLOORS.index(room(module)) < FLOORS.index(TENSORFLOW[0])
    for line, name in imported(MODULES[module]):
        if below:
            assert name.split(".")[0] not in FRAMEWORKS, f"{module}:{line} imports {name}: no TensorFlow there"
        if room(module) != "compat":
            assert not name.startswith(PRIVATE), f"{module}:{line} imports {name}: private things are in compat/"


PUBLIC = {"_exit", "_replace"}
"""Names with an underscore in front that Python documents: of ``os``, and of named tuples."""


INTERNAL = {"cached_definition", "function_spec", "unpack_inputs"}
"""Names of TensorFlow's that nothing documents, though they have no underscore in front."""

TAKEN_OVER = {"build", "unique_name"}
"""What Keras and TensorFlow ask their objects, and may be answered by others: to set it is to change how they work."""


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each access to something private of an object that is not the method's own.

    What the same file defines, as an attribute of ``self`` or in the body of a class, is no other's. A string that is
    such a name is an access, too: what it is a key of or is compared with is somebody's.
    """
    own = set(PUBLIC)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            own.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            own.update(name for each in node.body for name in _defined(each))
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    setters = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and "setattr" in ast.unparse(node.func)]
    set_by_name = {id(argument) for call in setters for argument in call.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not _is_own(node.value):
            name, is_set = node.attr, isinstance(node.ctx, ast.Store)
        elif _text(node) and id(node) not in parts:
            name, is_set = _text(node), id(node) in set_by_name
        else:
            continue
        is_private = re.fullmatch(r"_+[a-zA-Z]\w*", name) and (not name.endswith("__") or name == "__internal__")
        if (is_private and name not in own) or name in INTERNAL or (is_set and name in TAKEN_OVER):
            yield node.lineno, name


def _is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


@pytest.mark.parametrize("module", MODULES)
def test_what_is_private_of_others_is_reached_in_compat(module: str):
    if room(module) != "compat":
        assert list(private_names(ast.parse(MODULES[module].read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("graph._functions", ["_functions"]),
        ("graph._names_in_use[name] = 1", ["_names_in_use"]),
        ("self._graph._add_function(function)", ["_add_function"]),
        ("getattr(function, '_inference_function', None)", ["_inference_function"]),
        ("object.__setattr__(model, '_layers', [])", ["_layers"]),
        ("tf.__internal__.FuncGraph", ["__internal__"]),
        ("model._losses; self._losses", ["_losses"]),
        ("'_class' in operation.node_def.attr", ["_class"]),
        ("function.cached_definition", ["cached_definition"]),
        ("graph.unique_name = answer", ["unique_name"]),
        ("object.__setattr__(optimizer, 'build', build)", ["build"]),
        ("graph.unique_name(name); getattr(layer, 'build')", []),
        ("f'{name}_grad'", []),
        ("class A:\n    _mine: int\n    def one(self, other): return other._mine", []),
        ("class A:\n    def one(self, other): self._mine = other._mine", []),
        ("type(model).__name__", []),
        ("step._replace(seconds=1)", []),
    ],
)
def test_what_is_private_of_others(code: str, found: list[str]):
    assert [name for _, name in private_names(ast.parse(code))] == found


def test_folders_of_tests_are_rooms():
    folders = {path.parent.name for path in TESTS.glob("*/test_*.py")}
    assert folders <= {*FLOORS, "tensorflow", "tools"}


def test_what_tests_and_tools_share_is_in_neither():
    for path in [*TESTS.rglob("*.py"), *TOOLS.rglob("*.py")]:
        for line, name in imported(path):
            parts = name.split(".")
            place = f"{path.relative_to(TESTS.parent)}:{line}"
            if path.is_relative_to(TESTS):
                assert not any(part.startswith("test_") for part in parts[:-1]), f"{place}: no test imports a test"
            elif path.is_relative_to(TOOLS / "shared"):
                assert parts[0] != "tests" and (parts[0] != "tools" or parts[1] == "shared"), f"{place} imports {name}"
            else:
                assert parts[0] != "tests", f"{place} imports {name}: what is shared is in tools/shared"


def test_the_path_of_imports_is_left_alone():
    for path in [*TESTS.rglob("*.py"), *TOOLS.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                assert not ast.unparse(node.func).startswith("sys.path."), f"{path.name}:{node.lineno}"


def test_tests_of_planning_need_no_tensorflow():
    folders = [TESTS / room for room in (*PLANNING, "files")]
    modules = [f"tests.{path.parent.name}.{path.stem}" for folder in folders for path in folder.glob("test_*.py")]
    assert len(modules) > 10
    done = run_code(
        f"""
        import importlib, sys
        for name in {sorted(modules)}:
            importlib.import_module(name)
            assert not {FRAMEWORKS} & set(sys.modules), name
        """
    )
    assert done.returncode == 0, done.stderr[-500:]


def test_the_rules_fail_for_the_house_of_version_0_1():
    """``house_0_1.txt`` has the imports of that version, one module a line, with lazy ones and those for types."""
    lines = (Path(__file__).parent / "house_0_1.txt").read_text(encoding="utf-8").splitlines()
    imports = {module: targets.split() for module, _, targets in (line.partition(":") for line in lines)}
    plan, other = (circle for circle in circles(imports) if all(m.startswith("plan.") for m in circle))
    assert {m.removeprefix("plan.") for m in plan} == set(
        "costs least_peak nested one_level polish problem repeats search tables thinning registry".split()
    )
    assert {m.removeprefix("plan.") for m in other} == {"executor", "schedule", "simulate"}


@pytest.mark.parametrize(
    ("importer", "target", "up"),
    [("search.labels", "ir.graph", False), ("search.labels", "search.facts", False), ("ir.graph", "plan.plan", True)],
)
def test_what_is_upward(importer: str, target: str, up: bool):
    assert bool(upward({importer: [target]})) is up
