"""The one module that touches Keras internals. Read from Keras 3.15.1; what is used is listed in each docstring.

Everything else in the package uses the public API of Keras 3 and calls in here for the rest.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import AutocastScope, get_autocast_scope
from keras.src.backend import get_keras_mask as get_keras_mask
from keras.src.backend import set_keras_mask as set_keras_mask
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import StatelessScope, get_stateless_scope
from keras.src.layers.layer import CallContext
from keras.src.models.functional import Functional as Functional
from keras.src.models.functional import operation_fn as _operation_fn
from tensorflow.python.eager.record import could_possibly_record, record_operation, stop_recording

LayerHandler = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Makes the call of a layer: see ``layer_calls_go_to``."""


def own_class(layer: Any) -> type:
    """Return the class of a layer, of an optimized model the one that it was made from (``memsaver_base``)."""
    return getattr(type(layer), "memsaver_base", type(layer))


def inner_functional(model: Any) -> Functional | None:
    """Return the Functional graph that ``model`` runs, or ``None`` when its ``call`` is its own code.

    Uses ``Sequential._functional`` and compares the class's ``call`` with the two classes' own.
    """
    call = own_class(model).call  # type: ignore[attr-defined]
    if isinstance(model, keras.Sequential):
        return model._functional if call is keras.Sequential.call else None
    if isinstance(model, Functional):
        return model if call is Functional.call else None
    return None


def has_no_call(model: Any) -> bool:
    """Whether a model's class says nothing of how it is called, as where a ``train_step`` does all."""
    return own_class(model).call is keras.Model.call  # type: ignore[attr-defined]


def nodes_in_order(functional: Functional) -> list[Any]:
    """Return the nodes that ``Function._run_through_graph`` runs, in its order (``_nodes_by_depth``, deepest first)."""
    nodes: list[Any] = []
    for depth in sorted(functional._nodes_by_depth, reverse=True):
        nodes.extend(n for n in functional._nodes_by_depth[depth] if n.operation and not n.is_input)
    return nodes


def standardize_inputs(functional: Functional, inputs: Any) -> list[Any]:
    """Return the flat, converted inputs as ``Functional.call`` makes them (``_standardize_inputs``)."""
    return functional._standardize_inputs(inputs)


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
    layer leaves in the context for those behind it (a nested model its ``training``) is there after a first run, too.
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


def _current_graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


class RecordingScope(StatelessScope):
    """A StatelessScope that reads variables it was not told of once, and remembers what was updated and added.

    A variable that is not in ``given`` is read at its first use (from the enclosing scope, if there is one) and keeps
    that value, so that a replay under ``mapping()`` sees what the first run saw. One that is given several tensors
    hands out another at each read (``times_read``); all reads inside the body of a loop or branch are one. ``unlisted``
    collects variables
    that were read without being given and that a tape watches: for a gradient they must become arguments.
    ``losses_added`` pairs each loss with the layer that added it.
    """

    def __init__(self, given: list[tuple[Any, Any]]) -> None:
        super().__init__(state_mapping=None, collect_losses=True, initialize_variables=False)
        self.original_scope: Any = None
        self.operation: Any = None
        self.unlisted: list[Any] = []
        self._pending_losses: list[tuple[Any, Any]] = []
        self._variables: dict[int, Any] = {}
        self._seen: dict[int, Any] = {}
        self._updated: dict[int, Any] = {}
        self._given: dict[int, list[Any]] = {}
        self._reads: dict[int, int] = {}
        self._bodies: set[tuple[int, Any]] = set()
        self._graph = _current_graph()
        for variable, tensor in given:
            self._variables[id(variable)] = variable
            self._given.setdefault(id(variable), []).append(tensor)
            self._seen.setdefault(id(variable), tensor)
            self.state_mapping.setdefault(id(variable), tensor)

    def get_current_value(self, variable: Any) -> Any:
        """Return the variable's value in this scope; the first read fixes it."""
        key = id(variable)
        if key not in self.state_mapping:
            value = None if self.original_scope is None else self.original_scope.get_current_value(variable)
            if value is None:
                value = variable._value
            if value is None:
                value = _initialized(variable)
            if is_trained(variable) or getattr(value, "trainable", False):
                self.unlisted.append(variable)
            tensor = tf.convert_to_tensor(value)
            self._variables[key] = variable
            self._seen[key] = self.state_mapping[key] = tensor
        self._count(key)
        if key not in self._given:
            return self.state_mapping[key]
        given = self._given[key]
        read = given[min(self._reads[key], len(given)) - 1]
        if key not in self._updated:
            return read
        return _with_gradient_to(read, self.state_mapping[key]) if is_trained(variable) else self.state_mapping[key]

    def _count(self, key: int) -> None:
        graph = _current_graph()
        body = key, graph
        if graph is not self._graph:
            if body in self._bodies:
                return
            self._bodies.add(body)
        self._reads[key] = self._reads.get(key, 0) + 1

    def times_read(self, variable: Any) -> int:
        """Return how often a variable was read."""
        return self._reads.get(id(variable), 0)

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Note an assignment instead of making it."""
        variable, value = update
        # The value before the update is what a replay must start from, also when the layer never reads it.
        self.get_current_value(variable)
        self._updated[id(variable)] = variable
        # A variable that is read after it was assigned passes no gradient on to what was assigned, but takes it itself.
        super().add_update((variable, tf.stop_gradient(value)))

    def add_loss(self, loss: Any) -> None:
        """Note a loss and the operation that is running."""
        super().add_loss(loss)
        self._pending_losses.append((self.operation, loss))

    def mapping(self) -> list[tuple[Any, Any]]:
        """Return (variable, value at the start of the scope) for all variables that were given or read."""
        return [(self._variables[key], tensor) for key, tensor in self._seen.items()]

    def updates(self) -> list[tuple[Any, Any]]:
        """Return (variable, new value) for all variables that were assigned, in order of their first assignment."""
        return [(variable, self.state_mapping[key]) for key, variable in self._updated.items()]

    def losses_added(self) -> list[tuple[Any, Any]]:
        """Return (layer, loss) in the order in which they were added (``Layer._loss_ids`` tells the layer)."""
        return [(_loss_owner(operation, loss), loss) for operation, loss in self._pending_losses]


def _initialized(variable: Any) -> Any:
    """Return the value of a variable that was made in a stateless scope, as the seed of ``keras.random`` may be."""
    scope = get_stateless_scope()
    global_state.set_global_attribute("stateless_scope", None)
    try:
        with tf.init_scope():
            variable._deferred_initialize()
    finally:
        global_state.set_global_attribute("stateless_scope", scope)
    return variable._value


def _with_gradient_to(variable: Any, value: Any) -> Any:
    """Return ``value``, whose gradient goes to the tensor ``variable``."""
    with stop_recording():
        copy = tf.identity(value)
    record_operation("ReadVariableOp", [copy], [variable], lambda upstream: [upstream])
    return copy


def recording_scope() -> RecordingScope | None:
    """Return the RecordingScope that is active, if any: the replay of an enclosing segment."""
    scope = get_stateless_scope()
    return scope if isinstance(scope, RecordingScope) else None


def read_variable(variable: Any) -> Any:
    """Return the value that ``variable`` has here, as a tensor that is not autocast; a tape sees the read.

    Inside a stateless scope that is the scope's value (``Variable.value`` without ``_maybe_autocast``).
    """
    scope = get_stateless_scope()
    value = None if scope is None else scope.get_current_value(variable)
    return tf.convert_to_tensor(variable._value if value is None else value)


def local_variable(variable: Any) -> Any:
    """Return the ``tf.Variable`` of a variable of Keras; of one of a tf.distribute strategy, its first replica's."""
    value = variable._value if isinstance(variable, keras.Variable) else variable
    return value.values[0] if isinstance(value, tf.distribute.DistributedValues) else value


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


@functools.cache
def _make_layers_ask() -> None:
    plainly = keras.layers.Layer.__call__

    @functools.wraps(plainly)
    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _thread.handler is None:
            return plainly(self, *args, **kwargs)
        return _thread.handler(self, functools.partial(plainly, self), args, kwargs)

    keras.layers.Layer.__call__ = ask


def training_of_call() -> bool | None:
    """Return the ``training`` that the running call of a layer gives to layers that are not told."""
    context = global_state.get_global_attribute("current_call_ctx")
    return getattr(context, "training", None)


def takes_training(model: Any) -> bool:
    """Whether ``fit`` calls a model with ``training=True`` (``_call_has_training_arg``)."""
    return bool(model._call_has_training_arg)


def tape_may_record() -> bool:
    """Whether a tape is active that has not been stopped (``record.could_possibly_record``)."""
    return bool(could_possibly_record())


def losses_of(operation: Any) -> list[Any]:
    """Return the losses that ``operation`` and its sublayers have added since they were last cleared (``_losses``)."""
    layers = operation._flatten_layers() if isinstance(operation, keras.layers.Layer) else []
    return [loss for layer in layers for loss in layer._losses]


def is_trained(variable: Any) -> bool:
    """Whether a gradient may be asked for: trainable and of a floating dtype (``Variable._dtype``, never autocast)."""
    return bool(variable.trainable) and tf.as_dtype(variable._dtype).is_floating


def get_logits(output: Any) -> Any | None:
    """Return the logits that a Keras loss takes instead of an output of softmax or sigmoid (``_keras_logits``)."""
    return getattr(output, "_keras_logits", None)


def set_logits(output: Any, logits: Any) -> None:
    """Set what ``get_logits`` returns."""
    output._keras_logits = logits


def _loss_owner(operation: Any, loss: Any) -> Any:
    for layer in operation._flatten_layers():
        if id(loss) in layer._loss_ids:
            layer._loss_ids.discard(id(loss))
            return layer
    return operation


def pack_outputs(functional: Functional, flat: list[Any]) -> Any:
    """Return flat outputs as ``Functional.call`` returns them (``_outputs_struct``, a single one unpacked)."""
    packed = keras.tree.pack_sequence_as(functional._outputs_struct, flat)
    return packed[0] if isinstance(packed, (list, tuple)) and len(packed) == 1 else packed


def share_sequential(source: Any, target: Any) -> None:
    """Give ``target`` the layers and the graph of a built Sequential (``_layers``, ``_functional``)."""
    target._layers = list(source._layers)
    target._functional = source._functional
    target.built = True


def is_built_in(layer: Any) -> bool:
    """Whether Keras itself has the layer's class."""
    return own_class(layer).__module__.partition(".")[0] == "keras"


def sublayers(layer: Any) -> list[Any]:
    """Return the layers that a layer holds itself (``_flatten_layers``)."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


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
    own = set(vars(target)) | {"_memsaver"}
    for name, value in vars(source).items():
        if name in settings:
            object.__setattr__(target, name, value)
        elif name not in own:
            setattr(target, name, value)


def compile_arguments(model: Any) -> dict[str, Any] | None:
    """Return the keyword arguments to compile another model as ``model`` is (``_compile_config``); None if not kept.

    The optimizer is the very object: it may be wrapped for loss scaling and hold slots already.
    """
    config = getattr(model, "_compile_config", None)
    arguments = getattr(config, "config", None)
    if not isinstance(arguments, dict):
        return None
    return {**arguments, "optimizer": model.optimizer, "auto_scale_loss": False}


def own_optimizer(model: Any) -> Any | None:
    """Return the optimizer that a compiled model was given, or None."""
    return model.optimizer if getattr(model, "compiled", False) else None


def compiled_parts(model: Any) -> list[Any]:
    """Return what a compiled model builds at its first step: optimizer, losses and metrics (``Trainer.compile``)."""
    names = ("optimizer", "_compile_loss", "_compile_metrics", "_loss_tracker")
    parts = [vars(model).get(name) for name in names] if getattr(model, "compiled", False) else []
    return [part for part in parts if part is not None]


def unpickled_by_keras(reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what ``__reduce__`` returned, without naming a dynamic class (``KerasSaveable._unpickle_model``)."""
    return (keras.Model._unpickle_model, *reduced[1:])


def serialize_class_as(cls: type, registered: type) -> None:
    """Make instances of ``cls`` serialize under the registered name of another class (``GLOBAL_CUSTOM_NAMES``)."""
    from keras.src.saving import object_registration

    object_registration.GLOBAL_CUSTOM_NAMES[cls] = object_registration.get_registered_name(registered)


def loads_in_safe_mode() -> bool:
    """Whether Keras refuses Python code in files, as it does unless it was told otherwise (``in_safe_mode``)."""
    from keras.src.saving import serialization_lib

    return serialization_lib.in_safe_mode() is not False


def parts_of(model: Any) -> list[Any]:
    """Return the objects that a saved model is made of: layers, and of a compiled one what ``compile`` was given."""
    compiled = compile_arguments(model) if getattr(model, "compiled", False) else None
    return [*model._flatten_layers(), *keras.tree.flatten(compiled or {})]
