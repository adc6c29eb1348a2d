"""Identical segments share one trace of their gradients.

Deep models repeat blocks. Where the first run of a segment is, operation by operation, that of another segment, its
replay and gradients would be traced into the same operations, too, under other names. They are copied instead, which
takes a third of the time. The copies get the names that tracing would give them, so that the graph is the same either
way: names are part of the result (see ``parity.names``).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tensorflow as tf

from tf_memsaver.compat.gradient_terms import forget_number, has_forgotten, is_numbered_sum, name_of_sum
from tf_memsaver.compat.graphs import (
    AWAITED,
    COLOCATED,
    CUSTOM_GRADIENT,
    FuncGraph,
    attributes_in,
    has_control_dependencies,
    set_attribute,
)
from tf_memsaver.compat.unique_names import is_name_taken
from tf_memsaver.parity.grappler import FUNCTION_SCOPE, TAPE_SCOPE
from tf_memsaver.parity.names import Kept
from tf_memsaver.tfgraph.emission import Template

_SMALL = 64
"""Elements. A value that is known when a graph is traced can decide what is traced: these are compared."""

_GRADIENTS = (TAPE_SCOPE, FUNCTION_SCOPE)
"""Scopes in front of the names of gradient operations."""

_NUMBER = re.compile(r"_\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What the trace of a segment's replay and gradients depends on.

    Equal ``key``s mean that it will be the same operations. ``sources`` are the tensors that they may read, ``forward``
    the names of replayed operations and ``names`` what else names are made from; twins have them in the same order.
    """

    key: Hashable
    sources: tuple[tf.Tensor, ...]
    forward: tuple[str, ...]
    names: tuple[str, ...]

    def takes_names_of(self, twin: Replay) -> bool:
        """Whether scopes correspond to scopes: gradients are named by those of the forward operations."""
        scopes: dict[str, str] = {}
        pairs = ((_scope(before), _scope(after)) for before, after in zip(twin.forward, self.forward, strict=True))
        return all(scopes.setdefault(before, after) == after for before, after in pairs)


def _scope(name: str) -> str:
    return name.rpartition("/")[0]


class _Copied(NamedTuple):
    """An operation to copy. What it reads is a place among the sources, or an operation and its output."""

    operation: Template
    reads: tuple[int | tuple[int, int], ...]
    after: tuple[int, ...]


class _Copyable(NamedTuple):
    """A trace as something to copy: what else it depends on is the replay that it was made of."""

    replay: Replay
    operations: tuple[_Copied, ...]
    results: tuple[int | tuple[int, int] | None, ...]


class _Recorded(NamedTuple):
    """What a replay was traced into; most have no twin, so that nothing more is made of it before one comes."""

    replay: Replay
    operations: tuple[Any, ...]
    results: Sequence[tf.Tensor | None]


@dataclass(slots=True)
class Traces:
    """The gradients that were traced in one forward pass of a model, to be copied for its other segments."""

    _made: dict[tuple[int, Hashable], _Recorded | _Copyable | None] = field(default_factory=dict)

    def gradients(
        self, replay: Replay | None, trace: Callable[[], Sequence[tf.Tensor | None]], kept: Kept
    ) -> Sequence[tf.Tensor | None]:
        """Return what ``trace`` returns, copied from a twin of ``replay`` if one was traced in this graph."""
        graph = tf.compat.v1.get_default_graph()
        if replay is None or not isinstance(graph, FuncGraph) or has_control_dependencies(graph):
            return trace()
        key = id(graph), replay.key
        made = self._made.get(key)
        if made is not None and not replay.takes_names_of(made.replay):
            return trace()
        if isinstance(made, _Recorded):
            made = self._made[key] = _noted(made, graph)
        if made is not None:
            with graph.name_scope(None):
                return _copied(made, replay, graph, kept)
        start = graph.num_operations()
        results = trace()
        self._made.setdefault(key, _Recorded(replay, tuple(graph.get_operations()[start:]), results))
        return results


def description(operations: Sequence[Any], given: Sequence[tf.Tensor]) -> tuple[Hashable, tuple[tf.Tensor, ...]] | None:
    """Describe operations without names, and list what they read from outside; None if they cannot be compared.

    ``given`` are tensors from outside or among what is made here, whose order counts.
    """
    tokens: dict[int, Any] = {}
    outside: list[tf.Tensor] = []
    found: list[Any] = []

    def token(tensor: tf.Tensor) -> Any:
        if id(tensor) not in tokens:
            tokens[id(tensor)] = len(outside)
            outside.append(tensor)
            found.append(_spec(tensor))
        return tokens[id(tensor)]

    places: dict[int, int] = {}
    for place, operation in enumerate(operations):
        definition = operation.node_def
        if CUSTOM_GRADIENT in definition.attr or any(id(each) not in places for each in operation.control_inputs):
            return None
        found.append(
            (
                operation.type,
                operation.device,
                tuple(token(tensor) for tensor in operation.inputs),
                tuple(places[id(each)] for each in operation.control_inputs),
                attributes_in(definition),
                tuple(_shape(tensor) for tensor in operation.outputs),
            )
        )
        places[id(operation)] = place
        tokens.update((id(tensor), (place, number)) for number, tensor in enumerate(operation.outputs))
    found.append(tuple(token(tensor) for tensor in given))
    return tuple(found), tuple(outside)


def _spec(tensor: tf.Tensor) -> Hashable:
    known = None
    if tensor.op.type == "Const":
        known = tensor.op.node_def.attr["value"].SerializeToString(deterministic=True)
    elif (tensor.dtype.is_integer or tensor.dtype.is_bool) and (tensor.shape.num_elements() or _SMALL + 1) <= _SMALL:
        value = tf.get_static_value(tensor)
        known = None if value is None else value.tobytes()
    return tensor.dtype, _shape(tensor), known


def _shape(tensor: tf.Tensor) -> tuple[int | None, ...] | None:
    return None if tensor.shape.rank is None else tuple(tensor.shape)


def _noted(traced: _Recorded, graph: Any) -> _Copyable | None:
    """Return a trace as something to copy, or None if it reads what a twin may lack."""
    replay, operations, results = traced
    place_of: dict[int, Any] = {}
    for place, tensor in enumerate(replay.sources):
        place_of.setdefault(id(tensor), place)
    for outer, internal in graph.captures:
        if id(outer) in place_of:
            place_of.setdefault(id(internal), place_of[id(outer)])
    number: dict[int, int] = {}
    copied: list[_Copied] = []
    for operation in operations:
        # What is read from another graph becomes an argument of this one; a copy's is another one.
        if operation.type == "Placeholder":
            continue
        template = Template(operation)
        if (
            template.is_stateful
            or template.names_functions
            or COLOCATED in operation.node_def.attr
            or any(id(tensor) not in place_of for tensor in operation.inputs)
            or any(id(each) not in number for each in operation.control_inputs)
        ):
            return None
        reads = tuple(place_of[id(tensor)] for tensor in operation.inputs)
        after = tuple(number[id(each)] for each in operation.control_inputs)
        number[id(operation)] = len(copied)
        place_of.update((id(tensor), (len(copied), output)) for output, tensor in enumerate(operation.outputs))
        copied.append(_Copied(template, reads, after))
    # A sparse gradient may have its indices from outside.
    made = tuple(None if tensor is None else place_of.get(id(tensor), -1) for tensor in results)
    if -1 in made:
        return None
    return _Copyable(replay, tuple(copied), made)


def _copied(trace: _Copyable, replay: Replay, graph: Any, kept: Kept) -> list[tf.Tensor | None]:
    names = _Names(trace.replay, replay, graph, kept)
    for its, own in zip(trace.replay.sources, replay.sources, strict=True):
        _share_mark(its.op, own.op)
    made: list[list[tf.Tensor]] = []
    operations: list[Any] = []
    for operation, reads, after in trace.operations:
        inputs = [replay.sources[read] if isinstance(read, int) else made[read[0]][read[1]] for read in reads]
        name = names.of(operation)
        before = [operations[place] for place in after]
        with graph.control_dependencies(before) if before else contextlib.nullcontext():
            copy = operation.copy(graph, inputs, name)
        if has_forgotten(graph, operation.name):
            forget_number(copy.outputs[0])
        operations.append(copy)
        made.append(list(copy.outputs))
    results: list[tf.Tensor | None] = []
    for place in trace.results:
        if place is None:
            results.append(None)
            continue
        if isinstance(place, int):
            results.append(replay.sources[place])
            continue
        number, output = place
        results.append(made[number][output])
        # What was known of the shapes of the others has had its effect.
        made[number][output].set_shape(trace.operations[number].operation.shapes[output])
    return results


def _share_mark(before: Any, after: Any) -> None:
    """Mark an operation that others wait for by control dependencies, as tracing does."""
    marked = before.node_def.attr.get(AWAITED)
    if marked is not None and AWAITED not in after.node_def.attr:
        set_attribute(after, AWAITED, marked)


class _Names:
    """Names for the operations of one segment, from those of its twin: those that tracing would give them."""

    def __init__(self, its: Replay, own: Replay, graph: Any, kept: Kept) -> None:
        self._graph, self._kept = graph, kept
        self._scopes: dict[str, str] = {"": "", **{f"{name}/": f"{name}/" for name in _GRADIENTS}}
        self._given: set[str] = set()
        forward = list(zip(its.forward, own.forward, strict=True))
        for twin, name in forward:
            self._know(_scope(twin), _scope(name))
        for twin, name in (*forward, *zip(its.names, own.names, strict=True)):
            before, after = twin.split("/"), name.split("/")
            if len(before) == len(after):
                for count in range(1, len(before)):
                    self._know("/".join(before[:count]), "/".join(after[:count]))
            self._know(twin, name)

    def _know(self, twin: str, own: str) -> None:
        """Note what stands for a scope or operation of the twin, as for its gradients."""
        if f"{twin}/" not in self._scopes:
            for before, after in ((twin, own), (f"{twin}_grad", f"{own}_grad")):
                for scope in ("", *(f"{name}/" for name in _GRADIENTS)):
                    self._scopes[f"{scope}{before}/"] = f"{scope}{after}/"

    def of(self, twin: Template) -> str:
        """Return the name for an operation, from that of its twin, with a slash after it."""
        name = twin.name
        if f"{name}/" in self._scopes:
            own = self._scopes[f"{name}/"]
            return own if name in self._given else f"{self._unique(own[:-1])}/"
        return self._numbered(name, is_sum=is_numbered_sum(twin.type, name))

    def _numbered(self, twin: str, *, is_sum: bool = False) -> str:
        """Return the name of what is called by what it is, and numbered where there are several."""
        scope, _, last = twin.rpartition("/")
        if scope and f"{scope}/" not in self._scopes:
            self._numbered(scope)
        plain = "AddN" if is_sum else _NUMBER.sub("", last)
        if is_sum or (plain != last and is_name_taken(self._graph, f"{scope}/{plain}".lstrip("/"))):
            last = plain
        own = f"{self._scopes[f'{scope}/' if scope else '']}{last}"
        own = self._unique((name_of_sum(self._graph, own) if is_sum else None) or own)
        self._given.add(twin)
        self._scopes[f"{twin}/"] = f"{own}/"
        return f"{own}/"

    def _unique(self, name: str) -> str:
        return self._kept.take(self._graph, name)
