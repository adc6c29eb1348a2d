"""Tensors that are passed on unchanged, with a gradient function of their own."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_memsaver.compat.tapes import record_operation, stop_recording
from tf_memsaver.errors import SecondDerivativeError
from tf_memsaver.parity.gradients import maker_of
from tf_memsaver.runtime.replayable import Tensors
from tf_memsaver.tfgraph.emission import registered_segment

_is_refused_outside: contextvars.ContextVar[bool] = contextvars.ContextVar("is_refused_outside", default=False)


def with_gradient(outputs: Tensors, inputs: Tensors, gradient: Callable[..., Sequence[Any]]) -> list[tf.Tensor]:
    """Return ``outputs`` with a gradient function of their own, which takes theirs and returns those of ``inputs``.

    As ``tf.custom_gradient``, but without its search through the graph for variables, and without zeros for gradients
    that nobody asks for.
    """
    with stop_recording():
        # A graph may take the gradient of an eager run, too.
        if tf.executing_eagerly() or not all(map(tf.is_symbolic_tensor, outputs)):
            passed = [tf.identity(tensor) for tensor in outputs]
        else:
            # Read by SavedModels, and by the gradients of a function's graph.
            def of_identities(_: Any, *upstream: Any) -> list[Any]:
                return [*([None] * len(outputs)), *gradient(*upstream[: len(outputs)])]

            overridden = {"IdentityN": registered_segment(of_identities)}
            # One that is a term of a sum is sorted by its name.
            scope = f"{maker_of(outputs[0]).name}/" if outputs else None
            with tf.compat.v1.get_default_graph().gradient_override_map(overridden), tf.name_scope(scope or "segment"):
                passed = tf.identity_n([*outputs, *inputs])[: len(outputs)]
    record_operation("segment", passed, list(inputs), gradient, _refuse)
    return passed


def without_gradient(outputs: Tensors, inputs: Tensors) -> list[tf.Tensor]:
    """Return ``outputs`` so that it is an error to ask for their gradient; as they are, within ``refused_outside``."""
    return list(outputs) if _is_refused_outside.get() else with_gradient(outputs, inputs, _refuse)


@contextlib.contextmanager
def refused_outside() -> Iterator[None]:
    """Make gradients that will leave a segment ``without_gradient``, so that segments inside need not do it.

    Graph optimisation has two rounds, and takes out the outermost layer of ``IdentityN`` in each. One that stays keeps
    a gradient that is a product from becoming one with the optimizer's.
    """
    token = _is_refused_outside.set(True)
    try:
        yield
    finally:
        _is_refused_outside.reset(token)


def _refuse(*_: Any) -> Any:
    raise SecondDerivativeError


def note_gradient(output: tf.Tensor, note: Callable[[tf.Tensor], None]) -> tf.Tensor:
    """Pass a tensor through; tell ``note`` the gradient that arrives for it, right after its terms were added up.

    A custom gradient gets zeros for outputs that the loss does not depend on, and cannot tell them from a gradient that
    is zero. With this note the replay leaves such outputs out, so that weights used by them alone keep gradient None.
    """

    def gradient(upstream: tf.Tensor) -> list[tf.Tensor]:
        note(upstream)
        return [upstream]

    return with_gradient([output], [output], gradient)[0]


_OPERATIONS_AFTER = 16
"""So many operations are taken to follow a layer, for the order in which gradients come to it."""


def with_late_gradient(output: tf.Tensor) -> tf.Tensor:
    """Pass a tensor through so that its gradient comes when those of losses have gone on.

    An eager tape adds terms in the order in which they come. The gradient of a loss that a layer has added is there at
    once in the plain step, while that of the layer's output passes all that follows; a replay gets them together.
    """
    for _ in range(_OPERATIONS_AFTER):
        output = with_gradient([output], [output], lambda upstream: [upstream])[0]
    return output
