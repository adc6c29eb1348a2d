"""Which operations of a backward pass may be told to wait for others, so that no bit changes."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

from tf_memsaver.compat.onednn import has_onednn_for
from tf_memsaver.cost.rules import FILTER_GRADIENTS
from tf_memsaver.parity.buffers import buffer_of
from tf_memsaver.parity.grappler import (
    BIAS_GRADIENT,
    FUNCTION_SCOPE,
    FUSED_WITH_PAD,
    HELD_IN_ORDER,
    MERGED_WITH_BIAS_GRADIENT,
    PADS,
    SUMS,
    TAKEN_OUT_IF_EQUAL,
    TAPE_SCOPE,
)


class Held(NamedTuple):
    """An operation that others may wait for; ``waits`` says whether it may wait, too."""

    operation: Any
    waits: bool


def held_in_order(operations: Sequence[Any], others: Container[str]) -> list[Held]:
    """Return kernels, and others by name, of a backward pass in the order in which they are to run.

    That is the order in which they were traced, but for the gradient of a convolution's kernel, which comes before that
    of its input: it frees what the convolution read. With it goes the gradient of the bias. Where oneDNN has kernels
    for their type, it makes one of the two, as long as neither waits for what the other does not: so both wait for
    nothing but what they read.
    """
    ordered = filter_gradients_first(operations)
    kernels = [each for each in ordered if each.name in others or (is_backward(each) and _may_be_held(each))]
    biases: dict[int, list[Any]] = {}
    for each in kernels:
        if each.type == BIAS_GRADIENT:
            biases.setdefault(id(buffer_of(each.inputs[0])), []).append(each)
    merged = {
        id(each): biases.get(id(buffer_of(each.inputs[2])), [])
        for each in kernels
        if each.type == MERGED_WITH_BIAS_GRADIENT and has_onednn_for(each.outputs[0].dtype.name)
    }
    moved = {id(bias) for group in merged.values() for bias in group}
    found: dict[int, Held] = {}
    for each in kernels:
        if id(each) not in moved:
            group = merged.get(id(each), [])
            for bias in group:
                found.setdefault(id(bias), Held(bias, waits=False))
            found[id(each)] = Held(each, waits=not group and not _reads_a_pad(each))
    return list(found.values())


def filter_gradients_first(operations: Sequence[Any]) -> list[Any]:
    """Return operations as they were traced, but each gradient of a convolution's kernel before that of its input."""
    place = {id(each): number for number, each in enumerate(operations)}
    first = {id(_before(each, place)): each for each in operations if each.type in FILTER_GRADIENTS}
    found: dict[int, Any] = {}
    for each in operations:
        for one in (first.get(id(each), each), each):
            found.setdefault(id(one), one)
    return list(found.values())


def is_kernel(tensor: Any) -> bool:
    """Whether a kernel of a backward pass has made a tensor, one that others may wait for."""
    operation = buffer_of(tensor).op
    return is_backward(operation) and _may_be_held(operation)


def last_held(operation: Any, place: Mapping[int, int]) -> Any | None:
    """Return the last operation of a backward pass, of those that lead to one and itself, that others may wait for.

    Graph optimisation joins sums to one sum, and moves products, only where nobody waits for them: what is to wait for
    such an operation waits for what it adds up. ``place`` has the place of each operation by id; None: there is none.
    """
    pending = [operation]
    while pending:
        last = max(pending, key=lambda each: place[id(each)])
        if not is_backward(last) and last.type not in SUMS:
            return None
        if _may_be_held(last):
            return last
        pending.remove(last)
        pending += [each.op for each in last.inputs if id(each.op) in place and each.op not in pending]
    return None


def waited_for(operation: Any, place: Mapping[int, int]) -> Any:
    """Return what others wait for in the place of an operation: of a sum, the last that leads to it (``last_held``).

    A sum that is waited for would not be joined with the one that it is a term of. One that has no place was there
    before.
    """
    if operation.type not in SUMS or id(operation) not in place:
        return operation
    return last_held(operation, place) or operation


def _may_be_held(operation: Any) -> bool:
    """Whether an operation is a kernel, also once the graph is optimised.

    What leaves its input as it is, as the gradient of a sum of equal shapes does, is taken out, and others share the
    buffer, which decides where a sum of three terms begins. If it waits, an identity stays.
    """
    if operation.type not in HELD_IN_ORDER:
        return False
    if operation.type not in TAKEN_OUT_IF_EQUAL:
        return True
    given, made = operation.inputs[0].shape, list(operation.outputs)
    made += [reader.outputs[0] for reader in made[0].consumers() if reader.type == "Reshape"]
    return given.rank is None or all(given.as_list() != (each.shape.rank and each.shape.as_list()) for each in made)


def is_backward(operation: Any) -> bool:
    """Whether an operation is of a backward pass, by its name."""
    return not {TAPE_SCOPE, FUNCTION_SCOPE}.isdisjoint(operation.name.split("/"))


def _before(gradient: Any, place: dict[int, int]) -> Any:
    """Return the gradient of the input that one function has made with that of the kernel, or the latter itself."""
    number = place[id(gradient)]
    for other in gradient.inputs[2].consumers():
        is_input = other.type == FILTER_GRADIENTS[gradient.type] and place.get(id(other), number) < number
        # Nothing that it reads may come of what is to wait for it.
        if is_input and all(place.get(id(each.op), -1) < place[id(other)] for each in gradient.inputs):
            return other
    return gradient


def _reads_a_pad(operation: Any) -> bool:
    """Whether an operation may be made one with a padding, which takes equal control inputs, too."""
    return bool(operation.type in FUSED_WITH_PAD and operation.inputs[0].op.type in PADS)
