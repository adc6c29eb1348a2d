"""Which operations are recorded under a name scope of their own: a tape names their backward operations by it.

``tf.matmul`` opens a scope, in which its gradient is ``gradient_tape/…/MatMul/MatMul``; ``tf.exp`` opens none, and its
gradient is ``gradient_tape/…/mul``. Graph optimisation sorts by these names. A graph does not tell, only the moment of
recording does.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import execute


class _Thread(threading.local):
    """Whose operations are noted: the graph, and the names of those without a scope of their own."""

    def __init__(self) -> None:
        self.graph: Any = None
        self.names: set[str] = set()


_thread = _Thread()


@contextlib.contextmanager
def unscoped_operations() -> Iterator[set[str]]:
    """Collect the names of the current graph's operations that are recorded meanwhile without a scope of their own."""
    _make_operations_tell()
    before = _thread.graph, _thread.names
    _thread.graph, _thread.names = tf.compat.v1.get_default_graph(), set()
    try:
        yield _thread.names
    finally:
        _thread.graph, _thread.names = before


@functools.cache
def _make_operations_tell() -> None:
    """Note the scope where generated code has operations recorded (``execute.record_gradient``), tape or not."""
    must_record, record = execute.must_record_gradient, execute.record_gradient

    def asked() -> bool:
        return _thread.graph is not None or must_record()

    @functools.wraps(record)
    def told(op_name: str, inputs: Any, attrs: Any, outputs: Any) -> Any:
        maker = outputs[0].op if _thread.graph is not None and outputs and tf.is_symbolic_tensor(outputs[0]) else None
        if maker is not None and maker.graph is _thread.graph and maker.name != tf.get_current_name_scope():
            _thread.names.add(maker.name)
        return record(op_name, inputs, attrs, outputs)

    execute.must_record_gradient, execute.record_gradient = asked, told
