"""Folders that are never half there: written beside their place, and moved into it when they are whole."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PLANS_FILE = os.path.join("assets.extra", "memsaver_plans.json")
"""Where the plans lie in a rewritten SavedModel, by endpoint."""


@contextlib.contextmanager
def written_beside(target: Path) -> Iterator[Path]:
    """Yield a fresh folder beside ``target`` that takes its place when the block ends well, and else disappears.

    What stood at ``target`` goes only when the new folder stands there.
    """
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.part-", dir=target.parent))
    try:
        yield fresh
        fresh.chmod(0o777 & ~_umask())
        _put_in_place(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _put_in_place(fresh: Path, target: Path) -> None:
    if not os.path.lexists(target):
        fresh.rename(target)
        return
    old = fresh.with_name(f"{fresh.name}-old")
    target.rename(old)
    try:
        fresh.rename(target)
    except OSError:
        old.rename(target)
        raise
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old)
    else:
        old.unlink()


def _umask() -> int:
    """Return the process's file mode mask; ``mkdtemp`` ignores it and makes the folder private."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
