"""A script of somebody's, run as Python would run it up to its first ``fit``, and the call of ``fit`` in its text."""

from __future__ import annotations

import ast
import contextlib
import linecache
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from tf_memsaver.errors import InvalidRequestError

_LONGEST = 60
"""Characters of an argument that is repeated in a line to add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a program calls something: a file, a line from 1, and the call as it stands there, where it is found."""

    file: str
    line: int
    call: ast.Call | None

    @classmethod
    def of(cls, frame: FrameType, name: str = "fit") -> Place:
        """Return where a frame is, and the call of a method of this name there."""
        file, line = frame.f_code.co_filename, frame.f_lineno
        linecache.checkcache(file)
        text = "".join(linecache.getlines(file))
        shown = os.path.relpath(file) if os.path.isabs(file) else file
        return cls(file=file if shown.startswith(os.pardir) else shown, line=line, call=_call_at(text, line, name))

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def variable(self) -> str:
        """The name that the method is called on, such as ``model`` or ``self.net``; empty where it is no name."""
        owner = self.call.func.value if self.call is not None and isinstance(self.call.func, ast.Attribute) else None
        return ast.unparse(owner) if owner is not None and _is_name(owner) else ""

    def argument(self, position: int, name: str) -> str:
        """Return an argument of the call as it is written; empty where it is not given, is long or not to be found."""
        if self.call is None or any(isinstance(each, ast.Starred) for each in self.call.args):
            return ""
        named = [each.value for each in self.call.keywords if each.arg == name]
        given = named or self.call.args[position : position + 1]
        written = ast.unparse(given[0]) if given else ""
        return written if len(written) <= _LONGEST else ""


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a script as ``python path arguments...`` would, in this process; what it raises comes out of this."""
    with _as_a_program(path, arguments):
        runpy.run_path(path, run_name="__main__")


def own_traceback(path: str, error: BaseException) -> str:
    """Return the traceback that Python would print for a script, without the frames of who runs it."""
    found: TracebackType | None = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename != path:
        found = found.tb_next
    return "".join(traceback.format_exception(type(error), error, found))


def check_text(path: str) -> None:
    """Check that a script can be read, and is Python.

    Raises:
      InvalidRequestError: it cannot, or it is not; the sentence says where.
    """
    try:
        with open(path, "rb") as file:
            compile(file.read(), path, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise InvalidRequestError(f"'{path}' cannot be run, line {error.lineno}: {error.msg}.") from error
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"'{path}' cannot be read: {error}.") from error


@contextlib.contextmanager
def _as_a_program(path: str, arguments: Sequence[str]) -> Iterator[None]:
    """Give the process the arguments and the first place to look for modules that the program would have."""
    argv, folder = sys.argv, os.path.dirname(os.path.realpath(path))
    sys.argv = [path, *arguments]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv = argv
        with contextlib.suppress(ValueError):
            sys.path.remove(folder)


def _call_at(text: str, line: int, name: str) -> ast.Call | None:
    """Return the innermost call of a method of this name that a line is part of; None where none or several are."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == name
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return found[0] if len(found) == 1 else None


def _is_name(node: Any) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_name(node.value))
