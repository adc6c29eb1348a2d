"""What is done for equal bits alone, as one interface: the runtime asks a level of parity, and its rules answer.

Without any of them results are right within rounding, and memory is the same: gates hold the order, not rules.
"""

from __future__ import annotations

import contextlib
import contextvars
import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tf_memsaver.compat.graphs import is_compiled_by_xla
from tf_memsaver.parity import extra_readers, gradients, sums
from tf_memsaver.parity.gates import Gates, after, free_constants
from tf_memsaver.parity.grappler import REORDERED_BY_SIZE
from tf_memsaver.parity.names import Names
from tf_memsaver.parity.products import factors_with_constants
from tf_memsaver.parity.swishes import first_swishes


class Rule(enum.Enum):
    """Something that is done for equal bits alone, with what it does."""

    NAMES = "layers and operations are called as in the plain step in replays, and otherwise in first runs"
    INPUT_NAMES = "what enters a replay is called as what made it"
    ARRIVING_NAMES = "a gradient that arrives for a replay is called as in the plain step"
    ARRIVING_AFTER_FACTORS = "a gradient arrives when the factors of a replay are there that constants move past"
    ARRIVING_SHAPES = "a gradient that arrives is known to have the shape of its output where sizes are not known"
    LEAVING_NAMES = "a gradient that leaves a replay is called as in the plain step"
    RESULTS_AS_TERMS = "what leaves a segment and may be a term of a sum is an operation of its own"
    TERMS_ONE_BY_ONE = "the terms of a gradient that others add to leave a segment, and arrive, one by one"
    GRADIENTS_AS_TERMS = "a gradient that leaves a segment and may be a term of a sum is an operation of its own"
    READERS_IN_FIRST_RUN = "a value that the plain step's backward pass reads has a second reader in a first run"
    READERS_IN_REPLAY = "a value that loses a reader in a replay gets another one"
    FIRST_SWISHES = "a swish that stays unfused in a loop, since it is the first there, stays so in a replay"
    SQUARES_OF_CUBES = "the square that the gradient of a cube computes is there in a first run"
    CONVOLUTIONS = "a convolution in front of a LeakyRelu that is waited for is read once more"
    TERMS_IN_FIRST_RUN = "a term that is needed after its sum is held, in a first run"
    TERMS_IN_REPLAY = "a term that is needed after its sum is held, in a replay"
    TERMS_AFTER = "a result that is needed after a sum that it is a term of is held"
    FREE_CONSTANTS = "constants in a replay do not wait for its gate"
    FREE_PRODUCTS = "a gradient of a weight that is a product leaves before the others are there"
    SUMS_IN_PAIRS = "a gradient of many terms is added two by two, so that no sum of it is taken apart to save memory"
    EAGER_ORDER = "an eager replay takes gradients in the order in which the plain step's tape adds them"
    WHOLE_GRADIENT_SUMS = "no segment ends between the readers of a tensor that is a term of a sum of many"
    WHOLE_FUSIONS = "no segment ends between operations that graph optimisation makes one"
    WHOLE_SUMS = "no segment ends between a sum of many terms and a term that lends it its buffer"
    STORED_SUMS = "a sum that graph optimisation would join with others otherwise in a first run is stored"
    WHOLE_CONSTANT_CHAINS = "no segment ends between products or sums through which a constant moves"
    WHOLE_PRODUCTS = "no segment ends inside a product of factors of several shapes"

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Parity:
    """A level of parity: the rules that are kept."""

    rules: frozenset[Rule]

    def without(self, *rules: Rule) -> Parity:
        """Return the level with some rules less."""
        return Parity(self.rules.difference(rules))

    def names(self) -> Names:
        """Return what names the operations of a forward pass that begins here."""
        return Names.of_model(settled=Rule.NAMES in self.rules)

    @property
    def terms_one_by_one(self) -> bool:
        """Whether a gradient of several terms enters and leaves a segment in terms, to be added where others are."""
        return Rule.TERMS_ONE_BY_ONE in self.rules

    @property
    def eager_order(self) -> bool:
        """Whether an eager replay takes gradients in the order of the plain step's tape."""
        return Rule.EAGER_ORDER in self.rules

    # What leaves a first run --------------------------------------------------------------------------------------

    def read_in_first_run(
        self,
        operations: Sequence[Any],
        sources: Iterable[Any],
        results: Sequence[Any],
        forward_first: bool | None,
        gates: Gates,
    ) -> tuple[tuple[tf.Tensor, ...], tuple[tf.Tensor, ...]]:
        """Add the readers that a first run lacks.

        Args:
          operations: what the first run added to its graph, in order.
          sources: the tensors that gradients are taken for.
          results: the tensors that gradients come from.
          forward_first: see ``CallSequence``.
          gates: what reads single elements.

        Returns:
          What was read, as float32 vectors: the gate of the replay must depend on them by data, since graph
          optimisation takes out what hangs on a control dependency alone. And those of the results that the plain step
          needs until the backward pass.
        """
        if not self.rules:
            return (), ()
        run = extra_readers.FirstRunReads(operations, sources, results)
        read: list[tf.Tensor] = []
        if Rule.SQUARES_OF_CUBES in self.rules:
            read += run.squares_of_cubes(forward_first)
        if Rule.READERS_IN_FIRST_RUN in self.rules:
            read += run.values()
        if Rule.TERMS_IN_FIRST_RUN in self.rules:
            read += run.terms(gates)
        return extra_readers.first_elements(read, gates), run.needed_results()

    def result(self, tensor: tf.Tensor, one_of_several: bool, note: Callable[[Any], None]) -> tf.Tensor:
        """Return a result of a segment that may be a term of a sum; several of them may be added up.

        Its gradient is told to ``note`` as it arrives.
        """
        return gradients.as_term(tensor, one_of_several, note) if Rule.RESULTS_AS_TERMS in self.rules else tensor

    # What enters a replay -----------------------------------------------------------------------------------------

    def read_before_replay(
        self, operations: Sequence[Any], inputs: Sequence[Any], needed: Sequence[Any], gates: Gates
    ) -> tuple[tf.Tensor, ...]:
        """Add the readers that are missing once it is known what reads the results of a first run.

        Args:
          operations: those of the first run.
          inputs: what it read.
          needed: the results that the plain step needs until the backward pass.
          gates: what reads single elements.

        Returns:
          As ``read_in_first_run``.
        """
        terms: tuple[tf.Tensor, ...] = ()
        if Rule.TERMS_AFTER in self.rules:
            terms = (*sums.read_after_later_sums(needed, gates), *sums.read_after_sums_of_inputs(inputs, gates))
        keep = Rule.CONVOLUTIONS in self.rules
        return (*terms, *(extra_readers.read_convolutions(operations, inputs, gates) if keep else ()))

    def entering(self, gate: tf.Tensor, tensor: tf.Tensor, forward_first: bool | None) -> tf.Tensor:
        """Return what a replay reads of an input, not before the gate."""
        if Rule.INPUT_NAMES in self.rules:
            return gradients.gated_input(gate, tensor, forward_first)
        return after(gate, tensor)

    def factors(self, replayed: Sequence[Any]) -> list[tf.Tensor]:
        """Return what is to be there before a gradient arrives for a replay that added these operations."""
        return factors_with_constants(replayed) if Rule.ARRIVING_AFTER_FACTORS in self.rules else []

    def arriving(
        self,
        gate: tf.Tensor,
        held: bool,
        name: str,
        gradient: tf.Tensor,
        output: tf.Tensor,
        first: tf.Tensor,
        *,
        one_of_several: bool,
    ) -> tf.Tensor:
        """Return the gradient that arrived for an output of a replay, and of its first run, or one of several terms.

        The plain step calls it by a name. If it is ``held``, it waits for the gate, whatever reads it.
        """

        def view(copy: tf.Tensor) -> tf.Tensor:
            return gradients.of_shape(copy, gradient, output, first) if Rule.ARRIVING_SHAPES in self.rules else copy

        if Rule.ARRIVING_NAMES not in self.rules:
            return view(gradient)
        return gradients.under_plain_name(gate, held, name, gradient, output, view, one_of_several=one_of_several)

    # What leaves a replay -----------------------------------------------------------------------------------------

    def read_in_replay(
        self,
        operations: Sequence[Any],
        inputs: Sequence[tuple[Any, Any]],
        replayed: Sequence[Any],
        needed: Collection[int],
        outputs: Sequence[Any],
        arrived: Collection[int],
        gates: Gates,
    ) -> tuple[tf.Tensor, ...]:
        """Add the readers that a replay lacks.

        Args:
          operations: those of the first run.
          inputs: what the first run read, each with what the replay reads of it after its gate.
          replayed: what the replay added to its graph, in order.
          needed: the ids of the operations that the gradients are made of, backward operations among them.
          outputs: what the replay returned.
          arrived: the places of those that a gradient arrived for: others have no reader after the segment.
          gates: what reads single elements.

        Returns:
          As ``read_in_first_run``.
        """
        if not self.rules:
            return ()
        read: list[tf.Tensor] = []
        if Rule.READERS_IN_REPLAY in self.rules:
            read += extra_readers.values_that_lose_readers(replayed, needed, outputs, arrived)
        if Rule.FIRST_SWISHES in self.rules:
            read += first_swishes(replayed)
        if Rule.TERMS_IN_REPLAY in self.rules:
            passed = [gated for tensor, gated in inputs if not sums.is_left_within(tensor, operations)]
            read += sums.read_after_sums_of_replay(replayed, needed, [*passed, *outputs], gates)
        return extra_readers.first_elements(read, gates)

    def free_constants(self, operations: Iterable[Any], gate: tf.Tensor) -> None:
        """Let the constants of a replay do without its gate."""
        if Rule.FREE_CONSTANTS in self.rules:
            free_constants(operations, gate)

    def may_leave_early(self, gradient: Any) -> bool:
        """Whether a weight's gradient is a product, whose factors the optimizer's own product may be joined with.

        Graph optimisation multiplies such a gradient's factors by a learning rate in the order of their sizes
        (``MinimizeBroadcasts``), if nothing stands in between. No factor is larger than the weight.
        """
        if Rule.FREE_PRODUCTS not in self.rules or not isinstance(gradient, tf.Tensor):
            return False
        return bool(gradients.maker_of(gradient).type == REORDERED_BY_SIZE)

    def released(self, gate: tf.Tensor | None, gradient: tf.Tensor) -> tf.Tensor:
        """Return a gradient that leaves a replay, after the gate if any: it is ready, as its operation's name says."""
        if Rule.LEAVING_NAMES in self.rules:
            return gradients.released(gate, gradient)
        return after(gate, gradient, gradients.READY)

    def leaving(self, gradient: tf.Tensor, gates: Gates) -> tf.Tensor:
        """Return a gradient that leaves a segment and may be a term of a sum (``gradients.may_be_summed``)."""
        return gradients.gradient_as_term(gradient, gates) if Rule.GRADIENTS_AS_TERMS in self.rules else gradient

    def to_be_added(self, terms: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Return what a tape adds up in a graph instead of the terms of a gradient (``sums.in_pairs``)."""
        return sums.in_pairs(terms) if Rule.SUMS_IN_PAIRS in self.rules else terms


EXACT = Parity(frozenset(Rule))
"""Every rule: equal bits, wherever TensorFlow itself gives equal bits."""

ROUNDING = Parity(frozenset())
"""No rule: results are equal within rounding, which is all that there is under XLA."""

_chosen: contextvars.ContextVar[Parity | None] = contextvars.ContextVar("parity", default=None)


def level_here() -> Parity:
    """Return the level of parity for a forward pass that begins here: exact, unless XLA will compile it.

    XLA fuses and orders by rules of its own, and takes neither names nor readers for what they are: bits differ either
    way, while extra readers keep it from fusing: a small BERT took twice the memory, and 1.6 times as long to compile.
    """
    chosen = _chosen.get()
    if chosen is None:
        return ROUNDING if is_compiled_by_xla(tf.compat.v1.get_default_graph()) else EXACT
    return chosen


@contextlib.contextmanager
def at_level(level: Parity) -> Iterator[None]:
    """Run forward passes at another level of parity."""
    token = _chosen.set(level)
    try:
        yield
    finally:
        _chosen.reset(token)
