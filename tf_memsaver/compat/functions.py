"""Functions that people write for TensorFlow: what a ``tf.function`` is made of, and running it without tracing it.

Read from TensorFlow 2.21: ``tensorflow/python/eager/polymorphic_function/polymorphic_function.py``
(``PolymorphicFunction``, ``class_method_to_instance_method``), ``autograph_util.py`` and ``tf_method_target.py``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.python.eager.polymorphic_function.autograph_util import py_func_from_autograph
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.eager.polymorphic_function.tf_method_target import TfMethodTarget

from tf_memsaver.compat.graphs import FuncGraph
from tf_memsaver.compat.tapes import could_possibly_record

LIBRARIES = ("tensorflow", "keras", "keras_hub", "tf_keras", "numpy", "absl", "tf_memsaver")
"""Packages whose functions are nobody's own."""


def is_library(each: Any) -> bool:
    """Whether a function, class or module is of TensorFlow, Keras, NumPy or this package."""
    name = getattr(each, "__module__", None) or getattr(each, "__name__", None) or ""
    return str(name).partition(".")[0] in LIBRARIES


def is_tf_function(each: Any) -> bool:
    """Whether something is a ``tf.function``, bound to an object or not."""
    return isinstance(each, Function)


def python_function(function: Any) -> Any:
    """Return the Python function that a ``tf.function`` traces, as it was written."""
    return function.python_function


def python_signature(function: Any) -> inspect.Signature:
    """Return the Python signature of a function of a loaded SavedModel, with its default values (``function_spec``)."""
    defaults = function.function_spec.default_values
    return inspect.Signature(
        [
            inspect.Parameter(p.name, p.kind, default=defaults.get(p.name, inspect.Parameter.empty))
            for p in function.function_spec.function_type.parameters.values()
        ]
    )


def is_compiled(function: Any) -> bool:
    """Whether XLA compiles what a ``tf.function`` traces."""
    return bool(function._jit_compile)


def has_traces(function: Any) -> bool:
    """Whether a ``tf.function`` has been traced, so that equal arguments run what was traced then."""
    return bool(function.experimental_get_tracing_count())


def converted(function: Any) -> Callable[..., Any]:
    """Return a function that does in a graph what a function does in ``tf.function``, or what a ``tf.function`` does.

    Python's ``if`` and ``while`` over tensors become TensorFlow's, unless it is a ``tf.function`` that says otherwise.
    Nothing is traced by itself, so that nothing of it stays.
    """
    if is_tf_function(function):
        written = function.python_function
        return py_func_from_autograph(written) if function._autograph else written
    return py_func_from_autograph(function)


def bound_object(method: Any) -> Any:
    """Return the object that a method is bound to; a method that is a ``tf.function`` knows it by a weak reference."""
    owner = method.__self__
    return owner.target if isinstance(owner, TfMethodTarget) else owner


class _Thread(threading.local):
    """The graph in which functions are run and not traced, and how many of those that run are in a tape's reach."""

    graph: Any = None
    recorded: int = 0


_thread = _Thread()


@contextlib.contextmanager
def functions_run_inline() -> Iterator[None]:
    """Run every ``tf.function`` of the user's that is called in the current graph there, as the Python that it is.

    What it would trace would stay with it, and run in its place later. Those that layers call are left alone.
    """
    _make_functions_ask()
    before = _thread.graph
    _thread.graph = tf.compat.v1.get_default_graph()
    try:
        yield
    finally:
        _thread.graph = before


@functools.cache
def _make_functions_ask() -> None:
    plainly = Function.__call__

    @functools.wraps(plainly)
    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        graph = _thread.graph
        if not isinstance(graph, FuncGraph) or tf.compat.v1.get_default_graph() is not graph:
            return plainly(self, *args, **kwargs)
        in_layer = global_state.get_global_attribute("current_call_ctx") is not None
        if in_layer or is_library(self.python_function):
            return plainly(self, *args, **kwargs)
        recorded = could_possibly_record()
        _thread.recorded += recorded
        try:
            return converted(self)(*args, **kwargs)
        finally:
            _thread.recorded -= recorded

    Function.__call__ = ask


def in_recorded_function() -> bool:
    """Whether a ``tf.function`` runs inline (``functions_run_inline``) that a tape outside of it may record as one."""
    return _thread.recorded > 0
