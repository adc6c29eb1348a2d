"""Trace one real training step of a Keras model, unit by unit, into a FuncGraph.

Every layer call is recorded on a tape of its own, and the backward pass runs over the calls in reverse: so each
backward operation is known to belong to its call, and the operations each call adds are found by counting, never by
parsing names. Tracing allocates no activations, so a model far too large to run can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tf_memsaver.capture import batch
from tf_memsaver.capture.layer_calls import CallSequence
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.ir.graph import Phase
from tf_memsaver.keras_compat import is_trained, losses_of, standardize_inputs


@dataclass(kw_only=True)
class TracedStep:
    """The traced graph and, beside it, who made which operation.

    ``owners[i]`` is the (phase, unit) of operation ``i``; ``boundary[u]`` are the tensors that call ``u`` made;
    ``sparse_units`` are the calls that have a variable whose gradient is sparse (IndexedSlices);
    ``gradient_units[id(t)]`` are the calls that send a gradient to the boundary tensor ``t`` (None is the loss).
    """

    graph: Any
    owners: list[tuple[Phase, int | None]] = field(default_factory=list)
    boundary: list[list[Any]] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    loss: Any = None
    weight_gradients: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    updated: list[Any] = field(default_factory=list)
    sparse_units: dict[int, str] = field(default_factory=dict)
    gradient_units: dict[int, list[int | None]] = field(default_factory=dict)
    optimizer: Any = None

    def reachable(self) -> set[int]:
        """Return the ids of the operations that something outside depends on: the outputs and every assignment."""
        stack = [tensor.op for tensor in self.outputs]
        stack += [op for op in self.graph.get_operations() if op.type.startswith(("Assign", "Resource"))]
        wanted: set[int] = set()
        while stack:
            operation = stack.pop()
            if id(operation) in wanted:
                continue
            wanted.add(id(operation))
            stack.extend(tensor.op for tensor in operation.inputs)
            stack.extend(operation.control_inputs)
        return wanted


def trace_step(model: Any, functional: Any, sequence: CallSequence, batch_size: int) -> TracedStep:
    """Trace forward, loss, backward and, for a compiled model, the optimizer's update.

    Raises:
      UnsupportedModelError: nothing in the model can be trained.
    """
    trained = [v for v in model.trainable_variables if is_trained(v)]
    if not trained:
        raise UnsupportedModelError(
            f"model '{model.name}' has no trainable weights, so a training step keeps nothing. "
            f"Set trainable=True on the layers to be trained before optimizing."
        )
    optimizer = _ready_optimizer(model, trained)
    graph = tf.__internal__.FuncGraph("memsaver_step")
    step = TracedStep(graph=graph, optimizer=optimizer)
    try:
        with graph.as_default():
            _Tracer(model, functional, sequence, step, trained).run(batch_size)
    finally:
        model._clear_losses()
    return step


def _ready_optimizer(model: Any, trained: list[Any]) -> Any | None:
    """Return a built optimizer to trace the update with: the model's own, or a built copy of it."""
    optimizer = model.optimizer if getattr(model, "compiled", False) else None
    if optimizer is None or optimizer.built:
        return optimizer
    copy = type(optimizer).from_config(optimizer.get_config())
    copy.build(trained)
    return copy


def _seen_through(output: Any) -> list[Any]:
    """Return the logits that a Keras loss takes instead of ``output``: it looks through softmax and sigmoid."""
    logits = getattr(output, "_keras_logits", None)
    if logits is not None:
        return [logits]
    return [output.op.inputs[0]] if isinstance(output, tf.Tensor) and output.op.type in ("Softmax", "Sigmoid") else []


class _Tracer:
    def __init__(
        self, model: Any, functional: Any, sequence: CallSequence, step: TracedStep, trained: list[Any]
    ) -> None:
        self._model, self._functional, self._sequence, self._step = model, functional, sequence, step
        self._trained = {id(v.value): v for v in trained}
        self._gradients: dict[int, list[Any]] = {}
        self._weight_gradients: dict[int, list[Any]] = {}
        self._slots: list[Any] = [None] * sequence.slot_count
        self._needs_gradient = [False] * sequence.slot_count

    def run(self, batch_size: int) -> None:
        tapes = self._forward(batch_size)
        targets = self._placeholders([spec for spec, _ in batch.target_specs(self._model, batch_size)])
        loss_tape, sources, scaled = self._loss(targets)
        self._mark(Phase.FORWARD, None)
        self._backward_of(loss_tape, [scaled], [tf.ones_like(scaled)], sources, None)
        for unit in reversed(range(len(tapes))):
            tape, outputs, inputs = tapes[unit]
            self._backward_of(tape, outputs, [self._take(t) for t in outputs], inputs, unit)
        gradients = self._sum_weight_gradients()
        self._mark(Phase.BACKWARD, None)
        self._update(gradients)
        self._mark(Phase.UPDATE, None)

    def _placeholders(self, specs: list[tf.TensorSpec]) -> list[Any]:
        tensors = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs]
        self._step.inputs.extend(tensors)
        return tensors

    def _mark(self, phase: Phase, unit: int | None) -> None:
        """Give all operations added since the last call to an owner."""
        total = len(self._step.graph.get_operations())
        self._step.owners.extend([(phase, unit)] * (total - len(self._step.owners)))

    def _forward(self, batch_size: int) -> list[tuple[Any, list[Any], list[Any]]]:
        flat = self._placeholders(batch.input_specs(self._model, batch_size))
        self._x = batch.pack_inputs(self._model, flat)
        for slot, tensor in zip(self._sequence.inputs, standardize_inputs(self._functional, self._x), strict=True):
            self._slots[slot] = tensor
        self._mark(Phase.FORWARD, None)
        self._loss_tensors: list[Any] = []
        tapes = []
        for unit, call in enumerate(self._sequence.calls):
            differentiable = [self._slots[i] for i in call.inputs if self._needs_gradient[i]]
            with tf.GradientTape() as tape:
                tape.watch(differentiable)
                made = call.run(self._slots, training=True)
            added = [t for t in losses_of(call.operation) if all(t is not seen for seen in self._loss_tensors)]
            self._loss_tensors.extend(added)
            trains = any(id(v) in self._trained for v in tape.watched_variables())
            floats = [t for t in made if isinstance(t, tf.Tensor) and t.dtype.is_floating]
            for slot, tensor in zip(call.outputs, made, strict=True):
                self._slots[slot] = tensor
                self._needs_gradient[slot] = (bool(differentiable) or trains) and any(tensor is t for t in floats)
            ends = [*floats, *(t for end in floats for t in _seen_through(end)), *added]
            tapes.append((tape, ends if differentiable or trains else [], differentiable))
            self._step.boundary.append([*made, *added])
            self._mark(Phase.FORWARD, unit)
        return tapes

    def _loss(self, targets: list[Any]) -> tuple[Any, list[Any], Any]:
        flat = [self._slots[slot] for slot in self._sequence.outputs]
        outputs = keras.tree.pack_sequence_as(self._functional._outputs_struct, flat)
        outputs = outputs[0] if isinstance(outputs, (list, tuple)) and len(outputs) == 1 else outputs
        sources = [t for t in [*flat, *self._loss_tensors] if isinstance(t, tf.Tensor) and t.dtype.is_floating]
        sources += [logits for output in flat for logits in _seen_through(output)]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            self._step.loss = batch.training_loss(
                self._model, self._x, batch.pack_targets(self._model, targets), outputs
            )
            scaled = self._step.loss
            if self._step.optimizer is not None:
                scaled = self._step.optimizer.scale_loss(scaled)
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
                if id(source) in self._trained:
                    if isinstance(gradient, tf.IndexedSlices) and unit is not None:
                        self._step.sparse_units[unit] = self._trained[id(source)].path
                    self._weight_gradients.setdefault(id(source), []).append(gradient)
                else:
                    self._gradients.setdefault(id(source), []).append(gradient)
                    self._step.gradient_units.setdefault(id(source), []).append(unit)
        self._mark(Phase.BACKWARD, unit)

    def _sum_weight_gradients(self) -> list[tuple[Any, Any]]:
        pairs = []
        for key, variable in self._trained.items():
            arrived = self._weight_gradients.get(key)
            if arrived:
                dense = len(arrived) > 1
                total = tf.add_n([tf.convert_to_tensor(g) for g in arrived]) if dense else arrived[0]
                pairs.append((total, variable))
        for gradient, _ in pairs:
            self._step.weight_gradients.append(gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient)
        return pairs

    def _update(self, gradients: list[tuple[Any, Any]]) -> None:
        self._step.outputs = [self._step.loss]
        if self._step.optimizer is None:
            self._step.outputs += self._step.weight_gradients
        else:
            self._step.optimizer.apply_gradients(gradients)
