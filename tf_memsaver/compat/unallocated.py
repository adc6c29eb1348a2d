"""Variables without memory: what a trace needs of an optimizer's slots is their shapes alone.

Read from TensorFlow 2.20 and 2.21, in which these files are the same: ``tensorflow/python/framework/ops.py`` (each
graph's stack of variable creators) and ``tensorflow/python/ops/resource_variable_ops.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

from tf_memsaver.compat.graphs import FuncGraph
from tf_memsaver.compat.released import release


@contextlib.contextmanager
def variables_unallocated() -> Iterator[None]:
    """Make every ``tf.Variable`` that is made meanwhile one that can be traced, but has no value.

    An initializer is traced, not run, to learn the shape.
    """

    def create(next_creator: Callable[..., Any], **given: Any) -> Any:
        del next_creator
        spec = _spec(given["initial_value"], given.get("dtype"), given.get("shape"))
        taken = ("trainable", "name", "constraint", "synchronization", "aggregation")
        settings = {key: given[key] for key in taken if given.get(key) is not None}
        return UninitializedVariable(shape=spec.shape, dtype=spec.dtype, **settings)

    inner = tf.compat.v1.get_default_graph()
    with tf.init_scope():
        outer = tf.compat.v1.get_default_graph()
    with contextlib.ExitStack() as stack:
        # Each graph has a stack of its own, and the public tf.variable_creator_scope knows the innermost graph alone.
        for graph in (outer,) if inner is outer else (outer, inner):
            stack.enter_context(graph._variable_creator_scope(create))
        yield


def _spec(value: Any, dtype: Any, shape: Any) -> tf.TensorSpec:
    graph = FuncGraph("initial_value")
    with graph.as_default():
        tensor = tf.convert_to_tensor(value() if callable(value) else value, dtype)
        spec = tf.TensorSpec(tensor.shape if shape is None else shape, tensor.dtype)
    del tensor
    release(graph)
    return spec
