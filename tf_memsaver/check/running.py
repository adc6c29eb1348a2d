"""Ways to run training steps while they are watched: in Keras's own ``fit``, or one by one."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import tensorflow as tf

from tf_memsaver.check.training_step import OwnTrainStep, RunnableStep, TrainingStep
from tf_memsaver.check.watch import Steps, StepWatch
from tf_memsaver.compat.keras_training import own_optimizer, replicas_of
from tf_memsaver.compat.released import gradients_end_with_graphs
from tf_memsaver.errors import InvalidRequestError
from tf_memsaver.options.table import MeasureMode
from tf_memsaver.program.data import Batch, with_free_batch
from tf_memsaver.program.losses import needs_stand_in, no_gradient
from tf_memsaver.program.signature import is_planned_as_a_step
from tf_memsaver.program.told import Told


class StepRunner(Protocol):
    """Runs steps of a model on one batch, again and again."""

    def run(self, count: int) -> Steps:
        """Run as many steps; return their figures. The first step ever is traced, and compiled where it is."""


@dataclass(frozen=True, slots=True)
class How:
    """How steps are run: in a mode, and with the mean square of the outputs as a loss or not."""

    mode: MeasureMode
    stand_in: bool

    @classmethod
    def of(cls, model: Any, told: Told, given: Batch, mode: MeasureMode | None) -> How:
        """Return how the steps of a model are run on a batch: in ``fit``, if no mode is wanted and ``fit`` can be.

        Raises:
          InvalidRequestError: ``fit`` is wanted of a model that has none, or whose loss cannot be computed.
        """
        stand_in = needs_stand_in(model, told.batch_size, given)
        has_fit = bool(getattr(model, "compiled", False))
        if mode == "fit" and not has_fit:
            raise InvalidRequestError('mode="fit" needs a compiled model. Compile it, or leave mode out.')
        if mode == "fit" and stand_in:
            raise InvalidRequestError(
                'mode="fit" needs the model\'s own loss, which cannot be computed on this data (the log says why). '
                "Give data= (your training data, as for fit), or leave mode out."
            )
        fits = has_fit and not stand_in and replicas_of(model) == 1
        return cls(mode or ("fit" if fits else "graph"), stand_in)


@contextlib.contextmanager
def runner_of(model: Any, told: Told, given: Batch, how: How) -> Iterator[StepRunner]:
    """Yield what runs a model's steps on a batch; what ``fit`` notes of itself is put back after."""
    if how.mode != "fit":
        yield _OneByOne(_step_of(model, told, given, how), given)
        return
    kept = {name: vars(model).get(name) for name in _NOTED_BY_FIT}
    try:
        runner = _Fit(model, told, given)
        model.train_function = None  # What was traced for other data, and compiled before, would not be traced again.
        yield runner
    finally:
        for name, value in kept.items():
            setattr(model, name, value)


_NOTED_BY_FIT = ("history", "stop_training", "train_function")


class _Fit:
    """Keras's own ``fit``, on a dataset of the shapes that the user's data has."""

    def __init__(self, model: Any, told: Told, given: Batch) -> None:
        self._model, self._at_once = model, model.steps_per_execution
        shapes = [leaf.shape for leaf in _specs_in_fit(told, given).leaves]

        def element(*leaves: tf.Tensor) -> Any:
            opened = map(tf.compat.v1.placeholder_with_default, leaves, shapes)
            # Lists in a dataset are rows of tensors.
            return keras.tree.lists_to_tuples(keras.utils.pack_x_y_sample_weight(*given.filled(opened)))

        self._data = tf.data.Dataset.from_tensors(tuple(given.leaves)).repeat().map(element)

    def run(self, count: int) -> Steps:
        watch = StepWatch(count)
        # The class's own: a task of KerasHub would prepare once more what is prepared already.
        with gradients_end_with_graphs():
            data = self._data.take(count * self._at_once)
            try:
                keras.Model.fit(self._model, data, shuffle=False, verbose=0, callbacks=[watch])
            except ValueError as error:
                if "No gradients provided" in str(error):
                    raise no_gradient(self._model.name) from error
                raise
        watch.steps.seconds = [each / self._at_once for each in watch.steps.seconds]
        return watch.steps


def _specs_in_fit(told: Told, given: Batch) -> Batch:
    """Return the specs by which ``fit`` traces its step: with a free batch, unless all batches are of one size."""
    if told.fixed_batch:
        return given.mapped(tf.TensorSpec.from_tensor)
    return given.mapped(with_free_batch) if told.data is None else told.data.specs


class _OneByOne:
    """A step function of our own, or the model's ``train_step``, called step by step."""

    def __init__(self, step: RunnableStep, given: Batch) -> None:
        self._step, self._given, self._traced = step, given, False

    def run(self, count: int) -> Steps:
        watch = StepWatch(count)
        for number in range(count):
            gc.collect()
            watch.on_train_batch_begin(number)
            if not self._traced:
                self._step.trace(self._given)
                self._traced = True
            self._step.run(self._given)
            watch.on_train_batch_end(number)
        return watch.steps


def _step_of(model: Any, told: Told, given: Batch, how: How) -> RunnableStep:
    assert how.mode != "fit"
    if is_planned_as_a_step(model):
        return OwnTrainStep(model, how.mode, given, free_batch=not told.fixed_batch)
    optimizer = own_optimizer(model)
    return TrainingStep(
        model,
        how.mode,
        given,
        optimizer=optimizer,
        gradients=optimizer is None,
        free_batch=not told.fixed_batch,
        stand_in=how.stand_in,
    )
