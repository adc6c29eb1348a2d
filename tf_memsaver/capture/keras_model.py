"""Capture: a Keras model and a batch size in, the Graph of one training step out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_memsaver import keras_compat
from tf_memsaver.capture import batch
from tf_memsaver.capture.batch import check_batch_size, input_specs
from tf_memsaver.capture.convert import build_graph, current_device
from tf_memsaver.capture.layer_calls import check_supported, list_layer_calls
from tf_memsaver.capture.step import Placeholders, Weight, trace_step
from tf_memsaver.ir.graph import Graph, MemoryKind


def capture_graph(model: Any, *, batch_size: int) -> Graph:
    """Trace one training step of ``model`` at ``batch_size`` and return it as a Graph; nothing is run or changed.

    With a compiled model the step has its loss and its optimizer's update; without, the mean square of the outputs
    stands in for the loss and the step ends with the gradients.

    Raises:
      UnsupportedModelError: another Keras backend, an unbuilt or subclassed model, or nothing to train.
      UnknownDimensionError: an input dimension other than the batch is unknown.
      InvalidRequestError: the batch size is none.
    """
    check_supported(model)
    batch_size = check_batch_size(batch_size)
    input_specs(model, batch_size)
    if not getattr(model, "compiled", False):
        logging.info("model '%s' is not compiled: its optimizer's slots are not counted", model.name)
    source = KerasStep(model, batch_size)
    return build_graph(source, trace_step(source), batch_size, current_device())


class KerasStep:
    """The training step of a Functional or Sequential model (see ``step.StepSource``)."""

    def __init__(self, model: Any, batch_size: int) -> None:
        """Prepare the step; the model is only read."""
        self._model, self._batch_size = model, batch_size
        self._functional = check_supported(model)
        self.name: str = model.name
        self.sequence = list_layer_calls(model)
        trained = [v for v in model.trainable_variables if keras_compat.is_trained(v)]
        self.weights = [Weight(path=v.path, variable=v.value, owner=v) for v in trained]
        self.optimizer = _ready_optimizer(model, trained)

    def residents(self) -> Sequence[tuple[str, tf.Variable, MemoryKind]]:
        """Return the model's variables and the optimizer's."""
        slots = [] if self.optimizer is None else self.optimizer.variables
        return [
            *((v.path, v.value, MemoryKind.PARAMETER) for v in self._model.variables),
            *((v.path, v.value, MemoryKind.OPTIMIZER) for v in slots),
        ]

    def enter(self, placeholders: Placeholders) -> list[Any]:
        """Make the inputs of the model and convert them as its call does."""
        self._x = batch.pack_inputs(self._model, placeholders(input_specs(self._model, self._batch_size)))
        return keras_compat.standardize_inputs(self._functional, self._x)

    def loss(self, placeholders: Placeholders, outputs: list[Any]) -> Any:
        """Return the compiled loss, or what stands in for it."""
        targets = placeholders([spec for spec, _ in batch.target_specs(self._model, self._batch_size)])
        packed = keras.tree.pack_sequence_as(self._functional._outputs_struct, outputs)
        packed = packed[0] if isinstance(packed, (list, tuple)) and len(packed) == 1 else packed
        return batch.training_loss(self._model, self._x, batch.pack_targets(self._model, targets), packed)

    def losses_of(self, operation: Any) -> list[Any]:
        """Return the losses that a layer has added."""
        return keras_compat.losses_of(operation)

    def seen_through(self, output: Any) -> list[Any]:
        """Return the logits that a Keras loss takes instead of ``output``: it looks through softmax and sigmoid."""
        logits = getattr(output, "_keras_logits", None)
        if logits is not None:
            return [logits]
        last = output.op if isinstance(output, tf.Tensor) else None
        return [last.inputs[0]] if last is not None and last.type in ("Softmax", "Sigmoid") else []

    def close(self) -> None:
        """Forget the losses that tracing added to the layers."""
        self._model._clear_losses()


def _ready_optimizer(model: Any, trained: list[Any]) -> Any | None:
    """Return a built optimizer to trace the update with: the model's own, or a built copy of it."""
    optimizer = keras_compat.own_optimizer(model)
    if optimizer is None or optimizer.built or not trained:
        return optimizer
    copy = type(optimizer).from_config(optimizer.get_config())
    copy.build(trained)
    return copy
