"""Symbols: what graph optimisation calls sizes that are not known, and by which it compares shapes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_memsaver.parity.gates import is_of_shapes
from tf_memsaver.parity.grappler import OF_SIZES_OF_THEIR_OWN
from tf_memsaver.tfgraph.operations import is_loop

_SEEN_THROUGH = frozenset("Cast ConcatV2 Identity Reshape Slice StridedSlice".split())
"""Operations on shapes through which graph optimisation follows a symbol: not through ``GatherV2`` and ``Pack``."""

Symbol = tuple[str, int]
"""The operation and the output that a symbol was made for."""

_known: weakref.WeakKeyDictionary[Any, dict[Symbol, Symbol | None]] = weakref.WeakKeyDictionary()
"""The symbols of tensors, by graph."""


def makes_symbols(operation: Any) -> bool:
    """Whether an operation gives the sizes of its result new symbols: a ``Reshape`` to a constant shape, for the -1."""
    is_fixed = operation.type == "Reshape" and operation.inputs[1].op.type == "Const"
    return is_fixed or has_new_sizes(operation)


def has_new_sizes(operation: Any) -> bool:
    """Whether the symbols of an operation's result are those of nothing else, whatever reads it."""
    return hides_sizes(operation) or is_loop(operation) or operation.type in OF_SIZES_OF_THEIR_OWN


def hides_sizes(operation: Any) -> bool:
    """Whether an operation hides all sizes of its result: a ``Reshape`` to a shape with a computed size among others.

    ``tf.repeat`` makes such a shape. The ``Pack`` of that size becomes an ``ExpandDims``, through which symbols are not
    followed (``constant_folding.cc: SimplifyPack``, ``graph_properties.cc``).
    """
    if operation.type != "Reshape" or operation.inputs[1].op.type != "ConcatV2":
        return False
    parts = operation.inputs[1].op.inputs[:-1]
    return any(
        each.op.type == "Pack" and len(each.op.inputs) == 1 and tf.get_static_value(each) is None for each in parts
    )


def symbol_of(tensor: tf.Tensor) -> Symbol | None:
    """Return what stands for the symbols of a tensor of a forward pass: None if all its sizes are known.

    Two tensors that it is the same for have the same symbols.
    """
    known = _known.setdefault(tensor.graph, {})
    pending, opened = [tensor], set[Symbol]()
    while pending:
        current = pending[-1]
        key = _key_of(current)
        sources = () if key in known or _is_known(current) else _sources_of(current)
        # In a loop as TensorFlow 1 writes it, a tensor leads to itself.
        missing = [each for each in sources if _key_of(each) not in known and _key_of(each) not in opened]
        if missing:
            opened.add(key)
            pending.extend(missing)
            continue
        pending.pop()
        if key not in known:
            given = {known.get(_key_of(each), _key_of(each)) for each in sources} - {None}
            # Of several symbols it is not known that they are the same size.
            own = len(given) != 1 or makes_symbols(current.op)
            known[key] = None if _is_known(current) else key if own else given.pop()
    return known[_key_of(tensor)]


def _key_of(tensor: tf.Tensor) -> Symbol:
    return tensor.op.name, tensor.value_index


def _is_known(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype != tf.variant and tensor.shape.is_fully_defined())


def _sources_of(tensor: tf.Tensor) -> Sequence[tf.Tensor]:
    """Return what a tensor has its symbols from; nothing where they are its own."""
    operation = tensor.op
    if operation.type == "IdentityN":
        return (operation.inputs[tensor.value_index],)
    vectors = [each for each in operation.inputs if each.dtype.is_integer and each.shape.rank == 1]
    shapes = [each for each in vectors if is_of_shapes(each)]
    if not shapes:
        return tuple(operation.inputs)
    return [source for each in shapes for source in _shaping(each)]


def _shaping(shape: tf.Tensor) -> list[tf.Tensor]:
    """Return the tensors whose sizes a shape is made of, as far as graph optimisation follows them."""
    if shape.op.type in ("Shape", "ShapeN"):
        return [shape.op.inputs[shape.value_index]]
    if shape.op.type in _SEEN_THROUGH:
        return [source for each in shape.op.inputs for source in _shaping(each)]
    return []
