"""Where a result may be written, and what may be replaced there. The library and the command go by these rules.

- An empty path, a root, the working folder, the home folder and their parents are never a target; nor is the source, a
  folder that holds it, or a place inside it.
- Only what tf_memsaver writes is replaced, and only with leave: a file by a file, a folder by a folder, and a folder
  only if all that it holds is in the lists below. A link or a device is never replaced.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeAlias

from tf_memsaver.errors import InvalidRequestError, OutputError, OutputExistsError

PLAN_FILE, MODEL_FILE, SAVED_MODEL_FOLDER = "plan.json", "model.keras", "saved_model"
"""What the command ``optimize`` writes for a Keras model."""
EXTRA_FOLDER, EXPORTED_PLAN, REWRITTEN_PLANS = "assets.extra", "memsaver_plan.json", "memsaver_plans.json"
"""What we add to a SavedModel: the plan of an exported model, or the plans of a rewritten one by endpoint."""

REPORT_MARK = '<meta name="generator" content="tf_memsaver report">'
"""What a report's page has at its begin."""

_SHOWN = 3
"""How many of the entries that are in the way an error names."""


class TargetKind(enum.Enum):
    """What a result is."""

    FILE = "file"
    FOLDER = "folder"


Identity = tuple[int, int, int]
"""Device, inode and time of the last change: the same file or folder, as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A place that may be written to. ``replaced`` is what stands there and may go; None if the place is free."""

    path: Path
    kind: TargetKind
    replaced: Identity | None


def check_target(
    path: str | os.PathLike[str], kind: TargetKind, *, overwrite: bool, sources: Sequence[str | os.PathLike[str]] = ()
) -> Target:
    """Check, before any long work, that ``path`` may be written to. An empty folder counts as a free place.

    Args:
      path: the file or folder to write.
      kind: which of both.
      overwrite: whether something that tf_memsaver wrote may be replaced.
      sources: files and folders that the result is made from; what does not exist is left out.

    Raises:
      InvalidRequestError: the path can never be a target.
      OutputExistsError: something is there that may not be replaced.
      OutputError: the folder that it is to lie in cannot be written to.
    """
    text = _text(path)
    if kind is TargetKind.FILE and text.endswith(os.sep):
        raise InvalidRequestError(
            f"the output path '{text}' ends like the path of a folder, but a file is written. Name a file."
        )
    try:
        place = _resolved(text)
        _check_place(place, text, sources)
        return Target(path=place, kind=kind, replaced=_replaceable(place, text, kind, overwrite))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidRequestError(f"the output path {text!r} cannot be used: {reason}.") from error


def identity(path: Path) -> Identity:
    """Return what tells the file or folder at ``path``, as it is now, from any other. Links are not followed."""
    found = os.lstat(path)
    return found.st_dev, found.st_ino, found.st_mtime_ns


def in_the_way(path: Path, kind: TargetKind) -> str:
    """Say why what stands at ``path`` may not be replaced by a result of this kind; ``""`` if it may be."""
    mode = os.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        return "it is a symbolic link; name what it points to"
    if stat.S_ISDIR(mode):
        return _in_the_way_in(path) if kind is TargetKind.FOLDER else "it is a folder, and the result is a file"
    if not stat.S_ISREG(mode):
        return "it is no regular file"
    if kind is TargetKind.FOLDER:
        return "it is a file, and the result is a folder"
    is_ours = _holds_plan(path) or _holds_report(path) or not path.stat().st_size
    return "" if is_ours else "it is a file that holds no plan and no report"


# Places -------------------------------------------------------------------------------------------------------------


def _text(path: str | os.PathLike[str]) -> str:
    try:
        text = os.fsdecode(path)
    except TypeError as error:
        raise InvalidRequestError(f"the output path is {path!r}. Pass a text or a pathlib.Path.") from error
    if not text.strip():
        raise InvalidRequestError(
            "the output path is empty. Name a file or folder. (A shell variable that is not set is empty.)"
        )
    if os.path.expanduser(text) != text:
        raise InvalidRequestError(
            f"the output path '{text}' begins with '~', which was not expanded. Write the home folder in full."
        )
    return text


def _resolved(text: str) -> Path:
    """Return the absolute path of ``text``, through the links on the way; a link that stands there itself is kept."""
    head, tail = os.path.split(text.rstrip(os.sep))
    if tail in ("", os.curdir, os.pardir):
        return Path(os.path.realpath(text))
    return Path(os.path.realpath(head or os.curdir), tail)


def _check_place(place: Path, text: str, sources: Sequence[str | os.PathLike[str]]) -> None:
    protected = []
    for known in (Path.cwd, Path.home):
        # A working folder may have been removed, and a user may have no home.
        with contextlib.suppress(OSError, RuntimeError):
            protected.append(known())
    if _is_at_or_above(place, protected) or os.path.ismount(place):
        raise InvalidRequestError(
            f"the output path '{text}' is a root, the working or the home folder, a parent of these, or a mount "
            "point. Name a new folder."
        )
    parent = place.parent
    if not parent.is_dir():
        what = "is not a folder. Choose another path" if os.path.lexists(parent) else "does not exist. Create it first"
        raise InvalidRequestError(f"the output path '{text}' cannot be written: its folder '{parent}' {what}.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(text, f"the folder '{parent}' is not writable")
    existing = [Path(os.path.realpath(source)) for source in sources if os.fspath(source) and os.path.exists(source)]
    if _is_at_or_above(place, existing) or any(_is_at_or_above(source, [place]) for source in existing):
        raise InvalidRequestError(
            f"the output path '{text}' is the source, contains it or is inside it. Choose a path outside the source."
        )


def _is_at_or_above(folder: Path, paths: Sequence[Path]) -> bool:
    """Whether ``folder`` is one of ``paths`` or of their parents, under whatever name."""
    found = _inode(folder)
    above = [each for path in paths for each in (path, *path.parents)]
    return folder in above or (found is not None and any(_inode(each) == found for each in above))


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


# What may be replaced -----------------------------------------------------------------------------------------------


def _replaceable(place: Path, text: str, kind: TargetKind, overwrite: bool) -> Identity | None:
    """Return what stands at ``place`` and may be replaced, None if the place is free."""
    try:
        # Before the contents are looked at, so that a later change is noticed.
        now = identity(place)
    except FileNotFoundError:
        return None
    if kind is TargetKind.FOLDER and place.is_dir() and not place.is_symlink() and not any(place.iterdir()):
        return None
    reason = in_the_way(place, kind)
    if reason or not overwrite:
        raise OutputExistsError(text, reason)
    return now


def _is_file(path: Path) -> bool:
    return stat.S_ISREG(os.lstat(path).st_mode)


def _holds_plan(path: Path) -> bool:
    """Whether a file begins as ``Plan.save`` writes it."""
    if not _is_file(path):
        return False
    with path.open("rb") as file:
        return re.match(rb'\s*\{\s*"schema_version"\s*:', file.read(256)) is not None


def _holds_report(path: Path) -> bool:
    """Whether a file begins as the page of a report does."""
    if not _is_file(path):
        return False
    with path.open("rb") as file:
        return REPORT_MARK.encode() in file.read(256)


def _holds_optimized_model(path: Path) -> bool:
    """Whether a file is a ``.keras`` file of an optimized model, whose class is registered under our name."""
    if not _is_file(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return b"tf_memsaver>" in archive.read("config.json")
    except (zipfile.BadZipFile, KeyError):
        return False


_Entries: TypeAlias = "Mapping[str, Callable[[Path], bool] | _Entries]"
"""Patterns of names, with the check of a file or with the entries of a folder."""

_SAVED_MODEL: _Entries = {
    "saved_model.pb": _is_file,
    "fingerprint.pb": _is_file,
    "keras_metadata.pb": _is_file,
    "variables": {"variables.index": _is_file, "variables.data-*": _is_file},
    "assets": {"*": _is_file},
    EXTRA_FOLDER: {EXPORTED_PLAN: _is_file, REWRITTEN_PLANS: _is_file},
}
_OPTIMIZED: _Entries = {
    PLAN_FILE: _holds_plan,
    MODEL_FILE: _holds_optimized_model,
    SAVED_MODEL_FOLDER: _SAVED_MODEL,
}
_FOLDERS: Mapping[str, _Entries] = {PLAN_FILE: _OPTIMIZED, "saved_model.pb": _SAVED_MODEL}
"""The kinds of folders that we write, each by the file that is always in it."""


def _in_the_way_in(folder: Path) -> str:
    listed = os.listdir(folder)
    kinds = [entries for sign, entries in _FOLDERS.items() if sign in listed]
    names = min((sorted(_foreign(folder, entries)) for entries in kinds), key=len, default=sorted(listed))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"it holds {', '.join(map(repr, names[:_SHOWN]))}{more}, which tf_memsaver does not write" if names else ""


def _foreign(folder: Path, entries: _Entries) -> Iterator[str]:
    """Yield the paths within ``folder`` that are not in the list."""
    for path in folder.iterdir():
        check = next((check for pattern, check in entries.items() if fnmatchcase(path.name, pattern)), None)
        if check is None or (callable(check) and not check(path)):
            yield path.name
        elif not callable(check):
            if stat.S_ISDIR(os.lstat(path).st_mode):
                yield from (os.path.join(path.name, name) for name in _foreign(path, check))
            else:
                yield path.name
