"""The backward pass of a segment: its replay is traced, or copied from a twin's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_memsaver.errors import SecondDerivativeError
from tf_memsaver.parity.fan_out import held_through_sums_behind, keep_convolutions
from tf_memsaver.parity.gates import Gates
from tf_memsaver.parity.gradients import RENAMED, gradient_as_term, maker_of, may_be_summed
from tf_memsaver.parity.names import plain_name
from tf_memsaver.runtime import twins
from tf_memsaver.runtime.first_run import FirstRun
from tf_memsaver.runtime.own_gradients import with_gradient
from tf_memsaver.runtime.replay import replay
from tf_memsaver.runtime.replayable import Replayable, Shared, Tensors


def replay_gradients(
    function: Replayable,
    inputs: Tensors,
    weights: Tensors,
    first: FirstRun,
    upstream: dict[int, tf.Tensor],
    shared: Shared,
) -> list[Any]:
    """Replay and return a gradient, or None, for each of inputs and weights."""
    places, arrived = list(upstream), list(upstream.values())

    def trace() -> Sequence[tf.Tensor | None]:
        return replay(function, inputs, weights, first, upstream, shared.gates)

    if tf.executing_eagerly():
        gradients = trace()
    else:
        # What reads the outputs is known by now.
        first.witness += held_through_sums_behind(first.needed, shared.gates)
        first.needed = ()
        first.witness += keep_convolutions(first.operations, inputs, shared.gates)
        described = _described(function, first, places, arrived, inputs, weights, shared.gates)
        gradients = shared.traces.gradients(described, trace, shared.names.kept)

    def second(*_: Any) -> Any:
        raise SecondDerivativeError

    # Everything enters as an argument, so that no path of a second derivative goes around the error.
    found = [gradient for gradient in gradients if gradient is not None]
    passed = iter(with_gradient(found, [*arrived, *inputs, *weights], second))
    guarded = [None if gradient is None else next(passed) for gradient in gradients]
    if tf.executing_eagerly():
        return guarded
    terms = [may_be_summed(tensor, first.operations) for tensor in inputs]
    terms += [first.variables.count(each) > 1 or function.is_read_elsewhere(each) for each in first.variables]
    return [
        gradient_as_term(gradient, shared.gates) if term and gradient is not None else gradient
        for gradient, term in zip(guarded, terms, strict=True)
    ]


def _described(
    function: Replayable,
    first: FirstRun,
    places: Sequence[int],
    arrived: Tensors,
    inputs: Tensors,
    weights: Tensors,
    gates: Gates,
) -> twins.Replay | None:
    """Return what the trace of ``replay`` depends on, or None if that cannot be said."""
    sources = [*inputs, *weights]
    read = [*arrived, *sources, *first.held, *first.witness]
    described = twins.description(first.operations, [*read, *first.outputs])
    if described is None:
        return None
    operations, outside = described
    kinds = tuple(gradient.op.type if gradient.op.type in RENAMED else "" for gradient in arrived)

    # A frozen layer runs the same operations as others, but its variables are held, and get no gradient.
    variables = tuple(first.variables)

    def named(operations: Iterable[Any]) -> list[str]:
        return [
            plain_name(operation.name, graph, function.forward_first).rstrip("/")
            for operation in operations
            for graph in (operation.graph, None)
        ]

    return twins.Replay(
        key=(function.forward_first, tuple(places), tuple(first.wanted), variables, first.ungated, kinds, operations),
        sources=(*read, *outside, *gates.constants()),
        forward=tuple(named(first.operations)),
        names=(
            *named(maker_of(tensor) for tensor in (*arrived, *sources)),
            *(function.gradient_name(place) for place in places),
        ),
    )
