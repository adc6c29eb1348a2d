"""Trace one real training step, unit by unit, into a FuncGraph.

Every call is recorded on a tape of its own, and the backward pass runs over the calls in reverse: so each
backward operation is known to belong to its call, and the operations each call adds are found by counting, never by
parsing names. Tracing allocates no activations, so a model far too large to run can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_memsaver.capture.notes import CallNotes, SparseGradients, complete_shape
from tf_memsaver.capture.step import MODEL_SCOPE, CalledStep, TracedStep, units_of_code
from tf_memsaver.compat.gradients import summed
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.ir.graph import Phase
from tf_memsaver.pace import counted
from tf_memsaver.parity.names import Names
from tf_memsaver.program.losses import no_gradient
from tf_memsaver.tfgraph.operations import has_gradients


def trace_step(source: CalledStep, graph: Any) -> TracedStep:
    """Trace, in a graph, forward, loss, backward and, where there is an optimizer, its update.

    Raises:
      UnsupportedModelError: nothing can be trained.
    """
    if not source.weights:
        raise UnsupportedModelError(
            f"'{source.name}' has no trainable weights, so a training step keeps no activations. Set trainable=True "
            "on the layers that you want to train."
        )
    step = TracedStep(graph=graph, code=units_of_code(source.sequence))
    with graph.as_default():
        _Tracer(source, step).run()
    return step


class _Tracer:
    def __init__(self, source: CalledStep, step: TracedStep) -> None:
        self._source, self._sequence, self._step = source, source.sequence, step
        self._trained = {id(weight.variable): weight for weight in source.weights}
        self._gradients: dict[int, list[Any]] = {}
        self._weight_gradients: dict[int, list[Any]] = {}
        self._sparse = SparseGradients()
        self._slots: list[Any] = [None] * self._sequence.slot_count
        self._needs_gradient = [False] * self._sequence.slot_count

    def run(self) -> None:
        # A scope stands for the model's: below it the names of layers may begin as they do not at the root.
        with tf.name_scope(MODEL_SCOPE):
            entry = self._enter()
            tapes = self._forward()
        loss_tape, sources, scaled = self._loss()
        self._mark(Phase.FORWARD, None)
        self._backward_of(loss_tape, [scaled], [tf.ones_like(scaled)], sources, None)
        self._mark(Phase.BACKWARD, None)
        weights = self._first_readers()
        for unit in counted("backward pass", range(len(tapes))[::-1]):
            tape, outputs, inputs = tapes[unit]
            self._backward_of(tape, outputs, [self._take(t) for t in outputs], inputs, unit)
            self._backward_of_weights(entry, [self._slots[slot] for slot in weights.get(unit, ())])
            self._mark(Phase.BACKWARD, unit)
        self._step.sparse_units = self._sparse.summed()
        gradients = self._sum_weight_gradients()
        if not gradients:
            raise no_gradient(self._source.name)
        self._mark(Phase.BACKWARD, None)
        self._update(gradients)
        self._mark(Phase.UPDATE, None)

    def _first_readers(self) -> dict[int, list[int]]:
        """Return, by unit, the slots made of weights that no unit before it reads: there their gradients are all in."""
        first: dict[int, int] = {}
        for unit, call in enumerate(self._sequence.calls):
            for slot in self._sequence.weights.intersection(call.inputs):
                first.setdefault(slot, unit)
        by_unit: dict[int, list[int]] = {}
        for slot in sorted(first):
            by_unit.setdefault(first[slot], []).append(slot)
        return by_unit

    def _placeholders(self, specs: Sequence[tf.TensorSpec]) -> list[Any]:
        tensors = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs]
        self._step.inputs.extend(tensors)
        return tensors

    def _enter(self) -> Any:
        """Fill the slots that are there before the first call; return the tape that saw weights being read."""
        with tf.GradientTape(persistent=True) as tape:
            tensors = self._source.enter(self._placeholders)
        for slot, tensor in zip(self._sequence.inputs, tensors, strict=True):
            self._slots[slot] = tensor
            self._needs_gradient[slot] = slot in self._sequence.weights
        handles = {id(self._step.graph.capture(v.handle)): v for v in tape.watched_variables()}
        reads = [each for each in self._step.graph.get_operations() if each.type == "ReadVariableOp"]
        self._read = {id(each.outputs[0]): handles.get(id(each.inputs[0])) for each in reads}
        self._mark(Phase.FORWARD, None)
        return tape

    def _mark(self, phase: Phase, unit: int | None) -> None:
        """Give all operations added since the last call to an owner."""
        added = self._step.graph.num_operations() - len(self._step.owners)
        self._step.owners.extend([(phase, unit)] * added)

    def _forward(self) -> list[tuple[Any, list[Any], list[Any]]]:
        self._loss_tensors: list[Any] = []
        tapes = []
        names = Names.of_model()
        known = {*self._trained, *(id(variable) for _, variable, _ in self._source.residents())}
        notes = CallNotes(self._step, known, [call.operation for call in self._sequence.calls])
        known_tensors = {id(tensor) for tensor in self._slots}
        for unit, call in enumerate(counted("forward pass", self._sequence.calls)):
            differentiable = [self._slots[i] for i in call.inputs if self._needs_gradient[i]]
            with tf.GradientTape() as tape:
                tape.watch(differentiable)
                made = call.run(self._slots, training=True, names=names)
            added = [
                t for t in self._source.losses_of(call.operation) if all(t is not seen for seen in self._loss_tensors)
            ]
            self._loss_tensors.extend(added)
            read = tape.watched_variables()
            notes.note(unit, read)
            trains = any(id(v) in self._trained for v in read)
            floats = [t for t in made if isinstance(t, tf.Tensor) and has_gradients(t.dtype)]
            # What a call hands on as it is, as the ways into a network and out of it do, gets its gradient where it was
            # made.
            ends = [t for t in floats if id(t) not in known_tensors]
            for slot, tensor in zip(call.outputs, made, strict=True):
                complete_shape(tensor, self._sequence.shapes.get(slot), self._step)
                self._slots[slot] = tensor
                self._needs_gradient[slot] = (bool(differentiable) or trains) and any(tensor is t for t in floats)
            ends += [t for end in ends for t in self._source.seen_through(end)]
            known_tensors.update(map(id, (*floats, *ends)))
            ends += added
            tapes.append((tape, ends if differentiable or trains else [], differentiable))
            self._step.boundary.append([*made, *added])
            self._mark(Phase.FORWARD, unit)
        return tapes

    def _loss(self) -> tuple[Any, list[Any], Any]:
        flat = [self._slots[slot] for slot in self._sequence.outputs]
        sources = [t for t in [*flat, *self._loss_tensors] if isinstance(t, tf.Tensor) and has_gradients(t.dtype)]
        sources += [seen for output in flat for seen in self._source.seen_through(output)]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            self._step.loss = self._source.loss(flat)
            scaled = self._step.loss
            if self._source.optimizer is not None:
                scaled = self._source.optimizer.scale_loss(scaled)
        # They need nothing but the results, so TensorFlow works them out when these are there.
        self._source.metrics(flat)
        return tape, sources, scaled

    def _take(self, tensor: Any) -> Any | None:
        """Return the summed gradient that has arrived for a tensor, as ``tape.gradient`` would sum it."""
        arrived = self._gradients.pop(id(tensor), None)
        if not arrived:
            return None
        return summed(arrived)

    def _backward_of(
        self, tape: Any, outputs: list[Any], upstream: list[Any], inputs: list[Any], unit: int | None
    ) -> None:
        reached = [(t, g) for t, g in zip(outputs, upstream, strict=True) if g is not None]
        if reached:
            variables = [v for v in tape.watched_variables() if id(v) in self._trained]
            sources = [*inputs, *variables]
            gradients = tape.gradient([t for t, _ in reached], sources, output_gradients=[g for _, g in reached])
            for source, gradient in zip(sources, gradients, strict=True):
                if gradient is None:
                    continue
                is_sparse, trained = isinstance(gradient, tf.IndexedSlices), self._trained.get(id(source))
                if trained is not None:
                    self._sparse.add(trained.path, unit, is_sparse, trained.variable)
                elif id(source) in self._read:
                    self._sparse.add(source.name, unit, is_sparse)
                elif is_sparse:
                    self._sparse.leaves(source.name, unit)
                if id(source) in self._trained:
                    self._weight_gradients.setdefault(id(source), []).append(gradient)
                else:
                    self._gradients.setdefault(id(source), []).append(gradient)
                    self._step.gradient_units.setdefault(id(source), []).append(unit)

    def _backward_of_weights(self, entry: Any, made: list[Any]) -> None:
        """Pass the gradients of what is made of weights on to the weights; those of a mere read stay sparse.

        No replay does this: what is made of weights alone is made in front of all segments.
        """
        arrived = [self._take(tensor) for tensor in made]
        for place, (tensor, gradient) in enumerate(zip(made, arrived, strict=True)):
            variable = self._read.get(id(tensor))
            if isinstance(gradient, tf.IndexedSlices) and variable is not None:
                self._weight_gradients.setdefault(id(variable), []).append(gradient)
                arrived[place] = None
        self._backward_of(entry, made, arrived, [], None)

    def _sum_weight_gradients(self) -> list[tuple[Any, Any]]:
        pairs = []
        for key, weight in self._trained.items():
            arrived = self._weight_gradients.get(key)
            if arrived:
                pairs.append((summed(arrived), weight.owner))
        for gradient, _ in pairs:
            self._step.weight_gradients.append(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient)
        return pairs

    def _update(self, gradients: list[tuple[Any, Any]]) -> None:
        self._step.outputs = [self._step.loss]
        if self._source.optimizer is None:
            self._step.outputs += self._step.weight_gradients
        else:
            self._source.update(gradients)
