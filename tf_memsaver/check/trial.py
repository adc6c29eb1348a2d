"""Training a model in the ways that ``verify`` compares, with a record of all that comes out."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_memsaver.check.training_step import KeptState, OwnTrainStep, TrainingStep
from tf_memsaver.compat.keras_training import own_optimizer
from tf_memsaver.options.table import Mode
from tf_memsaver.pace import counted, report_progress
from tf_memsaver.program.data import Batch, freed
from tf_memsaver.program.kept_objects import slots_of
from tf_memsaver.program.losses import needs_stand_in
from tf_memsaver.program.told import Told
from tf_memsaver.rewrite.optimized_model import another

Record = dict[tuple[str, str, int], "np.ndarray[Any, Any] | None"]
"""Numbers by what they are: their kind, their name and the step. A gradient may be None."""


class Trial:
    """Trains models from the same state on the same batches, and keeps every number under (kind, name, step)."""

    def __init__(self, model: Any, told: Told, steps: int, mode: Mode, state: KeptState) -> None:
        """Take so many batches of a model, and the state to begin with."""
        self.mode, self.steps, self._state = mode, steps, state
        self._size = None if told.fixed_batch else told.batch_size
        self._batches = told.batches(model, steps)
        self._names = _different_names(model.variables)
        self.stand_in = needs_stand_in(model, told.batch_size, self._batches[0])

    def step_of(self, model: Any) -> TrainingStep:
        """Return the model's training step in a loop; it may be run again and again."""
        own = own_optimizer(model)
        optimizer = keras.optimizers.SGD(0.01) if own is None else own
        return TrainingStep(
            model,
            self.mode,
            self._batches[0],
            optimizer=optimizer,
            free_batch=self._size is not None,
            stand_in=self.stand_in,
        )

    def train(self, model: Any, step: TrainingStep) -> Record:
        """Return the loss, the gradients and all variables of every step."""
        self._state.restore()
        record: Record = {}
        for number, given in enumerate(counted("steps", self._batches)):
            loss, gradients = step.run(given)
            record["loss", "loss", number] = loss.numpy()
            for variable, gradient in zip(step.weights, gradients, strict=True):
                record["gradient", self._name(variable), number] = _array(gradient)
            for variable in model.variables:
                kind = "weight" if variable.trainable else "state"
                record[kind, self._name(variable), number] = variable.numpy()
        return record

    def loop(self, model: Any) -> Record:
        """Return what the step of a loop returns every time, and leaves in the variables."""
        self._state.restore()
        step = OwnTrainStep(model, self.mode, self._batches[0], free_batch=self._size is not None)
        record: Record = {}
        for number, given in enumerate(counted("steps", self._batches)):
            record.update(
                (("result of the step", name, number), np.asarray(each)) for name, each in step.run(given).items()
            )
        record.update(self._left_in(model, "step"))
        return record

    def _name(self, variable: Any) -> str:
        return self._names.get(id(variable), variable.path)

    def _left_in(self, model: Any, after: str) -> Record:
        """Return what training left in the variables of a model and of its optimizers."""
        record: Record = {}
        for variable in model.variables:
            kind = f"weight after {after}" if variable.trainable else f"state after {after}"
            record[kind, self._name(variable), self.steps - 1] = variable.numpy()
        for place, variable in enumerate(slots_of(model)):
            record[f"slot after {after}", f"{place} {variable.path}", self.steps - 1] = variable.numpy()
        return record

    def fit(self, model: Any) -> Record:
        """Return what ``fit`` logs after every step and leaves in the variables."""
        self._state.restore()
        subject = another(model)
        subject.run_eagerly, subject.jit_compile = self.mode == "eager", self.mode == "xla"
        record: Record = {}

        def note(step: int, logs: dict[str, Any]) -> None:
            report_progress("steps of fit", step + 1, self.steps)
            record.update((("log of fit", name, step), np.asarray(value)) for name, value in logs.items())

        noting = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: note(batch, logs))
        with warnings.catch_warnings():
            # Keras warns of what is so in the user's own fit, too.
            warnings.simplefilter("ignore")
            subject.fit(_as_dataset(self._batches, self._size), verbose=0, callbacks=[noting])
        record.update(self._left_in(subject, "fit"))
        return record


def _different_names(variables: Sequence[Any]) -> dict[int, str]:
    """Return a name for each variable, by its ``id``: its path, with a number where several have the same one."""
    names: dict[int, str] = {}
    taken = Counter[str]()
    for variable in variables:
        taken[variable.path] += 1
        number = taken[variable.path]
        names[id(variable)] = variable.path if number == 1 else f"{variable.path} ({number})"
    return names


def _as_dataset(batches: Sequence[Batch], size: int | None) -> tf.data.Dataset:
    """Return batches as data for ``fit``; the last is not full, so that the batch is free, as with most data.

    Without a ``size`` all are full, since the model or its data has batches of one size.

    Its length is known. Otherwise ``fit`` would find the end by a step without data, in which what needs no gradient
    runs: a weight's decay, for one, but not that of a plan, which waits for the gradient (``runtime.updates``).
    """
    given = list(batches) if size is None else [*batches[:-1], batches[-1].mapped(lambda each: _not_full(each, size))]
    full, *elements = (_without_lists(keras.utils.pack_x_y_sample_weight(*each)) for each in (batches[0], *given))
    free = keras.tree.map_structure(lambda each: freed(size, tf.TensorSpec(each.shape, each.dtype)), full)
    made = tf.data.Dataset.from_generator(lambda: iter(elements), output_signature=free)
    return made.apply(tf.data.experimental.assert_cardinality(len(elements)))


def _without_lists(structure: Any) -> Any:
    """Return a structure with tuples for lists, which would be taken for tensors."""
    if isinstance(structure, dict):
        return {name: _without_lists(part) for name, part in structure.items()}
    return tuple(map(_without_lists, structure)) if isinstance(structure, (list, tuple)) else structure


def _not_full(tensor: tf.Tensor, size: int) -> tf.Tensor:
    return tensor[:-1] if tensor.shape.rank and 1 < tensor.shape[0] == size else tensor


def _array(gradient: Any) -> np.ndarray[Any, Any] | None:
    """Return a gradient as one array; a sparse one as its values after its indices."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        indices = np.asarray(gradient.indices).reshape(-1).astype(np.float64)
        return np.concatenate([indices, np.asarray(gradient.values).reshape(-1).astype(np.float64)])
    return np.asarray(gradient)
