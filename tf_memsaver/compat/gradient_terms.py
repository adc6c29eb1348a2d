"""The terms of gradients: what tapes add up, one by one, as a replay must hand them on.

A tape adds all gradients of a tensor by one call of its *aggregate function*, right before the backward function of
what made the tensor; those of sources it adds at the end. Read from TensorFlow 2.20 and 2.21:
``tensorflow/c/eager/tape.h: GradientTape::ComputeGradient`` and ``tensorflow/python/eager/backprop.py``, where both
functions are registered. What plain models do is left as it is: the same functions are called with the same arguments,
and nothing is noted where no segment was recorded.
"""

from __future__ import annotations

import functools
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop

from tf_memsaver.compat.tapes import wrap_gradient_function, wrap_recorded_gradients

_vspace = backprop._default_vspace

Prepare = Callable[[Sequence[Any]], Sequence[Any]]
"""What a graph adds up instead of the terms of a gradient: them as they are, or fewer terms of the same sum."""


class _Terms(list[Any]):
    """What a tape gets instead of the sum of a source's terms."""


class _Thread(threading.local):
    """The gradient that stands for a source's own (``gradients_in_terms``), and the last sum with its terms."""

    marker: Any = None
    last: tuple[weakref.ref[Any], tuple[Any, ...]] | None = None


_thread = _Thread()
_graphs: weakref.WeakKeyDictionary[Any, Prepare] = weakref.WeakKeyDictionary()
"""The graphs in which segments were recorded, with what is done with terms there before they are added up."""
_eager: weakref.WeakSet[Any] = weakref.WeakSet()
"""The gradient functions of the segments that eager tapes have recorded."""

_unread: weakref.WeakKeyDictionary[Any, dict[str, set[str]]] = weakref.WeakKeyDictionary()
"""By graph and scope, the names of its sums whose numbers others have, too (``forget_number``)."""
_AGAIN = "-again"
"""Ends the name of a sum with the number of one that nobody reads: a hyphen sorts before all else."""
_NUMBERED = re.compile(rf"(?P<scope>(.*/)?)AddN(_\d+)?({_AGAIN}(_\d+)?)?")


def gradients_in_terms(
    tape: tf.GradientTape,
    targets: Sequence[Any],
    upstream: Sequence[Any],
    sources: Sequence[Any],
    marker: Any,
) -> list[list[Any]]:
    """Return, for each source, the terms of its gradient, in the order in which the tape would add them.

    Also where only their sums are wanted (``sum_of``): if two sources have one tensor as their gradient, as those of an
    addition do, ``tape.gradient`` counts one reference to it too many, and the graph stays in memory for good
    (``TapeGradient`` in tensorflow/python/eager/pywrap_tfe_src.cc, TensorFlow 2.21).

    Args:
      tape: what recorded the targets.
      targets: what gradients come from; one of several terms stands there once for each.
      upstream: their gradients.
      sources: tensors that the tape was told to watch.
      marker: any tensor that is nobody's gradient.

    Somebody must have asked to ``note_sums``.
    """
    before, _thread.marker = _thread.marker, marker
    try:
        # A source that is a target, too, has the gradient that is given for it as its first term.
        results = tape.gradient([*sources, *targets], sources, output_gradients=[*([marker] * len(sources)), *upstream])
    finally:
        _thread.marker = before
    return [list(each) if isinstance(each, _Terms) else [] for each in results]


def note_sums(gradient: Callable[..., Any], prepare: Prepare) -> None:
    """Have tapes tell what they add: in the current graph, or, in eager mode, while a segment's ``gradient`` lives.

    In a graph, they add what ``prepare`` makes of the terms.
    """
    _register()
    if tf.executing_eagerly():
        _eager.add(gradient)
    else:
        _graphs[tf.compat.v1.get_default_graph()] = prepare


@functools.cache
def _register() -> None:
    pywrap_tfe.TFE_Py_RegisterVSpace(_vspace._replace(aggregate_fn=_added))
    wrap_gradient_function(_forgetting)
    wrap_recorded_gradients(lambda differentiate, _: _forgetting(differentiate))


def last_sum(total: Any) -> tuple[Any, ...]:
    """Return the terms of the gradient that has arrived for a tensor: to be called by its backward function.

    A gradient that was passed on as it is by an operation in between is one term, be it a sum or not.
    """
    last, _thread.last = _thread.last, None
    return last[1] if last is not None and last[0]() is total else (total,)


def _added(gradients: Sequence[Any]) -> Any:
    first = gradients[0]
    if isinstance(first, _Terms):
        first.extend(gradients[1:])
        return first
    if first is _thread.marker:
        return _Terms(gradients[1:])
    total = sum_of(gradients)
    if len(gradients) > 1 and isinstance(total, tf.Tensor) and _somebody_listens(total):
        _thread.last = weakref.ref(total, _forget), tuple(gradients)
    return total


def forget_number(total: tf.Tensor) -> None:
    """Let the next sum have the number in this one's name, ``AddN_9``: nobody reads it, and a plain step has none.

    Graph optimisation sorts terms by name, sums among them: ``AddN_10`` comes before ``AddN_9``.
    """
    found = _NUMBERED.fullmatch(total.op.name) if tf.is_symbolic_tensor(total) else None
    if found is not None:
        _unread.setdefault(total.graph, {}).setdefault(found["scope"], set()).add(total.op.name)


def has_forgotten(graph: Any, name: str) -> bool:
    """Whether a sum of a graph was told to ``forget_number``."""
    return any(name in names for names in _unread.get(graph, {}).values())


def name_of_sum(graph: Any, name: str = "AddN") -> str | None:
    """Return what to call the next sum of the scope: it has the number of one that was forgotten.

    None if none was: the graph numbers it, as those of plain steps.
    """
    found = _NUMBERED.fullmatch(graph.unique_name(name, mark_as_used=False)) if graph in _unread else None
    unread = len(_unread[graph].get(found["scope"], ())) if found is not None else 0
    if not unread:
        return None
    number = int(graph.unique_name(name).rpartition("_")[2]) - unread
    return f"{name}_{number}{_AGAIN}" if number else f"{name}{_AGAIN}"


def is_numbered_sum(operation_type: str, name: str) -> bool:
    """Whether an operation has a name that tapes give to sums."""
    return operation_type == "AddN" and _NUMBERED.fullmatch(name) is not None


def sum_of(gradients: Sequence[Any]) -> Any:
    """Return the sum that a tape makes of gradients, with the number that it has where no sum was forgotten."""
    name, graph = None, tf.compat.v1.get_default_graph()
    if len(gradients) > 1 and all(isinstance(each, tf.Tensor) for each in gradients):
        if graph in _graphs:
            gradients = _graphs[graph](gradients)
        name = name_of_sum(graph)
    return _vspace.aggregate_fn(gradients) if name is None else tf.raw_ops.AddN(inputs=gradients, name=name)


def _somebody_listens(total: tf.Tensor) -> bool:
    # Eager terms that are noted keep their memory until the next operation's gradient.
    return total.graph in _graphs if tf.is_symbolic_tensor(total) else bool(_eager)


def _forget(total: weakref.ref[Any]) -> None:
    last = _thread.last
    if last is not None and last[0] is total:
        _thread.last = None


def _forgetting(differentiate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(differentiate)
    def differentiated(*given: Any) -> Any:
        try:
            return differentiate(*given)
        finally:
            _thread.last = None

    return differentiated
