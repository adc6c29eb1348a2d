"""Output paths of the command: never written over something without leave."""

from __future__ import annotations

import os
from pathlib import Path

from tf_memsaver.errors import InvalidRequestError, OutputExistsError
from tf_memsaver.files import PLANS_FILE

PLAN_FILE = "plan.json"
"""Every folder that we write holds a plan; only such a folder may be replaced."""


def check_output(path: str | None, *, overwrite: bool, folder: bool) -> Path:
    """Check, before any long work, that the output can be written; return its path.

    Raises:
      InvalidRequestError: no path was given, or overwriting would remove something that we did not write.
      OutputExistsError: something is there, and ``overwrite`` is not set.
    """
    if not path:
        raise InvalidRequestError("say where to write, with --output.")
    target = Path(os.path.abspath(path))
    if not target.parent.is_dir():
        raise InvalidRequestError(f"the folder '{target.parent}' of --output does not exist. Make it first.")
    if not os.path.lexists(target) or (folder and target.is_dir() and not any(target.iterdir())):
        return target
    if not overwrite:
        raise OutputExistsError(path)
    ours = any((target / name).is_file() for name in (PLAN_FILE, PLANS_FILE))
    if target.is_dir() if not folder else not ours:
        raise InvalidRequestError(
            f"'{path}' was not written by this command, so --overwrite does not replace it. Choose another path."
        )
    return target
