"""Calls of Keras's layers: what they inherit from the call around them, and who makes them.

Read from Keras 3.12 to 3.15: ``layers/layer.py``, ``models/functional.py``, ``backend/common/global_state.py`` and
``variables.py`` (autocast), ``backend/common/masking.py``.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
from keras.src.backend import AutocastScope, get_autocast_scope
from keras.src.backend import get_keras_mask as get_keras_mask
from keras.src.backend import set_keras_mask as set_keras_mask
from keras.src.backend.common import global_state
from keras.src.layers.layer import CallContext
from keras.src.models.functional import operation_fn as _operation_fn

LayerHandler = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Makes the call of a layer: see ``layer_calls_go_to``."""


def bind_training(operation: Any, training: bool | None) -> Callable[..., Any]:
    """Return ``operation`` with ``training`` passed on exactly as ``Functional.call`` passes it (``operation_fn``)."""
    return _operation_fn(operation, training=training)


def training_seen_by(operation: Any, kwargs: Mapping[str, Any], training: bool | None) -> bool | None:
    """Return the ``training`` that a nested model's call gets when its parent is called with ``training``."""

    class Probe:
        _call_context_args = getattr(operation, "_call_context_args", ())
        _call_has_training_arg = True

        def __call__(self, **seen: Any) -> Any:
            return seen.get("training")

    given = {k: v for k, v in kwargs.items() if k == "training"}
    seen = _operation_fn(Probe(), training=training)(**given)
    return training if seen is None else bool(seen)


def training_of_call() -> bool | None:
    """Return the ``training`` that the running call of a layer gives to layers that are not told."""
    context = global_state.get_global_attribute("current_call_ctx")
    return getattr(context, "training", None)


@contextlib.contextmanager
def outside_of_name_scopes() -> Iterator[None]:
    """Let layers open the name scopes that they open at the top (global attribute ``name_scope_stack``).

    A layer that is called while it is called opens none: Keras has its scope on the stack.
    """
    outer = global_state.get_global_attribute("name_scope_stack")
    global_state.set_global_attribute("name_scope_stack", [])
    try:
        yield
    finally:
        global_state.set_global_attribute("name_scope_stack", outer)


class Environment:
    """What a layer call inherits from its surroundings: call-context arguments and the autocast dtype."""

    __slots__ = ("arguments", "autocast_dtype", "autocast_set", "context")

    def __init__(self, context: Any, arguments: dict[str, Any], autocast_set: bool, autocast_dtype: str | None) -> None:
        self.context, self.arguments = context, arguments
        self.autocast_set, self.autocast_dtype = autocast_set, autocast_dtype


def current_environment(training: bool | None) -> Environment:
    """Return the surroundings of the running call (global attribute ``current_call_ctx``).

    Where none runs, there is ``training`` alone.
    """
    context = global_state.get_global_attribute("current_call_ctx")
    arguments = {"training": training} if context is None else _arguments_in(context)
    scope = get_autocast_scope()
    return Environment(context, arguments, scope is not None, None if scope is None else scope.dtype)


def _arguments_in(context: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(context).items() if name != "entry_layer"}


@contextlib.contextmanager
def call_environment(environment: Environment) -> Iterator[None]:
    """Run layers as if inside the model's call: a replay happens after that call has ended.

    The context's entry layer is none of the model's, so that no layer resets the context or clears its losses. What a
    layer leaves in the context for those after it (a nested model its ``training``) is there after a first run, too.
    """
    outer = global_state.get_global_attribute("current_call_ctx")
    context = CallContext(entry_layer=None)
    for name, value in environment.arguments.items():
        context.set_value(name, value)
    global_state.set_global_attribute("current_call_ctx", context)
    try:
        if environment.autocast_set:
            with AutocastScope(environment.autocast_dtype):
                yield
        else:
            yield
        if outer is not None and outer is environment.context:
            for name, value in _arguments_in(context).items():
                outer.set_value(name, value)
    finally:
        global_state.set_global_attribute("current_call_ctx", outer)


@contextlib.contextmanager
def next_call_runs(layer: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Let the next ``__call__`` of a layer run ``function(layer, args, kwargs)`` instead of the layer's ``call``.

    ``Operation.__call__`` looks ``call`` up in the instance, with the arguments that ``Layer.__call__`` has prepared.
    What somebody else put there is put back.
    """
    before = vars(layer).get("call")

    def put_back() -> None:
        if before is None:
            vars(layer).pop("call", None)
        else:
            object.__setattr__(layer, "call", before)

    def once(*args: Any, **kwargs: Any) -> Any:
        put_back()
        return function(layer, args, kwargs)

    object.__setattr__(layer, "call", once)
    try:
        yield
    finally:
        put_back()


class _Thread(threading.local):
    """What handles the calls of layers: replicas of tf.distribute are traced by threads that take turns."""

    handler: LayerHandler | None = None


_thread = _Thread()


@contextlib.contextmanager
def layer_calls_go_to(handler: LayerHandler | None) -> Iterator[None]:
    """Let ``handler(layer, call, args, kwargs)`` make the calls of layers while this is open; None calls them plainly.

    ``call`` is what the layer would do (``Layer.__call__``, which asks for a handler from the first use of this on).
    """
    _make_layers_ask()
    before = _thread.handler
    _thread.handler = handler
    try:
        yield
    finally:
        _thread.handler = before


def layer_handler() -> LayerHandler | None:
    """Return who makes the calls of layers now (``layer_calls_go_to``)."""
    return _thread.handler


def accepted_arguments(layer: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments as a layer's ``call`` gets them: ``CallSpec`` drops ``training`` if it takes none."""
    known = layer._call_signature.parameters
    return {name: value for name, value in kwargs.items() if name in known or name not in layer._call_context_args}


@functools.cache
def _make_layers_ask() -> None:
    plainly = keras.layers.Layer.__call__

    @functools.wraps(plainly)
    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _thread.handler is None:
            return plainly(self, *args, **kwargs)
        return _thread.handler(self, functools.partial(plainly, self), args, kwargs)

    keras.layers.Layer.__call__ = ask
