"""What an optimizer works out without a gradient waits for that gradient.

``momentum * m``, a weight's decay, a running mean of the weights: TensorFlow's threads compute them as soon as a step
begins, since nothing keeps them, and their results wait for the gradients all through the step, a buffer for each
weight. So where backward passes are held in order, the read of the variable that they begin with waits for the gradient
that its update is for. A read is fused with nothing, and what it waits for is a kernel, so no bit changes.

A variable is changed in place only while nobody reads it. Else its new value takes another buffer and keeps it
(``PrepareToUpdateVariable`` in TensorFlow 2.21's ``training_op_helpers.h``): a free chunk, often larger than the value.
The gradient of a convolution's input reads the kernel when the kernel's own gradient is known already: so the change
waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from typing import Any

import tensorflow as tf

from tf_memsaver.compat.graphs import wait_for
from tf_memsaver.cost.rules import MULTI_VIEWS
from tf_memsaver.parity.buffers import buffer_of
from tf_memsaver.parity.control import last_held
from tf_memsaver.tfgraph.operations import ASSIGNMENTS, tensor_bytes


def hold_updates(operations: Sequence[Any], gradients: Collection[str], least_bytes: int) -> None:
    """Let reads of large variables after a backward pass wait for the gradients that meet what comes of them.

    Args:
      operations: all of a graph, in the order in which they were traced.
      gradients: the names of those that make the results of backward passes.
      least_bytes: smaller variables are left alone.
    """
    place = {id(each): number for number, each in enumerate(operations)}
    needs: dict[int, int] = {}
    assigned: dict[int, list[int]] = {}
    for number, operation in enumerate(operations):
        if operation.type == "ReadVariableOp":
            # A moment that was updated: what is made of it needs the gradient, too.
            before = assigned.get(id(operation.inputs[0]), [])
        else:
            makers = [buffer_of(tensor).op for tensor in operation.inputs]
            before = [needs[id(each)] for each in makers if id(each) in needs]
        if operation.name in gradients:
            needs[id(operation)] = number
        elif before:
            needs[id(operation)] = max(before)
            if operation.type in ASSIGNMENTS:
                assigned.setdefault(id(operation.inputs[0]), []).append(needs[id(operation)])
    first = min(needs.values(), default=len(operations))
    for operation in operations[first + 1 :]:
        if operation.type == "ReadVariableOp" and tensor_bytes(operation.outputs[0]) >= least_bytes:
            own = needs.get(id(operation), -1)
            met = _met(operation, needs, own) or assigned.get(id(operation.inputs[0]), [])
            earlier = [each for each in met if own < each < place[id(operation)]]
            gradient = last_held(operations[min(earlier)], place) if earlier else None
            if gradient is not None:
                wait_for(operation, gradient)


def update_in_place(operations: Sequence[Any], held: Container[str]) -> None:
    """Let changes of variables wait for what a backward pass reads of them, as far as that is held in order.

    Args:
      operations: all of a graph, in the order in which they were traced.
      held: the names of what is held in order.
    """
    readers: dict[int, list[Any]] = {}
    for operation in operations:
        if operation.name in held:
            for read in {buffer_of(tensor).op for tensor in operation.inputs}:
                if read.type == "ReadVariableOp":
                    readers.setdefault(id(read.inputs[0]), []).append(operation)
        elif operation.type in ASSIGNMENTS and id(operation.inputs[0]) in readers:
            # A segment hands on all its gradients by one operation, so the change seems to wait for them. Graph
            # optimisation takes out edges that it finds to be implied, and that operation later: not so this one.
            with tf.device(operation.device), tf.control_dependencies(readers[id(operation.inputs[0])]):
                wait_for(operation, tf.no_op(name="memsaver_reads"))


def _met(read: Any, needs: dict[int, int], own: int) -> list[int]:
    """Return the gradients after ``own`` that meet what comes of a read, each where they first do."""
    found, pending = [], [read.outputs[0]]
    seen: set[int] = set()
    while pending:
        tensor = pending.pop()
        for consumer in tensor.consumers():
            if consumer.type in MULTI_VIEWS:
                pending += [consumer.outputs[place] for place, each in enumerate(consumer.inputs) if each is tensor]
            elif needs.get(id(consumer), -1) > own:
                found.append(needs[id(consumer)])
            elif id(consumer) not in seen:
                seen.add(id(consumer))
                pending += consumer.outputs
    return found
