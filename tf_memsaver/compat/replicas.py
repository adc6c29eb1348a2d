"""Replicas of tf.distribute: code traced outside of ``Strategy.run`` as one of them runs it, and their variables.

Read from TensorFlow 2.21: ``tensorflow/python/distribute/distribute_lib.py`` (``ReplicaContextBase``), ``values.py``
(``DistributedVariable``), ``distribute_utils.py`` and ``values_util.py`` beside it. Read from Keras 3.12 to 3.15:
``utils/traceback_utils.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.python.distribute.distribute_utils import regroup, select_replica, value_container
from tensorflow.python.distribute.values_util import get_current_replica_id_as_int

from tf_memsaver.errors import UnsupportedModelError


class FirstReplica(tf.distribute.ReplicaContext):
    """The first replica, where no other one is traced: what they would bring to a merge are placeholders."""

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what the first replica gets of a merge."""
        mine, *others = self._strategy.extended.worker_devices
        given = args, kwargs or {}
        # A merge goes by the devices of what it is given.
        brought = [_each_tensor(given, tf.identity, mine)]
        brought += [_each_tensor(given, lambda t: tf.compat.v1.placeholder(t.dtype, t.shape), each) for each in others]
        return select_replica(0, super().merge_call(merge_fn, *regroup(tuple(brought))))


def _each_tensor(structure: Any, make: Callable[[Any], Any], device: str) -> Any:
    """Return a structure with what is made on a device of each symbolic tensor in it."""

    def made(value: Any) -> Any:
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(made(value.values), made(value.indices), value.dense_shape)
        return make(value) if tf.is_symbolic_tensor(value) else value

    with tf.device(device):
        return tf.nest.map_structure(made, structure)


@contextlib.contextmanager
def in_one_replica(strategy: Any = None, kind: Any = FirstReplica) -> Iterator[None]:
    """Run what follows, in the current graph, as the first replica of a tf.distribute strategy, here the current one.

    There ``GradientTape.gradient`` and an optimizer's ``apply_gradients`` may be called. Sums over all replicas are
    traced with placeholders for what the others have, and updates go to the variables of all of them
    (``other_devices``). Without a strategy nothing changes. ``kind`` is the class of the replica's context.
    """
    strategy = strategy or tf.distribute.get_strategy()
    if not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy():
        yield
        return
    with contextlib.ExitStack() as stack:
        if strategy is not tf.distribute.get_strategy():
            stack.enter_context(strategy.scope())
        if tf.distribute.in_cross_replica_context():
            # Sums are made on the devices of what is summed.
            stack.enter_context(tf.device(strategy.extended.worker_devices[0]))
            stack.enter_context(kind(strategy, 0))
        yield


def other_devices(strategy: Any) -> frozenset[str]:
    """Return the devices of the replicas other than the first, as operations name them."""
    return frozenset(strategy.extended.worker_devices[1:]) if strategy.num_replicas_in_sync > 1 else frozenset()


class AnyReplica(tf.distribute.ReplicaContext):
    """A replica that stands for all of them, so that what it runs may depend neither on its number nor on the others.

    Raises:
      UnsupportedModelError: it does.
    """

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse it."""
        raise _depends_on_replica()

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> NoReturn:
        """Refuse it."""
        raise _depends_on_replica()

    def all_gather(self, value: Any, axis: Any, options: Any = None) -> NoReturn:
        """Refuse it."""
        raise _depends_on_replica()

    @property
    def replica_id_in_sync_group(self) -> NoReturn:
        """Refuse it."""
        raise _depends_on_replica()


def _depends_on_replica() -> UnsupportedModelError:
    error = UnsupportedModelError(
        "a layer exchanges values with the other replicas (as BatchNormalization(synchronized=True) does), or asks "
        "which replica it runs in. A plan of operations cannot do so: make the plan with granularity='layer'."
    )
    # Keras puts the arguments of a layer's call around what has no such attribute (``utils/traceback_utils.py``).
    error._keras_call_info_injected = True  # type: ignore[attr-defined]
    return error


def of_this_replica(variable: Any) -> Any:
    """Return this replica's copy of a variable, of which another replica's is given; the first's, outside of replicas.

    A variable of no strategy is returned as it is.
    """
    whole = of_all_replicas(variable)
    return variable if whole is None else whole.values[get_current_replica_id_as_int() or 0]


def of_all_replicas(variable: Any) -> Any | None:
    """Return the variable of a strategy that a copy belongs to, or None."""
    whole = value_container(variable)
    return whole if isinstance(whole, tf.distribute.DistributedValues) else None
