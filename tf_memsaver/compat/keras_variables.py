"""Variables of Keras: their values here and now, and a scope that remembers what was read and assigned.

Read from Keras 3.12 to 3.15: ``backend/common/variables.py`` and ``stateless_scope.py``, ``layers/layer.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import StatelessScope, get_stateless_scope

from tf_memsaver.compat.tapes import record_operation, stop_recording


def is_trained(variable: Any) -> bool:
    """Whether a gradient may be asked for: trainable and of a floating dtype (``Variable._dtype``, never autocast)."""
    return bool(variable.trainable) and tf.as_dtype(variable._dtype).is_floating


def bytes_of(variable: Any) -> int:
    """Return the size of a Keras variable."""
    return int(variable.value.shape.num_elements() * variable.value.dtype.size)


def local_variable(variable: Any) -> Any:
    """Return the ``tf.Variable`` of a variable of Keras; of one of a tf.distribute strategy, its first replica's."""
    value = _tf_variable(variable)
    return value.values[0] if has_replicas(variable) else value


def has_replicas(variable: Any) -> bool:
    """Whether each replica of a tf.distribute strategy has its own copy of a variable."""
    return isinstance(_tf_variable(variable), tf.distribute.DistributedValues)


def _tf_variable(variable: Any) -> Any:
    return variable._value if isinstance(variable, keras.Variable) else variable


@contextlib.contextmanager
def read_as_local(variables: Sequence[Any]) -> Iterator[None]:
    """Let variables of Keras be their ``local_variable``: what is traced meanwhile reads and sets those alone."""
    whole = [(variable, variable._value) for variable in variables]
    for variable, _ in whole:
        variable._value = local_variable(variable)
    try:
        yield
    finally:
        for variable, value in whole:
            variable._value = value


def read_variable(variable: Any) -> Any:
    """Return the value that ``variable`` has here, as a tensor that is not autocast; a tape sees the read.

    Inside a stateless scope that is the scope's value (``Variable.value`` without ``_maybe_autocast``).
    """
    scope = get_stateless_scope()
    value = None if scope is None else scope.get_current_value(variable)
    return tf.convert_to_tensor(variable._value if value is None else value)


def recording_scope() -> RecordingScope | None:
    """Return the RecordingScope that is active, if any: the replay of an enclosing segment."""
    scope = get_stateless_scope()
    return scope if isinstance(scope, RecordingScope) else None


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


def _current_graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


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


def _loss_owner(operation: Any, loss: Any) -> Any:
    for layer in operation._flatten_layers():
        if id(loss) in layer._loss_ids:
            layer._loss_ids.discard(id(loss))
            return layer
    return operation
