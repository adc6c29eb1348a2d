"""Gradient tapes: what they record, and what they are kept from recording.

Read from TensorFlow 2.20 and 2.21, in which these files are the same: ``tensorflow/python/eager/record.py`` and
``execute.py``, ``backprop.py`` (``_gradient_function``), ``tensorflow/python/ops/resource_variable_ops.py``.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop, execute, record
from tensorflow.python.eager.record import VariableWatcher as VariableWatcher
from tensorflow.python.eager.record import could_possibly_record as could_possibly_record
from tensorflow.python.eager.record import should_record_backprop
from tensorflow.python.eager.record import stop_recording as stop_recording
from tensorflow.python.ops.resource_variable_ops import variable_accessed as variable_accessed

Note = Callable[[tf.Operation], None]
"""Is told of an operation: see ``recorded_operations_go_to``."""


def followed(tensors: Sequence[Any]) -> list[bool]:
    """Return for each tensor whether a tape follows it; all may be, where none is there (a gradient of the graph)."""
    if not could_possibly_record():
        return [True] * len(tensors)
    return [bool(should_record_backprop([tensor])) for tensor in tensors]


class _Thread(threading.local):
    """Who is told of operations, and of which graph's."""

    def __init__(self) -> None:
        self.graph: Any = None
        self.note: Note | None = None


_thread = _Thread()


@contextlib.contextmanager
def recorded_operations_go_to(note: Note) -> Iterator[None]:
    """Tell ``note`` of each operation of the current graph at the moment when it is recorded, tape or not.

    ``execute.record_gradient``, which is called wherever generated code makes an operation, asks from the first use of
    this on. An operation is made in its own name scope, if it has one, and that is still open then.
    """
    _make_operations_tell()
    before = _thread.graph, _thread.note
    _thread.graph, _thread.note = tf.compat.v1.get_default_graph(), note
    try:
        yield
    finally:
        _thread.graph, _thread.note = before


_marks: list[Callable[[tf.Operation], str]] = []


def mark_recorded_operations(mark: Callable[[tf.Operation], str]) -> None:
    """Put what ``mark`` says of an operation after the name scope that it is recorded with, from now on.

    What differentiates it is told both.
    """
    _make_operations_tell()
    _marks.append(mark)


@functools.cache
def _make_operations_tell() -> None:
    must_record, record = execute.must_record_gradient, execute.record_gradient

    def asked() -> bool:
        return _thread.note is not None or must_record()

    @functools.wraps(record)
    def told(op_name: str, inputs: Any, attrs: Any, outputs: Any) -> Any:
        if not outputs or not tf.is_symbolic_tensor(outputs[0]):
            return record(op_name, inputs, attrs, outputs)
        maker = outputs[0].op
        if _thread.note is not None and maker.graph is _thread.graph:
            _thread.note(maker)
        mark = "".join(each(maker) for each in _marks)
        if not mark:
            return record(op_name, inputs, attrs, outputs)
        return pywrap_tfe.TFE_Py_RecordGradient(op_name, inputs, attrs, outputs, f"{tf.get_current_name_scope()}{mark}")

    execute.must_record_gradient, execute.record_gradient = asked, told


def wrap_gradient_function(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace what differentiates an operation for all tapes by what ``wrap`` makes of it.

    TensorFlow keeps one such function and cannot be asked for it: whoever registers one of his own elsewhere takes
    away what was wrapped here.
    """
    backprop._gradient_function = wrap(backprop._gradient_function)
    pywrap_tfe.TFE_Py_RegisterGradientFunction(backprop._gradient_function)


def wrap_recorded_gradients(wrap: Callable[[Callable[..., Any], Any], Callable[..., Any]]) -> None:
    """Have tapes get, of each gradient function that is recorded from now on, what ``wrap`` makes of it.

    It is given the outputs, too, whose gradient that is. The functions are those of ``record_operation``: of segments
    and copied operations, of ``tf.custom_gradient``, of functions.
    """
    before = record.record_operation

    @functools.wraps(before)
    def recorded(
        op_type: str, output_tensors: Any, input_tensors: Any, backward_function: Any, forward_function: Any = None
    ) -> None:
        before(op_type, output_tensors, input_tensors, wrap(backward_function, output_tensors), forward_function)

    record.record_operation = recorded


def record_operation(
    kind: str, outputs: Sequence[Any], inputs: Sequence[Any], gradient: Callable[..., Any], forward: Any = None
) -> None:
    """Have the tapes that follow any of the inputs record an operation with a gradient function of its own."""
    record.record_operation(kind, outputs, inputs, gradient, forward)
