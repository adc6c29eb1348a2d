"""Sums of many terms: what decides the order in which their kernel adds them.

Graph optimisation makes one sum of additions of additions. Its kernel adds the terms in the order of their names, but
begins with one whose buffer it can take for the result: the first that nobody else holds. So it counts who else reads a
term, and when. A term that the plain step needs after the sum must be held here, too: it is read once more, after it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_memsaver.compat.graphs import place_of
from tf_memsaver.parity.buffers import buffer_of
from tf_memsaver.parity.gates import Gates
from tf_memsaver.parity.gradients import has_layout, kept
from tf_memsaver.parity.grappler import ADDITIONS, READS_OUTPUT, READS_OUTPUT_FOR, SUMS
from tf_memsaver.parity.readers import EXTRA_READERS, is_extra, made_as, readers_among, readers_of, source_of

_AT_ONCE = 8
"""How many terms the kernel of a sum adds to it at once."""


class Sum(NamedTuple):
    """Additions that graph optimisation makes one: the last of them, and the terms of its shape."""

    last: Any
    terms: tuple[Any, ...]


def sums_of_many(operations: Iterable[Any], readers: Mapping[int, Sequence[Any]]) -> Iterator[Sum]:
    """Yield sums of three and more terms, whose order is part of the result; ``readers`` are those of a tensor (id)."""

    def joined(tensor: Any) -> bool:
        return tensor.op.type in SUMS and len(readers.get(id(tensor), ())) == 1

    for operation in operations:
        if operation.type not in SUMS:
            continue
        only = readers.get(id(operation.outputs[0]), ())
        if len(only) != 1 or only[0].type not in SUMS:
            shape = operation.outputs[0].shape
            alike = (tensor for tensor in _terms(operation, joined) if tensor.shape.rank == shape.rank)
            terms = tuple(tensor for tensor in alike if shape.rank is None or list(tensor.shape) == list(shape))
            if len(terms) > 2:
                yield Sum(operation, terms)


def _terms(addition: Any, joined: Callable[[Any], bool], source: Callable[[Any], Any] = lambda tensor: tensor) -> Any:
    """Yield the terms of an addition, and of the additions that are ``joined`` with it."""
    for tensor in map(source, addition.inputs):
        if joined(tensor):
            yield from _terms(tensor.op, joined, source)
        else:
            yield tensor


def read_after_sums(
    operations: Sequence[Any], readers: Mapping[int, Sequence[Any]], needed: Collection[int], gates: Gates
) -> Iterator[tf.Tensor]:
    """Read, after each sum among operations, those of its terms whose buffers (ids) the plain step needs longer."""
    for last, terms in sums_of_many(operations, readers):
        held = [tensor for tensor in terms if id(buffer_of(tensor)) in needed]
        if held:
            yield _read_after(last, held, gates)


def read_after_sums_of_replay(
    replayed: Sequence[Any], needed: Collection[int], passed: Sequence[Any], gates: Gates
) -> Iterator[tf.Tensor]:
    """Read terms once more after a sum in a replay, where what reads them later in the plain step is not there.

    That is what stands outside of the segment, for what it is ``passed`` and passes on (no segment begins between a sum
    and the term whose buffer it takes), and operations (not those whose ids are ``needed``) that nobody needs here.
    """
    own = [operation for operation in replayed if not is_extra(operation)]
    place = {id(operation): number for number, operation in enumerate(own)}
    readers: dict[int, list[Any]] = readers_among(own)
    for tensor in passed:
        readers.setdefault(id(tensor), []).append(_Elsewhere())
    outside = {id(buffer_of(tensor)) for tensor in passed}
    for last, terms in sums_of_many(own, readers):
        if id(last) not in needed:
            continue
        unneeded = (reader for reader in own[place[id(last)] + 1 :] if id(reader) not in needed)
        lacking = outside.union(id(buffer_of(tensor)) for reader in unneeded for tensor in reader.inputs)
        held = [tensor for tensor in terms if id(buffer_of(tensor)) in lacking]
        if held:
            yield _read_after(last, held, gates)


class _Elsewhere(NamedTuple):
    """Stands for what reads a tensor outside of the operations that are looked at."""

    type: str = ""


def only_sums_read(tensor: Any, readers: Iterable[Any]) -> bool:
    """Whether nothing but sums (and gates) reads a tensor in the plain step, and no gradient does.

    A sum whose terms are all like that begins with the first, wherever segments end: either each of them can lend the
    result its buffer or none, where all are held (``read_after_sums_of_inputs``).
    """
    if tensor.op.type in READS_OUTPUT or tensor.op.type in READS_OUTPUT_FOR or buffer_of(tensor) is not tensor:
        return False
    return all(each.type in _READS_NO_VALUE for each in readers)


_READS_NO_VALUE = SUMS | {"Sub"}
"""Operations on whole tensors, without views, whose gradients read none of their values; gates are of the last kind."""


def read_after_sums_of_inputs(inputs: Iterable[Any], gates: Gates) -> tuple[tf.Tensor, ...]:
    """Read the terms of a sum once more after it, where a segment holds one that nobody needs in the plain step."""
    lasts = dict.fromkeys(last for tensor in inputs for last in _last_sum(tensor))
    return tuple(_read_after(last, _all_terms(last), gates) for last in lasts)


def is_left_within(tensor: Any, operations: Iterable[Any]) -> bool:
    """Whether nobody needs a tensor in the plain step after a sum of many terms that is one of these operations."""
    return any(last in operations for last in _last_sum(tensor))


def _last_sum(tensor: Any) -> Iterator[Any]:
    """Yield the sum of many terms after which nobody needs a tensor in the plain step, if there is one."""
    made = made_as(tensor)
    if made.graph is tf.compat.v1.get_default_graph() and only_sums_read(made, readers_of(made)):
        last = max(_sums_with(made), key=place_of, default=None)
        if last is not None and len(_all_terms(last)) > 2:
            yield last


def read_after_later_sums(tensors: Iterable[Any], gates: Gates) -> tuple[tf.Tensor, ...]:
    """Read what is a term of a sum after its segment once more, after the sum.

    Args:
      tensors: results of a first run that the plain step needs longer.
      gates: what reads single elements.

    Returns:
      What was read, as float32 vectors. What is run must depend on them by data.
    """
    read: list[tf.Tensor] = []
    for tensor in tensors:
        # A backward pass in a graph of its own gets the terms as they stand.
        if tensor.graph is tf.compat.v1.get_default_graph():
            sums = {id(last): last for last in _sums_with(tensor)}
            read.extend(_read_after(last, [tensor], gates) for last in sums.values() if len(_all_terms(last)) > 2)
    return tuple(read)


def is_one_of_many(tensor: Any) -> bool:
    """Whether a tensor is a term of a sum of three and more, of which no gradient reads sizes in the plain step."""
    return any(len(_all_terms(last)) > 2 for last in _sums_with(tensor))


def _sums_with(tensor: Any) -> Iterator[Any]:
    """Yield the last additions of the sums that a tensor is a term of."""
    for reader in readers_of(tensor):
        if reader.type in SUMS:
            further = _readers_once(reader.outputs[0])
            inside = len(further) == 1 and further[0].type in SUMS
            yield from _sums_with(reader.outputs[0]) if inside else (reader,)


def _all_terms(addition: Any) -> list[Any]:
    """Return the terms of an addition that graph optimisation makes one with those that it reads."""

    def joined(tensor: Any) -> bool:
        return tensor.op.type in SUMS and len(_readers_once(tensor)) == 1

    return list(_terms(addition, joined, source_of))


def _readers_once(tensor: Any) -> list[Any]:
    """Return what reads a tensor, of additions of equal terms one: graph optimisation leaves one, before it joins."""
    found: dict[Any, Any] = {}
    for reader in readers_of(tensor):
        terms = frozenset(id(source_of(term)) for term in reader.inputs)
        found.setdefault((reader.type, terms) if reader.type in ADDITIONS else id(reader), reader)
    return list(found.values())


def in_pairs(terms: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Return two terms whose sum is that of a gradient's terms, added in the order in which one kernel adds them.

    Where all sizes are known, graph optimisation takes sums of three and more terms apart once it thinks that the step
    needs more than 0.8 of a device's memory, which it takes to be 256 MiB on a CPU: those whose terms are in memory at
    the peak. Then each term is added to a variable as it arrives, in whatever order (``memory_optimizer.cc:
    SchedulingPass``). Recomputing puts the peak elsewhere, and so other sums would be added in another order.

    One kernel adds up to nine terms one after the other. Of more, it adds what remains of a division by eight first,
    and then the sum of each eight (``aggregate_ops.cc: AddNOp``). It begins with the first term whose buffer nobody
    else has. If other operations read at most one, that is the first or the second of all, which makes no difference.
    A sum that only this one reads becomes part of it in the plain step, products may be rewritten, and what is passed
    on has another name there: these are left as they are. So are all where graph optimisation is turned off: nothing
    takes them apart, nor puts them in the order of their names.
    """
    if len(terms) < 3 or tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False):
        return terms
    if not all(map(_has_its_own_buffer, terms)) or _have_a_common_factor(terms):
        return terms
    shared = [term for term in terms if term.consumers()]
    if len(shared) > 1 or any(term.op.type in SUMS and not term.consumers() for term in terms):
        return terms
    ordered = sorted(terms, key=_name)
    rest = len(terms) % _AT_ONCE
    begin = rest if rest > 1 else rest + _AT_ONCE
    eights = (_added(ordered[place : place + _AT_ONCE]) for place in range(begin, len(terms), _AT_ONCE))
    *others, last = *ordered[:begin], *eights
    return [_added(others), last]


def _added(terms: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the sum of some terms, one added after the other."""
    total, *others = terms
    for term in others:
        with tf.name_scope(f"{total.op.name}/"):
            total = kept(tf.raw_ops.AddN(inputs=[total, term], name="pair"), "pair")
    return total


def _name(tensor: tf.Tensor) -> str:
    return tensor.name.removesuffix(":0")


def _has_its_own_buffer(tensor: tf.Tensor) -> bool:
    if not tf.is_symbolic_tensor(tensor) or not tensor.shape.is_fully_defined() or has_layout(tensor):
        return False
    return buffer_of(tensor) is tensor


def _have_a_common_factor(terms: Sequence[tf.Tensor]) -> bool:
    """Whether graph optimisation may take a factor out of a sum (``HoistCommonFactorOutOfAggregation``)."""
    if len({term.op.type for term in terms}) > 1 or terms[0].op.type not in ("Mul", "RealDiv"):
        return False
    return bool(set.intersection(*({id(factor) for factor in term.op.inputs} for term in terms)))


def _read_after(last: Any, terms: Sequence[Any], gates: Gates) -> tf.Tensor:
    with tf.name_scope(EXTRA_READERS):
        # After it by data: an operation that another one waits for is not joined with others.
        return gates.first_elements(terms, gate=gates.gate([gates.first_elements([last.outputs[0]])]))
