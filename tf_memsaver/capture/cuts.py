"""Where no segment may end, because a cut there would change the rounding of some result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_memsaver.capture.step import TracedStep
from tf_memsaver.ir.graph import Phase
from tf_memsaver.parity.buffers import views_among
from tf_memsaver.parity.grappler import ADDITIONS, CONSTANTS_MOVE_THROUGH, FUSED_WITH_READER, REORDERED_BY_SIZE, SUMS
from tf_memsaver.parity.level import Rule, level_here
from tf_memsaver.parity.sums import only_sums_read, sums_of_many


def joined_positions(step: TracedStep, *, backward_is_a_call: bool = False) -> set[int]:
    """Return the positions between units at which no segment may end.

    Args:
      step: the traced step.
      backward_is_a_call: whether the backward pass is a call of its own, as that of a ``tf.function`` is.
    """
    rules = level_here().rules
    joined = {position for rule, positions in _RULES.items() if rule in rules for position in positions(step)}
    if backward_is_a_call and Rule.WHOLE_GRADIENT_SUMS in rules:
        joined |= _parting_positions(step)
    return joined


def _splitting_positions(step: TracedStep) -> set[int]:
    """Return the positions between the readers of a tensor with a gradient of many terms that is a term of a sum, too.

    Where a size is not known, graph optimisation finds out by and by that the gradient of such a sum is that of each
    term, and sorts the terms of gradients by the names that they have in between. What leaves a segment may have those
    of the end. Of sums of three terms it finds out before it sorts (in 500 gradients of 90 random networks).
    """
    unit_of, readers = _readers(step, (Phase.FORWARD,))
    forward = [each for each in step.graph.get_operations() if id(each) in unit_of]
    large = (terms for _, terms in sums_of_many(forward, readers) if len(terms) > 3)
    summed = {id(term): term for terms in large for term in terms}
    splitting: set[int] = set()
    for tensor in summed.values():
        units = [unit_of[id(reader)] for reader in readers[id(tensor)] if id(reader) in unit_of]
        if len(units) > 2:
            splitting |= _between(step, units)
    return splitting


def _parting_positions(step: TracedStep) -> set[int]:
    """Return the positions between the readers of a tensor whose gradient is a sum of three and more terms.

    No tape runs in the backward pass of a function, so that nothing tells in which terms a gradient arrives: a segment
    that makes a tensor and reads it would add its own to the sum of the others. A single term of later calls is a
    sum of one, if it is that of an addition. (After a Concat last bits differed: DenseNet121.) If one operation reads
    that addition, its gradient is that operation's, by whose name graph optimisation sorts the terms.
    """
    (unit_of, readers), past_the_end = _readers(step, (Phase.FORWARD,)), len(step.boundary)

    def read_in_units(tensor: Any) -> dict[int, list[Any]]:
        found: dict[int, list[Any]] = {}
        for reader in readers.get(id(tensor), ()):
            if id(reader) in unit_of:
                found.setdefault(unit_of[id(reader)], []).append(reader)
        return found

    parting: set[int] = set()
    for maker, tensor in ((u, t) for u, made in enumerate(step.boundary) for t in made if isinstance(t, tf.Tensor)):
        units = sorted({past_the_end if unit is None else unit for unit in step.gradient_units.get(id(tensor), ())})
        by_unit = read_in_units(tensor)
        if units and maker in by_unit:
            # A penalty of what a layer returns, for one.
            units.insert(0, maker)
        terms = [max(1, len(by_unit.get(unit, ()))) for unit in units]
        if sum(terms) > 2 and len(units) > 1:
            last = by_unit.get(units[-1], [])
            is_of_addition = len(last) == 1 and last[0].type in ADDITIONS
            alone = is_of_addition and sum(map(len, read_in_units(last[0].outputs[0]).values())) > 1
            parting |= _between(step, units[:-1] if alone else units)
    return parting


def _fusing_positions(step: TracedStep) -> set[int]:
    """Return the positions between two ops that graph optimisation makes one, with other roundings.

    It reorders chains of additions (a residual sum after a BatchNorm), and fuses a convolution or product with
    what is added to it and the activation after it, wherever nothing else reads what lies between.
    """
    unit_of, readers = _readers(step, (Phase.FORWARD,))
    fusing: set[int] = set()
    for operation in step.graph.get_operations():
        consumers = FUSED_WITH_READER.get(operation.type)
        only = readers.get(id(operation.outputs[0]), []) if consumers and id(operation) in unit_of else []
        if consumers and len(only) == 1 and only[0].type in consumers and id(only[0]) in unit_of:
            fusing |= _joined(step, (unit_of[id(operation)], unit_of[id(only[0])]))
    return fusing


def _lending_positions(step: TracedStep) -> set[int]:
    """Return the positions between a sum of many terms and those of them that nobody needs after it.

    Such a term lends the result its buffer, which decides where the sum begins: no cut may hold it. If nobody needs any
    of them, the sum begins with the first, whoever holds them (``only_sums_read``).
    """
    unit_of, readers = _readers(step, (Phase.FORWARD,))
    lending: set[int] = set()
    forward = [each for each in step.graph.get_operations() if id(each) in unit_of]

    def is_needed_after(end: int, tensor: Any) -> bool:
        """Whether its buffer is: by the backward pass, say, which a dense layer hands a view of what it reads."""
        reading = readers.get(id(tensor), ())
        views = (made for each in reading for made in views_among(each.outputs, tensor))
        return any(unit_of.get(id(each), end + 1) > end for each in reading) or any(
            is_needed_after(end, view) for view in views
        )

    for last, terms in sums_of_many(forward, readers):
        end = unit_of[id(last)]
        lent = [term for term in terms if id(term.op) in unit_of and not is_needed_after(end, term)]
        if len(lent) < len(terms) or not all(only_sums_read(term, readers[id(term)]) for term in terms):
            for term in lent:
                lending |= _joined(step, (unit_of[id(term.op)], end))
    return lending


def _constant_positions(step: TracedStep) -> set[int]:
    """Return the positions between two products (or sums), forward or backward, where the second has a constant."""
    unit_of, readers = _readers(step, (Phase.FORWARD, Phase.BACKWARD))
    chained: set[int] = set()
    for operation in step.graph.get_operations():
        family = next((f for f in CONSTANTS_MOVE_THROUGH if operation.type in f), None)
        if family is None or id(operation) not in unit_of:
            continue
        if not any(tensor.op.type == "Const" for tensor in operation.inputs):
            continue
        for tensor in operation.inputs:
            made = _made_for_one(tensor, readers)
            if made is not None and made.type in family and id(made) in unit_of:
                chained |= _joined(step, (unit_of[id(made)], unit_of[id(operation)]))
    return chained | _doubling_positions(step)


def _doubling_positions(step: TracedStep) -> set[int]:
    """Return the positions between a tensor that is added to itself, the sum, and the products that it goes into.

    Graph optimisation makes a product of the sum, whose constant goes on into those (``SimplifyAggregation``).
    """
    unit_of, readers = _readers(step, (Phase.FORWARD,))
    doubling: set[int] = set()
    for operation in step.graph.get_operations():
        is_needed = id(operation) in unit_of and operation.type in SUMS
        if not is_needed or len(operation.inputs) == 1 or len({id(tensor) for tensor in operation.inputs}) > 1:
            continue
        chain = [operation]
        for each in chain:
            if each is operation or each.type in CONSTANTS_MOVE_THROUGH[0]:
                chain += [reader for reader in readers.get(id(each.outputs[0]), ()) if reader not in chain]
        joined = (unit_of.get(id(each)) for each in (operation.inputs[0].op, *chain))
        doubling |= _joined(step, [unit for unit in joined if unit is not None])
    return doubling


def _broadcast_positions(step: TracedStep) -> set[int]:
    """Return the positions inside products of several factors, forward or backward, that are of more than one shape.

    Graph optimisation multiplies the small factors first (``MinimizeBroadcasts``), and so changes the rounding.
    """
    unit_of, readers = _readers(step, (Phase.FORWARD, Phase.BACKWARD))
    operations = [
        each for each in step.graph.get_operations() if each.type == REORDERED_BY_SIZE and id(each) in unit_of
    ]
    products = set(map(id, operations))

    def factor(tensor: Any) -> Any | None:
        made = _made_for_one(tensor, readers)
        return made if id(made) in products else None

    inner = {id(factor(tensor)) for each in operations for tensor in each.inputs}
    joined: set[int] = set()
    for operation in operations:
        if id(operation) in inner:
            continue
        group, shapes = [operation], set[str]()
        for each in group:
            for tensor in each.inputs:
                made = factor(tensor)
                if made is None:
                    shapes.add(str(tensor.shape))
                else:
                    group.append(made)
        if len(shapes) > 1:
            joined |= _joined(step, [unit_of[id(each)] for each in group])
    return joined


_RULES = {
    Rule.WHOLE_GRADIENT_SUMS: _splitting_positions,
    Rule.WHOLE_FUSIONS: _fusing_positions,
    Rule.WHOLE_SUMS: _lending_positions,
    Rule.WHOLE_CONSTANT_CHAINS: _constant_positions,
    Rule.WHOLE_PRODUCTS: _broadcast_positions,
}
"""By rule, what finds the positions at which no segment may end."""


def _between(step: TracedStep, units: Sequence[int]) -> set[int]:
    """Return the positions at which a segment that ends parts some of these units from others.

    A network that has none of them can be cut anywhere: code before it and after it parts them as it is.
    """
    first, last = min(units), max(units)
    others = [part for part in step.networks if part[0] > first and part[1] <= last]
    free = {
        position
        for start, stop in others
        for position in range(start, stop + 1)
        if not any(start <= unit < stop for unit in units)
    }
    return set(range(first + 1, last + 1)) - free


def _joined(step: TracedStep, units: Sequence[int]) -> set[int]:
    """Return the positions that part units whose operations graph optimisation takes together; none if all are code.

    Code runs as it stands, whatever is cut: a running total does not join the blocks beside it.
    """
    return set() if step.code.issuperset(units) else _between(step, units)


def _made_for_one(tensor: Any, readers: Mapping[int, Sequence[Any]]) -> Any | None:
    """Return the operation that makes a tensor, if that has one reader alone, or None.

    What passes it on unchanged is no reader, such as the ``IdentityN`` of a swish: graph optimisation takes it out.
    """
    while len(readers.get(id(tensor), ())) == 1:
        if tensor.op.type not in ("Identity", "IdentityN"):
            return tensor.op
        tensor = tensor.op.inputs[tensor.value_index]
    return None


def _readers(step: TracedStep, phases: tuple[Phase, ...]) -> tuple[dict[int, int], dict[int, list[Any]]]:
    """Return the unit of each operation of some phases that is needed, and for each tensor the operations that read it.

    Keys are ids.
    """
    unit_of = {
        id(operation): unit
        for operation, (phase, unit) in zip(step.graph.get_operations(), step.owners, strict=True)
        if phase in phases and unit is not None and id(operation) in step.reachable
    }
    return unit_of, step.readers
