"""Trace one real training step, unit by unit, into a FuncGraph.

Every call is recorded on a tape of its own, and the backward pass runs over the calls in reverse: so each
backward operation is known to belong to its call, and the operations each call adds are found by counting, never by
parsing names. Tracing allocates no activations, so a model far too large to run can be captured.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from tf_memsaver.compat.graphs import led_to
from tf_memsaver.compat.keras_models import all_layers
from tf_memsaver.compat.keras_variables import local_variable
from tf_memsaver.cost.rules import METADATA_READERS
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.ir.graph import CODE, MemoryKind, Phase
from tf_memsaver.pace import counted
from tf_memsaver.parity.names import Names
from tf_memsaver.program.calls import CallSequence
from tf_memsaver.program.losses import no_gradient
from tf_memsaver.program.train_step import Placeholders
from tf_memsaver.tfgraph.operations import has_gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """Something that is trained: ``variable`` is what a tape watches, ``owner`` what an optimizer takes.

    Under a tf.distribute strategy ``variable`` is that of the first replica.
    """

    path: str
    variable: tf.Variable
    owner: Any


Resident = tuple[str, tf.Variable, MemoryKind]
"""A variable that is live during the step, with its name and kind."""


def residents_of(parameters: Iterable[Any], slots: Iterable[Any]) -> list[Resident]:
    """Return the variables of models and of optimizers, each once: an optimizer lists those of its model, too."""
    # Those that an optimizer made itself may be of TensorFlow.
    pairs = [(v, MemoryKind.PARAMETER) for v in parameters] + [(v, MemoryKind.OPTIMIZER) for v in slots]
    found: dict[int, Resident] = {}
    for each, kind in pairs:
        variable = local_variable(each)
        found.setdefault(id(variable), (getattr(each, "path", each.name), variable, kind))
    return list(found.values())


class StepSource(Protocol):
    """What a Graph is made of: a training step that can be traced."""

    @property
    def name(self) -> str:
        """What errors and plans call it."""
        ...

    @property
    def sequence(self) -> CallSequence:
        """The calls, one unit each."""
        ...

    def residents(self) -> Sequence[Resident]:
        """Return all variables that are live during the step."""
        ...

    def trace(self, graph: Any) -> TracedStep:
        """Return the step, traced in a graph.

        Raises:
          UnsupportedModelError: nothing can be trained.
        """
        ...

    def close(self) -> None:
        """Forget what tracing left behind; called once the graph is no longer needed."""
        ...


class CalledStep(StepSource, Protocol):
    """A step that is put together of one call of a model: ``model_step`` and ``function_step`` have one each."""

    @property
    def optimizer(self) -> Any | None:
        """A built Keras optimizer, if the step has an update."""
        ...

    def update(self, gradients: list[tuple[Any, Any]]) -> None:
        """Update the weights: pairs of a gradient and the owner of a weight."""
        ...

    @property
    def weights(self) -> Sequence[Weight]:
        """What is trained."""
        ...

    def enter(self, placeholders: Placeholders) -> list[Any]:
        """Make the batch; return the tensors for ``sequence.inputs``."""
        ...

    def loss(self, outputs: list[Any]) -> Any:
        """Return the scalar loss for the tensors of ``sequence.outputs``."""
        ...

    def metrics(self, outputs: list[Any]) -> None:
        """Add what a step does with its results beside the loss."""
        ...

    def losses_of(self, operation: Any) -> list[Any]:
        """Return the losses that a call's operation has added."""
        ...

    def seen_through(self, output: Any) -> list[Any]:
        """Return the tensors that the loss may take instead of an output."""
        ...


def units_of_code(sequence: CallSequence) -> set[int]:
    """Return the units that are code of the user's, which no segment replays."""
    return {unit for unit, call in enumerate(sequence.calls) if call.kind == CODE}


@dataclass(kw_only=True)
class TracedStep:
    """The traced graph and, beside it, who made which operation.

    ``owners[i]`` is the (phase, unit) of operation ``i``; ``boundary[u]`` are the tensors that call ``u`` made;
    ``sparse_units`` are, by unit, the names of what it has a sparse gradient (IndexedSlices) for that is a term of a
    sum; ``drawing_units`` are the calls that drew from Python's or NumPy's random numbers; ``unknown_reads`` are, by
    unit, the names of the trainable variables that a call reads and that the source does not list;
    ``gradient_units[id(t)]`` are the calls that send a gradient to the boundary tensor ``t`` (None is the loss).
    ``passes[i]`` is the number of the tape's pass in which operation ``i`` runs, where there are several.
    ``networks`` are the first and last unit (exclusive) of each call of a network, where there is code in between.
    ``code`` are the units that are code of the user's, which runs as it stands. ``elsewhere`` are the devices of other
    replicas: what runs there is no part of the step.
    """

    graph: Any
    owners: list[tuple[Phase, int | None]] = field(default_factory=list)
    boundary: list[list[Any]] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    loss: Any = None
    weight_gradients: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    sparse_units: dict[int, str] = field(default_factory=dict)
    drawing_units: set[int] = field(default_factory=set)
    unknown_reads: dict[int, str] = field(default_factory=dict)
    gradient_units: dict[int, list[int | None]] = field(default_factory=dict)
    networks: list[tuple[int, int]] = field(default_factory=list)
    code: set[int] = field(default_factory=set)
    passes: list[int] = field(default_factory=list)
    elsewhere: frozenset[str] = frozenset()

    @cached_property
    def reachable(self) -> set[int]:
        """The ids of the operations that something outside depends on: the outputs and every assignment.

        An optimizer that accumulates gradients assigns in a branch.
        """
        effects = [op for op in self.graph.get_operations() if op.type.startswith(("Assign", "Case", "If", "Resource"))]
        return led_to(
            [*(tensor.op for tensor in self.outputs), *(op for op in effects if op.device not in self.elsewhere)]
        )

    @cached_property
    def readers(self) -> dict[int, list[Any]]:
        """The reachable operations that read more of a tensor than its shape, by the tensor's id."""
        readers: dict[int, list[Any]] = {}
        for operation in self.graph.get_operations():
            if id(operation) in self.reachable and operation.type not in METADATA_READERS:
                for tensor in operation.inputs:
                    readers.setdefault(id(tensor), []).append(operation)
        return readers


class SparseGradients:
    """Finds the sparse gradients that are terms of sums, where the parts of a replay would come in another order."""

    def __init__(self) -> None:
        self._units: dict[tuple[str, int], dict[int | None, bool]] = {}

    def add(self, name: str, unit: int | None, is_sparse: bool, variable: Any = None) -> None:
        """Note that a unit (None: what is in no unit) has a gradient for what is called ``name``.

        Several variables may have one name.
        """
        units = self._units.setdefault((name, id(variable)), {})
        units[unit] = units.get(unit, False) or is_sparse

    def leaves(self, name: str, unit: int | None) -> None:
        """Note that the sparse gradient of a unit goes to what another one made, where it is a term of a sum."""
        self.add(name, unit, True)
        self.add(name, None, True)

    def summed(self) -> dict[int, str]:
        """Return, by unit, what it has a sparse gradient for, if others have a gradient for that, too."""
        return {
            unit: name
            for (name, _), units in self._units.items()
            for unit, sparse in units.items()
            if len(units) > 1 and sparse and unit is not None
        }


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
        with tf.name_scope("model"):
            entry = self._enter()
            tapes = self._forward()
        loss_tape, sources, scaled = self._loss()
        self._mark(Phase.FORWARD, None)
        self._backward_of(loss_tape, [scaled], [tf.ones_like(scaled)], sources, None)
        weights = self._first_readers()
        for unit in counted("backward pass", range(len(tapes))[::-1]):
            tape, outputs, inputs = tapes[unit]
            self._backward_of(tape, outputs, [self._take(t) for t in outputs], inputs, unit)
            self._backward_of_weights(entry, [self._slots[slot] for slot in weights.get(unit, ())], unit)
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
            # What a call hands on as it is, as the way into a network does, gets its gradient where it was made.
            ends = [t for t in floats if id(t) not in known_tensors]
            known_tensors.update(map(id, floats))
            for slot, tensor in zip(call.outputs, made, strict=True):
                complete_shape(tensor, self._sequence.shapes.get(slot), self._step)
                self._slots[slot] = tensor
                self._needs_gradient[slot] = (bool(differentiable) or trains) and any(tensor is t for t in floats)
            ends = [*ends, *(t for end in ends for t in self._source.seen_through(end)), *added]
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
        return arrived[0] if len(arrived) == 1 else tf.add_n([tf.convert_to_tensor(g) for g in arrived])

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
        self._mark(Phase.BACKWARD, unit)

    def _backward_of_weights(self, entry: Any, made: list[Any], unit: int) -> None:
        """Pass the gradients of what is made of weights on to the weights; those of a mere read stay sparse."""
        arrived = [self._take(tensor) for tensor in made]
        for place, (tensor, gradient) in enumerate(zip(made, arrived, strict=True)):
            variable = self._read.get(id(tensor))
            if isinstance(gradient, tf.IndexedSlices) and variable is not None:
                self._weight_gradients.setdefault(id(variable), []).append(gradient)
                arrived[place] = None
        self._backward_of(entry, made, arrived, [], unit)

    def _sum_weight_gradients(self) -> list[tuple[Any, Any]]:
        pairs = []
        for key, weight in self._trained.items():
            arrived = self._weight_gradients.get(key)
            if arrived:
                dense = len(arrived) > 1
                total = tf.add_n([tf.convert_to_tensor(g) for g in arrived]) if dense else arrived[0]
                pairs.append((total, weight.owner))
        for gradient, _ in pairs:
            self._step.weight_gradients.append(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient)
        return pairs

    def _update(self, gradients: list[tuple[Any, Any]]) -> None:
        self._step.outputs = [self._step.loss]
        if self._source.optimizer is None:
            self._step.outputs += self._step.weight_gradients
        else:
            self._source.update(gradients)


def complete_shape(tensor: Any, said: Sequence[int | None] | None, step: TracedStep) -> None:
    """Tell a tensor the shape that the model says it has, where tracing does not show it: after split text."""
    if said and isinstance(tensor, tf.Tensor) and not tensor.shape.is_fully_defined():
        # Of several sizes nobody knows which is meant: a batch of graphs has as many nodes and edges as there are.
        sizes = {given.shape[0] for given in step.inputs if given.shape.rank}
        shape = (sizes.pop() if said[0] is None and len(sizes) == 1 else said[0], *said[1:])
        if tensor.shape.is_compatible_with(shape):
            tensor.set_shape(shape)


class CallNotes:
    """Notes in a step what calls do beside making tensors, one call after the other."""

    def __init__(self, step: TracedStep, known: Collection[int], operations: Iterable[Any]) -> None:
        """Begin with the next call of these operations; ``known`` are ids of the variables that the source lists."""
        self._step, self._known = step, known
        self._generators = _generators_of(operations)
        self._drawn = _random_states(self._generators)

    def note(self, unit: int, read: Iterable[Any]) -> None:
        """Note whether a call that was just made drew random numbers, and what it read of variables not listed."""
        before, self._drawn = self._drawn, _random_states(self._generators)
        if self._drawn != before:
            self._step.drawing_units.add(unit)
        unknown = [variable.name for variable in read if id(variable) not in self._known]
        self._step.unknown_reads.update((unit, name) for name in unknown[:1])


def _generators_of(operations: Iterable[Any]) -> list[Any]:
    """Return the generators of random numbers that layers hold as attributes, without TensorFlow's."""
    layers = [layer for each in operations if isinstance(each, keras.layers.Layer) for layer in all_layers(each)]
    held = [value for layer in layers for value in vars(layer).values()]
    return [each for each in held if isinstance(each, (np.random.Generator, np.random.RandomState, random.Random))]


def _random_states(generators: Sequence[Any]) -> bytes:
    """Return the states of generators that are not TensorFlow's: what draws from them, draws once a trace."""
    return pickle.dumps((random.getstate(), np.random.get_state(legacy=False), generators))
