"""What graph optimisation makes of a traced step, as far as its memory depends on that: joined sums, and equal values.

A step runs as Grappler leaves it. Sources are TensorFlow 2.21's, ``tensorflow/core/grappler/optimizers``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tf_memsaver.capture.step import TracedStep
from tf_memsaver.ir.graph import Phase
from tf_memsaver.parity.grappler import ADDITIONS, SUMS
from tf_memsaver.parity.symbols import has_new_sizes, hides_sizes


class JoinedSums:
    """Tells which sums become part of the sum that reads them, so that their terms wait for all others.

    ``arithmetic_optimizer.cc: AddOpsRewriteStage`` does that where nothing else reads a sum, and it knows that all
    shapes are equal. If the batch size is free, it has a symbol for it, and those of two dilated convolutions differ.
    """

    def __init__(self, step: TracedStep, *, fixed_batch: bool) -> None:
        """Read a step; ``fixed_batch`` tells that ``fit`` traces it for one batch size."""
        self._step = step
        self._symbols: dict[int, int] = {} if fixed_batch else _batch_symbols(step, has_new_sizes)
        # Of these alone gradients may tell that they are the same.
        self._hidden: dict[int, int] = {} if fixed_batch else _batch_symbols(step, hides_sizes)

    def has(self, operation: Any, phase: Phase) -> bool:
        """Whether an operation of a phase is such a sum."""
        if operation.type not in SUMS or operation.control_inputs:
            return False
        (total,) = operation.outputs
        reader = self._only_reader(total)
        if reader is None or reader.type not in SUMS or reader.outputs[0].shape != total.shape:
            return False
        # Where the shapes of gradients come from is another matter.
        return phase is not Phase.FORWARD or _are_alike(self._symbols, [*operation.inputs, *reader.inputs])

    def depend_on_gradients(self, operation: Any) -> bool:
        """Whether gradients decide if others become part of a sum of the forward pass.

        Gradients tell what is of one size, as that of a ReLU does, which is a product of two. Where that makes operands
        of one size that have different symbols, a plain step joins sums, and a first run, which has no gradients, does
        not. That was seen only of sizes that an operation hides, and no gradient tells those of its own result.
        """
        if operation.type not in SUMS:
            return False
        terms = [term for term in operation.inputs if term.shape == operation.outputs[0].shape]
        inner = any(term.op.type in SUMS and self._only_reader(term) is operation for term in terms)
        hidden = any(hides_sizes(term.op) for term in terms)
        return inner and not hidden and not _are_alike(self._hidden, terms)

    def depend_on_equals(self, operation: Any) -> bool:
        """Whether a sum of the forward pass is joined with another one, or not, because of equal additions.

        Graph optimisation leaves one of equal ones. All that read any of them read that one, and what only equal ones
        read has one reader.
        """
        if operation.type not in SUMS:
            return False
        equals = self._equals.get(id(operation), [])
        if any(reader.type in SUMS for equal in equals for reader in self._readers(equal.outputs[0])):
            return True
        totals = (total for total in (*operation.inputs, *operation.outputs) if total.op.type in SUMS)
        return any(map(self._is_read_by_equals, totals))

    @cached_property
    def _equals(self) -> dict[int, list[Any]]:
        return _equal_additions(self._step)

    def _is_read_by_equals(self, tensor: Any) -> bool:
        """Whether several additions read a tensor, all of them equal, and nothing else."""
        readers = {id(reader): reader for reader in self._readers(tensor)}
        equals = [id(equal) for reader in readers.values() for equal in self._equals.get(id(reader), [])[:1]]
        return len(readers) > 1 and len(equals) == len(readers) and len(set(equals)) == 1

    def _readers(self, tensor: Any) -> Sequence[Any]:
        return self._step.readers.get(id(tensor), [])

    def _only_reader(self, tensor: Any) -> Any | None:
        readers = self._readers(tensor)
        return readers[0] if len(readers) == 1 else None


def _are_alike(symbols: Mapping[int, int], tensors: Iterable[Any]) -> bool:
    return len({symbols.get(id(tensor), 0) for tensor in tensors}) < 2


def _equal_additions(step: TracedStep) -> dict[int, list[Any]]:
    """Return, by addition of the forward pass (id), all that add up the same, if there are several."""
    first: dict[int, int] = {}
    found: dict[frozenset[int], list[Any]] = {}
    for operation, (phase, _) in zip(step.graph.get_operations(), step.owners, strict=True):
        if phase is Phase.FORWARD and operation.type in ADDITIONS and id(operation) in step.reachable:
            alike = found.setdefault(frozenset(first.get(id(term), id(term)) for term in operation.inputs), [])
            alike.append(operation)
            first[id(operation.outputs[0])] = id(alike[0].outputs[0])
    return {id(each): alike for alike in found.values() if len(alike) > 1 for each in alike}


def _batch_symbols(step: TracedStep, makes_symbol: Callable[[Any], bool]) -> dict[int, int]:
    """Return a number for the batch size of each tensor (id) that is made of the batch: 0 for that of the batch."""
    symbol_of = {id(tensor): 0 for tensor in step.inputs}
    for number, operation in enumerate(step.graph.get_operations(), 1):
        made = [tensor for tensor in operation.inputs if id(tensor) in symbol_of]
        if made and operation.outputs:
            given = {symbol_of[id(tensor)] for tensor in made}
            if len(given) > 1:
                # What is broadcast, as the statistics of a BatchNorm are, has no batch.
                given = {symbol_of[id(tensor)] for tensor in _of_size_of(operation.outputs[0], made)} or given
            symbol = number if len(given) > 1 or makes_symbol(operation) else given.pop()
            symbol_of.update((id(tensor), symbol) for tensor in operation.outputs)
    return symbol_of


def _of_size_of(output: Any, tensors: Iterable[Any]) -> list[Any]:
    """Return those tensors that have the rank and the first size of another one."""
    shape = output.shape
    return [each for each in tensors if shape.rank and each.shape.rank == shape.rank and each.shape[0] == shape[0]]


class EqualValues:
    """Finds operations that compute what another one has computed: ``arithmetic_optimizer.cc: DedupComputations``.

    It leaves one operation of those of one type, with equal inputs and attributes, that have no state. Two causal
    convolutions of one tensor, for one, read the same padded tensor. It is for forward passes: that of backward passes
    hardly matters (a TCN's plan: 59 MiB measured, 62 predicted, 66 with equal products of a LayerNormalization's).
    """

    def __init__(self) -> None:
        self._found: dict[tuple[Any, ...], list[Any]] = {}
        self._original: dict[int, Any] = {}

    def original(self, operation: Any) -> Any | None:
        """Return the operation that was asked for before, and computes the same, or None.

        Sums are left out: which of them are joined depends on who reads them.
        """
        inputs = [self._original.get(id(tensor), tensor) for tensor in operation.inputs]
        if operation.type == "Identity":
            self._original[id(operation.outputs[0])] = inputs[0]
            return None
        computed = [tensor for tensor in inputs if tensor.op.type != "Const"]
        is_out = operation.type in SUMS or operation.op_def.is_stateful or operation.control_inputs
        if not computed or is_out:
            return None
        alike = self._found.setdefault((operation.type, len(inputs), *map(id, computed)), [])
        for other in alike:
            if _compute_the_same(operation, other):
                pairs = zip(operation.outputs, other.outputs, strict=True)
                self._original.update((id(tensor), first) for tensor, first in pairs)
                return other
        alike.append(operation)
        return None


def _compute_the_same(operation: Any, other: Any) -> bool:
    """Whether two operations of one type, whose other inputs are equal, have equal constants and attributes."""
    pairs = zip(_constants(operation), _constants(other), strict=True)
    return operation.node_def.attr == other.node_def.attr and all(
        (mine is None) == (its is None) and (mine is None or mine.node_def.attr == its.node_def.attr)
        for mine, its in pairs
    )


def _constants(operation: Any) -> Iterable[Any]:
    """Yield, for each input, the constant that it is, or None."""
    return (tensor.op if tensor.op.type == "Const" else None for tensor in operation.inputs)
