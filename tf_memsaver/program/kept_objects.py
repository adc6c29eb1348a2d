"""Put Python objects back as they were: the attributes, lists, dicts and sets that tracing changed.

Optimizers, losses and metrics of Keras are built when they are first used, and those that people write may change
whatever they hold. To run them for a trial, and to build none anew from a configuration that they may lack, the very
objects are used, and put back in place afterwards.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_memsaver.compat.keras_training import compiled_parts

_LEFT_ALONE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    keras.KerasTensor,
    keras.layers.Layer,
    tf.Module,
    tf.distribute.Strategy,
    tf.data.Dataset,
    tf.data.Iterator,
    tf.Graph,
    tf.summary.SummaryWriter,
    tf.train.Checkpoint,
    tf.train.CheckpointManager,
    tf.types.experimental.GenericFunction,
    np.ndarray,
)
"""What is left alone."""


def trained_with(model: Any) -> list[Any]:
    """Return what a model is trained with: what it is compiled with, and what hangs on it, alone or in lists."""
    return [*compiled_parts(model), *vars(model).values()]


class KeptObjects:
    """Context that puts objects, and the lists, dicts, sets and objects that they hold, back as they were, in place.

    Layers, variables and tensors are left alone, and so is what only a function's closure holds. ``variables`` lists
    the Keras and TensorFlow variables that the objects hold, ``objects`` all that are put back.
    """

    def __init__(self, *roots: Any) -> None:
        """Take down how ``roots`` are now."""
        self._undo: list[Callable[[], None]] = []
        self.variables: list[Any] = []
        self.objects: list[Any] = []
        self._seen: dict[int, Any] = {}
        waiting = collections.deque(roots)
        while waiting:
            each = waiting.popleft()
            if id(each) not in self._seen:
                self._seen[id(each)] = each
                if isinstance(each, (keras.Variable, tf.Variable)):
                    self.variables.append(each)
                elif not _is_apart(each):
                    self.objects.append(each)
                    waiting.extend(self._taken_down(each))

    def __enter__(self) -> KeptObjects:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers among the objects."""
        return [each for each in self.objects if isinstance(each, keras.optimizers.Optimizer)]

    def restore(self) -> None:
        """Put everything back now."""
        for undo in self._undo:
            undo()

    def _taken_down(self, each: Any) -> Iterator[Any]:
        """Take down how ``each`` is; yield what it holds."""
        if isinstance(each, types.MethodType):
            yield each.__self__
        elif isinstance(each, functools.partial):
            yield from (each.func, *each.args, *each.keywords.values())
        for base in (collections.OrderedDict, dict, list, collections.deque, set):
            if base in type(each).__mro__:
                items = base.copy(each)
                self._undo.append(functools.partial(_refill, base, each, items))
                yield from items.values() if isinstance(items, dict) else items
                break
        if isinstance(each, (tuple, frozenset)):
            yield from each
        # TensorFlow tracks dicts and tuples by proxies.
        if hasattr(type(each), "__wrapped__"):
            yield each.__wrapped__
        attributes = getattr(each, "__dict__", None)
        if type(attributes) is dict:
            self._undo.append(functools.partial(_refill, dict, attributes, dict(attributes)))
            yield from attributes.values()


def _is_apart(each: Any) -> bool:
    return isinstance(each, _LEFT_ALONE) or tf.is_tensor(each)


def _refill(base: Any, container: Any, items: Any) -> None:
    """Give a container its items back by the methods of its base class, past those that track what is added."""
    if base is list:
        if not _are_same(container, items):
            list.__setitem__(container, slice(None), items)
    elif base in (dict, collections.OrderedDict):
        if not (_are_same(base.keys(container), items) and _are_same(base.values(container), items.values())):
            base.clear(container)
            base.update(container, items)
    elif base is set:
        if set.symmetric_difference(container, items):
            set.clear(container)
            set.update(container, items)
    elif not _are_same(container, items):
        container.clear()
        container.extend(items)


def _are_same(left: Any, right: Any) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


def slots_of(model: Any) -> list[Any]:
    """Return the variables of all optimizers that a model is trained with.

    An optimizer that scales the loss has the variables of the one inside, too: they are there twice.
    """
    return [variable for each in KeptObjects(*trained_with(model)).optimizers for variable in each.variables]
