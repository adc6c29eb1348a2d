"""A pass begins when the forward passes that were traced before it are over.

Where a step calls two networks, or has several losses, the backward pass of one branch could begin while the forward
pass of another still runs, with the activations of both passes in memory. So the first operation of a backward pass
that is held in order waits for what the other branches end with: a reduction, such as the mean of a loss, or an extra
reader of a first run. Graph optimisation fuses neither with anything, and only what the step runs anyway is waited for.
What a branch does after the last of them is not waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from tf_memsaver.compat.graphs import led_to, makers, read_instead, wait_for
from tf_memsaver.cost.rules import METADATA_READERS, REDUCTIONS
from tf_memsaver.parity.readers import is_extra
from tf_memsaver.tfgraph.operations import tensor_bytes

_POOLS = frozenset({"AvgPool", "AvgPool3D", "MaxPool", "MaxPool3D"})
"""Kernels of forward passes that graph optimisation fuses with nothing."""


def hold_start(first: Any, forward: Iterable[Any], is_large: Callable[[Any], bool]) -> None:
    """Let the first operation of a backward pass wait for the ends of the branches that it would run beside.

    Args:
      first: the operation.
      forward: what the graph runs of forward passes before it, in the order in which it was traced.
      is_large: whether an operation touches a large buffer: a branch that touches none is left alone.
    """
    over = led_to([first])
    beside = set[int]()
    ends: dict[int, Any] = {}
    for each in forward:
        if id(each) not in over and each.device == first.device:
            is_beside = any(id(maker) in beside for maker in makers(each))
            if is_beside or (not is_extra(each) and is_large(each)):
                beside.add(id(each))
                if is_extra(each) or _reduces(each):
                    ends[id(each)] = each
    # The last ones: those that lead to no other.
    led = led_to(maker for each in ends.values() for maker in makers(each))
    for number, each in ends.items():
        if number not in led:
            wait_for(first, each)


def take_turns(forward: Iterable[Any], is_large: Callable[[Any], bool]) -> None:
    """Let a forward pass that nothing before it leads to begin when those that were traced before it are over.

    A teacher would run beside its student, and a target network beside the one that is trained, with the activations of
    both in memory. So the first large operation reads the data through an identity that waits, since a kernel that
    waits would not be fused, for the last one before it that may be waited for. Nothing is held if there is none.

    Args:
      forward: what the graph runs of forward passes, in the order in which it was traced.
      is_large: whether an operation touches a large buffer.
    """
    inside, of_data = set[int](), set[int]()
    last: dict[str, Any] = {}
    for each in forward:
        data = [place for place, maker in enumerate(makers(each)) if id(maker) in of_data]
        if data or _is_data(each):
            of_data.add(id(each))
        is_inside = any(id(maker) in inside for maker in makers(each))
        if data and not is_inside and each.type not in METADATA_READERS and is_large(each):
            is_inside = True
            if each.device in last:
                _hold(each, data, last[each.device])
        if is_inside:
            inside.add(id(each))
            if is_extra(each) or _reduces(each) or each.type in _POOLS:
                last[each.device] = each


def _hold(operation: Any, places: Iterable[int], other: Any) -> None:
    """Let an operation not read the largest of some of its inputs before another one is over."""
    place = max(places, key=lambda each: tensor_bytes(operation.inputs[each], 1))
    with operation.graph.as_default(), tf.control_dependencies([other]):
        read_instead(operation, place, tf.identity(operation.inputs[place], "in_turn"))


def _is_data(operation: Any) -> bool:
    """Whether an operation is what a step is given: its arguments, but for variables."""
    return operation.type == "Placeholder" and operation.outputs[0].dtype not in (tf.resource, tf.variant)


def _reduces(operation: Any) -> bool:
    """Whether an operation is a reduction to fewer axes: graph optimisation takes out one over no axes."""
    return operation.type in REDUCTIONS and operation.inputs[0].shape.rank != operation.outputs[0].shape.rank
