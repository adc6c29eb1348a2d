"""Names for calls of layers, by the order in which they come."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any


class LayerPaths:
    """Names the calls of layers as they come: ``encoder/block_3``, and ``encoder/block_3#2`` for the second one."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._seen: Counter[str] = Counter()

    @contextlib.contextmanager
    def entered(self, layer: Any) -> Iterator[str]:
        """Return the name of a call; calls that are made inside are below it."""
        path = "/".join([*self._open[-1:], layer.name])
        self._seen[path] += 1
        self._open.append(path if self._seen[path] == 1 else f"{path}#{self._seen[path]}")
        try:
            yield self._open[-1]
        finally:
            self._open.pop()

    @contextlib.contextmanager
    def outermost(self, layer: Any) -> Iterator[str | None]:
        """Return the name of a call that no other one makes, and None for the others."""
        if self._open:
            yield None
        else:
            with self.entered(layer) as path:
                yield path
