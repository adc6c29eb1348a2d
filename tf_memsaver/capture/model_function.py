"""The training call of a Keras model as a traced function, for plans whose units are operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_memsaver import keras_compat
from tf_memsaver.capture.batch import pack_inputs
from tf_memsaver.capture.function_calls import FunctionCalls
from tf_memsaver.capture.layer_calls import check_supported
from tf_memsaver.errors import UnsupportedModelError


class ModelFunction:
    """A model's call with ``training=True``, listed operation by operation; it stands for the layers' settings then.

    Beside its outputs the function returns what Keras hangs on them (masks, logits that a loss looks through to) and
    the losses that layers add.
    """

    def __init__(self, model: Any) -> None:
        """Trace ``model``, which is only read, with a free batch dimension.

        Raises:
          UnsupportedModelError: the model is no built Functional or Sequential model, or its call cannot be traced.
        """
        check_supported(model)
        self._structure: Any = None
        specs = [tf.TensorSpec(tuple(t.shape), t.dtype, name=t.name) for t in model.inputs]

        def traced(*flat: Any) -> dict[str, list[Any]]:
            outputs = model(pack_inputs(model, list(flat)), training=True)
            self._structure = keras.tree.map_structure(lambda _: None, outputs, none_is_leaf=False)
            made = keras.tree.flatten(outputs)
            return {
                "losses": keras_compat.losses_of(model),
                "masks": [keras_compat.get_keras_mask(tensor) for tensor in made],
                "logits": [keras_compat.get_logits(tensor) for tensor in made],
                "outputs": made,
            }

        model._clear_losses()
        try:
            with tf.init_scope():
                concrete = tf.function(traced, autograph=False).get_concrete_function(*specs)
        except (TypeError, ValueError, tf.errors.OperatorNotAllowedInGraphError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise UnsupportedModelError(f"the call of model '{model.name}' cannot be traced: {reason}") from error
        finally:
            model._clear_losses()
        scopes = {operation.name.partition("/")[0] for operation in concrete.graph.get_operations() if operation.inputs}
        self.calls = FunctionCalls(concrete, scope=min(scopes, key=lambda name: not name.startswith(model.name)))

    def finish(self, model: Any, flat: Sequence[Any]) -> Any:
        """Return the outputs of ``model`` for the tensors of ``calls.sequence.outputs``; it gets the added losses."""
        result = self.calls.leave(flat)
        for loss in result["losses"]:
            # A Functional model has an add_loss of its own, for symbolic tensors alone.
            keras.layers.Layer.add_loss(model, loss)
        for output, mask, logits in zip(result["outputs"], result["masks"], result["logits"], strict=True):
            if mask is not None:
                keras_compat.set_keras_mask(output, mask)
            if logits is not None:
                keras_compat.set_logits(output, logits)
        return keras.tree.pack_sequence_as(self._structure, result["outputs"])


def settings_of(model: Any) -> tuple[bool, ...]:
    """Return what of a model decides what its call traces, and may change later: the ``trainable`` flags."""
    flags = [layer.trainable for layer in model._flatten_layers()]
    return (*flags, *(variable.trainable for variable in model.variables))
