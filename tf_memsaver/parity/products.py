"""Products through which a constant moves: when their gradients begin in a replay, and what is multiplied early.

Graph optimisation moves a constant from one factor of a product to another, unless the operation waits for something
(``grappler/optimizers/constant_folding.cc: ConstantPushDown``, ``arithmetic_optimizer.cc: MinimizeBroadcasts``). Where
it finds that two factors have one shape (``constant_folding.cc: MaterializeBroadcastGradientArgs``), it lets their
gradients wait for them, until it sees that data imply that (``dependency_optimizer.cc: TransitiveReduction``). In the
plain step data do: each gradient comes of the loss, which comes of the factors. In a replay the gradient that arrives
comes of the first run, and not of the replay's factors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import tensorflow as tf

from tf_memsaver.parity.control import is_backward
from tf_memsaver.parity.gradients import before_additions
from tf_memsaver.parity.grappler import CONSTANTS_MOVE_THROUGH, SUMS
from tf_memsaver.parity.readers import readers_among, source_of

_PRODUCTS, _ = CONSTANTS_MOVE_THROUGH
_JOINED = _PRODUCTS | SUMS
"""What graph optimisation may join with others of its kind, unless something waits for it."""


def factors_with_constants(replayed: Sequence[Any]) -> list[tf.Tensor]:
    """Return the factors that a replay makes which are products with a constant, in products that have such gradients.

    These are of two tensors of sizes that are not known: a product with a number has no two factors of one shape, and a
    factor that is read once more would not be joined with that number.
    """
    here = {id(operation) for operation in replayed}
    return [
        factor
        for operation in replayed
        if operation.type in _PRODUCTS and not any(each.shape.is_fully_defined() for each in operation.inputs)
        for factor in operation.inputs
        if id(factor.op) in here and _has_constant(source_of(factor).op)
    ]


def made_early(
    backward: Sequence[Any], name_of: Callable[[Any], str] = attrgetter("name")
) -> Iterator[tuple[Any, int, Any]]:
    """Yield products of a backward pass that would not wait for it: the product, which factor is early, and a wait.

    Of three factors, a gradient, an activation and a constant, graph optimisation multiplies the last two first. So a
    copy of the activation is made as soon as that is there, and lies in memory until the gradient arrives. A scaled
    softmax is such an activation, as in Keras's attention without dropout, and the base of a power. The wait is an
    operation that comes before the gradient.

    Of two factors of one shape, the constant goes to the first one by ``name_of``, the name in the step. With sizes
    that are not known, a gradient of two waits for both, and then the constant stays at the activation.
    """
    here, readers = {id(operation) for operation in backward}, readers_among(backward)

    def is_scaled(operation: Any) -> bool:
        return operation.type in _PRODUCTS and any(each.op.type == "Const" for each in operation.inputs)

    def only_reader(product: Any) -> Any | None:
        # Where sizes are not known, a gradient is summed up to its shape, and that is taken out as it has it already.
        after = readers.get(id(product.outputs[0]), [])
        while len(after) == 1 and after[0].type in ("Sum", "Reshape"):
            after = readers.get(id(after[0].outputs[0]), [])
        return after[0] if len(after) == 1 else None

    for product in (each for each in backward if each.type == "Mul"):
        after = only_reader(product)
        for place, passed in enumerate(reversed(product.inputs)):
            activation, gradient = product.inputs[place], before_additions(passed)
            if id(gradient.op) not in here or is_backward(activation.op) or activation.op.type == "Const":
                continue
            if gradient is passed and name_of(gradient.op) < name_of(activation.op):
                continue
            before = [
                each.op
                for each in gradient.op.inputs
                if id(each.op) in here and each.op.type not in _JOINED and each.op.type != "Const"
            ]
            # What others read, too, keeps its constant.
            is_alone = len(readers.get(id(gradient), [])) == 1
            if before and ((is_alone and is_scaled(gradient.op)) or (after is not None and is_scaled(after))):
                yield product, place, before[0]


def _has_constant(operation: Any) -> bool:
    """Whether an operation is a product with a constant that may round.

    A power of two rounds nothing, so that it may stand at any factor.
    """
    if operation.type not in _PRODUCTS or not operation.outputs[0].dtype.is_floating:
        return False
    sources = [source_of(tensor) for tensor in operation.inputs]
    values = [tf.get_static_value(source) for source in sources if source.op.type == "Const"]
    return any(value is not None and value.size == 1 and not _is_power_of_two(value.item()) for value in values)


def _is_power_of_two(number: float) -> bool:
    return abs(math.frexp(number)[0]) == 0.5
