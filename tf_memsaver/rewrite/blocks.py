"""What a segment reads and makes, and who reads that after it: plain facts, in slots, before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tf_memsaver.ir.segments import Segment
from tf_memsaver.parity.grappler import ACTIVATION_PARTS, REORDERED_BY_SIZE, gradient_name, sum_name
from tf_memsaver.program.calls import Call, CallSequence, Reader
from tf_memsaver.tfgraph.operations import ASSIGNMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivingGradients:
    """What the plain step makes of the gradients of a segment's outputs.

    ``names`` has the name under which each arrives, and ``terms`` the slots whose gradients may be terms of a sum.
    ``several`` are the slots that may be operands of one sum or product. ``forward_first`` is that of ``CallSequence``.
    """

    names: Mapping[int, str]
    terms: frozenset[int]
    several: frozenset[int]
    forward_first: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A segment with what it reads and makes, all in slots.

    Attributes:
      segment: the segment of the plan.
      calls: its calls, each with the slots that nothing reads after it.
      children: the segments that it is run in while it is replayed.
      result_makers: labels of the calls that make an output of the model.
      inputs: what it reads and does not make.
      outputs: what it makes and something after it reads.
      read_elsewhere: the inputs that others may read, too, so that their gradients are sums.
      released: the inputs that nothing after it reads.
      resident: inputs that are live during the whole step, without the weights.
      weights: slots that are made of trained variables.
      own_weights: those of them that nothing outside gets a gradient for.
      variables: what its calls list as their variables, each once.
      own_variables: ids of those that no other call lists.
      assigned: outputs that nothing but assignments to variables reads.
      gradients: how gradients arrive for its outputs.
    """

    segment: Segment
    calls: tuple[tuple[Call, tuple[int, ...]], ...]
    children: tuple[Block, ...]
    result_makers: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    read_elsewhere: frozenset[int]
    released: tuple[int, ...]
    resident: frozenset[int]
    weights: frozenset[int]
    own_weights: frozenset[int]
    variables: tuple[Any, ...]
    own_variables: frozenset[int]
    assigned: frozenset[int]
    gradients: ArrivingGradients


def blocks_of(sequence: CallSequence, segments: Sequence[Segment]) -> tuple[Block, ...]:
    """Return a block for each segment of a model's calls."""
    readers = _Readers.of(sequence)
    return tuple(_block(sequence, segment, readers) for segment in segments)


def _block(sequence: CallSequence, segment: Segment, readers: _Readers) -> Block:
    calls = sequence.calls[segment.start : segment.stop]
    made = dict.fromkeys(slot for call in calls for slot in call.outputs)
    inputs = tuple(dict.fromkeys(slot for call in calls for slot in call.inputs if slot not in made))
    outputs = tuple(slot for slot in made if readers.are_after(segment, slot))
    factors = readers.factors(segment.stop, outputs)
    added = frozenset(slot for slot in outputs if readers.has_addition(segment.stop, slot))
    of_others = {*sequence.inputs, *sequence.outputs}
    variables = tuple({id(v): v for call in calls for v in _variables(call)}.values())
    return Block(
        segment=segment,
        calls=tuple((call, readers.released_by(call, index)) for index, call in enumerate(calls, segment.start)),
        children=tuple(_block(sequence, child, readers) for child in segment.children),
        result_makers=tuple(call.label for call in calls if not set(call.outputs).isdisjoint(sequence.outputs)),
        inputs=inputs,
        outputs=outputs,
        read_elsewhere=frozenset(s for s in inputs if s in of_others or not readers.are_within(segment, s)),
        released=tuple(slot for slot in inputs if not readers.are_after(segment, slot)),
        resident=sequence.resident - sequence.weights,
        weights=sequence.weights,
        own_weights=_own_weights(sequence, segment, inputs, readers),
        variables=variables,
        own_variables=frozenset(id(v) for v in variables if readers.of_variable[id(v)] == 1),
        assigned=frozenset(slot for slot in outputs if readers.are_all(ASSIGNMENTS, segment.stop, slot)),
        gradients=ArrivingGradients(
            names={slot: readers.gradient_name(slot, segment.stop, sequence.forward_first) for slot in outputs},
            terms=factors.union(s for s in outputs if not readers.are_all(ACTIVATION_PARTS, segment.stop, s)),
            several=factors | added if len(added) > 1 else factors,
            forward_first=sequence.forward_first,
        ),
    )


def _own_weights(sequence: CallSequence, segment: Segment, inputs: Sequence[int], readers: _Readers) -> frozenset[int]:
    read_once = sequence.weights.intersection(inputs) - sequence.read_again
    return frozenset(slot for slot in read_once if readers.are_within(segment, slot))


def _variables(call: Call) -> Sequence[Any]:
    return getattr(call.operation, "variables", ())


class _Readers(NamedTuple):
    """Who reads what: the last call that reads a slot, who sends gradients to it, how many calls list a variable (id).

    The model's outputs are read past the end.
    """

    last: Sequence[int]
    of_slot: Mapping[int, Sequence[tuple[int, Reader]]]
    of_variable: Counter[int]

    @classmethod
    def of(cls, sequence: CallSequence) -> _Readers:
        last = [-1] * sequence.slot_count
        of_slot: dict[int, list[tuple[int, Reader]]] = {}
        for index, call in enumerate(sequence.calls):
            for slot in dict.fromkeys(call.inputs):
                last[slot] = index
                of_slot.setdefault(slot, []).extend((index, reader) for reader in call.readers(slot))
        for slot in sequence.outputs:
            last[slot] = len(sequence.calls)
        return cls(last, of_slot, Counter(id(v) for call in sequence.calls for v in _variables(call)))

    def released_by(self, call: Call, index: int) -> tuple[int, ...]:
        """Return the slots of a call that nothing reads after it."""
        return tuple(slot for slot in {*call.inputs, *call.outputs} if self.last[slot] <= index)

    def are_after(self, segment: Segment, slot: int) -> bool:
        """Return whether anything after a segment reads a slot."""
        return self.last[slot] >= segment.stop

    def are_within(self, segment: Segment, slot: int) -> bool:
        """Return whether nothing outside a segment reads a slot."""
        return all(segment.start <= index < segment.stop for index, _ in self.of_slot.get(slot, ()))

    def are_all(self, kinds: Collection[str], position: int, slot: int) -> bool:
        """Return whether all that reads a slot from a position on is of some kinds."""
        found = self.from_position(position, slot)
        return bool(found) and self.last[slot] == found[-1][0] and all(reader.kind in kinds for _, reader in found)

    def has_addition(self, position: int, slot: int) -> bool:
        """Return whether any of those that read a slot from a position on passes its gradient on as it is."""
        return any(reader.passes_to is not None for _, reader in self.from_position(position, slot))

    def factors(self, position: int, slots: Iterable[int]) -> frozenset[int]:
        """Return those of the slots that a product from a position on reads with another one of them."""
        of_product: dict[str, set[int]] = {}
        for slot in slots:
            for _, reader in self.from_position(position, slot):
                if reader.kind == REORDERED_BY_SIZE:
                    of_product.setdefault(reader.name, set()).add(slot)
        return frozenset(slot for read in of_product.values() if len(read) > 1 for slot in read)

    def from_position(self, position: int, slot: int) -> list[tuple[int, Reader]]:
        """Return what reads a slot from a position on, each with the index of its call."""
        return [(index, reader) for index, reader in self.of_slot.get(slot, ()) if index >= position]

    def gradient_name(self, slot: int, position: int, forward_first: bool | None) -> str:
        """Return the name, in the plain step, of the gradient that arrives for a slot at a position."""
        found = self.from_position(position, slot)
        if len(found) != 1:
            return sum_name(in_function=forward_first is not None)
        reader = found[0][1]
        if reader.passes_to is not None:
            return self.gradient_name(reader.passes_to, position, forward_first)
        return gradient_name(reader.name)
