"""The ordered step: what decides the memory of a backward pass runs in the order in which it was traced.

TensorFlow's threads run what is ready. In a backward pass that is much: the gradients of a layer's weights and of its
input, the backward passes of two branches, the replays of a network that is called twice. Side by side they take more
memory than one by one, and another amount in each step. So control edges let kernels that touch large tensors, and
the gates of replays, wait for what was traced before them. No kernel sees such an edge; that graph optimisation does
not see them either is up to ``parity.control``. The steps of a loop that goes back in time take turns, too: each makes
a gradient of the weights, and these would wait for their sum side by side.

Only in graphs: eager steps are in order, and XLA orders by itself.
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
import tensorflow as tf

from tf_memsaver.compat.gradients import backward_passes_go_to
from tf_memsaver.compat.graphs import (
    is_compiled_by_xla,
    led_to,
    read_instead,
    run_steps_in_turn,
    traced_graphs_go_to,
    wait_for,
)
from tf_memsaver.cost.rules import Kernels
from tf_memsaver.cost.workspace import workspace_bytes
from tf_memsaver.parity.buffers import buffer_of
from tf_memsaver.parity.control import filter_gradients_first, held_in_order, is_backward, waited_for
from tf_memsaver.parity.extra_readers import needed_for
from tf_memsaver.parity.gates import is_gate
from tf_memsaver.parity.gradients import is_ready
from tf_memsaver.parity.grappler import REORDERED_BY_SIZE
from tf_memsaver.parity.products import made_early
from tf_memsaver.runtime.groups import Groups, Profile
from tf_memsaver.runtime.starts import hold_start, take_turns
from tf_memsaver.runtime.updates import hold_updates, update_in_place
from tf_memsaver.tfgraph.operations import is_loop, kernels_here, spec_of, tensor_bytes

_LEAST_BYTES = 1 << 18
"""What is smaller decides no peak."""

_LEAST_VARIABLE = 1 << 14
"""Variables are many: what optimizers make of those that are smaller than ``_LEAST_BYTES`` adds up."""


@dataclass(slots=True)
class _Ordered:
    """A graph whose backward passes are held in order; operations are known by name, so that they can be forgotten.

    ``gates`` are what replays begin with and ``ends`` the last gradients that they hand on, ``gradients`` the results
    of the backward passes, ``placed`` what is in order, ``starts`` how many operations there were before each pass and
    the first of it that may wait. By device, ``turns`` has what those that come after a place in the graph are to wait
    for, and ``over`` the place and the end of the last replay: replicas on other devices go on by themselves. Where
    they exchange values, as a synchronized norm does, the pass of one holds operations of the others, between which the
    rest of theirs comes later.
    """

    batch_size: int
    gates: set[str] = field(default_factory=set)
    ends: set[str] = field(default_factory=set)
    gradients: set[str] = field(default_factory=set)
    placed: set[str] = field(default_factory=set)
    starts: list[tuple[int, str]] = field(default_factory=list)
    turns: dict[str, list[tuple[int, tuple[str, ...]]]] = field(default_factory=dict)
    over: dict[str, tuple[int, str]] = field(default_factory=dict)

    def before(self, device: str, place: float = math.inf) -> tuple[str, ...]:
        """Return what an operation at a place is to wait for, as far as that is traced before it."""
        turns = self.turns.get(device, [])
        number = bisect_left(turns, place, key=itemgetter(0))
        return turns[number - 1][1] if number else ()

    def end_of_replay(self, device: str, place: float = math.inf) -> tuple[str, ...]:
        """Return what a replay, or the forward pass of another tape, has to wait for besides."""
        over = self.over.get(device)
        return (over[1],) if over and over[0] < place else ()


_ordered: weakref.WeakKeyDictionary[Any, _Ordered] = weakref.WeakKeyDictionary()


def get_ready() -> None:
    """Have graphs put in order when they are traced to their end: those whose tracing begins after this.

    Who makes a plan's segments calls it. A graph that is being traced would not be noticed, since Python looks up what
    ends a ``with`` where that begins.
    """
    backward_passes_go_to(_put_in_order)
    traced_graphs_go_to(_finish)


def hold_in_order(batch_size: int | None) -> None:
    """Let the backward passes that are added to the current graph from now on run in order.

    Args:
      batch_size: what dimensions that are not known count as; None leaves the order to TensorFlow.
    """
    graph = tf.compat.v1.get_default_graph()
    if batch_size is not None and not tf.executing_eagerly() and not is_compiled_by_xla(graph):
        _ordered.setdefault(graph, _Ordered(batch_size))


def note_replay(
    graph: Any, start: int, gradients: Sequence[tf.Tensor | None], handed_on: Sequence[tf.Tensor | None]
) -> None:
    """Let the replay that was added to a graph from operation ``start`` on take its turn, if the graph is in order.

    Along one chain of segments the gradients see to that. The calls of a network that is called twice, or two networks
    side by side, would be replayed at the same time, with the activations of both in memory.

    Its end is the operation by which all its gradients are handed on. That stays in the graph where it is waited for,
    and a product among them would not be joined with the optimizer's own product: then the end is a gradient that is
    ready when the others are.
    """
    gate = next((each for each in graph.get_operations()[start:] if is_gate(each)), None)
    ends = [each.op for each in handed_on if each is not None]
    if gate is None or not ends or graph not in _ordered:
        return
    made = [each.op for each in gradients if each is not None]
    if any(each.type == REORDERED_BY_SIZE for each in made):
        # An identity that is waited for stays, too.
        ends = sorted(filter(is_ready, made), key=lambda each: each.type != "Identity") or ends
    _ordered[graph].gates.add(gate.name)
    _ordered[graph].ends.add(ends[-1].name)


def in_turn(tensor: Any) -> Any:
    """Return what a forward pass reads, not before the replays that its graph has on this device are over.

    A step with several tapes would otherwise run the forward passes of all of them first, where one does not need the
    other: with small batches whose gradients are added up, all activations would be in memory at once.
    """
    if tf.executing_eagerly() or not tf.is_symbolic_tensor(tensor):
        return tensor
    graph = tf.compat.v1.get_default_graph()
    ordered = _ordered.get(graph)
    if ordered is None or tensor.device not in ordered.over:
        return tensor
    names = (*ordered.before(tensor.device), *ordered.end_of_replay(tensor.device))
    with tf.control_dependencies([graph.get_operation_by_name(name) for name in names]):
        return tf.identity(tensor)


def _put_in_order(graph: Any, start: int, gradients: Sequence[tf.Tensor]) -> None:
    """Add the control edges to a backward pass: the operations of a graph from ``start`` on that gradients need.

    What is waited for is run: so nothing may wait for what graph optimisation takes out.
    """
    ordered = _ordered.get(graph)
    if ordered is None:
        return
    added = graph.get_operations()[start:]
    ordered.gradients.update(buffer_of(each).op.name for each in gradients if each.graph is graph)
    needed, kernels = needed_for(gradients, added), kernels_here()
    alive = [each for each in added if id(each) in needed]
    place = {id(each): number for number, each in enumerate(added)}
    for loop in filter(is_loop, alive):
        run_steps_in_turn(loop)
    for product, early, before in made_early(alive):
        if tensor_bytes(product.inputs[early], ordered.batch_size) >= _LEAST_BYTES:
            _hold_back(product, early, before)
    held = held_in_order(alive, ordered.gates | ordered.ends)
    # A gradient that comes before what was traced before it has that one's place.
    places = np.minimum.accumulate([start + place[id(each)] for each, _ in reversed(held)])[::-1].tolist()
    taking_turns = {
        each.name
        for each, _ in held
        if each.name in ordered.gates or _touched(each, ordered.batch_size, kernels) >= _LEAST_BYTES
    } - (ordered.placed | ordered.ends)
    groups = _groups(filter_gradients_first(alive), taking_turns, gradients, ordered.batch_size, kernels)
    turns: list[tuple[str, int, tuple[str, ...]]] = []
    waited: dict[str, tuple[str, ...]] = {}
    begun = set[str]()
    for (operation, waits), its_place in zip(held, places, strict=True):
        name, device = operation.name, operation.device
        if name in ordered.ends:
            end = its_place, waited_for(operation, place).name
            ordered.over[device] = max(ordered.over.get(device, end), end)
            continue
        if name not in taking_turns:
            continue
        group, others = groups[device], ordered.before(device, its_place)
        if others == waited.get(device, ()) and group.has_room(name):
            before = group.join(name)
        else:
            before = (*group.end(name, waits=waits), *others)
        if name in ordered.gates:
            _wait(operation, (*before, *ordered.end_of_replay(device, its_place)))
        elif waits:
            _wait(operation, before)
        if waits:
            waited[device] = others
            if device not in begun:
                begun.add(device)
                ordered.starts.append((start, name))
        ordered.placed.add(name)
        turns.append((device, its_place, group.open))
    for device, its_place, names in turns:
        insort(ordered.turns.setdefault(device, []), (its_place, names), key=itemgetter(0))


def _groups(
    operations: Sequence[Any], held: Container[str], results: Sequence[tf.Tensor], batch_size: int, kernels: Kernels
) -> dict[str, Groups]:
    """Return the groups of each device, with nothing in them yet."""
    by_device: dict[str, list[Any]] = {}
    for each in operations:
        by_device.setdefault(each.device, []).append(each)
    return {device: Groups(its, held, Profile(its, results, batch_size, kernels)) for device, its in by_device.items()}


def _finish(graph: Any, run: Sequence[Any]) -> None:
    """Put backward passes in order with the rest of a graph that was traced to its end: forward passes, updates."""
    ordered = _ordered.get(graph)
    if ordered is None or not ordered.gradients:
        return
    operations, kernels = graph.get_operations(), kernels_here()
    hold_updates(operations, ordered.gradients, _LEAST_VARIABLE)
    update_in_place(operations, ordered.placed)
    needed = led_to(run)

    def is_large(operation: Any) -> bool:
        return _touched(operation, ordered.batch_size, kernels) >= _LEAST_BYTES

    for number, (start, name) in enumerate(sorted(ordered.starts)):
        forward = [each for each in operations[:start] if id(each) in needed and not is_backward(each)]
        if not number:
            # The forward passes of later tapes wait as they are traced (``in_turn``).
            take_turns(forward, is_large)
        hold_start(graph.get_operation_by_name(name), forward, is_large)


def _hold_back(operation: Any, place: int, before: Any) -> None:
    """Let an operation read the input at a place when another operation is over.

    The operation itself must not wait: a constant would not move through it as in the plain step.
    """
    with operation.graph.as_default(), tf.device(operation.device), tf.control_dependencies([before]):
        held = operation.inputs[place]
        read_instead(operation, place, tf.identity(held, name=f"{held.op.name}/held_back"))


def _wait(operation: Any, names: Iterable[str]) -> None:
    """Let an operation wait for others, but for those that it waits for as it is."""
    implied = {each.name for each in (*operation.control_inputs, *(tensor.op for tensor in operation.inputs))}
    for name in names:
        if name not in implied:
            implied.add(name)
            wait_for(operation, operation.graph.get_operation_by_name(name))


def _touched(operation: Any, batch_size: int, kernels: Kernels) -> int:
    """Return the bytes of the largest buffer that an operation reads, makes or works with."""
    spec = spec_of(operation, kernels, free=batch_size)
    return max((*spec.input_bytes, *spec.output_bytes, workspace_bytes(spec)), default=0)
