"""The loss of a training step: the compiled one, or what stands in for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_memsaver.compat import keras_training
from tf_memsaver.compat.messages import first_line
from tf_memsaver.compat.released import gradients_end_with_graphs, release
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.program.batch import batch_specs, made_up, with_batch
from tf_memsaver.program.data import Batch, with_free_batch
from tf_memsaver.program.kept_objects import KeptObjects
from tf_memsaver.program.signature import is_planned_as_a_step, signature_of, trained_on


def mean_squares(tensors: Iterable[Any]) -> list[tf.Tensor]:
    """Return the mean square of every floating tensor: what stands in for a loss."""
    return [tf.reduce_mean(tf.square(tf.cast(t, tf.float32))) for t in tensors if t.dtype.is_floating]


def training_loss(model: Any, given: Batch, outputs: Any, *, stand_in: bool = False) -> tf.Tensor:
    """Return the scalar loss of a training step: what Keras trains on, else the mean square of every output.

    A model that is compiled without a loss trains on those that its layers add. With ``stand_in`` the mean square takes
    the place of a compiled loss, too. Losses added by layers and regularizers count in all cases, in the order in which
    Keras sums them.
    """
    if not stand_in and (_has_loss(model) or (_is_compiled(model) and _layers_add_losses(model))):
        x, y, weight = given
        return model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weight, training=True)
    terms = mean_squares(keras.tree.flatten(outputs))
    # A layer may add a loss for each example: Keras trains on their sum.
    terms += [tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in model.losses]
    if not terms:
        raise no_gradient(model.name)
    return tf.add_n(terms)


def needs_stand_in(model: Any, batch_size: int, given: Batch | None = None) -> bool:
    """Whether the compiled loss cannot be computed on the model's targets, or made-up ones; the log says why.

    The loss is traced by itself, for outputs of the model's shapes and, for a given batch, computed on made-up ones.
    The model is left as it was.
    """
    if is_planned_as_a_step(model) or not _has_loss(model):
        return False
    specs, outputs = batch_specs(model, batch_size), _output_specs(model, batch_size)

    def computed(*flat: Any) -> Any:
        made = keras.tree.pack_sequence_as(signature_of(model).outputs, list(flat[: len(outputs)]))
        return training_loss(model, specs.filled(flat[len(outputs) :]), made)

    keras_training.clear_losses(model)
    try:
        with tf.init_scope(), KeptObjects(*keras_training.compiled_parts(model)), gradients_end_with_graphs():
            flat = [*outputs, *specs.leaves]
            signature = flat if given is None else [with_free_batch(spec) for spec in flat]
            concrete = tf.function(computed, autograph=False).get_concrete_function(*signature)
            if given is not None:
                generator = np.random.default_rng(0)
                concrete(*(tf.constant(made_up(generator, spec, 0)) for spec in outputs), *given.leaves)
            release(concrete.graph)
    except Exception as error:  # Whatever a loss that somebody wrote may raise.
        data = trained_on(model)
        logging.warning(
            "model '%s': its loss %s cannot be computed on %s (%s). The mean square of the outputs replaces it, "
            "and the memory of the loss itself is not counted.%s",
            model.name,
            ", ".join(_loss_names(model)),
            "the targets of data" if data else "made-up targets",
            first_line(error) if data is None or data.y is not None else "data has no targets: give data=(x, y)",
            "" if data else " Give data= (your training data, as for fit).",
        )
        return True
    finally:
        keras_training.clear_losses(model)
    return False


def _has_loss(model: Any) -> bool:
    return _is_compiled(model) and model.loss is not None


def _is_compiled(model: Any) -> bool:
    return bool(getattr(model, "compiled", False))


def _layers_add_losses(model: Any) -> bool:
    """Whether layers added losses when the model was called, besides those of the weights' regularizers."""
    return len(model.losses) > sum(getattr(v, "regularizer", None) is not None for v in model.trainable_weights)


def _loss_names(model: Any) -> list[str]:
    losses = [loss for loss in keras.tree.flatten(model.loss) if loss is not None]
    return [loss if isinstance(loss, str) else f"'{_name_of(loss)}'" for loss in losses]


def _name_of(loss: Any) -> str:
    return str(getattr(loss, "name", None) or getattr(loss, "__name__", None) or type(loss).__name__)


def _output_specs(model: Any, batch_size: int) -> list[tf.TensorSpec]:
    outputs = keras.tree.flatten(signature_of(model).outputs)
    return [tf.TensorSpec(with_batch(tensor.shape, batch_size), tensor.dtype) for tensor in outputs]


def no_gradient(name: str) -> UnsupportedModelError:
    """Return the error for a model whose loss does not depend on its weights."""
    return UnsupportedModelError(
        f"no weight of '{name}' gets a gradient: what it returns does not depend on them in a way that can be "
        f"differentiated (integers, such as those of argmax, cannot). Give it an output of floating-point numbers, "
        f"such as the logits."
    )
