"""Whether a model is one that something can be done for."""

from __future__ import annotations

import os
import weakref
from typing import Any

import keras
from absl import logging

from tf_memsaver.compat import keras_models
from tf_memsaver.compat.backend import check_backend
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.program.train_step import has_own_train_step
from tf_memsaver.units import shown

_OF_A_CLASS = ("call", "train_step", "compute_loss")
"""Methods that Keras also looks for in the model object itself."""

_WARNED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Distributions that a warning named."""


def check_model(model: Any, *, needs_call: bool = True) -> None:
    """Check that a model is one of Keras 3 on TensorFlow and, unless its step is planned, that it can be called.

    Raises:
      UnsupportedModelError: it is not.
    """
    if isinstance(model, (str, os.PathLike)):
        raise UnsupportedModelError(
            f"expected a keras.Model, got the text or path {shown(model)}. Load the model first: "
            "keras.models.load_model(...)."
        )
    if isinstance(model, type) and issubclass(model, keras.Model):
        raise UnsupportedModelError(
            f"expected a keras.Model, got the class {model.__name__} itself. Give an instance: {model.__name__}(...)."
        )
    if not isinstance(model, keras.Model):
        raise UnsupportedModelError(
            f"expected a keras.Model, got {type(model).__name__}. Build the model with Keras 3; tf_keras (Keras 2) "
            "is not supported. For a plain function, use tf_memsaver.optimize_function."
        )
    check_backend()
    _warn_of_distribution()
    if needs_call and keras_models.has_no_call(model):
        raise _without_a_call(model)
    for name in _OF_A_CLASS:
        if name in vars(model):
            raise UnsupportedModelError(
                f"model '{model.name}' has a {name} that was set on the object (model.{name} = ...). A plan is made "
                f"for that of the class {type(model).__name__}, so it would have no effect. Define {name} in a class "
                "of your own, or delete the attribute."
            )
    if isinstance(model, keras.Sequential) and keras_models.inner_functional(model) is None:
        raise UnsupportedModelError(
            f"Sequential model '{model.name}' is not built. Add a keras.Input(...) first, or call "
            f"model.build((None, ...)) with the input shape."
        )


def _warn_of_distribution() -> None:
    """Say, once for each, that a distribution of Keras's own does nothing on TensorFlow.

    ``backend/tensorflow/distribution_lib.py`` (Keras 3.12 to 3.15) calls itself a prototype, and nothing asks it where
    variables and batches are to be.
    """
    distribution = keras.distribution.distribution()
    if distribution is not None and distribution not in _WARNED:
        _WARNED.add(distribution)
        logging.warning(
            "keras.distribution is set to %s, which Keras's TensorFlow backend ignores. The model trains on one "
            "device, with whole batches, and is planned for that. To use several devices, make the model under "
            "tf.distribute.MirroredStrategy().",
            type(distribution).__name__,
        )


def _without_a_call(model: Any) -> UnsupportedModelError:
    advice = (
        "Give data= (your training data, as for fit): then all networks that its train_step trains are planned "
        "together."
        if has_own_train_step(model)
        else "Give it a call(), or a train_step() that trains its networks."
    )
    return UnsupportedModelError(
        f"model '{model.name}' ({type(model).__name__}) has no call(), so it has no forward pass to plan. {advice}"
    )
