"""Files and folders that are never there by half, and leave nothing behind.

A result is made in a private folder beside its place, under a name that nobody else has, and moved to its place when it
is whole. The move takes a free place, or the place of what stood there when the target was checked, and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tf_memsaver.errors import OutputError, OutputExistsError
from tf_memsaver.files.targets import Target, TargetKind, identity, in_the_way

_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
_CHANGED = "another program wrote there in the meantime, so this result was discarded"

_scratch: set[Path] = set()
"""The private folders that exist, or are about to."""
_moved: dict[Path, Path] = {}
"""Where a folder that is being replaced was moved, and where it belongs until the new one stands there."""


@contextlib.contextmanager
def scratch_folder(parent: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a fresh, private folder in ``parent`` that is removed at the end, however the block ends.

    Raises:
      OutputError: it cannot be made.
    """
    folder = _new_name(Path(parent))
    try:
        try:
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise OutputError(str(parent), error.strerror or str(error)) from error
        yield folder
    finally:
        _remove(folder)


def drop_unfinished() -> None:
    """Put back what was being replaced and remove all private folders, for a process that ends without unwinding."""
    for old, place in tuple(_moved.items()):
        if os.path.lexists(old) and not os.path.lexists(place):
            old.rename(place)
    for folder in tuple(_scratch):
        _remove(folder)


@contextlib.contextmanager
def written(target: Target) -> Iterator[Path]:
    """Yield the path to write a result to; at the end of the block it stands at ``target``, or nothing does.

    Where the result is a folder, an empty one lies at the path that is yielded. If the block fails, what was to be
    replaced is as it was. Modes are those that ``open`` and ``mkdir`` give, and a
    file that is replaced keeps its own.

    Raises:
      OutputExistsError: the target was free, or was something else, when it was checked.
      OutputError: the result cannot be written, such as on a full disk.
    """
    try:
        with scratch_folder(target.path.parent) as folder:
            fresh = folder / "new"
            if target.kind is TargetKind.FOLDER:
                fresh.mkdir()
            yield fresh
            if target.replaced is None:
                _take_free(fresh, target)
            else:
                _replace(fresh, target, folder.with_name(f"{folder.name}-old"))
    except OSError as error:
        raise OutputError(str(target.path), error.strerror or str(error)) from error
    except OutputError as error:
        # From a part of a folder: the path inside the private folder means nothing to anybody.
        raise OutputError(str(target.path), error.reason) from error


def _take_free(fresh: Path, target: Target) -> None:
    """Move ``fresh`` to a place that is free, or an empty folder's."""
    try:
        if target.kind is TargetKind.FOLDER:
            # POSIX: only onto an empty folder.
            fresh.rename(target.path)
        else:
            _rename_file(fresh, target.path)
    except OSError as error:
        if error.errno in _TAKEN:
            raise OutputExistsError(str(target.path), _CHANGED) from error
        raise


def _rename_file(fresh: Path, place: Path) -> None:
    try:
        os.link(fresh, place)
    except FileExistsError:
        raise
    except OSError:
        # A file system without hard links: claim the name, then replace our own empty file.
        os.close(os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        try:
            fresh.replace(place)
        except BaseException:
            place.unlink()
            raise


def _replace(fresh: Path, target: Target, old: Path) -> None:
    """Put ``fresh`` in the place of what stands at ``target``, if that is still the same; folders by way of ``old``."""
    _check_unchanged(target.path, target)
    if target.kind is TargetKind.FILE:
        # As ``open`` would leave it.
        shutil.copymode(target.path, fresh)
        fresh.replace(target.path)
        return
    _moved[old] = target.path
    try:
        target.path.rename(old)
        # Nobody else finds it now. If what follows fails, it is moved back and never removed.
        _check_unchanged(old, target)
        _take_free(fresh, target)
        _scratch.add(old)
    except BaseException:
        if os.path.lexists(old):
            _put_back(old, target.path)
        raise
    finally:
        del _moved[old]
    _remove(old)


def _check_unchanged(path: Path, target: Target) -> None:
    with contextlib.suppress(FileNotFoundError):
        if identity(path) == target.replaced and not in_the_way(path, target.kind):
            return
    raise OutputExistsError(str(target.path), _CHANGED)


def _put_back(old: Path, place: Path) -> None:
    try:
        old.rename(place)
    except OSError as error:
        raise OutputExistsError(str(place), f"{_CHANGED}; what stood there before is kept in '{old}'") from error


# Private folders ----------------------------------------------------------------------------------------------------


def _new_name(parent: Path) -> Path:
    """Return a name that nobody has, noted before the folder exists: a signal may come at any time."""
    folder = parent / f".tf_memsaver.part-{os.urandom(8).hex()}"
    _scratch.add(folder)
    return folder


def _remove(folder: Path) -> None:
    # Another thread that still writes makes the first try fail.
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.lexists(folder):
            break
    _scratch.discard(folder)
