"""What trains a Keras model: its optimizer, losses and metrics, those that layers add, and how ``fit`` calls it.

Read from Keras 3.12 to 3.15: ``trainers/trainer.py``, ``layers/layer.py``, ``activations/activations.py``,
``optimizers/base_optimizer.py``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_memsaver.compat.keras_variables import has_replicas
from tf_memsaver.compat.unallocated import variables_unallocated


def takes_training(model: Any) -> bool:
    """Whether ``fit`` calls a model with ``training=True`` (``_call_has_training_arg``)."""
    return bool(model._call_has_training_arg)


def preprocessing_of(model: Any) -> Callable[[Any, Any, Any], Any] | None:
    """Return what ``fit`` of a KerasHub task makes of each batch (``PipelineModel.preprocess_samples``), or None."""
    prepare = getattr(model, "preprocess_samples", None)
    return prepare if callable(prepare) and getattr(model, "preprocessor", None) is not None else None


def replicas_of(model: Any) -> int:
    """Return how many replicas share a batch in ``fit``."""
    return int(model.distribute_strategy.num_replicas_in_sync)


def own_optimizer(model: Any) -> Any | None:
    """Return the optimizer that a compiled model was given, or None."""
    return model.optimizer if getattr(model, "compiled", False) else None


def fit_compiles(model: Any) -> bool:
    """Whether ``fit`` compiles a model's steps with XLA on this device.

    ``"auto"``, the default, has become yes or no when the model was compiled (``trainers/trainer.py: compile``,
    ``model_supports_jit``): no on CPUs, under a strategy, where operations are to be deterministic, and where a layer
    says so. Steps that run eagerly are not compiled.
    """
    return bool(getattr(model, "compiled", False) and model.jit_compile and not model.run_eagerly)


def build_unallocated(optimizer: Any) -> None:
    """Let an optimizer build its slots on variables without memory, until its attributes are put back."""
    build = optimizer.build

    def built(*args: Any, **kwargs: Any) -> None:
        with variables_unallocated():
            build(*args, **kwargs)

    object.__setattr__(optimizer, "build", built)


def leave_out_updates(optimizer: Any) -> None:
    """Let an optimizer change no variable that it trains, until its attributes are put back (``_backend_update_step``).

    Tracing the updates takes about as long as tracing all that they are made of.
    """
    object.__setattr__(optimizer, "_backend_update_step", lambda *_: None)


def last_compiled(model: Any) -> weakref.ref[Any] | None:
    """Return what is another one whenever ``compile`` was called: its tracker of the loss; None if it never was."""
    tracker = getattr(model, "_loss_tracker", None)
    return None if tracker is None else weakref.ref(tracker)


def compile_arguments(model: Any) -> dict[str, Any] | None:
    """Return the keyword arguments to compile another model as ``model`` is (``_compile_config``); None if not kept.

    The optimizer is the very object: it may be wrapped for loss scaling and hold slots already.
    """
    config = getattr(model, "_compile_config", None)
    arguments = getattr(config, "config", None)
    if not isinstance(arguments, dict):
        return None
    return {**arguments, "optimizer": model.optimizer, "auto_scale_loss": False}


def share_run_options(model: Any, other: Any) -> None:
    """Let ``fit`` run the steps of another model as those of ``model``: its options may be set after ``compile``."""
    for name in ("jit_compile", "run_eagerly", "steps_per_execution"):
        setattr(other, name, getattr(model, name))


def compile_scope(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Return the scope in which a model was compiled: its tracker of the loss has a variable for each replica, or one.

    With one, all replicas add to it, in an order of their own.
    """
    tracker = getattr(model, "_loss_tracker", None)
    variables = [] if tracker is None else tracker.variables
    if any(map(has_replicas, variables)):
        strategy: tf.distribute.Strategy = model.distribute_strategy
        return strategy.scope()
    return contextlib.nullcontext()


_COMPILED_PARTS = ("optimizer", "_compile_loss", "_compile_metrics", "_loss_tracker")
"""The attributes that a compiled model builds at its first step (``Trainer.compile``)."""


def compiled_parts(model: Any) -> list[Any]:
    """Return what a compiled model builds at its first step: optimizer, losses and metrics."""
    parts = [vars(model).get(name) for name in _COMPILED_PARTS] if getattr(model, "compiled", False) else []
    return [part for part in parts if part is not None]


def share_compiled_parts(model: Any, other: Any) -> None:
    """Give another model over the same layers the very losses and metrics of ``model``, so that they count together."""
    for name in _COMPILED_PARTS:
        if name in vars(model):
            object.__setattr__(other, name, vars(model)[name])


def losses_of(operation: Any) -> list[Any]:
    """Return the losses that ``operation`` and its sublayers have added since they were last cleared (``_losses``)."""
    layers = operation._flatten_layers() if isinstance(operation, keras.layers.Layer) else []
    return [loss for layer in layers for loss in own_losses(layer)]


def own_losses(layer: Any) -> list[Any]:
    """Return the losses that a layer itself has added since they were last cleared."""
    return list(layer._losses)


def clear_losses(model: Any) -> None:
    """Forget the losses that layers have added (``_clear_losses``)."""
    model._clear_losses()


def get_logits(output: Any) -> Any | None:
    """Return the logits that a Keras loss takes instead of an output of softmax or sigmoid (``_keras_logits``)."""
    return getattr(output, "_keras_logits", None)


def set_logits(output: Any, logits: Any) -> None:
    """Set what ``get_logits`` returns."""
    output._keras_logits = logits
