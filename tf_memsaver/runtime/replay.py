"""The replay of a segment under a tape, and the gradients that come of it."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_memsaver.parity.fan_out import replay_witness
from tf_memsaver.parity.gates import Gates, behind
from tf_memsaver.parity.gradients import READY, gated_input, maker_of, under_plain_name
from tf_memsaver.runtime.first_run import FirstRun
from tf_memsaver.runtime.own_gradients import late, note_gradient
from tf_memsaver.runtime.replayable import Replayable, Tensors


def replay(
    function: Replayable,
    inputs: Tensors,
    weights: Tensors,
    first: FirstRun,
    arrived: dict[int, tf.Tensor],
    gates: Gates,
) -> list[tf.Tensor | None]:
    """Replay under a tape and return a gradient, or None, for each of inputs and weights."""
    gate = None
    if not tf.executing_eagerly():
        gate = gates.gate([gates.first_elements(list(arrived.values())), *first.witness])
    with contextlib.ExitStack() as stack:
        if gate is not None:
            stack.enter_context(tf.control_dependencies([gate]))
        tape = stack.enter_context(tf.GradientTape(watch_accessed_variables=False))
        gated = [gated_input(gate, tensor, function.forward_first) for tensor in inputs]
        sources = list(itertools.compress([*gated, *weights], first.wanted))
        tape.watch(sources)
        start = _size_of_graph()
        finished: list[int] = []
        noted = weights if gate is not None else [note_gradient(w, place, finished) for place, w in enumerate(weights)]
        held = [t if place in first.ungated else behind(gate, t) for place, t in enumerate(first.held)]
        outputs = function.replay(gated, noted, held)
        losses = [function.is_loss(place) for place in range(len(outputs))]
        if gate is None and any(losses):
            outputs = [t if is_loss else late(t) for t, is_loss in zip(outputs, losses, strict=True)]
    end = _size_of_graph()
    renamed = [
        under_plain_name(gate, function.gradient_name(place), gradient, outputs[place])
        for place, gradient in arrived.items()
    ]
    # Sums of gradients lie there in a function's backward pass; copies of its operations name their scopes in full.
    with contextlib.nullcontext() if function.forward_first is None else tf.name_scope("gradients/"):
        results = tape.gradient([outputs[place] for place in arrived], sources, output_gradients=renamed)
    given = iter(results)
    gradients = [next(given) if wanted else None for wanted in first.wanted]
    if gate is None:
        of_weights = _as_finished(gradients[len(gated) :], first.variables, finished)
        return [*gradients[: len(gated)], *of_weights]
    # Nobody gets a gradient before all are there: the replay of the segment before this one would otherwise start
    # while weight gradients here still hold replayed activations.
    found = [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]
    added = gate.graph.get_operations()[start:]
    _free_constants(added[: end - start], gate)
    witness = replay_witness(added[: end - start], added, outputs, arrived, found, gates)
    products = [place >= len(gated) and _is_product(gradient) for place, gradient in enumerate(gradients)]
    if witness is not None and all(
        gradient is None or free for gradient, free in zip(gradients, products, strict=True)
    ):
        products = [False] * len(gradients)
    waiting = [not free and gradient is not None for gradient, free in zip(gradients, products, strict=True)]
    copies = _together(
        list(itertools.compress(gradients, waiting)),
        sum(waiting[: len(gated)]),
        None if witness is None else gates.gate([witness]),
    )
    together = iter(copies)
    return [next(together) if waits else gradient for gradient, waits in zip(gradients, waiting, strict=True)]


def _is_product(gradient: Any) -> bool:
    """Whether a weight's gradient is a product, whose factors the optimizer's own product may be joined with.

    Graph optimisation multiplies such a gradient's factors by a learning rate in the order of their sizes
    (``MinimizeBroadcasts``), if nothing stands in between. No factor is larger than the weight.
    """
    return isinstance(gradient, tf.Tensor) and maker_of(gradient).type == "Mul"


def _free_constants(operations: Iterable[Any], gate: tf.Tensor) -> None:
    """Let constants not wait for the gate: graph optimisation moves only free ones through chains of products and sums.

    Those of gradient functions, which wait for the gradient that arrives, do so in the plain step, too.
    """
    for operation in operations:
        if operation.type == "Const" and gate.op in operation.control_inputs:
            others = [each for each in operation.control_inputs if each is not gate.op]
            operation._remove_all_control_inputs()
            operation._add_control_inputs(others)


def _as_finished(gradients: list[Any], variables: Sequence[int], finished: Sequence[int]) -> list[Any]:
    """Return gradients of weights so that those of one variable are in the order in which they were finished.

    That is the order in which the plain step's tape adds them.
    """
    arranged: list[Any] = [None] * len(gradients)
    for variable in dict.fromkeys(variables):
        places = [place for place, its in enumerate(variables) if its == variable]
        for place, source in zip(places, (each for each in finished if each in places), strict=False):
            arranged[place] = gradients[source]
    return arranged


def _size_of_graph() -> int:
    return 0 if tf.executing_eagerly() else tf.compat.v1.get_default_graph().num_operations()


def _together(tensors: Tensors, first: int, gate: tf.Tensor | None) -> list[tf.Tensor]:
    """Return the tensors unchanged, but none before all are there; the smallest depends on ``gate`` by data.

    The smallest of those from ``first`` on, of weights, if there are any: nobody may want the gradient of an input, if
    all that is in front of the segment is frozen, and graph optimisation would take it out.

    Graph optimisation sorts the terms of a sum by name, and a gradient that passes straight through an addition becomes
    such a term: so each copy takes the name of the operation that made it, with an ending that sorts right behind it.
    """
    places = range(first if first < len(tensors) else 0, len(tensors))
    smallest = min(places, key=lambda place: tensors[place].shape.num_elements() or sys.maxsize, default=0)
    with tf.control_dependencies([t.op for t in tensors]):
        copies = []
        for place, tensor in enumerate(tensors):
            with tf.name_scope(f"{maker_of(tensor).name}/"):
                copies.append(behind(gate if place == smallest else None, tensor, READY))
        return copies
