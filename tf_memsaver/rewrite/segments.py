"""Run a model's layer calls in the segments of a plan.

A recompute segment is a pure function of tensors: its float inputs and trainable weights are arguments, its state
(BatchNorm statistics, dropout seeds, every variable that is not trained), integer inputs and masks are read once and
held. It runs inside a scope that catches updates and losses; they are applied once, after the first run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import tensorflow as tf

from tf_memsaver.compat import keras_calls, keras_variables
from tf_memsaver.compat.keras_variables import RecordingScope
from tf_memsaver.errors import PlanMismatchError, UnsupportedModelError
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.parity.names import Names, plain_name
from tf_memsaver.program.calls import ACTIVATIONS, ASSIGNMENTS, Call, CallSequence, Reader
from tf_memsaver.program.program import Segmenter
from tf_memsaver.runtime.recompute import Shared, Tensors, recompute

_SMALL = 64
"""Elements of an integer tensor, such as a seed."""


class SegmentedForward:
    """The forward pass of a model in segments: flat inputs in, flat outputs out."""

    def __init__(self, sequence: CallSequence, segments: Sequence[Segment]) -> None:
        """Prepare the segments.

        Raises:
          PlanMismatchError: a recompute segment holds a layer call that makes an output of the model.
        """
        self._sequence = sequence
        readers = _Readers.of(sequence)
        self._blocks = tuple(_Block.build(sequence, segment, readers) for segment in segments)

    def __call__(self, inputs: Sequence[Any], training: bool | None, shared: Shared | None = None) -> list[Any]:
        """Return the flat outputs for flat, standardized inputs; ``shared`` if these are part of a larger model.

        Names are those of the scope that it is called in.
        """
        slots: list[Any] = [None] * self._sequence.slot_count
        for slot, tensor in zip(self._sequence.inputs, inputs, strict=True):
            slots[slot] = _of_graph(tensor)
        shared = replace(shared, names=Names.of_model()) if shared else Shared()
        for block in self._blocks:
            block.run(slots, training, shared)
        return [slots[slot] for slot in self._sequence.outputs]


IN_SEGMENTS = Segmenter(prepare=SegmentedForward, begin=Shared)
"""What programs are handed to be run by a plan."""


def _of_graph(tensor: Any) -> Any:
    """Return the tensor by which the graph that is being traced, if any, reads what may be an eager tensor.

    Gradients of variables go to their handles, which stay as they are.
    """
    if (
        tf.executing_eagerly()
        or not tf.is_tensor(tensor)
        or tf.is_symbolic_tensor(tensor)
        or tensor.dtype == tf.resource
    ):
        return tensor
    return tf.compat.v1.get_default_graph().capture(tensor)


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

    def behind(self, position: int, slot: int) -> list[tuple[int, Reader]]:
        """Return what reads a slot from behind a position, each with the index of its call."""
        return [(index, reader) for index, reader in self.of_slot.get(slot, ()) if index >= position]

    def are_all(self, kinds: Collection[str], position: int, slot: int) -> bool:
        """Return whether all that reads a slot from behind a position is of some kinds."""
        found = self.behind(position, slot)
        return bool(found) and self.last[slot] == found[-1][0] and all(reader.kind in kinds for _, reader in found)

    def are_within(self, segment: Segment, slot: int) -> bool:
        """Return whether nothing outside a segment reads a slot."""
        return all(segment.start <= index < segment.stop for index, _ in self.of_slot.get(slot, ()))

    def gradient_name(self, slot: int, position: int, forward_first: bool | None) -> str:
        """Return the name, in the plain step, of the gradient that arrives for a slot from behind a position."""
        found = self.behind(position, slot)
        if len(found) != 1:
            return "AddN" if forward_first is None else "gradients/AddN"
        reader = found[0][1]
        if reader.passes_to is not None:
            return self.gradient_name(reader.passes_to, position, forward_first)
        return re.sub(r"[^\w./-]", "_", f"gradients/{reader.name}_grad", flags=re.ASCII)


def _variables(call: Call) -> Sequence[Any]:
    return getattr(call.operation, "variables", ())


@dataclass(slots=True)
class _Block:
    """A segment with what it reads and makes.

    ``variables`` grows when a run meets one that its layers do not list; ``own_variables`` (ids) are those that no
    other call lists, and ``own_weights`` the slots of weights that nothing else gets a gradient for.
    """

    segment: Segment
    calls: tuple[tuple[Call, tuple[int, ...]], ...]
    children: tuple[_Block, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    passed_on: tuple[int, ...]
    spent: tuple[int, ...]
    weights: frozenset[int]
    own_weights: frozenset[int]
    resident: frozenset[int]
    forward_first: bool | None
    gradient_names: dict[int, str]
    terms: frozenset[int]
    updates: frozenset[int]
    variables: list[Any] = field(default_factory=list)
    own_variables: frozenset[int] = frozenset()

    @classmethod
    def build(cls, sequence: CallSequence, segment: Segment, readers: _Readers) -> _Block:
        calls = sequence.calls[segment.start : segment.stop]
        made = {slot for call in calls for slot in call.outputs}
        read = dict.fromkeys(slot for call in calls for slot in call.inputs if slot not in made)
        kept = tuple(slot for call in calls for slot in call.outputs if readers.last[slot] >= segment.stop)
        if segment.mode is SegmentMode.RECOMPUTE:
            for call in calls:
                if set(call.outputs) & set(sequence.outputs):
                    raise PlanMismatchError(
                        f"it replays '{call.label}', which makes an output of this model and must stay in a store "
                        f"segment"
                    )
        ends = [
            tuple(slot for slot in {*call.inputs, *call.outputs} if readers.last[slot] <= index)
            for index, call in enumerate(calls, segment.start)
        ]
        # What is read here and behind is passed on, so that its gradient is one sum: see capture.cuts.
        fixed = sequence.resident.union(sequence.outputs)
        passed_on = tuple(slot for slot in read if readers.last[slot] >= segment.stop and slot not in fixed)
        left = (*kept, *passed_on)
        block = cls(
            segment=segment,
            calls=tuple(zip(calls, ends, strict=True)),
            children=tuple(cls.build(sequence, child, readers) for child in segment.children),
            inputs=tuple(read),
            outputs=left,
            passed_on=passed_on,
            spent=tuple(slot for slot in read if readers.last[slot] < segment.stop),
            weights=sequence.weights,
            own_weights=frozenset(
                slot
                for slot in sequence.weights.intersection(read) - sequence.read_again
                if readers.are_within(segment, slot)
            ),
            resident=sequence.resident - sequence.weights,
            forward_first=sequence.forward_first,
            gradient_names={slot: readers.gradient_name(slot, segment.stop, sequence.forward_first) for slot in left},
            terms=frozenset(left) - {slot for slot in left if readers.are_all(ACTIVATIONS, segment.stop, slot)},
            updates=frozenset(slot for slot in left if readers.are_all(ASSIGNMENTS, segment.stop, slot)),
        )
        block.variables = list({id(v): v for call in calls for v in _variables(call)}.values())
        block.own_variables = frozenset(id(v) for v in block.variables if readers.of_variable[id(v)] == 1)
        return block

    def run(self, slots: list[Any], training: bool | None, shared: Shared) -> None:
        """Run on the tensors in ``slots`` and put the outputs there, dropping what no later call reads."""
        if self.segment.mode is SegmentMode.STORE:
            self.run_calls(slots, training, shared.names)
        else:
            while not self._run_recomputed(slots, training, shared):
                pass

    def run_calls(self, slots: list[Any], training: bool | None, names: Names) -> None:
        """Run the calls one by one; trained as they stand, or inside an enclosing segment's replay."""
        scope = keras_variables.recording_scope()
        for call, ends in self.calls:
            if scope is not None:
                scope.operation = call.operation
            for slot, tensor in zip(call.outputs, call.run(slots, training, names), strict=True):
                slots[slot] = tensor
            for slot in ends:
                slots[slot] = None

    def run_inside(self, slots: list[Any], training: bool | None, shared: Shared) -> None:
        """Run what the segment consists of: its children, or its calls."""
        if not self.children:
            self.run_calls(slots, training, shared.names)
        for child in self.children:
            child.run(slots, training, shared)

    def _run_recomputed(self, slots: list[Any], training: bool | None, shared: Shared) -> bool:
        """Run as a recompute segment; return False when variables were found that were not listed."""
        # Layers may be frozen and unfrozen between runs, so what is trained is asked anew.
        weights = [v for v in self.variables if keras_variables.is_trained(v)]
        state = [(v, keras_variables.read_variable(v)) for v in self.variables if not keras_variables.is_trained(v)]
        run = _Run(self, slots, training, weights, state, shared)
        try:
            outputs = recompute(run, run.differentiable, run.uncopied, shared)
        except _UnlistedVariablesError as found:
            self.variables.extend(found.variables)
            return False
        for slot in self.spent:
            slots[slot] = None
        run.publish(outputs, slots)
        return True


class _UnlistedVariablesError(Exception):
    def __init__(self, variables: list[Any]) -> None:
        super().__init__(variables)
        self.variables = variables


class _Run:
    """One run of a recompute block: a ``runtime.Replayable`` and the side effects that it must have once."""

    def __init__(
        self,
        block: _Block,
        slots: Sequence[Any],
        training: bool | None,
        weights: Sequence[Any],
        state: Sequence[tuple[Any, tf.Tensor]],
        shared: Shared,
    ) -> None:
        self._shared, self._names = shared, shared.names.first_run()
        self._block, self._training, self._weights, self._state = block, training, tuple(weights), tuple(state)
        self._environment = keras_calls.current_environment(training)
        self._slot_count = len(slots)
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._name_scope = tf.get_current_name_scope()
        _refuse_composites(block, slots)
        # Random numbers wait for the gate of a replay by their seeds.
        resident = {slot for slot in block.resident.intersection(block.inputs) if not _is_small_integer(slots[slot])}
        entering = [slot for slot in block.inputs if slot not in resident]
        floats = [slot for slot in entering if _is_differentiable(slots[slot])]
        self._weight_slots = tuple(slot for slot in floats if slot in block.weights)
        self._float_slots = tuple(slot for slot in floats if slot not in block.weights)
        self._other_slots = tuple(slot for slot in entering if slot not in floats)
        self._resident = {slot: slots[slot] for slot in block.inputs if slot in resident}
        self.differentiable = [slots[slot] for slot in self._float_slots]
        self.uncopied = [keras_variables.read_variable(v) for v in weights] + [slots[s] for s in self._weight_slots]
        masks = [(slot, keras_calls.get_keras_mask(slots[slot])) for slot in block.inputs if slots[slot] is not None]
        self._masked_slots = tuple(slot for slot, mask in masks if mask is not None)
        self._held = [slots[slot] for slot in self._other_slots] + [mask for _, mask in masks if mask is not None]
        self._held_variables: list[Any] = []
        self._read_again: list[int] = []
        self._float_outputs: tuple[int, ...] = ()
        self._others: list[tuple[int, Any]] = []
        self._masks: list[tuple[int, Any]] = []
        self._updates: list[tuple[Any, Any]] = []
        self._loss_owners: list[Any] = []

    @property
    def forward_first(self) -> bool | None:
        return self._block.forward_first

    def gradient_name(self, place: int) -> str:
        return "loss" if self.is_loss(place) else self._block.gradient_names[self._float_outputs[place]]

    def is_loss(self, place: int) -> bool:
        return place >= len(self._float_outputs)

    def may_be_term(self, place: int) -> bool:
        return self.is_loss(place) or self._float_outputs[place] in self._block.terms

    # runtime.Replayable -------------------------------------------------------------------------------------------

    def first_run(self, inputs: Tensors, weights: Tensors) -> list[tf.Tensor]:
        given = [*zip(self._weights, weights, strict=False), *self._state]
        slots, scope = self._run(inputs, weights, self._held, given, self._names)
        if scope.unlisted:
            raise _UnlistedVariablesError(scope.unlisted)
        self._read_again = [p for p, v in enumerate(self._weights) for _ in range(scope.times_read(v) - 1)]
        listed = {id(v) for v in self._weights}
        mapping = [(v, tensor) for v, tensor in scope.mapping() if id(v) not in listed]
        self._held_variables = [v for v, _ in mapping]
        self._held = [*self._held, *(tensor for _, tensor in mapping)]
        _refuse_composites(self._block, slots)
        made = [(slot, slots[slot]) for slot in self._block.outputs]
        updates = self._block.updates
        self._float_outputs = tuple(slot for slot, t in made if slot not in updates and _is_differentiable(t))
        self._others = [(slot, tensor) for slot, tensor in made if slot not in self._float_outputs]
        self._masks = [(slot, keras_calls.get_keras_mask(tensor)) for slot, tensor in made]
        self._updates = scope.updates()
        losses = scope.losses_added()
        self._loss_owners = [owner for owner, _ in losses]
        return [slots[slot] for slot in self._float_outputs] + [loss for _, loss in losses]

    def read_again(self) -> list[tuple[int, tf.Tensor]]:
        return [(place, keras_variables.read_variable(self._weights[place])) for place in self._read_again]

    def is_read_elsewhere(self, place: int) -> bool:
        if place < len(self._weights):
            return id(self._weights[place]) not in self._block.own_variables
        return self._weight_slots[place - len(self._weights)] not in self._block.own_weights

    def held(self) -> list[tf.Tensor]:
        return self._held

    def replay(self, inputs: Tensors, weights: Tensors, held: Tensors) -> list[tf.Tensor]:
        fixed = len(held) - len(self._held_variables)
        again = len(self._read_again)
        given = [
            *zip(self._weights, weights[again:], strict=False),
            *zip((self._weights[place] for place in self._read_again), reversed(weights[:again]), strict=True),
            *zip(self._held_variables, held[fixed:], strict=True),
        ]
        # What is differentiated, the replay, takes the names of the plain step, and the first run other ones.
        home = plain_name(self._name_scope, self._graph, self.forward_first)
        with tf.name_scope(home):
            slots, scope = self._run(inputs, weights[again:], held[:fixed], given, self._names.replay(home.rstrip("/")))
        return [slots[slot] for slot in self._float_outputs] + [loss for _, loss in scope.losses_added()]

    def _run(
        self, inputs: Tensors, weights: Tensors, held: Tensors, given: list[tuple[Any, Any]], names: Names
    ) -> tuple[list[Any], RecordingScope]:
        slots: list[Any] = [None] * self._slot_count
        for slot, tensor in self._resident.items():
            slots[slot] = tensor
        for slot, tensor in zip(self._weight_slots, weights[len(self._weights) :], strict=True):
            slots[slot] = tensor
        for slot, tensor in zip(self._float_slots, inputs, strict=True):
            slots[slot] = tensor
        for slot, tensor in zip(self._other_slots, held, strict=False):
            slots[slot] = tensor
        for slot, mask in zip(self._masked_slots, held[len(self._other_slots) :], strict=True):
            keras_calls.set_keras_mask(slots[slot], mask)
        scope = RecordingScope(given)
        with scope, keras_calls.call_environment(self._environment):
            self._block.run_inside(slots, self._training, replace(self._shared, names=names))
            for slot in self._block.passed_on:
                slots[slot] = _passed_on(slots[slot])
        return slots, scope

    # Once, after the first run ------------------------------------------------------------------------------------

    def publish(self, outputs: Sequence[tf.Tensor], slots: list[Any]) -> None:
        """Put the outputs into ``slots``, and apply the updates and losses of the first run."""
        for slot, tensor in zip(self._float_outputs, outputs, strict=False):
            slots[slot] = tensor
        for slot, tensor in self._others:
            slots[slot] = tensor
        for slot, mask in self._masks:
            if mask is not None:
                keras_calls.set_keras_mask(slots[slot], mask)
        outer = keras_variables.recording_scope()
        for owner, loss in zip(self._loss_owners, outputs[len(self._float_outputs) :], strict=True):
            if outer is not None:
                outer.operation = owner
            owner.add_loss(loss)
        for variable, value in self._updates:
            variable.assign(value)
        self._others, self._masks, self._updates = [], [], []


def _passed_on(tensor: Any) -> Any:
    if not _is_differentiable(tensor):
        return tensor
    copy = tf.identity(tensor)
    mask = keras_calls.get_keras_mask(tensor)
    if mask is not None:
        keras_calls.set_keras_mask(copy, mask)
    return copy


def _refuse_composites(block: _Block, slots: Sequence[Any]) -> None:
    """Check that neither what enters a segment nor what leaves it is ragged or sparse.

    Raises:
      UnsupportedModelError: the gradient of such a tensor would be lost.
    """
    for call, _ in block.calls:
        for slot in {*call.inputs, *call.outputs}.intersection((*block.inputs, *block.outputs)):
            if slots[slot] is not None and not isinstance(slots[slot], (tf.Tensor, tf.Variable)):
                raise UnsupportedModelError(
                    f"layer '{call.label}' makes or reads a ragged or sparse tensor, which cannot cross the boundary "
                    f"of a recompute segment. Make a new plan with tf_memsaver.search_plan, or name the layer in keep=."
                )


def _is_differentiable(tensor: Any) -> bool:
    return isinstance(tensor, tf.Tensor) and (tensor.dtype.is_floating or tensor.dtype.is_complex)


def _is_small_integer(tensor: Any) -> bool:
    count = tensor.shape.num_elements() if isinstance(tensor, tf.Tensor) and tensor.dtype.is_integer else None
    return count is not None and count <= _SMALL
