"""Which operations are recorded under a name scope of their own: a tape names their backward operations by it.

``tf.matmul`` opens a scope, in which its gradient is ``gradient_tape/…/MatMul/MatMul``; ``tf.exp`` opens none, and its
gradient is ``gradient_tape/…/mul``. Graph optimisation sorts by these names. A graph does not tell, only the moment of
recording does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tf_memsaver.compat.tapes import recorded_operations_go_to


@contextlib.contextmanager
def unscoped_operations() -> Iterator[set[str]]:
    """Collect the names of the current graph's operations that are recorded meanwhile without a scope of their own."""
    names: set[str] = set()

    def note(operation: tf.Operation) -> None:
        if operation.name != tf.get_current_name_scope():
            names.add(operation.name)

    with recorded_operations_go_to(note):
        yield names
