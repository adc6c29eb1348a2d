"""The training step that ``measure`` and ``verify`` run: what people write, traced as ``fit`` traces it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_memsaver.compat.keras_variables import has_replicas, is_trained
from tf_memsaver.compat.released import gradients_end_with_graphs
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.options.table import Mode
from tf_memsaver.program.data import Batch, with_free_batch
from tf_memsaver.program.kept_objects import KeptObjects, trained_with
from tf_memsaver.program.losses import no_gradient, training_loss


class KeptState:
    """Context that puts models, what they are compiled with and what else they train with back as they were, in place.

    Variables get their values back, and optimizers, losses and metrics that were built meanwhile are as before.
    """

    def __init__(self, *models: Any) -> None:
        self._objects = KeptObjects(*(part for model in models for part in trained_with(model)))
        variables = [v for model in models for v in model.variables]
        self._variables = {id(v): v for v in [*variables, *self._objects.variables]}.values()

    def __enter__(self) -> KeptState:
        self._values = [v.numpy() for v in self._variables]
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Put everything back as it was at the start now."""
        self._objects.restore()
        for variable, value in zip(self._variables, self._values, strict=True):
            variable.assign(value)


class RunnableStep:
    """A function of a batch, run in a mode; its batch dimension is free, if that is wanted."""

    def __init__(self, function: Callable[..., Any], mode: Mode, example: Batch, *, free_batch: bool = True) -> None:
        """Prepare to run a function of the leaves of batches like ``example``."""
        self._function, self._mode = function, mode
        if mode != "eager":
            signature = [
                with_free_batch(leaf) if free_batch else tf.TensorSpec.from_tensor(leaf) for leaf in example.leaves
            ]
            self._function = tf.function(function, jit_compile=mode == "xla", input_signature=signature)

    def trace(self, given: Batch) -> None:
        """Trace (graph mode) or trace and compile (XLA) the step; compiling runs it once."""
        if self._mode == "graph":
            with gradients_end_with_graphs():
                self._function.get_concrete_function()  # type: ignore[attr-defined]
        elif self._mode == "xla":
            self.run(given)

    def run(self, given: Batch) -> Any:
        """Run one step to its end; return what the function returns."""
        with gradients_end_with_graphs():
            result = self._function(*given.leaves)
        for tensor in tf.nest.flatten(result)[:1]:
            tensor.numpy()
        return result


def train_step_of(model: Any, example: Batch) -> Callable[..., Any]:
    """Return the ``train_step`` of a model as a function of the leaves of batches like ``example``."""
    structure = example.mapped(lambda _: 0)

    def step(*leaves: Any) -> Any:
        return model.train_step(keras.utils.pack_x_y_sample_weight(*structure.filled(leaves)))

    return step


class OwnTrainStep(RunnableStep):
    """The ``train_step`` of a model that has its own; a step returns its logs."""

    def __init__(self, model: Any, mode: Mode, example: Batch, *, free_batch: bool) -> None:
        """Prepare the step on batches like ``example``."""
        super().__init__(train_step_of(model, example), mode, example, free_batch=free_batch)


class TrainingStep(RunnableStep):
    """One training step: a tape, the loss, the gradients, and the update where there is an optimizer.

    The batch dimension is free, as in ``fit`` of most data. With every shape known, TensorFlow's graph optimizer turns
    sums of three and more terms into accumulators wherever it reckons with little memory (80% of 256 MiB on any CPU).
    These add in order of arrival, so that last bits differ from run to run, and start from zeros that stay allocated
    between steps.
    """

    def __init__(
        self,
        model: Any,
        mode: Mode,
        example: Batch,
        *,
        optimizer: Any = None,
        gradients: bool = True,
        free_batch: bool = True,
        stand_in: bool = False,
    ) -> None:
        """Prepare a step on batches like ``example``.

        Without ``gradients`` a step returns none, so that nothing keeps them once the update has read them. Without
        ``free_batch`` it is traced for the batch size of the example. With ``stand_in`` the loss is that of a model
        that is not compiled (``losses.needs_stand_in``).

        Raises:
          UnsupportedModelError: the model belongs to a tf.distribute strategy.
        """
        self._model, self._optimizer, self._returned, self._stand_in = model, optimizer, gradients, stand_in
        self._structure = example.mapped(lambda _: 0)
        self.weights = [v for v in model.trainable_variables if is_trained(v)]
        if any(map(has_replicas, self.weights)):
            raise UnsupportedModelError(
                f"model '{model.name}' was made under a tf.distribute strategy, but steps that are checked in "
                "this process run on one device. To check its plan, make the model without the strategy."
            )
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.weights)
        super().__init__(self._step, mode, example, free_batch=free_batch)

    def _step(self, *leaves: Any) -> tuple[Any, list[Any]]:
        given = self._structure.filled(leaves)
        with tf.GradientTape() as tape:
            outputs = self._model(given.x, training=True)
            loss = training_loss(self._model, given, outputs, stand_in=self._stand_in)
            scaled = loss if self._optimizer is None else self._optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, [v.value for v in self.weights])
        if self._optimizer is not None:
            pairs = [(g, v) for g, v in zip(gradients, self.weights, strict=True) if g is not None]
            if not pairs:
                raise no_gradient(self._model.name)
            self._optimizer.apply_gradients(pairs)
        return loss, gradients if self._returned else []
