"""A model's own ``train_step``, traced as ``fit`` runs it, with somebody who hears which layers it calls.

Nothing of the user's is rebuilt: the very optimizers, losses and metrics are used, and put back as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tf_memsaver.compat import keras_calls, keras_models, keras_training
from tf_memsaver.compat.functions import functions_run_inline
from tf_memsaver.compat.gradients import Listener, tapes_heard_by
from tf_memsaver.compat.replicas import in_one_replica
from tf_memsaver.program.data import Batch
from tf_memsaver.program.kept_objects import KeptObjects, trained_with

Placeholders = Callable[[Sequence[tf.TensorSpec]], list[Any]]
"""Makes the placeholders of a step."""


def has_own_train_step(model: Any) -> bool:
    """Whether a model says itself what a training step does."""
    return keras_models.own_class(model).train_step is not keras.Model.train_step  # type: ignore[attr-defined]


def has_own_step(cls: Any) -> bool:
    """Whether a class of models says what a step does, or its loss: that may call the model again, under tapes."""
    return cls.train_step is not keras.Model.train_step or cls.compute_loss is not keras.Model.compute_loss


def what_is_traced(model: Any) -> str:
    """Return what errors call the step of a model."""
    return str(getattr(model, "traced_as", f"the train_step of model '{model.name}'"))


@contextlib.contextmanager
def left_as_it_was(model: Any) -> Iterator[list[Any]]:
    """Put what a training step uses back when this ends; yield its optimizers, whose slots take no memory meanwhile.

    Layers that are built only now are built for good. What is trainable is put back, too.
    """
    parts = KeptObjects(*trained_with(model))
    trainable = [(each, each.trainable) for each in (*keras_models.all_layers(model), *model.variables)]
    for optimizer in parts.optimizers:
        keras_training.build_unallocated(optimizer)
    keras_training.clear_losses(model)
    try:
        yield parts.optimizers
    finally:
        keras_training.clear_losses(model)
        parts.restore()
        for each, value in trainable:
            if each.trainable != value:
                each.trainable = value


def run_train_step(
    model: Any, specs: Batch, placeholders: Placeholders, layers: keras_calls.LayerHandler, tapes: Listener
) -> Any:
    """Run the ``train_step`` of a model in the current graph, on placeholders for a batch; return its logs."""
    given = specs.filled(placeholders(specs.leaves))
    hearing = keras_calls.layer_calls_go_to(layers), tapes_heard_by(tapes), functions_run_inline()
    with hearing[0], hearing[1], hearing[2], in_one_replica(model.distribute_strategy):
        return keras_models.own_class(model).train_step(  # type: ignore[attr-defined]
            model, keras.utils.pack_x_y_sample_weight(*given)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Differentiated:
    """The gradient of one operation: the operations of it are ``start`` to ``stop`` of the graph."""

    operation: Any
    start: int
    stop: int
    gradients: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What a tape's ``gradient`` did; ``nested`` says that another tape may have recorded it."""

    start: int
    stop: int
    sources: tuple[Any, ...]
    results: tuple[Any, ...]
    nested: bool


class TapeNotes:
    """Takes down what tapes do (see ``compat.gradients.Listener``)."""

    def __init__(self) -> None:
        self.operations: list[Differentiated] = []
        self.taken: list[Taken] = []

    def differentiated(self, operation: Any, start: int, stop: int, gradients: Sequence[Any]) -> None:
        """Note the gradient of an operation."""
        self.operations.append(Differentiated(operation=operation, start=start, stop=stop, gradients=tuple(gradients)))

    def took_gradients(
        self, start: int, stop: int, sources: Sequence[Any], results: Sequence[Any], nested: bool
    ) -> None:
        """Note a call of ``GradientTape.gradient``."""
        self.taken.append(Taken(start=start, stop=stop, sources=tuple(sources), results=tuple(results), nested=nested))
