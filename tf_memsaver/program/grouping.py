"""From the calls of single operations to units: those that are needed, in an order that suits plans, in groups."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence

import tensorflow as tf

from tf_memsaver.cost import rules
from tf_memsaver.parity.grappler import SUMS
from tf_memsaver.program.op_calls import GroupCall, OpCall, slots_of
from tf_memsaver.tfgraph.operations import ASSIGNMENTS, custom_gradient_bodies, functions_in, has_gradients

LARGE_ELEMENTS = 4096
"""A tensor of a known shape with as many elements ends a group; so does one whose shape depends on the arguments."""


def needed(calls: Sequence[OpCall], outputs: Iterable[int]) -> list[OpCall]:
    """Return the calls that an output or a side effect depends on."""
    wanted, kept = set(outputs), []
    for call in reversed(calls):
        effect = call.operation.is_stateful and call.operation.type != "ReadVariableOp"
        if effect or not wanted.isdisjoint(call.outputs):
            wanted.update(call.reads)
            kept.append(call)
    kept.reverse()
    return kept


def arranged(calls: Sequence[OpCall]) -> list[OpCall]:
    """Return calls in an order in which segments may end at more places: assignments last, and running totals late."""
    return _totals_late(_assignments_last(calls))


def _totals_late(calls: Sequence[OpCall]) -> list[OpCall]:
    """Move each sum of numbers, such as one for each sample, right before the sum that alone reads it.

    Graph optimisation makes one sum of them, so that no segment ends in between: the log-determinants of a flow, which
    are added up from its first layer to its last, left no place to end one.
    """
    readers: dict[int, list[OpCall]] = {}
    for call in calls:
        for slot in set(call.reads):
            readers.setdefault(slot, []).append(call)
    before: dict[int, list[OpCall]] = {}
    for call in calls:
        reading = [reader for slot in call.outputs for reader in readers.get(slot, ())]
        if len(reading) == 1 and _adds_numbers(call) and _adds_numbers(reading[0]):
            before.setdefault(id(reading[0]), []).append(call)
    moved = {id(call) for late in before.values() for call in late}
    pending, found = [call for call in reversed(calls) if id(call) not in moved], list[OpCall]()
    while pending:
        if late := before.pop(id(pending[-1]), []):
            pending += reversed(late)
        else:
            found.append(pending.pop())
    return found


def _adds_numbers(call: OpCall) -> bool:
    return call.operation.type in SUMS and not call.pinned and call.operation.shapes[0].rank in (0, 1)


def _assignments_last(calls: Sequence[OpCall]) -> list[OpCall]:
    """Move each assignment after all other calls, if none of them uses its variable after it."""
    kept: list[OpCall] = []
    last: list[OpCall] = []
    used: set[int] = set()
    for call in reversed(calls):
        if call.operation.type in ASSIGNMENTS and call.inputs[0] not in used:
            last.append(call)
        else:
            kept.append(call)
            used.update(call.inputs)
    return [*reversed(kept), *reversed(last)]


def grouped(
    calls: Sequence[OpCall],
    outputs: Iterable[int],
    early: frozenset[int],
    together: Sequence[Hashable] = (),
) -> tuple[GroupCall, ...]:
    """Group consecutive calls: up to the next that makes a large tensor; a pinned one stands alone.

    A function that has a gradient of its own stays in one group, with the gradient, and so does what makes and reads a
    list of tensors: gradients of lists pass no boundary. ``early`` are the slots that are filled before all calls.
    Consecutive calls with the same key in ``together``, where there is one for each call, stay together, too.
    """
    ends = [place for place, call in enumerate(calls) if call.gradient is not None]
    bodies = custom_gradient_bodies([call.inputs for call in calls], [call.outputs for call in calls], ends)
    inside = {place for body, end in zip(bodies, ends, strict=True) for place in range(min(body, default=end), end)}
    inside.update(_between_lists(calls))
    inside.update(place for place, whole in enumerate(together[:-1]) if whole == together[place + 1])
    groups: list[list[OpCall]] = []
    open_group = False
    for place, call in enumerate(calls):
        if place - 1 not in inside and (call.pinned or not open_group):
            groups.append([])
        groups[-1].append(call)
        ends_whole = bool(together) and any(map(_makes_large, groups[-1]))
        open_group = place in inside or not (call.pinned or ends_whole or _makes_large(call))
    return group_calls(groups, outputs, early)


def group_calls(
    groups: Sequence[Sequence[OpCall]], outputs: Iterable[int], early: frozenset[int]
) -> tuple[GroupCall, ...]:
    """Return a call for each group of operations; ``outputs`` are read after all, ``early`` filled before all."""
    last_read: dict[int, int] = dict.fromkeys(outputs, len(groups))
    for number, group in reversed(list(enumerate(groups))):
        for call in group:
            for slot in call.reads:
                last_read.setdefault(slot, number)
    made_by = _Signatures()
    found = []
    for number, group in enumerate(groups):
        made = [slot for call in group for slot in call.outputs]
        read = dict.fromkeys(slot for call in group for slot in call.reads if slot not in set(made))
        read |= dict.fromkeys(slot for call in group for slot in slots_of(call.after) if slot in early)
        found.append(
            GroupCall(
                members=tuple(group),
                inputs=tuple(read),
                outputs=tuple(slot for slot in made if last_read.get(slot, -1) > number),
                signature=made_by.of(group),
            )
        )
    return tuple(found)


def _between_lists(calls: Sequence[OpCall]) -> set[int]:
    """Return the places of calls from one that makes a list of tensors up to the last that reads it, without that."""
    last_reader = {slot: place for place, call in enumerate(calls) for slot in call.reads}
    between: set[int] = set()
    for place, call in enumerate(calls):
        for slot, dtype in zip(call.outputs, call.operation.dtypes, strict=True):
            if dtype == tf.variant:
                between.update(range(place, last_reader.get(slot, place)))
    return between


def _makes_large(call: OpCall) -> bool:
    if call.operation.type in rules.VIEWS or call.operation.type in rules.MULTI_VIEWS:
        return False
    made = zip(call.operation.shapes, call.operation.dtypes, strict=True)
    sizes = [shape.num_elements() for shape, dtype in made if has_gradients(dtype)]
    return any(size is None or size >= LARGE_ELEMENTS for size in sizes)


_NOT_DESCRIBED = ("seed", "seed2", "shared_name", "value")
"""Attributes that may differ where a plan is as good."""


class _Signatures:
    """Describes operations without names: type, attributes, and where the inputs come from."""

    def __init__(self) -> None:
        self._producer: dict[int, str] = {}
        self._count = 0

    def of(self, group: Sequence[OpCall]) -> str:
        """Return the signature of the next group."""
        texts = []
        for call in group:
            attributes = sorted(
                (key, str(value))
                for key, value in call.operation.attributes.items()
                if not key.startswith("_") and not functions_in(value) and key not in _NOT_DESCRIBED
            )
            digest = hashlib.sha256(repr(attributes).encode()).hexdigest()[:8]
            reads = " ".join(self._producer.get(slot, f"in{slot}") for slot in call.reads)
            texts.append(f"{call.operation.type}[{digest}]({reads})")
            for place, slot in enumerate(call.outputs):
                self._producer[slot] = f"{self._count}.{place}"
            self._count += 1
        return "; ".join(texts)
