"""The backward pass of a segment: its replay is traced, or copied from a twin's."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_memsaver.parity.gates import Gates
from tf_memsaver.parity.gradients import RENAMED, has_sizes_of_its_own, maker_of, may_be_summed
from tf_memsaver.parity.names import plain_name
from tf_memsaver.runtime import twins
from tf_memsaver.runtime.first_run import FirstRun
from tf_memsaver.runtime.order import hold_in_order, note_replay
from tf_memsaver.runtime.own_gradients import without_gradient
from tf_memsaver.runtime.replay import Arrived, replay_eagerly, replay_in_graph
from tf_memsaver.runtime.replayable import Shared
from tf_memsaver.runtime.slices import Gradient, Gradients, changed, flattened, unflattened, values_of, with_values


def gradients_of(first: FirstRun, arrived: Arrived, shared: Shared) -> Gradients:
    """Return a gradient, or None, for each place of a first run (``FirstRun.places``).

    Args:
      first: the run to replay.
      arrived: the terms of the gradients of its outputs, by output; none for those that the loss does not depend on.
      shared: what the segments of the same forward pass share.
    """
    if first.is_eager:
        return _once_only(replay_eagerly(first, arrived, shared.parity), first, arrived)
    gates, parity = shared.gates, shared.parity
    # What reads the outputs is known by now.
    first.read += parity.read_before_replay(first.operations, first.inputs, first.needed, gates)
    first.needed = ()
    described = _described(first, arrived, gates)
    graph = tf.compat.v1.get_default_graph()
    hold_in_order(shared.ordered)
    start = graph.num_operations()
    traced = shared.traces.gradients(
        described, lambda: flattened(replay_in_graph(first, arrived, shared)), shared.names.kept
    )
    made = unflattened(traced)
    gradients = _once_only(made, first, arrived)
    note_replay(graph, start, values_of(made), values_of(gradients))
    terms = [
        count > 1 or may_be_summed(tensor, first.operations)
        for tensor, count in zip(first.inputs, first.counts, strict=True)
        for _ in range(count)
    ]
    terms += first.summed
    values = [
        parity.leaving(gradient, gates) if term and gradient is not None else gradient
        for gradient, term in zip(values_of(gradients), terms, strict=True)
    ]
    return with_values(gradients, values)


def _once_only(gradients: Sequence[Gradient | None], first: FirstRun, arrived: Arrived) -> Gradients:
    """Return gradients whose own gradient is an error."""
    # Everything enters as an argument, so that no path of a second derivative goes around the error.
    return changed(
        gradients, lambda found: without_gradient(found, [*itertools.chain(*arrived.values()), *first.arguments])
    )


def _described(first: FirstRun, arrived: Arrived, gates: Gates) -> twins.Replay | None:
    """Return what the trace of a replay depends on, or None if that cannot be said."""
    function = first.function
    upstream = [*itertools.chain(*arrived.values())]
    entering = [*upstream, *first.arguments]
    read = [*entering, *first.held, *first.read]
    described = twins.description(first.operations, [*read, *first.outputs])
    if described is None:
        return None
    operations, outside = described
    made = itertools.chain.from_iterable(operation.outputs for operation in first.operations)

    def named(operations: Iterable[Any]) -> list[str]:
        return [
            plain_name(operation.name, graph, function.forward_first).rstrip("/")
            for operation in operations
            for graph in (operation.graph, None)
        ]

    return twins.Replay(
        key=(
            function.forward_first,
            tuple((place, len(terms)) for place, terms in arrived.items()),
            tuple(first.counts),
            tuple(first.wanted),
            # A frozen layer runs the same operations as others, but its variables are held, and get no gradient.
            tuple(first.variables),
            tuple(first.summed),
            first.ungated,
            tuple(gradient.op.type if gradient.op.type in RENAMED else "" for gradient in upstream),
            tuple(
                has_sizes_of_its_own(each, first.outputs[place]) for place, terms in arrived.items() for each in terms
            ),
            operations,
        ),
        sources=(*read, *outside, *gates.constants(), *made),
        forward=tuple(named(first.operations)),
        names=(
            *named(maker_of(tensor) for tensor in entering),
            *(function.gradient_name(place) for place in arrived),
        ),
    )
