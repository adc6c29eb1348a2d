"""The ``call`` of a model's own class: its arguments by name, and how it is run as it is."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

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
