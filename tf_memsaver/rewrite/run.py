"""One run of a recompute segment: a pure function of tensors, and the side effects that it must have once.

The segment's float inputs and trained weights are arguments. Its state (BatchNorm statistics, dropout seeds, every
variable that is not trained), integer inputs and masks are read once and held. It runs inside a scope that catches
updates and losses; they are applied once, after the first run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tf_memsaver.compat import keras_calls, keras_variables
from tf_memsaver.compat.keras_variables import RecordingScope
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.parity.names import Names, plain_name
from tf_memsaver.rewrite.blocks import Block
from tf_memsaver.rewrite.entering import Entering, Variables, is_differentiable, mask_of
from tf_memsaver.runtime.replayable import Shared, Tensors

Runner = Callable[[list[Any], bool | None, Shared], None]
"""Runs on the tensors in slots and puts the outputs there, dropping what no later call reads; and ``training``."""


class UnlistedVariablesError(Exception):
    """A segment's layers have read trained variables that they do not list: they must be arguments of its run."""

    def __init__(self, variables: list[Any]) -> None:
        """Make an error that carries the variables."""
        super().__init__(variables)
        self.variables = variables


@dataclass(frozen=True, slots=True, kw_only=True)
class _Effects:
    """What a first run is to have done once: fill other slots than the differentiable ones, with masks, and update."""

    others: tuple[tuple[int, Any], ...]
    masks: tuple[tuple[int, Any], ...]
    updates: tuple[tuple[Any, Any], ...]
    loss_owners: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a segment runs first: a replay comes when the model's call is over, and maybe in another graph."""

    training: bool | None
    environment: Any
    graph: Any
    scope: str
    slot_count: int

    @classmethod
    def here(cls, training: bool | None, slot_count: int) -> _Place:
        return cls(
            training=training,
            environment=keras_calls.current_environment(training),
            graph=None if tf.executing_eagerly() else tf.compat.v1.get_default_graph(),
            scope=tf.get_current_name_scope(),
            slot_count=slot_count,
        )


class Run:
    """One run of a recompute segment: a ``runtime.replayable.Replayable``, whose arguments are inputs and weights."""

    def __init__(
        self,
        block: Block,
        inside: Runner,
        slots: Sequence[Any],
        training: bool | None,
        variables: Sequence[Any],
        shared: Shared,
    ) -> None:
        """Prepare to run ``inside``, what the segment consists of, with the ``variables`` that its layers read."""
        self._block, self._inside, self._shared = block, inside, shared
        self._variables = Variables.of(variables)
        self._names = shared.names.first_run()
        self._place = _Place.here(training, len(slots))
        _refuse_composites(block, slots)
        self._entering = Entering.of(block, slots)
        self.inputs = [slots[slot] for slot in self._entering.floats]
        trained = [keras_variables.read_variable(v) for v in self._variables.trained]
        self.weights = [*trained, *(slots[slot] for slot in self._entering.weights)]
        masks = [keras_calls.get_keras_mask(slots[slot]) for slot in self._entering.masked]
        self._held = [*(slots[slot] for slot in self._entering.others), *masks]
        self._float_outputs: tuple[int, ...] = ()
        self._handed_on: frozenset[int] = frozenset()
        self._effects: _Effects | None = None

    # runtime.replayable.Replayable --------------------------------------------------------------------------------

    @property
    def forward_first(self) -> bool | None:
        """Whether the plain step's forward pass sorts before its backward pass, by name."""
        return self._block.gradients.forward_first

    def gradient_name(self, place: int) -> str:
        """Return how the plain step names the gradient of an output."""
        return "loss" if self.is_loss(place) else self._block.gradients.names[self._float_outputs[place]]

    def is_loss(self, place: int) -> bool:
        """Return whether an output is a loss that a layer has added: these follow the slots' tensors."""
        return place >= len(self._float_outputs)

    def may_be_term(self, place: int) -> bool:
        """Return whether an output may be a term of a sum after the segment."""
        return self.is_loss(place) or self._float_outputs[place] in self._block.gradients.terms

    def is_one_of_several(self, place: int) -> bool:
        """Return whether a sum or product after the segment may read an output and another one."""
        return not self.is_loss(place) and self._float_outputs[place] in self._block.gradients.several

    def is_input_of_others(self, place: int) -> bool:
        """Return, after ``first_run``, whether others read an input, too: as what the segment hands on, for one."""
        return self._entering.floats[place] in self._block.read_elsewhere or place in self._handed_on

    def first_run(self, inputs: Tensors, weights: Tensors) -> list[tf.Tensor]:
        """Run and return the differentiable outputs, then the losses.

        Raises:
          UnlistedVariablesError: trained variables were read that are no arguments.
        """
        given = [*zip(self._variables.trained, weights, strict=False), *self._variables.state]
        slots, scope = self._run(inputs, weights, self._held, given, self._names)
        if scope.unlisted:
            raise UnlistedVariablesError(scope.unlisted)
        self._hold(scope)
        _refuse_composites(self._block, slots)
        made = [(slot, slots[slot]) for slot in self._block.outputs]
        assigned = self._block.assigned
        # What a call hands on as it is, as the way into a network does, gets its gradients where it was made.
        entered = {id(tensor) for tensor in (*inputs, *weights)}
        self._float_outputs = tuple(
            slot for slot, t in made if slot not in assigned and id(t) not in entered and is_differentiable(t)
        )
        handed_on = {id(tensor) for _, tensor in made}
        self._handed_on = frozenset(place for place, tensor in enumerate(inputs) if id(tensor) in handed_on)
        losses = scope.losses_added()
        self._effects = _Effects(
            others=tuple((slot, tensor) for slot, tensor in made if slot not in self._float_outputs),
            masks=tuple((slot, mask) for slot, tensor in made if (mask := mask_of(tensor)) is not None),
            updates=tuple(scope.updates()),
            loss_owners=tuple(owner for owner, _ in losses),
        )
        return [slots[slot] for slot in self._float_outputs] + [loss for _, loss in losses]

    def _hold(self, scope: RecordingScope) -> None:
        """Hold the values of the state that was read, for a replay."""
        trained = self._variables.trained
        ids = {id(v) for v in trained}
        state = [(v, tensor) for v, tensor in scope.mapping() if id(v) not in ids]
        self._held = [*self._held, *(tensor for _, tensor in state)]
        self._variables = replace(
            self._variables,
            held=tuple(v for v, _ in state),
            read_again=tuple(place for place, v in enumerate(trained) for _ in range(scope.times_read(v) - 1)),
        )

    def read_again(self) -> list[tuple[int, tf.Tensor]]:
        """Return a tensor for every further read of a trained variable, with its place."""
        trained = self._variables.trained
        return [(place, keras_variables.read_variable(trained[place])) for place in self._variables.read_again]

    def is_read_elsewhere(self, place: int) -> bool:
        """Return whether the variable of a weight, or the slot, is read outside the segment, too."""
        trained = self._variables.trained
        if place < len(trained):
            return id(trained[place]) not in self._block.own_variables
        return self._entering.weights[place - len(trained)] not in self._block.own_weights

    def held(self) -> list[tf.Tensor]:
        """Return the tensors, masks and values of state that a replay must be given again."""
        return self._held

    def replay(self, inputs: Tensors, weights: Tensors, held: Tensors) -> list[tf.Tensor]:
        """Run again, under the names of the plain step, and return the same outputs."""
        variables = self._variables
        fixed, again = len(held) - len(variables.held), len(variables.read_again)
        given = [
            *zip(variables.trained, weights[again:], strict=False),
            *zip((variables.trained[p] for p in variables.read_again), reversed(weights[:again]), strict=True),
            *zip(variables.held, held[fixed:], strict=True),
        ]
        # What is differentiated, the replay, takes the names of the plain step, and the first run other ones.
        scope = plain_name(self._place.scope, self._place.graph, self.forward_first)
        names = self._names.replay(scope.rstrip("/"))
        with tf.name_scope(scope):
            slots, recorded = self._run(inputs, weights[again:], held[:fixed], given, names)
        return [slots[slot] for slot in self._float_outputs] + [loss for _, loss in recorded.losses_added()]

    def _run(
        self, inputs: Tensors, weights: Tensors, held: Tensors, given: list[tuple[Any, Any]], names: Names
    ) -> tuple[list[Any], RecordingScope]:
        of_slots = weights[len(self._variables.trained) :]
        slots = self._entering.filled(self._place.slot_count, inputs, of_slots, held)
        scope = RecordingScope(given)
        with scope, keras_calls.call_environment(self._place.environment):
            self._inside(slots, self._place.training, replace(self._shared, names=names))
        return slots, scope

    # Once, after the first run ------------------------------------------------------------------------------------

    def publish(self, outputs: Sequence[tf.Tensor], slots: list[Any]) -> None:
        """Put the outputs into ``slots``, and apply the updates and losses of the first run."""
        effects, self._effects = self._effects, None
        assert effects is not None, "a first run is published once"
        for slot, tensor in zip(self._float_outputs, outputs, strict=False):
            slots[slot] = tensor
        for slot, tensor in effects.others:
            slots[slot] = tensor
        for slot, mask in effects.masks:
            keras_calls.set_keras_mask(slots[slot], mask)
        outer = keras_variables.recording_scope()
        for owner, loss in zip(effects.loss_owners, outputs[len(self._float_outputs) :], strict=True):
            if outer is not None:
                outer.operation = owner
            owner.add_loss(loss)
        for variable, value in effects.updates:
            variable.assign(value)


def _refuse_composites(block: Block, slots: Sequence[Any]) -> None:
    """Check that neither what enters a segment nor what leaves it is ragged or sparse.

    Raises:
      UnsupportedModelError: the gradient of such a tensor would be lost.
    """
    for call, _ in block.calls:
        for slot in {*call.inputs, *call.outputs}.intersection((*block.inputs, *block.outputs)):
            if slots[slot] is not None and not isinstance(slots[slot], (tf.Tensor, tf.Variable)):
                raise UnsupportedModelError(
                    f"layer '{call.label}' makes or reads a ragged or sparse tensor, which cannot enter or leave a "
                    "recomputed segment. Make a new plan with tf_memsaver.search_plan, or name the layer in keep=."
                )
