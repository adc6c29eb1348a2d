"""The names that a graph gives: somebody else may settle those that it is asked for in a scope.

Read from TensorFlow 2.20 and 2.21: ``tensorflow/python/framework/ops.py`` (``Graph.unique_name``).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


def is_name_taken(graph: Any, name: str) -> bool:
    """Whether ``Graph.unique_name`` would give another name instead; it does not tell upper from lower case."""
    return name.lower() in graph._names_in_use


class _Question(NamedTuple):
    """Names that are asked for in a scope of a graph are settled by ``answer``."""

    graph: Any
    scope: str
    answer: Callable[[str], str]


class _Thread(threading.local):
    """The question that is open: replicas of tf.distribute are traced by threads that take turns."""

    question: _Question | None = None


_thread = _Thread()
_listening: weakref.WeakSet[Any] = weakref.WeakSet()


@contextlib.contextmanager
def asked(graph: Any, scope: str, answer: Callable[[str], str]) -> Iterator[None]:
    """Answer for a graph: what it is asked for directly in ``scope`` while this is open."""
    _listen(graph)
    before = _thread.question
    _thread.question = _Question(graph, scope, answer)
    try:
        yield
    finally:
        _thread.question = before


@contextlib.contextmanager
def nothing_asked(graph: Any) -> Iterator[None]:
    """Let a graph answer for itself, with names in full."""
    before = _thread.question
    _thread.question = None
    try:
        with graph.name_scope(None):
            yield
    finally:
        _thread.question = before


def _listen(graph: Any) -> None:
    """Make a graph ask, once for all."""
    if graph in _listening:
        return
    _listening.add(graph)
    itself = weakref.ref(graph)

    def unique_name(name: str, mark_as_used: bool = True) -> str:
        graph: Any = itself()
        question = _thread.question
        if question and question.graph is graph and question.scope == graph.get_name_scope() and mark_as_used:
            with nothing_asked(graph):
                return question.answer(name)
        return str(type(graph).unique_name(graph, name, mark_as_used))

    graph.unique_name = unique_name
