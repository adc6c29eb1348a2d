"""What a training step takes when XLA compiles it, as Keras's ``fit`` does on a GPU: asked of the compiler, not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from tf_memsaver.check.training_step import train_step_of
from tf_memsaver.compat.messages import first_line
from tf_memsaver.compat.released import gradients_end_with_graphs
from tf_memsaver.compat.xla import CompiledMemory, compiled_memory, program
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.program.data import Batch
from tf_memsaver.program.kept_objects import KeptObjects, trained_with

Asked = TypeVar("Asked")


def compiled_step_memory(model: Any, specs: Batch) -> CompiledMemory:
    """Return what the compiler assigns to a step of ``fit`` on a batch of these specs; nothing is run.

    What a first step builds, as the optimizer's slots, is built for it and dropped again.

    Raises:
      UnsupportedModelError: XLA cannot compile the step, as ``fit`` could not.
    """
    return _of_step(model, specs, compiled_memory)


def step_program(model: Any, specs: Batch) -> bytes:
    """Return the same step as TensorFlow hands it to XLA, a serialized ``HloModuleProto``: not compiled yet.

    Raises:
      UnsupportedModelError: the step has operations that XLA does not know.
    """
    return _of_step(model, specs, program)


def _of_step(model: Any, specs: Batch, ask: Callable[[Any, Any], Asked]) -> Asked:
    step = train_step_of(model, specs)
    with KeptObjects(*trained_with(model)), gradients_end_with_graphs():
        function = tf.function(step, jit_compile=True)
        function.get_concrete_function(*specs.leaves)  # What goes wrong here is not XLA's.
        try:
            return ask(function, specs.leaves)
        except (tf.errors.OpError, ValueError) as error:  # TensorFlow makes the latter of what XLA says.
            raise UnsupportedModelError(
                f"XLA cannot compile a step of model '{model.name}': {first_line(error)}. Compile the model with "
                "jit_compile=False; fit would fail, too, without it."
            ) from error
