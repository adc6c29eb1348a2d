"""What the first run of a segment is given, and what it leaves for its replay."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from tf_memsaver.compat.gradients import is_differentiated
from tf_memsaver.compat.tapes import followed
from tf_memsaver.parity.gates import is_of_shapes
from tf_memsaver.parity.readers import hands_on, is_extra, made_as, readers_of
from tf_memsaver.runtime.replayable import Replayable, Shared, Tensors

_EAGER_TERMS = 64
"""So many terms of an input's gradient leave one by one in eager mode, where nothing tells how many there are."""


@dataclass(slots=True, kw_only=True)
class FirstRun:
    """The first run of a function.

    Attributes:
      function: what is run.
      inputs: its arguments that a replay reads after the gate.
      weights: and those that a replay reads as they are.
      wanted: for which of the inputs and weights a gradient is wanted.
      variables: by weight, a number of the variable that it was read from.
      outputs: the differentiable outputs.
      counts: by input, how many terms of its gradient may leave one by one.
      term_by_term: by output, whether terms of its gradient arrive one by one: the function itself reads it, too.
      held: the other tensors that a replay must be given again.
      ungated: the places of those that it reads as they are.
      is_eager: whether it ran outside a graph. Its gradient may be taken inside one all the same (``tape.jacobian``).
      operations: what the run added to its graph, if there is one.
      read: what the gate of the replay must depend on, for equal bits.
      needed: the outputs that the plain step needs until the backward pass, and this one does not.
    """

    function: Replayable
    inputs: Tensors
    weights: Tensors
    wanted: list[bool]
    variables: list[int] = field(default_factory=list)
    outputs: list[tf.Tensor] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    term_by_term: list[bool] = field(default_factory=list)
    held: list[tf.Tensor] = field(default_factory=list)
    ungated: frozenset[int] = frozenset()
    is_eager: bool = False
    operations: tuple[tf.Operation, ...] = ()
    read: tuple[tf.Tensor, ...] = ()
    needed: tuple[tf.Tensor, ...] = ()

    @property
    def arguments(self) -> list[tf.Tensor]:
        """Inputs and weights."""
        return [*self.inputs, *self.weights]

    @property
    def places(self) -> list[tf.Tensor]:
        """Inputs and weights, each as often as terms of its gradient may leave one by one."""
        repeated = (itertools.repeat(*each) for each in zip(self.inputs, self.counts, strict=True))
        return [*itertools.chain.from_iterable(repeated), *self.weights]

    @property
    def summed(self) -> list[bool]:
        """By weight, whether its gradient is added to others: the variable is read several times, or elsewhere, too.

        The graph is asked, too: another call of the network, or a penalty, is not of this forward pass.
        """
        reads = Counter(self.variables)
        return [
            reads[each] > 1 or self.function.is_read_elsewhere(each) or _has_other_reads(weight)
            for each, weight in zip(self.variables, self.weights, strict=True)
        ]

    def arriving(self, place: int, total: tf.Tensor, terms: Sequence[tf.Tensor] | None) -> Sequence[tf.Tensor]:
        """Return the gradient that has arrived for an output: in terms, where the function adds others to them."""
        return terms if terms and self.term_by_term[place] else (total,)

    def run(self, shared: Shared) -> None:
        """Run the function, and note what it returns and adds to the graph."""
        one_by_one = shared.parity.terms_one_by_one
        if tf.executing_eagerly():
            self.is_eager = True
            self.outputs = self.function.first_run(self.inputs, self.weights)
            self.held = self.function.held()
            others = self._read_by_others(shared)
            self.counts = [_EAGER_TERMS if each else 1 for each in others]
            self.term_by_term = [one_by_one] * len(self.outputs)
            return
        graph = tf.compat.v1.get_default_graph()
        start = graph.num_operations()
        # Who makes a tensor may read it, too: the position bias of a T5, which its first layer makes and adds.
        read_before = [one_by_one and bool(readers_of(tensor)) for tensor in self.inputs]
        self.outputs = self.function.first_run(self.inputs, self.weights)
        self.held = self.function.held()
        others = [*map(operator.or_, read_before, self._read_by_others(shared))]
        self.operations = tuple(graph.get_operations()[start:])
        reads = Counter(id(tensor) for operation in self.operations for tensor in operation.inputs)
        self.counts = [
            max(1, reads[id(tensor)]) if each else 1 for tensor, each in zip(self.inputs, others, strict=True)
        ]
        reading = (each for each in self.operations if not is_extra(each) and not hands_on(each))
        # A segment inside reads what another one has passed on.
        read_here = {id(made_as(tensor)) for each in reading for tensor in each.inputs}
        self.term_by_term = [one_by_one and id(made_as(tensor)) in read_here for tensor in self.outputs]
        self.ungated = frozenset(p for p, t in enumerate(self.held) if tf.is_symbolic_tensor(t) and is_of_shapes(t))
        sources = itertools.compress(self.arguments, self.wanted)
        self.read, self.needed = shared.parity.read_in_first_run(
            self.operations, sources, self.outputs, self.function.forward_first, shared.gates
        )

    def _read_by_others(self, shared: Shared) -> list[bool]:
        """Return, by input, whether others read it, too, so that the terms of its gradient leave one by one."""
        return [
            shared.parity.terms_one_by_one
            and (self.function.is_input_of_others(place) or id(tensor) in shared.read_by_makers)
            for place, tensor in enumerate(self.inputs)
        ]

    def add_reads(self, again: Sequence[tuple[int, tf.Tensor]]) -> None:
        """Put further reads of variables (``Replayable.read_again``) in front of the weights.

        The last one is the first: so it is the first to send its gradient back.
        """
        self.variables = [*(place for place, _ in reversed(again)), *range(len(self.weights))]
        self.weights = [*(tensor for _, tensor in reversed(again)), *self.weights]
        self.wanted = followed(self.arguments)


def _has_other_reads(weight: tf.Tensor) -> bool:
    """Whether gradients come from other reads of the variable that a weight was read from, too."""
    read = weight.op
    if read.type != "ReadVariableOp":
        return False
    others = (each for each in read.inputs[0].consumers() if each.type == read.type and each is not read)
    return any(map(is_differentiated, others))
