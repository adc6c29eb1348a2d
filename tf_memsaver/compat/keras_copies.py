"""Copies of Keras models over the same layers, and what is written of them to files.

Read from Keras 3.12 to 3.15: ``models/model.py``, ``sequential.py`` and ``functional.py``, ``layers/layer.py``,
``saving/``.
"""

from __future__ import annotations

from typing import Any

import keras
from keras.src.saving import object_registration, serialization_lib

from tf_memsaver.compat.keras_models import all_layers
from tf_memsaver.compat.keras_training import compile_arguments


def share_sequential(source: Any, target: Any) -> None:
    """Give ``target`` the layers and the graph of a built Sequential (``_layers``, ``_functional``)."""
    target._layers = list(source._layers)
    target._functional = source._functional
    target.built = True


def share_order(source: Any, target: Any) -> None:
    """List the layers of ``target`` as ``source`` does (``_layers``), so that weights have the same order.

    A subclass of Functional may have set some of them as attributes before the constructor found them in the graph.
    """
    known = {id(layer) for layer in source._layers}
    vars(target)["_layers"][:] = [*source._layers, *(each for each in target._layers if id(each) not in known)]


def share_layers(source: Any, target: Any) -> None:
    """Give ``target``, a bare ``Model`` of the class of ``source``, all that its constructor and ``build`` made.

    Its trackers are its own (``_layers`` and others), so that what ``compile`` adds to one does not show in the other.
    They must not grow afterwards, as they do in ``share_attributes``.
    """
    for name in ("_build_shapes_dict", "_call_context_args", "_supports_masking", "built"):
        object.__setattr__(target, name, vars(source)[name])
    for name in ("_layers", "_non_trainable_variables", "_seed_generators", "_trainable_variables"):
        vars(target)[name][:] = vars(source)[name]


_OF_CALL = (
    "_allow_non_tensor_positional_args",
    "_call_context_args",
    "_call_has_context_arg",
    "_call_has_mask_arg",
    "_call_has_training_arg",
    "_call_signature",
    "_convert_input_args",
    "call_signature_parameters",
    "supports_jit",
)
"""What a layer's constructor read off its ``call``, or was told of it, and ``Layer.__call__`` and ``fit`` go by."""


def share_attributes(source: Any, target: Any) -> None:
    """Carry over what ``source`` has and ``target`` lacks, and the settings that its constructor took.

    What the constructor or ``compile`` sets is left alone: ``target`` has its own of those already.
    """
    settings = ("_trainable", "_dtype_policy", "autocast", "_distribute_strategy", "_manual_input_spec", *_OF_CALL)
    own = set(vars(target)) | {"_memsaver", "memsaver_memo"}
    for name, value in vars(source).items():
        if name in settings:
            object.__setattr__(target, name, value)
        elif name not in own:
            setattr(target, name, value)


def unpickled_by_keras(reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what ``__reduce__`` returned, without naming a dynamic class (``KerasSaveable._unpickle_model``)."""
    return (keras.Model._unpickle_model, *reduced[1:])


def serialize_class_as(cls: type, registered: type) -> None:
    """Make instances of ``cls`` serialize under the registered name of another class (``GLOBAL_CUSTOM_NAMES``)."""
    object_registration.GLOBAL_CUSTOM_NAMES[cls] = object_registration.get_registered_name(registered)


def keep_precision(saved: Any, model: Any) -> None:
    """Write the precision of layers into a model's serialized form where Keras leaves it out.

    ``get_config`` of SpatialDropout has the type of its variables (``layers/regularization/spatial_dropout.py``): made
    from that, it would compute in full precision where the model is in mixed precision.
    """
    layers = [layer for layer in all_layers(model) if not isinstance(layer, keras.layers.InputLayer)]
    policies: dict[Any, Any] = {(type(layer).__name__, layer.name): layer.dtype_policy for layer in layers}

    def visit(node: Any) -> None:
        if isinstance(node, dict):
            config = node.get("config")
            if isinstance(config, dict) and isinstance(config.get("dtype"), str):
                policy = policies.get((node.get("class_name"), config.get("name")))
                if policy is not None and policy.name != config["dtype"]:
                    config["dtype"] = keras.dtype_policies.serialize(policy)
        for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            visit(each)

    visit(saved)


def loads_in_safe_mode() -> bool:
    """Whether Keras refuses Python code in files, as it does unless it was told otherwise (``in_safe_mode``)."""
    return serialization_lib.in_safe_mode() is not False


def parts_of(model: Any) -> list[Any]:
    """Return the objects that a saved model is made of: layers, and of a compiled one what ``compile`` was given."""
    compiled = compile_arguments(model) if getattr(model, "compiled", False) else None
    return [*all_layers(model), *keras.tree.flatten(compiled or {})]
