"""The replay of a segment under a tape, and the gradients that come of it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_memsaver.compat.gradient_terms import gradients_in_terms, sum_of
from tf_memsaver.compat.graphs import is_compiled_by_xla, place_of
from tf_memsaver.cost.rules import FILTER_GRADIENTS
from tf_memsaver.parity.control import is_kernel, waited_for
from tf_memsaver.parity.extra_readers import needed_for
from tf_memsaver.parity.gates import Gates, after
from tf_memsaver.parity.gradients import READY, before_additions
from tf_memsaver.parity.grappler import FUNCTION_SCOPE
from tf_memsaver.parity.level import Parity
from tf_memsaver.parity.sizes import free_sizes
from tf_memsaver.runtime.first_run import FirstRun
from tf_memsaver.runtime.own_gradients import note_gradient, refused_outside, with_late_gradient
from tf_memsaver.runtime.replayable import Shared, Tensors
from tf_memsaver.runtime.slices import Gradient, Gradients, values_of, with_values

Arrived = Mapping[int, Sequence[tf.Tensor]]
"""The terms of the gradients that have arrived, by output."""


def replay_eagerly(first: FirstRun, arrived: Arrived, parity: Parity) -> Gradients:
    """Replay a first run, and return the gradients of its places for those that arrived, by output."""
    function = first.function
    finished: dict[int, Any] = {}
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        inputs = [tf.identity(tensor) for tensor in first.inputs]
        sources = list(itertools.compress([*inputs, *first.weights], first.wanted))
        tape.watch(sources)
        notes = [functools.partial(finished.setdefault, place) for place in range(len(first.weights))]
        weights = [note_gradient(weight, note) for weight, note in zip(first.weights, notes, strict=True)]
        outputs = function.replay(inputs, weights, [tf.identity(tensor) for tensor in first.held])
        losses = [function.is_loss(place) for place in range(len(outputs))]
        if any(losses) and parity.eager_order:
            outputs = [t if is_loss else with_late_gradient(t) for t, is_loss in zip(outputs, losses, strict=True)]
    targets, upstream = _one_by_one({place: (outputs[place], terms) for place, terms in arrived.items()})
    gradients = _gradients(first, tape, targets, upstream, sources, tf.zeros(()))
    count = sum(first.counts)
    if parity.eager_order:
        gradients[count:] = _as_finished(gradients[count:], first.variables, list(finished))
    return gradients


def _as_finished(gradients: Gradients, variables: Sequence[int], finished: Sequence[int]) -> Gradients:
    """Return gradients of weights so that those of one variable are in the order in which they were finished.

    That is the order in which the plain step's tape adds them.
    """
    arranged: Gradients = [None] * len(gradients)
    for variable in dict.fromkeys(variables):
        places = [place for place, its in enumerate(variables) if its == variable]
        for place, source in zip(places, (each for each in finished if each in places), strict=False):
            arranged[place] = gradients[source]
    return arranged


def _as_added(gradients: Gradients) -> list[int]:
    """Return the places of gradients in the order in which a tape has added them to the graph."""
    added = {place: place_of(value.op) for place, value in enumerate(values_of(gradients)) if value is not None}
    return sorted(added, key=added.__getitem__)


def replay_in_graph(first: FirstRun, arrived: Arrived, shared: Shared) -> Gradients:
    """Trace what ``replay_eagerly`` does, so that nothing of it starts before the gradients have arrived."""
    function, graph = first.function, tf.compat.v1.get_default_graph()
    gates, parity = shared.gates, shared.parity
    # Graph optimisation goes back from the last input first: along the gradients, to the first run's own operations
    # before those that are only read there (``FirstRunReads.squares_of_cubes``).
    waited = {id(each): each for each in map(before_additions, itertools.chain(*arrived.values()))}
    gate = gates.gate([*first.read, gates.first_elements([*waited.values()])])
    with tf.control_dependencies([gate]), tf.GradientTape(watch_accessed_variables=False) as tape:
        inputs = [parity.entering(gate, tensor, function.forward_first) for tensor in first.inputs]
        # Where terms leave this segment one by one, they leave those inside so.
        shared.read_by_makers.update(id(t) for t, count in zip(inputs, first.counts, strict=True) if count > 1)
        sources = list(itertools.compress([*inputs, *first.weights], first.wanted))
        tape.watch(sources)
        start = graph.num_operations()
        held = [t if place in first.ungated else after(gate, t) for place, t in enumerate(first.held)]
        outputs = function.replay(inputs, first.weights, held)
    replayed = graph.get_operations()[start:]
    factors = parity.factors(replayed)
    arrival = gates.gate([gates.first_elements(factors)]) if factors else gate
    renamed = {
        place: [
            parity.arriving(
                arrival,
                bool(factors),
                function.gradient_name(place),
                term,
                outputs[place],
                first.outputs[place],
                one_of_several=len(terms) > 1,
            )
            for term in terms
        ]
        for place, terms in arrived.items()
    }
    # Sums of gradients lie there in a function's backward pass; copies of its operations name their scopes in full.
    with contextlib.nullcontext() if function.forward_first is None else tf.name_scope(f"{FUNCTION_SCOPE}/"):
        targets, upstream = _one_by_one({place: (outputs[place], terms) for place, terms in renamed.items()})
        gradients = _gradients(first, tape, targets, upstream, sources, gate)
    count = sum(first.counts)
    gradients[count:] = _as_finished(gradients[count:], first.variables, _as_added(gradients[count:]))
    values = values_of(gradients)
    found = [each for each in values if each is not None]
    added = graph.get_operations()[start:]
    parity.free_constants(replayed, gate)
    entered = [*zip(first.inputs, inputs, strict=True)]
    free_sizes(first.operations, [*entered, *zip(first.held, held, strict=True)], replayed, added, found, gate)
    needed = needed_for(found, added)
    read = parity.read_in_replay(first.operations, entered, replayed, needed, outputs, arrived, gates)
    if is_compiled_by_xla(graph) and not any(operation.type in FILTER_GRADIENTS for operation in added):
        return with_values(gradients, _released_by_data(values, read, gates))
    # No other replay starts meanwhile in an ordered step: the update may have what nothing is added to.
    early = [shared.ordered is not None and not each for each in first.summed]
    return with_values(gradients, _released(values, early, gates.gate(read) if read else None, parity, added))


def _one_by_one(arrived: Mapping[int, tuple[tf.Tensor, Sequence[tf.Tensor]]]) -> tuple[Tensors, Tensors]:
    """Return targets and their gradients: a target of several terms stands there once for each."""
    pairs = [(output, term) for output, terms in arrived.values() for term in terms]
    return [output for output, _ in pairs], [term for _, term in pairs]


def _gradients(
    first: FirstRun, tape: tf.GradientTape, targets: Tensors, upstream: Tensors, sources: Tensors, marker: tf.Tensor
) -> Gradients:
    """Return a gradient, or None, for each place of a first run."""
    counts = [*first.counts, *[1] * len(first.weights)]
    with refused_outside():
        found = iter(gradients_in_terms(tape, targets, upstream, sources, marker))
    return [
        term
        for count, wanted in zip(counts, first.wanted, strict=True)
        for term in _filled(next(found) if wanted else [], count)
    ]


def _filled(terms: Sequence[Gradient], count: int) -> Gradients:
    """Return terms in so many places; what is too many is added up in the last one."""
    if len(terms) > count:
        terms = [*terms[: count - 1], sum_of(terms[count - 1 :])]
    return [*terms, *[None] * (count - len(terms))]


def _released(
    gradients: Sequence[tf.Tensor | None],
    early: Sequence[bool],
    gate: tf.Tensor | None,
    parity: Parity,
    added: Sequence[tf.Operation],
) -> list[tf.Tensor | None]:
    """Return gradients of inputs, then of weights, so that no replay starts before all are there.

    ``added`` are the operations of the replay and its backward pass.

    The replay of the segment before this one would otherwise start while weight gradients here still hold replayed
    activations. One gradient depends on ``gate`` by data: the smallest of those of weights, if there are any, since
    nobody may want that of an input, if all that is in front of the segment is frozen, and graph optimisation would
    take it out.

    Those of weights that may be ``early`` wait for nothing where a kernel makes them: they would be in memory to the
    end of the segment, with what their updates are made of.
    """
    inputs = len(gradients) - len(early)
    found = {place: gradient for place, gradient in enumerate(gradients) if gradient is not None}
    free = {place for place, gradient in found.items() if place >= inputs and parity.may_leave_early(gradient)}
    waiting = [place for place in found if (gate is not None and len(free) == len(found)) or place not in free]
    smallest = _smallest({place: found[place] for place in waiting}, inputs)
    released: list[tf.Tensor | None] = list(gradients)
    order = {id(each): number for number, each in enumerate(added)}
    with tf.control_dependencies([waited_for(before_additions(found[place]).op, order) for place in waiting]):
        for place in waiting:
            is_early = place >= inputs and place != smallest and early[place - inputs]
            if not (is_early and is_kernel(found[place])):
                released[place] = parity.released(gate if place == smallest else None, found[place])
    return released


def _smallest(gradients: Mapping[int, tf.Tensor], inputs: int) -> int:
    """Return the place of the smallest gradient of a weight, or of an input if there is none of a weight."""
    places = [place for place in gradients if place >= inputs] or list(gradients)
    return min(places, key=lambda place: gradients[place].shape.num_elements() or sys.maxsize, default=0)


def _released_by_data(
    gradients: Sequence[tf.Tensor | None], read: Sequence[tf.Tensor], gates: Gates
) -> list[tf.Tensor | None]:
    """Return what ``_released`` does where control dependencies do not count.

    XLA would else compute gradients of weights when the backward pass is over, and keep till then what they are
    computed of. Measured with TensorFlow 2.21 on a CPU: a step of a BERT takes 34.3 MiB for 48.7, of a ViT 45.7 for
    57.0. Where there are convolutions it is the other way round: 187.9 for 137.0 MiB, of a MobileNetV2.
    """
    waiting = [gradient for gradient in gradients if gradient is not None]
    if not waiting:
        return list(gradients)
    # XLA goes through what the gate depends on in this order: those of the last layers are ready first.
    gate = gates.gate([gates.first_elements(waiting[::-1]), *read])
    return [None if gradient is None else after(gate, gradient, READY) for gradient in gradients]
