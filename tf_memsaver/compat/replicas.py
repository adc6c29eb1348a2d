"""Code of a training step that is traced outside of ``Strategy.run``, as one replica would run it.

Read from TensorFlow 2.21: ``tensorflow/python/distribute/distribute_lib.py`` (``ReplicaContextBase``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


@contextlib.contextmanager
def in_one_replica(strategy: Any = None) -> Iterator[None]:
    """Run what follows, in the current graph, as the first replica of a tf.distribute strategy, here the current one.

    There ``GradientTape.gradient`` and an optimizer's ``apply_gradients`` may be called. Sums over all replicas are
    of what this one has, and updates go to the variables of all of them. Without a strategy nothing changes.
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
            stack.enter_context(tf.distribute.ReplicaContext(strategy, 0))
        yield
