"""What a step of a while loop or a branch keeps for its gradient, and what it works with.

A loop keeps lists, one element a step; a branch keeps what TensorFlow calls optionals, empty for the other branches
(``_wrap_intermediates`` in tensorflow/python/ops/cond_v2.py, TensorFlow 2.21).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_memsaver.cost import rules

_WRITERS = {"TensorListPushBack": 1, "TensorListSetItem": 2}
"""The operations that put an element into a list, and which of their inputs it is."""

_SHARING = rules.VIEWS | rules.MULTI_VIEWS | {"ReadVariableOp"}
"""Operations whose result is the buffer that they are given, or the variable's."""

_ELEMENTS = frozenset({"OptionalGetValue", "TensorListGetItem", "TensorListPopBack"})
"""Operations that hand out what a list or an optional holds, which stays where it is."""

_ELSEWHERE = _SHARING | _ELEMENTS | {"Const", "Placeholder"}
"""Operations whose results take no memory of a step's own."""


def added_by_step(body: Any, index: int) -> Any | None:
    """Return the tensor that each step of a loop adds to the list that is the loop's output ``index``.

    None where the output is no such list, and where the list takes no memory of its own (``held_in_loop``).
    """
    return None if held_in_loop(body, index) is not None else _added(body, index)


def added_up(body: Any) -> Iterator[Any]:
    """Yield the tensors that each step of a loop adds to a sum, which is handed from step to step."""
    for before, after in zip(body.inputs, map(shared, body.outputs), strict=True):
        terms = list(map(shared, after.op.inputs)) if after.op.type in rules.SUMS else []
        if any(term is before for term in terms):
            yield from (term for term in terms if term is not before)


def held_in_loop(body: Any, index: int) -> Any | None:
    """Return the input of a loop, or the output before it, that has the buffers of its output ``index``; None without.

    A list shares the buffers of its elements. A loop keeps for its gradient also what all of its steps read (a layer's
    weights), what they take out of a list, and under several names what one step makes and the next one begins with.
    """
    if shared(body.outputs[index]) is body.inputs[index]:
        return body.inputs[index]
    added = _added(body, index)
    if added is None:
        return None
    root = _root(body, added)
    if root.op.type == "TensorListGetItem":
        root = shared(root.op.inputs[0])
    if root.op.type == "Placeholder":
        return root
    before = ((body.outputs[other], _added(body, other)) for other in range(index))
    return next((output for output, other in before if other is not None and _root(body, other) is root), None)


def _added(body: Any, index: int) -> Any | None:
    writer = body.outputs[index].op
    place = _WRITERS.get(writer.type)
    return None if place is None else writer.inputs[place]


def _root(body: Any, tensor: Any) -> Any:
    """Return the tensor of the body, in this step or one before, whose buffer another one is, or an input of the loop.

    What comes back to itself is handed from step to step.
    """
    places = {id(each): place for place, each in enumerate(body.inputs)}
    seen: set[int] = set()
    while True:
        seen.add(id(tensor))
        tensor = shared(tensor)
        place = places.get(id(tensor))
        if place is None or id(body.outputs[place]) in seen:
            return tensor
        tensor = body.outputs[place]


def kept_by_branch(body: Any, index: int) -> Any | None:
    """Return the tensor that a branch keeps for its gradient in its output ``index``, which is an optional.

    None where the output is no such optional, and where its tensor takes no memory of its own (``held_in_branch``).
    """
    kept = _kept(body.outputs[index])
    is_constant = kept is not None and shared(kept).op.type == "Const"
    return None if is_constant or held_in_branch(body, index) is not None else kept


def held_in_branch(body: Any, index: int) -> Any | None:
    """Return the input of a branch, or the output before it, that has the buffer of its output ``index``, an optional.

    None where the output is no optional, and where its tensor has a buffer of its own.
    """
    kept = _kept(body.outputs[index])
    if kept is None:
        return None
    root = shared(kept)
    if root.op.type == "Placeholder":
        return root
    before = ((output, _kept(output) if output.dtype == tf.variant else output) for output in body.outputs[:index])
    return next((output for output, other in before if other is not None and shared(other) is root), None)


def _kept(output: Any) -> Any | None:
    maker = shared(output).op
    return maker.inputs[0] if maker.type == "OptionalFromValue" else None


def most_live(
    body: Any,
    operations: Sequence[Any],
    bytes_of: Callable[[Any], int],
    takes_over: Callable[[Any], Sequence[int]],
    ending: Sequence[Any] = (),
) -> int:
    """Return the most bytes that are live while a branch or a step of a loop runs, beside what it is given and returns.

    Args:
      body: the graph of the branch or the step.
      operations: those of it that count, which run in the order in which they were traced.
      bytes_of: the bytes of a tensor.
      takes_over: the places of the inputs whose buffer an operation's result may take over.
      ending: the inputs of the body that nobody reads after it: each is freed after its last reader inside.
    """
    last: dict[int, int] = {}
    for place, operation in enumerate(operations):
        # Graph optimisation takes an IdentityN out: who reads its results reads its inputs.
        for tensor in () if operation.type in rules.MULTI_VIEWS else (*operation.inputs, *operation.outputs):
            last[id(shared(tensor))] = place
    for tensor in body.outputs:
        last[id(shared(tensor))] = len(operations)
    given = sum(map(bytes_of, ending))
    live = {id(tensor): bytes_of(tensor) for tensor in ending if id(tensor) in last}
    now, most = sum(live.values()), given
    for place, operation in enumerate(operations):
        if operation.type in _ELSEWHERE:
            continue
        ending = [id(shared(operation.inputs[each])) for each in takes_over(operation)]
        for tensor in operation.outputs:
            live[id(tensor)] = bytes_of(tensor)
            now += live[id(tensor)]
            over = next((each for each in ending if last[each] == place and live.get(each) == live[id(tensor)]), None)
            if over is not None:
                now -= live.pop(over)
        most = max(most, now)
        for tensor in (*operation.inputs, *operation.outputs):
            root = id(shared(tensor))
            if root in live and last[root] == place:
                now -= live.pop(root)
    return most - given


def shared(tensor: Any) -> Any:
    """Return the tensor of a graph whose buffer another one is."""
    while tensor.op.type in _SHARING:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type in rules.MULTI_VIEWS else 0]
    return tensor
