"""Capture: a traced TensorFlow function and a batch size in, the Graph of one training step out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_memsaver.capture.convert import traced_graph
from tf_memsaver.capture.step import Resident, TracedStep, Weight
from tf_memsaver.capture.trace import trace_step
from tf_memsaver.compat.messages import first_line
from tf_memsaver.errors import InvalidRequestError, UnknownDimensionError, UnsupportedModelError
from tf_memsaver.ir.graph import Graph, MemoryKind
from tf_memsaver.options import checked
from tf_memsaver.program.function_calls import FunctionCalls
from tf_memsaver.program.losses import mean_squares
from tf_memsaver.program.train_step import Placeholders


def concrete_function(function: Any, specs: Sequence[Any]) -> Any:
    """Return ``function`` traced with ``specs``; a concrete function as it is.

    Raises:
      InvalidRequestError: there is nothing to trace it with, or tracing fails.
    """
    if hasattr(function, "structured_input_signature"):
        if specs:
            raise InvalidRequestError("a concrete function is already traced. Leave the specs out.")
        return function
    if not callable(function):
        raise InvalidRequestError(f"expected a function, got {type(function).__name__}")
    traceable = function if hasattr(function, "get_concrete_function") else tf.function(function)
    if not specs and getattr(traceable, "input_signature", None) is None:
        raise InvalidRequestError(
            "the function has no specs to be traced with. Give them after it, such as tf.TensorSpec((None, 224, "
            "224, 3))."
        )
    try:
        return traceable.get_concrete_function(*specs)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the function cannot be traced with these specs: {first_line(error)}") from error


def capture_function(calls: FunctionCalls, *, batch_size: int | None, profile: bool = False) -> Graph:
    """Trace one training step of a function at ``batch_size`` and return it as a Graph; nothing is run.

    The mean square of the floating results stands in for the loss, and the step ends with the gradients. With
    ``profile`` its operations are timed, one by one, on made-up values.

    Raises:
      UnsupportedModelError: there is nothing to train.
      UnknownDimensionError: a dimension other than the first one of an argument is unknown.
      InvalidRequestError: the batch size is none, or missing where a first dimension is unknown.
    """
    firsts = [spec.shape[0] for spec in calls.argument_specs if spec.shape.rank]
    if batch_size is None:
        if None in firsts:
            raise InvalidRequestError(
                "the first dimension of an argument is free, so memory cannot be counted. Give batch_size=."
            )
        batch_size = max(firsts, default=1)
    batch_size = checked(batch_size=batch_size)["batch_size"]
    return traced_graph(FunctionStep(calls, batch_size), batch_size, profile=profile)


class FunctionStep:
    """The training step of a function (see ``step.CalledStep``)."""

    optimizer = None

    def __init__(self, calls: FunctionCalls, batch_size: int) -> None:
        """Prepare the step; an unknown first dimension of an argument becomes ``batch_size``."""
        self._calls = calls
        self.name: str = calls.name
        self.sequence = calls.sequence
        self._specs = [_known(number, spec, batch_size) for number, spec in enumerate(calls.argument_specs)]
        self.weights = [
            Weight(path=v.name, variable=v, owner=v) for v in calls.variables if v.trainable and v.dtype.is_floating
        ]

    def residents(self) -> Sequence[Resident]:
        """Return the variables that the function uses."""
        return [(v.name, v, MemoryKind.PARAMETER) for v in self._calls.variables]

    def enter(self, placeholders: Placeholders) -> list[Any]:
        """Make the arguments, and run what is hoisted."""
        return self._calls.enter(placeholders(self._specs))

    def loss(self, outputs: list[Any]) -> Any:
        """Return the mean square of all floating results."""
        terms = mean_squares(outputs)
        if not terms:
            raise UnsupportedModelError(
                f"function '{self.name}' returns no floating-point tensor, so it has no gradients. Name a function "
                "that returns the model's outputs or a loss."
            )
        return tf.add_n(terms)

    def update(self, gradients: list[tuple[Any, Any]]) -> None:
        """Do nothing: there is no optimizer."""

    def metrics(self, outputs: list[Any]) -> None:
        """Add nothing."""

    def losses_of(self, operation: Any) -> list[Any]:
        """Return nothing: a function returns its losses."""
        del operation
        return []

    def seen_through(self, output: Any) -> list[Any]:
        """Return nothing: the loss takes the results."""
        del output
        return []

    def trace(self, graph: Any) -> TracedStep:
        """Trace the step (``trace.trace_step``)."""
        return trace_step(self, graph)

    def close(self) -> None:
        """Do nothing: tracing leaves nothing behind."""


def _known(number: int, spec: tf.TensorSpec, batch_size: int) -> tf.TensorSpec:
    shape = spec.shape.as_list() if spec.shape.rank is not None else [None, None]
    if any(size is None for size in shape[1:]):
        raise UnknownDimensionError(spec.name or f"argument {number}", tuple(shape))
    return tf.TensorSpec([batch_size if size is None else size for size in shape], spec.dtype)
