"""Slices that make up a whole tensor, as one operation: the gradient of each by itself is as large as the whole.

Code that runs step by step (a ``TimeDistributed``, a loop in Python) takes a tensor apart along one axis. The gradient
of every slice is the whole tensor, with zeros all around, and all of them are in memory until they are added up. That
of an ``Unpack`` is a ``Pack``, which makes the same numbers once, since what is added to each is zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_memsaver.compat.graphs import SLICES, FuncGraph
from tf_memsaver.compat.released import release
from tf_memsaver.cost.rules import METADATA_READERS
from tf_memsaver.parity.gradients import kept as kept_in_place
from tf_memsaver.parity.grappler import SUMS, TAPE_SCOPE
from tf_memsaver.program.op_calls import OpCall
from tf_memsaver.tfgraph.emission import Template
from tf_memsaver.tfgraph.operations import tensor_bytes

_LEAST = 3
"""Of fewer slices, the gradients take about as much as their sum."""

_PASS_GRADIENTS_ON = {*SUMS, "Identity", "IdentityN", "StopGradient"}
"""Operations whose gradient is the one that arrives: a sum of slices may be made one with a sum that it goes into."""


class _Slice(NamedTuple):
    """A call that takes one entry along an axis."""

    axis: int
    place: int
    call: OpCall


def slices_as_one(calls: Sequence[OpCall], outputs: Iterable[int], slot_count: int) -> tuple[list[OpCall], int]:
    """Return calls in which one ``Unpack`` makes all slices of a tensor, and how many slots there are then.

    Only where slices are all that reads the tensor, which one of the calls makes. Each is still called as it was: graph
    optimisation sorts by names.
    """
    made = {slot: (call, place) for call in calls for place, slot in enumerate(call.outputs)}
    kept, replaced = set(outputs), dict[int, list[OpCall]]()
    order = {id(call): place for place, call in enumerate(calls)}
    readers: dict[int, list[OpCall]] = {}
    for call in reversed(calls):
        # What only its shape is read of has no gradient.
        is_read = call.gradient is not None or any(slot in kept or slot in readers for slot in call.outputs)
        if call.operation.type not in METADATA_READERS and (is_read or call.operation.is_stateful):
            for slot in set(call.reads):
                readers.setdefault(slot, []).append(call)
    for slot, (maker, place) in made.items():
        slices = [*map(_slice_of, readers.get(slot, ()))]
        sizes = maker.operation.shapes[place]
        has_sum = maker.operation.dtypes[place].is_floating and maker.operation.type not in _PASS_GRADIENTS_ON
        if slot in kept or len(slices) < _LEAST or None in slices or not has_sum:
            continue
        found = sorted((each for each in slices if each is not None), key=lambda each: each.place)
        axis, places = found[0].axis, [each.place for each in found]
        if {each.axis for each in found} != {axis} or places != list(range(sizes[axis] or 0)):
            continue
        parts = tuple(range(slot_count, slot_count + len(found)))
        slot_count += len(found)
        earliest = min((each.call for each in found), key=lambda call: order[id(call)])
        whole = dataclasses.replace(
            earliest,
            operation=_unpack(maker, place, axis),
            label=f"{earliest.label}/unpack",
            inputs=(slot,),
            outputs=parts,
            constants=(None,),
        )
        for part, each in zip(parts, found, strict=True):
            named = dataclasses.replace(each.call, operation=_named(each.call), inputs=(part,), constants=(None,))
            replaced[id(each.call)] = [whole, named] if each.call is earliest else [named]
    return [made for call in calls for made in replaced.get(id(call), [call])], slot_count


def bytes_of_slices(operation: Any) -> int:
    """Return what the gradients of slices take in the plain step, besides what this ``Pack`` does in place of them.

    They are as large as the whole tensor each, and wait for each other. 0 for all other operations.
    """
    if operation.type != "Pack" or "/" not in operation.name:
        return 0
    scope = [part for part in operation.name.split("/")[:-1] if part != TAPE_SCOPE]
    try:
        unpacked = operation.graph.get_operation_by_name("/".join(scope))
    except KeyError:
        return 0
    is_of_slices = unpacked.type == "Unpack" and SLICES in unpacked.node_def.attr
    return (len(operation.inputs) - 2) * tensor_bytes(operation.outputs[0]) if is_of_slices else 0


def _slice_of(call: OpCall) -> _Slice | None:
    """Return what a call takes, if that is one entry along one axis, and nothing waits for it or it for others."""
    known = call.operation.type == "StridedSlice" and None not in call.constants[1:]
    if not known or call.after or call.gradient is not None:
        return None
    begin, _, strides = (_value(each.operation) for each in call.constants[1:] if each is not None)
    masks = {name: call.operation.attributes[f"{name}_mask"].i for name in ("begin", "end", "shrink_axis")}
    axis = masks["shrink_axis"].bit_length() - 1
    others = (1 << len(begin)) - 1 - (1 << max(axis, 0))
    has_others = any(call.operation.attributes[name].i for name in ("ellipsis_mask", "new_axis_mask"))
    if masks["shrink_axis"] != 1 << max(axis, 0) or has_others or (strides != 1).any():
        return None
    if masks["begin"] & others != others or masks["end"] & others != others or masks["begin"] >> axis & 1:
        return None
    return _Slice(axis, int(begin[axis]), call)


def _value(constant: Template) -> Any:
    return tf.make_ndarray(constant.attributes["value"].tensor)


def _unpack(maker: OpCall, place: int, axis: int) -> Template:
    """Return what takes an output of a call apart."""
    shape = maker.operation.shapes[place]

    def unpacked(whole: Any) -> Any:
        return tf.raw_ops.Unpack(value=whole, num=shape[axis], axis=axis)[0]

    made = _template(unpacked, maker.operation.dtypes[place], shape)
    made.attributes[SLICES] = tf.compat.v1.AttrValue(b=True)
    return made


def _named(call: OpCall) -> Template:
    """Return what gives a slice its name."""
    return _template(lambda part: kept_in_place(part, "part"), call.operation.dtypes[0], call.operation.shapes[0])


def _template(make: Callable[[Any], Any], dtype: tf.DType, shape: tf.TensorShape) -> Template:
    graph = FuncGraph("slices")
    with graph.as_default():
        template = Template(make(tf.compat.v1.placeholder(dtype, shape)).op)
    release(graph)
    return template
