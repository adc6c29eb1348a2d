"""The training step that ``measure`` and ``verify`` run: what people write, traced as ``fit`` traces it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_memsaver.capture import batch
from tf_memsaver.errors import InvalidRequestError
from tf_memsaver.keras_compat import is_trained

MODES = ("eager", "graph", "xla")


def check_mode(mode: str) -> None:
    """Check the name of a mode.

    Raises:
      InvalidRequestError: it is none of ``MODES``.
    """
    if mode not in MODES:
        raise InvalidRequestError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")


class KeptState:
    """Context that puts all variables of a model and its optimizer back as they were, in place."""

    def __init__(self, model: Any) -> None:
        optimizer = getattr(model, "optimizer", None)
        variables = [*model.variables, *(optimizer.variables if optimizer is not None else ())]
        self._variables = {id(v): v for v in variables}.values()

    def __enter__(self) -> KeptState:
        self._values = [v.numpy() for v in self._variables]
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Assign the values of the start now."""
        for variable, value in zip(self._variables, self._values, strict=True):
            variable.assign(value)


class TrainingStep:
    """One training step: a tape, the loss, the gradients, and the update where there is an optimizer.

    The batch dimension is free, as in ``fit``. With every shape known, TensorFlow's graph optimizer turns sums of three
    and more terms into accumulators wherever it reckons with little memory (80% of 256 MiB on any CPU). These add in
    order of arrival, so that last bits differ from run to run, and start from zeros that stay allocated between steps.
    """

    def __init__(
        self,
        model: Any,
        mode: str,
        example: tuple[Any, Any],
        *,
        optimizer: Any = None,
        gradients: bool = True,
        free_batch: bool = True,
    ) -> None:
        """Prepare a step on batches like ``example`` (inputs and targets) in one of ``MODES``.

        Without ``gradients`` a step returns none, so that nothing keeps them once the update has read them. Without
        ``free_batch`` it is traced for the batch size of the example.
        """
        self._model, self._optimizer, self._returned = model, optimizer, gradients
        self.weights = [v for v in model.trainable_variables if is_trained(v)]
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.weights)
        self._function: Callable[..., Any] = self._step
        if mode != "eager":
            signature = keras.tree.map_structure(_free if free_batch else tf.TensorSpec.from_tensor, example)
            self._function = tf.function(self._step, jit_compile=mode == "xla", input_signature=signature)
        self._mode = mode
        self.gradient_bytes = sum(v.value.shape.num_elements() * v.value.dtype.size for v in self.weights)

    def _step(self, x: Any, y: Any) -> tuple[Any, list[Any]]:
        with tf.GradientTape() as tape:
            outputs = self._model(x, training=True)
            loss = batch.training_loss(self._model, x, y, outputs)
            scaled = loss if self._optimizer is None else self._optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, [v.value for v in self.weights])
        if self._optimizer is not None:
            pairs = [(g, v) for g, v in zip(gradients, self.weights, strict=True) if g is not None]
            if not pairs:
                raise batch.no_gradient(self._model.name)
            self._optimizer.apply_gradients(pairs)
        return loss, gradients if self._returned else []

    def trace(self, x: Any, y: Any) -> None:
        """Trace (graph mode) or trace and compile (XLA) the step; compiling runs it once."""
        if self._mode == "graph":
            self._function.get_concrete_function()  # type: ignore[attr-defined]
        elif self._mode == "xla":
            self._function(x, y)

    def run(self, x: Any, y: Any) -> tuple[Any, list[Any]]:
        """Run one step to its end; return the loss and the gradients, in the order of ``weights``."""
        loss, gradients = self._function(x, y)
        loss.numpy()
        return loss, gradients


def _free(tensor: Any) -> tf.TensorSpec:
    return tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype)
