"""Write an optimized model as a SavedModel that trains in the smaller memory with TensorFlow alone.

The export follows the Reusable SavedModel interface (``__call__`` with ``training``, ``variables``,
``trainable_variables``, ``regularization_losses``), has endpoints ``serve`` and ``train`` that
``keras.layers.TFSMLayer`` can name, and carries the plan in ``assets.extra/memsaver_plan.json``. Recomputation survives
because custom gradients are saved as functions.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tf_memsaver.compat import keras_models
from tf_memsaver.compat.graphs import AutoTrackable
from tf_memsaver.compat.keras_training import clear_losses
from tf_memsaver.errors import InvalidRequestError, UnsupportedModelError
from tf_memsaver.files.targets import EXPORTED_PLAN, TargetKind, check_target
from tf_memsaver.options.table import Overwrite
from tf_memsaver.options.verbs import takes
from tf_memsaver.program.batch import pack_inputs
from tf_memsaver.program.model_check import check_model
from tf_memsaver.rewrite.optimized_model import is_optimized
from tf_memsaver.saved.folders import write_saved_model

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes(Overwrite)
def export_saved_model(optimized: Any, path: str | os.PathLike[str], **options: Unpack[Overwrite]) -> None:
    """Write an optimized model as a SavedModel, which trains in less memory without tf_memsaver.

    To train it, load it with ``tf.saved_model.load``, call ``loaded(x, training=True)`` under a tape, and take the
    gradients for ``loaded.trainable_variables``. ``loaded.regularization_losses`` are functions without arguments.
    ``loaded.train_with_losses(x)`` returns a dict of ``outputs`` and ``losses``, the losses that layers add in their
    call. The batch size stays free. The folder appears at once, so a reader never sees half of it.

    Args:
      optimized: a Functional or Sequential model that ``optimize`` or ``apply_plan`` returned.
      path: the folder to write.

    Raises:
      InvalidRequestError: the model is not optimized, or ``path`` cannot be written to (empty, or a folder in use).
      UnsupportedModelError: the model has its own ``call``.
      OutputExistsError: ``path`` exists and ``overwrite`` is false, or it contains more than a SavedModel.
      OutputError: the SavedModel cannot be written.
    """
    target = check_target(path, TargetKind.FOLDER, overwrite=options["overwrite"])
    _check_functional(optimized)
    if not is_optimized(optimized):
        raise InvalidRequestError(
            f"model '{optimized.name}' is not optimized, so there is no plan to export. Give the model that "
            "tf_memsaver.optimize returned, or export a plain model with model.export."
        )
    try:
        plan = optimized.memsaver_plan.to_json()
        write_saved_model(
            _reusable(optimized), target, {"serving_default": _signature(optimized)}, {EXPORTED_PLAN: plan}
        )
    finally:
        clear_losses(optimized)


def _check_functional(model: Any) -> None:
    check_model(model)
    if keras_models.inner_functional(model) is None:
        raise UnsupportedModelError(
            f"model '{model.name}' ({type(model).__name__}) has its own call(), but only Functional and Sequential "
            "models can be exported for training. model.save('model.keras') keeps the plan, and model.export(...) "
            "writes a SavedModel for inference."
        )


def _specs(model: Any) -> Any:
    flat = [tf.TensorSpec(tuple(t.shape), t.dtype, name=t.name) for t in model.inputs]
    return pack_inputs(model, flat)


def _reusable(model: Any) -> Any:
    """Return the trackable object that is saved, with all functions traced."""
    spec = _specs(model)
    root = AutoTrackable()
    added: list[Any] = []

    def run(inputs: Any, training: bool) -> Any:
        outputs = model(inputs, training=training)
        regularizers = sum(v.regularizer is not None for v in model.trainable_weights)
        losses = model.losses
        added[:] = losses[: len(losses) - regularizers]
        return outputs

    call = tf.function(lambda inputs, training=False: run(inputs, bool(training)), autograph=False)
    serve = tf.function(lambda inputs: run(inputs, False), autograph=False)
    train = tf.function(lambda inputs: run(inputs, True), autograph=False)
    call.get_concrete_function(spec, training=False)
    serve.get_concrete_function(spec)
    call.get_concrete_function(spec, training=True)
    train.get_concrete_function(spec)
    root.__call__, root.serve, root.train = call, serve, train
    if added:

        def with_losses(inputs: Any) -> dict[str, Any]:
            outputs = run(inputs, True)
            return {"outputs": outputs, "losses": list(added)}

        root.train_with_losses = tf.function(with_losses, autograph=False)
        root.train_with_losses.get_concrete_function(spec)
    root.variables = [v.value for v in model.variables]
    root.trainable_variables = [v.value for v in model.trainable_variables]
    root.regularization_losses = [_regularization(v) for v in model.trainable_weights if v.regularizer is not None]
    return root


def _regularization(variable: Any) -> Any:
    function = tf.function(lambda: variable.regularizer(variable.value), autograph=False)
    function.get_concrete_function()
    return function


def _signature(model: Any) -> Any:
    """Return the serving signature: inputs by name in, outputs by name out."""
    names = [t.name for t in model.inputs]
    outputs = model.output_names if hasattr(model, "output_names") else ["output"]

    def serving(**tensors: Any) -> dict[str, Any]:
        results = keras.tree.flatten(model(pack_inputs(model, [tensors[n] for n in names]), training=False))
        keys = (
            outputs
            if len(outputs) == len(results) == len(set(outputs))
            else [f"output_{i}" for i in range(len(results))]
        )
        return dict(zip(keys, results, strict=True))

    specs = {t.name: tf.TensorSpec(tuple(t.shape), t.dtype, name=t.name) for t in model.inputs}
    return tf.function(serving, autograph=False).get_concrete_function(**specs)
