"""Times of single operations, measured on the device at hand: what ``profile=True`` puts in place of the roofline.

An operation of the traced step is run by itself, on made-up values of the same shapes, so that a step which is too
large for the device can be profiled all the same. Equal operations are run once.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_memsaver.compat.eager import operation_by_itself
from tf_memsaver.ir.graph import Op
from tf_memsaver.pace import counted

RUNS = 5
"""Runs that are timed; the shortest counts, since other work only makes them longer."""

ENOUGH_SECONDS = 0.2
"""After so long no further run is begun."""


def with_measured_seconds(pairs: Sequence[tuple[Any, Op]], launch_seconds: float) -> list[Op]:
    """Return the ops of ``(operation, op)`` pairs with their measured seconds.

    Operations that cannot run by themselves (with state, loops, sizes that are known only in a step) keep what the
    roofline says, times the ratio of measured to predicted seconds of all others.

    Args:
      pairs: operations of a traced graph, and what the cost model made of them.
      launch_seconds: what starting an operation in a graph takes; it stands in for what starting one by itself takes.
    """
    alone = _Alone()
    measured = [alone.seconds(operation) if op.seconds else 0.0 for operation, op in counted("operations", pairs)]
    known = [(found + launch_seconds, op.seconds) for found, (_, op) in zip(measured, pairs, strict=True) if found]
    predicted = sum(seconds for _, seconds in known)
    scale = sum(found for found, _ in known) / predicted if predicted else 1.0
    return [
        dataclasses.replace(op, seconds=op.seconds * scale if found is None else found + launch_seconds)
        if op.seconds
        else op
        for found, (_, op) in zip(measured, pairs, strict=True)
    ]


class _Alone:
    """Runs operations by themselves."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], float | None] = {}
        scalar = tf.constant(0.0)
        self._launch = _shortest(lambda: tf.identity(scalar))

    def seconds(self, operation: Any) -> float | None:
        """Return how long a run takes, without starting it; None if it cannot run by itself."""
        key = _description(operation)
        if key not in self._found:
            self._found[key] = self._timed(operation)
        return self._found[key]

    def _timed(self, operation: Any) -> float | None:
        definition = operation.op_def
        own = [operation.get_attr(attribute.name) for attribute in definition.attr]
        shapes = [tensor.shape for tensor in (*operation.inputs, *operation.outputs)]
        if definition.is_stateful or any(map(_is_function, operation.node_def.attr.values())):
            return None
        if not all(shape.is_fully_defined() for shape in shapes) or any(_is_opaque(t) for t in operation.inputs):
            return None
        names = [attribute.name for attribute in definition.attr]
        attributes = tuple(each for pair in zip(names, map(_as_number, own), strict=True) for each in pair)
        try:
            inputs = [_made_up(tensor) for tensor in operation.inputs]
            run = operation_by_itself(operation.type, inputs, attributes, len(operation.outputs))
            return max(0.0, _shortest(run) - self._launch)
        except (tf.errors.OpError, TypeError, ValueError):
            # No kernel that runs by itself, or values that mean something to it.
            return None


def _shortest(run: Callable[[], Any]) -> float:
    """Return the seconds of the shortest of some runs, after one that counts for nothing."""
    with tf.init_scope():
        run()
        times: list[float] = []
        end = time.perf_counter() + ENOUGH_SECONDS
        while len(times) < RUNS and (len(times) < 2 or time.perf_counter() < end):
            tf.test.experimental.sync_devices()
            begin = time.perf_counter()
            run()
            tf.test.experimental.sync_devices()
            times.append(time.perf_counter() - begin)
    return min(times)


def _description(operation: Any) -> tuple[Any, ...]:
    """Return what decides how long an operation takes."""
    attributes = {name: str(value) for name, value in operation.node_def.attr.items() if not name.startswith("_")}
    return operation.type, tuple(map(_kind, operation.inputs)), tuple(sorted(attributes.items()))


def _kind(tensor: Any) -> tuple[Any, ...]:
    dimensions = tuple(tensor.shape) if tensor.shape.rank is not None else None
    value = tf.get_static_value(tensor) if tensor.dtype.is_integer else None
    return tensor.dtype.name, dimensions, None if value is None else value.tobytes()


def _made_up(tensor: Any) -> Any:
    """Return an eager tensor like that of a graph: its value where that is known, else numbers that any op can read."""
    with tf.init_scope():
        known = tf.get_static_value(tensor)
        if known is not None:
            return tf.constant(known, tensor.dtype)
        if tensor.dtype.is_floating:
            return tf.cast(tf.random.stateless_uniform(tensor.shape, (0, 0), 0.1, 1.0), tensor.dtype)
        return tf.ones(tensor.shape, tensor.dtype) if tensor.dtype == tf.bool else tf.zeros(tensor.shape, tensor.dtype)


def _as_number(value: Any) -> Any:
    """Return an attribute as the runtime takes it: dtypes by number."""
    if isinstance(value, tf.DType):
        return value.as_datatype_enum
    return [_as_number(each) for each in value] if isinstance(value, list) else value


def _is_function(attribute: Any) -> bool:
    return attribute.HasField("func") or bool(attribute.list.func)


def _is_opaque(tensor: Any) -> bool:
    return tensor.dtype in (tf.resource, tf.variant, tf.string)
