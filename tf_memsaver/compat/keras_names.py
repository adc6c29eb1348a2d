"""The names that Keras exports, read from its files: importing Keras takes seconds, a wrong name should not.

Read from Keras 3.12 to 3.15: the files of ``keras/applications``, ``losses`` and ``optimizers`` that export.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

_SHORT_LOSSES = frozenset("bce kld mae mse mape msle BCE KLD MAE MSE MAPE MSLE".split())
"""``keras.losses.get`` knows these, too; they are exported elsewhere."""


def applications() -> frozenset[str]:
    """Return the names of the models of keras.applications; none if they cannot be read."""
    return frozenset(name for name in _exported("applications") if name[0].isupper())


def losses() -> frozenset[str]:
    """Return the names that ``keras.losses.get`` knows; none if they cannot be read."""
    found = _exported("losses")
    return found | _SHORT_LOSSES if found else found


def optimizers() -> frozenset[str]:
    """Return the names of the optimizers in small letters, as ``keras.optimizers.get`` reads them; none if unread."""
    return frozenset(name.lower() for name in _exported("optimizers") if name[0].isupper())


def _exported(package: str) -> frozenset[str]:
    spec = importlib.util.find_spec("keras")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        try:
            tree = ast.parse((Path(folder) / package / "__init__.py").read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
        return frozenset(alias.asname or alias.name for node in imports for alias in node.names)
    return frozenset()
