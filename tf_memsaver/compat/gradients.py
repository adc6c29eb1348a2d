"""Listening to tapes: which operation each part of a backward pass is the gradient of, and when a pass is all there.

Read from TensorFlow 2.20 and 2.21, in which these files are the same: ``tensorflow/python/eager/backprop.py``
(``GradientTape.gradient``), ``imperative_grad.py`` and, for functions,
``tensorflow/python/ops/gradients_util.py`` (``_GradientsHelper``).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.eager import imperative_grad
from tensorflow.python.ops import gradients_util

from tf_memsaver.compat.graphs import led_to
from tf_memsaver.compat.tapes import (
    could_possibly_record,
    mark_recorded_operations,
    wrap_gradient_function,
    wrap_recorded_gradients,
)

_MARK = "\n"
"""Parts the name scope that an operation is recorded with from the operation's name. No scope has it."""


class Listener(Protocol):
    """Is told what tapes do in one graph, in which operations are counted."""

    def differentiated(self, operation: Any, start: int, stop: int, gradients: Sequence[Any]) -> None:
        """The gradient function of an operation has added operations ``start`` to ``stop``; it returned gradients."""

    def took_gradients(
        self, start: int, stop: int, sources: Sequence[Any], results: Sequence[Any], nested: bool
    ) -> None:
        """A tape has added operations; ``nested`` says that another tape may have recorded them."""


class _Thread(threading.local):
    """Who listens, and to which graph."""

    def __init__(self) -> None:
        self.graph: Any = None
        self.listener: Listener | None = None


_thread = _Thread()


@contextlib.contextmanager
def tapes_heard_by(listener: Listener) -> Iterator[None]:
    """Tell ``listener`` what tapes do in the current graph with what is recorded while this is open."""
    _make_tapes_tell()
    before = _thread.graph, _thread.listener
    _thread.graph, _thread.listener = tf.compat.v1.get_default_graph(), listener
    try:
        yield
    finally:
        _thread.graph, _thread.listener = before


def _tell(operation: Any, differentiate: Callable[[], Any]) -> Any:
    """Return the gradients of an operation, and tell the listener of them."""
    start = _thread.graph.num_operations()
    gradients = differentiate()
    flat = gradients if isinstance(gradients, (list, tuple)) else [gradients]
    if _thread.listener is not None:
        _thread.listener.differentiated(operation, start, _thread.graph.num_operations(), flat)
    return gradients


@functools.cache
def _make_tapes_tell() -> None:
    """Wrap what records operations, what differentiates one, and what a tape's ``gradient`` calls."""
    take = imperative_grad.imperative_grad

    def mark_of(operation: tf.Operation) -> str:
        is_heard = _thread.listener is not None and operation.graph is _thread.graph
        return f"{_MARK}{operation.name}" if is_heard else ""

    def telling(differentiate: Callable[..., Any]) -> Callable[..., Any]:
        def differentiated(*given: Any) -> Any:
            *others, marked = given
            scope, mark, name = (marked or "").partition(_MARK)
            if not mark or _thread.listener is None or tf.compat.v1.get_default_graph() is not _thread.graph:
                return differentiate(*others, scope)
            return _tell(_thread.graph.get_operation_by_name(name), lambda: differentiate(*others, scope))

        return differentiated

    def telling_of_recorded(backward: Callable[..., Any], outputs: Any) -> Callable[..., Any]:
        """Custom gradients, those of functions, and of operations that are recorded by hand."""
        made: Any = next(iter(tf.nest.flatten(outputs)), None)
        if _thread.listener is None or not tf.is_symbolic_tensor(made) or made.graph is not _thread.graph:
            return backward

        def differentiated(*arrived: Any) -> Any:
            if _thread.listener is None or tf.compat.v1.get_default_graph() is not _thread.graph:
                return backward(*arrived)
            return _tell(made.op, lambda: backward(*arrived))

        return differentiated

    @functools.wraps(take)
    def taken(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        if _thread.listener is None or tf.compat.v1.get_default_graph() is not _thread.graph:
            return take(tape, target, sources, *args, **kwargs)
        nested, start = could_possibly_record(), _thread.graph.num_operations()
        results = take(tape, target, sources, *args, **kwargs)
        _thread.listener.took_gradients(start, _thread.graph.num_operations(), sources, results, nested)
        return results

    mark_recorded_operations(mark_of)
    wrap_gradient_function(telling)
    wrap_recorded_gradients(telling_of_recorded)
    imperative_grad.imperative_grad = taken


class _Pass:
    """A backward pass that is being added to a graph, with the passes of the replays in it."""

    def __init__(self, targets: Any) -> None:
        self._targets = targets

    @functools.cached_property
    def sources(self) -> set[int]:
        """The ids of the operations that it may go back through."""

        def before(operation: Any) -> list[Any]:
            if operation.type == "StopGradient":
                return []
            return [each.op for each in operation.inputs if each.dtype.is_floating or each.dtype.is_complex]

        return led_to([each.op for each in tf.nest.flatten(self._targets) if tf.is_symbolic_tensor(each)], before)


class _Open(threading.local):
    """The backward passes that are being added to graphs, by the graph's id."""

    def __init__(self) -> None:
        self.passes: dict[int, _Pass] = {}


_open = _Open()


@functools.cache
def backward_passes_go_to(note: Callable[[Any, int, list[Any]], None]) -> None:
    """Tell ``note`` from now on of each backward pass that was added to a graph, with the passes of the replays in it.

    It is told the graph, how many operations it had before, and the tensors of the gradients.
    """

    def telling(take: Callable[..., Any], place: int) -> Callable[..., Any]:
        """Return a function that takes gradients of its argument at a place, and tells of that."""

        @functools.wraps(take)
        def taken(*args: Any, **kwargs: Any) -> Any:
            graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
            number = id(graph)
            if graph is None or number in _open.passes:
                return take(*args, **kwargs)
            start = graph.num_operations()
            _open.passes[number] = _Pass(args[place])
            try:
                results = take(*args, **kwargs)
            finally:
                del _open.passes[number]
            note(graph, start, [each for each in tf.nest.flatten(results, True) if tf.is_symbolic_tensor(each)])
            return results

        return taken

    imperative_grad.imperative_grad = telling(imperative_grad.imperative_grad, 1)
    gradients_util._GradientsHelper = telling(gradients_util._GradientsHelper, 0)


def is_differentiated(operation: Any) -> bool:
    """Whether the backward pass that is being added to the current graph may go back through an operation.

    ``backward_passes_go_to`` is to have been called before the pass. Outside of passes, nothing is differentiated.
    """
    found = _open.passes.get(id(tf.compat.v1.get_default_graph()))
    return found is not None and id(operation) in found.sources


def summed(gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> tf.Tensor | tf.IndexedSlices:
    """Return the sum of gradients as a tape makes it: if all are sparse, the slices of all, one behind the other.

    (``AggregateIndexedSlicesGradients`` in tensorflow/python/eager/backprop_util.py, TensorFlow 2.21.)
    """
    if len(gradients) == 1:
        return gradients[0]
    if not all(isinstance(each, tf.IndexedSlices) for each in gradients):
        return tf.add_n([tf.convert_to_tensor(each) for each in gradients])
    indices = [tf.cast(each.indices, tf.int64) for each in gradients]
    values = tf.concat([each.values for each in gradients], 0)
    return tf.IndexedSlices(values, tf.concat(indices, 0), gradients[0].dense_shape)
