"""Let traced graphs go when nobody needs them any more.

``tf.custom_gradient`` registers a gradient function for each of its calls, for good, and the function holds the graph
that it was called in, with all the variables that the graph reads. (Every update of a Keras optimizer has such a call:
the sum over the replicas of ``tf.distribute``.) Here such functions end with their graphs.

Read from TensorFlow 2.20 and 2.21, in which these files are the same: ``tensorflow/python/ops/custom_gradient.py``,
``tensorflow/python/framework/registry.py``, ``func_graph.py`` and ``ops.py``.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import func_graph, ops

_REGISTERED_FOR_A_CALL = ("CustomGradient-", "Memsaver")
"""How the names begin of gradient functions that are registered for one call (by ``tf.custom_gradient``, and by
``tfgraph.emission.registered``)."""

_HELD = "_memsaver_gradient_functions"


@contextlib.contextmanager
def gradients_end_with_graphs() -> Iterator[None]:
    """Keep the gradient functions that are registered while this is open no longer than the graphs they belong to.

    Each is held by its graph from then on; the registry knows it by a weak reference. So a ``tf.function`` that was
    traced meanwhile, and that somebody else keeps, keeps its gradients, too.
    """
    registry = ops.gradient_registry._registry
    known = set(registry)
    try:
        yield
    finally:
        for name in [name for name in list(registry) if name not in known]:
            entry = registry.get(name)
            graph = _graph_of(entry["type"]) if entry and name.startswith(_REGISTERED_FOR_A_CALL) else None
            if graph is not None:
                _hand_over(name, entry, graph)


def release(graph: Any) -> None:
    """Take a FuncGraph that is needed no more apart, so that nothing waits for the garbage collector.

    It may still be found: a layer may keep one of its tensors, and a ``tf.function`` that was first traced inside of it
    asks it for what it captured when a gradient is taken. It says that it captured nothing, as if it were gone.
    """
    if hasattr(graph, _HELD):
        getattr(graph, _HELD).clear()
    func_graph.dismantle_func_graph(graph)
    # What dismantling leaves there.
    graph.inputs, graph.outputs = [], []
    graph._function_captures = type(graph._function_captures)()
    graph._unfeedable_tensors.clear()


def _hand_over(name: str, entry: dict[str, Any], graph: Any) -> None:
    """Let the graph hold a registered gradient function, and the registry forget it with the graph."""
    registry = ops.gradient_registry._registry
    gradient = entry["type"]
    if not hasattr(graph, _HELD):
        setattr(graph, _HELD, [])
    getattr(graph, _HELD).append(gradient)
    kept = weakref.ref(gradient, lambda _: registry.pop(name, None))

    @tf.autograph.experimental.do_not_convert
    def of_graph(operation: Any, *upstream: Any) -> Any:
        found = kept()
        if found is None:
            raise LookupError(f"the graph of gradient function '{name}' is gone")
        return found(operation, *upstream)

    entry["type"] = of_graph


def _graph_of(function: Any) -> Any | None:
    """Return the graph of the first symbolic tensor that a gradient function's closure holds."""
    seen: set[int] = set()
    waiting = [function]
    while waiting:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        if tf.is_tensor(each) and isinstance(getattr(each, "graph", None), func_graph.FuncGraph):
            return each.graph
        if isinstance(each, dict):
            waiting.extend(each.values())
        elif isinstance(each, (list, tuple)):
            waiting.extend(each)
        else:
            waiting.extend(_enclosed(each))
    return None


def _enclosed(function: Any) -> Iterator[Any]:
    """Yield what a function, a method or a partial holds."""
    if isinstance(function, functools.partial):
        yield from (function.func, function.args, function.keywords)
    elif isinstance(function, types.MethodType):
        yield function.__func__
    elif isinstance(function, types.FunctionType):
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # It is empty.
                yield cell.cell_contents
