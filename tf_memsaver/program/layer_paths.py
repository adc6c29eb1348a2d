"""Names for calls of layers, by the order in which they come, and what makes calls by their names."""

from __future__ import annotations

import abc
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf


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


class NamedCalls(abc.ABC):
    """Makes the calls of layers in the graph that is current now, by their names (see ``layer_calls_go_to``).

    What is called in another graph, such as the body of a loop, is called as it stands, and not counted.
    """

    def __init__(self) -> None:
        self._paths, self._graph = LayerPaths(), tf.compat.v1.get_default_graph()

    def __call__(self, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make the call of a layer."""
        if tf.compat.v1.get_default_graph() is not self._graph:
            return call(*args, **kwargs)
        with self._paths.entered(layer) as path:
            return self.named(path, layer, call, args, kwargs)

    @abc.abstractmethod
    def named(self, path: str, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make the call of a layer that has a name."""
