"""The ``call`` of a model's own class: its arguments by name, and how it is run as it is."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tf_memsaver.compat import keras_models
from tf_memsaver.compat.tapes import could_possibly_record


def plain_call(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a model, optimized or not, as its own class does."""
    return keras_models.own_class(model).call(model, *args, **kwargs)  # type: ignore[attr-defined]


def may_be_differentiated(training: Any) -> bool:
    """Whether a gradient may be taken of a call that is made now: in training, or where a tape may record it."""
    return bool(training) or could_possibly_record()


def arguments_of(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model's own ``call`` by name, those left out included, in their order."""
    signature = inspect.signature(keras_models.own_class(model).call)  # type: ignore[attr-defined]
    bound = signature.bind(model, *args, **kwargs)
    bound.apply_defaults()
    named = dict(list(bound.arguments.items())[1:])
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(parameter.name))
    return named


def takes_any_number(model: Any) -> bool:
    """Whether a model's own ``call`` takes any number of arguments that have no names."""
    parameters = inspect.signature(keras_models.own_class(model).call).parameters  # type: ignore[attr-defined]
    return any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())


class CallArguments(NamedTuple):
    """What a model is called with: its first argument, ``training``, and by name the others that are not None.

    ``tensors`` are those that hold tensors. Where nobody gives ``training``, it is None, and the call has it from what
    is around.
    """

    inputs: Any
    training: Any
    tensors: dict[str, Any]
    others: dict[str, Any]

    @classmethod
    def of(cls, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CallArguments:
        """Return the arguments of a model's own ``call``."""
        (_, inputs), *others = arguments_of(model, args, kwargs).items()
        # Keras gives a model of several inputs a list of their masks, though none has one.
        given = {name: value for name, value in others if any(leaf is not None for leaf in keras.tree.flatten(value))}
        training = given.pop("training", None)
        tensors = {
            name: value
            for name, value in given.items()
            if any(isinstance(leaf, tf.Tensor) for leaf in keras.tree.flatten(value))
        }
        return cls(inputs, training, tensors, {name: value for name, value in given.items() if name not in tensors})


def is_constant(value: Any) -> bool:
    """Whether a call of a model may be traced once for all calls that are given a value equal to this one."""
    return isinstance(value, (bool, int, float, str))
