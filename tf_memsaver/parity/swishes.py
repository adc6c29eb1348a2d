"""The first swishes in the body of a loop, which graph optimisation leaves unfused while it fuses all others.

``tf.nn.silu`` takes the sigmoid of its input times a beta, which is 1. Graph optimisation folds that product, and from
then on the sigmoid waits for the constant (``grappler/optimizers/constant_folding.cc: SimplifyArithmeticOperations``).
Outside of loops nobody needs to wait for a constant. In the body of one its constants wait for the step to begin, so
the control edge stays unless another way leads from that constant, which stands for all its likes, to the sigmoid
(``dependency_optimizer.cc: TransitiveReduction``). An operation that waits so is not fused (``remapper.cc``). Another
way leads to every replay, since it waits for the forward pass: without an extra reader, it would be fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_memsaver.compat.graphs import is_in_a_loop
from tf_memsaver.parity.gates import is_gate
from tf_memsaver.parity.grappler import is_scalar
from tf_memsaver.parity.readers import source_of


def first_swishes(replayed: Sequence[Any]) -> list[tf.Tensor]:
    """Return the sigmoids of a replay that stay unfused in the loop that it is in, since they are the first."""
    sigmoids = [operation for operation in replayed if operation.type == "Sigmoid"]
    swishes = [sigmoid for sigmoid in sigmoids if any(is_scalar(each, 1) for each in _factors(sigmoid))]
    if not swishes or not is_in_a_loop(swishes[0].graph):
        return []
    reached = _reached_from_ones(replayed[-1])
    return [each.outputs[0] for each in swishes if not any(id(factor.op) in reached for factor in _factors(each))]


def _factors(sigmoid: Any) -> list[Any]:
    """Return what the input of a sigmoid is the product of, if it is one."""
    product = source_of(sigmoid.inputs[0]).op
    return [source_of(tensor) for tensor in product.inputs] if product.type == "Mul" else []


def _reached_from_ones(last: Any) -> set[int]:
    """Return the ids of the operations of a graph, up to the last, that lie behind the reader of a constant 1.

    Ways through gates do not count: so a replay is taken for its first run.
    """
    reached = set[int]()
    for operation in last.graph.get_operations():
        sources = [source_of(tensor) for tensor in operation.inputs]
        if not is_gate(operation) and any(id(source.op) in reached or is_scalar(source, 1) for source in sources):
            reached.add(id(operation))
        if operation is last:
            break
    return reached
