"""What a module of the user's own defines, read from its text: importing it may take seconds."""

from __future__ import annotations

import ast
import importlib.machinery
import os
import sys
from collections.abc import Iterable, Iterator, Sequence

_OPEN_ENDED = {"globals", "exec", "vars", "setattr", "__getattr__", "eval", "locals"}
"""Names by which a module may define others that its text does not tell."""


def top_level_names(module: str) -> set[str] | None:
    """Return the names that a module binds where it stands; None where its text cannot tell all of them.

    The module is looked for in the working folder, then as Python does it. Nothing is imported.
    """
    path = _file_of(module)
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None  # Importing it tells what is wrong.
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    defined = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    stars = (isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(tree))
    if any(stars) or _OPEN_ENDED & (used | defined) or any(isinstance(node, ast.Global) for node in ast.walk(tree)):
        return None
    return {"__name__", "__doc__", "__file__", *_bound(tree.body)}


def _file_of(module: str) -> str | None:
    """Return the file of a module's text; None for what has none, such as a package's folder or an extension."""
    if module in sys.modules:
        return None
    places: Sequence[str] | None = [os.getcwd(), *sys.path]
    spec = None
    for end in range(1, module.count(".") + 2):
        name = ".".join(module.split(".")[:end])
        spec = None if places is None else importlib.machinery.PathFinder.find_spec(name, places)
        if spec is None:
            return None
        places = spec.submodule_search_locations
    is_text = spec is not None and spec.has_location and str(spec.origin).endswith(".py")
    # A package's submodules are names of it, too, once they are imported.
    return spec.origin if spec is not None and is_text and places is None else None


def _bound(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that statements bind, those in their branches and loops included, not those in functions."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, (ast.MatchAs, ast.MatchStar, ast.ExceptHandler)) and node.name:
            yield node.name
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest
        yield from _bound(ast.iter_child_nodes(node))
