"""A backward pass begins when the forward passes that were traced before it are over.

Where a step calls two networks, or has several losses, the backward pass of one branch could begin while the forward
pass of another still runs, with the activations of both passes in memory. So the first operation of a backward pass
that is held in order waits for what the other branches end with: a reduction, such as the mean of a loss, or an extra
reader of a first run. Graph optimisation fuses neither with anything, and only what the step runs anyway is waited for.
What a branch does after the last of them is not waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tf_memsaver.compat.graphs import led_to, makers, wait_for
from tf_memsaver.cost.rules import REDUCTIONS
from tf_memsaver.parity.readers import is_extra


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


def _reduces(operation: Any) -> bool:
    """Whether an operation is a reduction to fewer axes: graph optimisation takes out one over no axes."""
    return operation.type in REDUCTIONS and operation.inputs[0].shape.rank != operation.outputs[0].shape.rank
