"""What is noted of the calls of a step while it is traced, whoever traces it."""

from __future__ import annotations

import pickle
import random
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_memsaver.capture.step import TracedStep
from tf_memsaver.compat.keras_models import all_layers


class SparseGradients:
    """Finds the sparse gradients that are terms of sums, where the parts of a replay would come in another order."""

    def __init__(self) -> None:
        self._units: dict[tuple[str, int], dict[int | None, bool]] = {}

    def add(self, name: str, unit: int | None, is_sparse: bool, variable: Any = None) -> None:
        """Note that a unit (None: what is in no unit) has a gradient for what is called ``name``.

        Several variables may have one name.
        """
        units = self._units.setdefault((name, id(variable)), {})
        units[unit] = units.get(unit, False) or is_sparse

    def leaves(self, name: str, unit: int | None) -> None:
        """Note that the sparse gradient of a unit goes to what another one made, where it is a term of a sum."""
        self.add(name, unit, True)
        self.add(name, None, True)

    def summed(self) -> dict[int, str]:
        """Return, by unit, what it has a sparse gradient for, if others have a gradient for that, too."""
        return {
            unit: name
            for (name, _), units in self._units.items()
            for unit, sparse in units.items()
            if len(units) > 1 and sparse and unit is not None
        }


def complete_shape(tensor: Any, said: Sequence[int | None] | None, step: TracedStep) -> None:
    """Tell a tensor the shape that the model says it has, where tracing does not show it: after split text."""
    if said and isinstance(tensor, tf.Tensor) and not tensor.shape.is_fully_defined():
        # Of several sizes nobody knows which is meant: a batch of graphs has as many nodes and edges as there are.
        sizes = {given.shape[0] for given in step.inputs if given.shape.rank}
        shape = (sizes.pop() if said[0] is None and len(sizes) == 1 else said[0], *said[1:])
        if tensor.shape.is_compatible_with(shape):
            tensor.set_shape(shape)


class CallNotes:
    """Notes in a step what calls do beside making tensors, one call after the other."""

    def __init__(self, step: TracedStep, known: Collection[int], operations: Iterable[Any]) -> None:
        """Begin with the next call of these operations; ``known`` are ids of the variables that the source lists."""
        self._step, self._known = step, known
        self._generators = _generators_of(operations)
        self._drawn = _random_states(self._generators)

    def note(self, unit: int, read: Iterable[Any]) -> None:
        """Note whether a call that was just made drew random numbers, and what it read of variables not listed."""
        before, self._drawn = self._drawn, _random_states(self._generators)
        if self._drawn != before:
            self._step.drawing_units.add(unit)
        unknown = [variable.name for variable in read if id(variable) not in self._known]
        self._step.unknown_reads.update((unit, name) for name in unknown[:1])


def _generators_of(operations: Iterable[Any]) -> list[Any]:
    """Return the generators of random numbers that layers hold as attributes, without TensorFlow's."""
    layers = [layer for each in operations if isinstance(each, keras.layers.Layer) for layer in all_layers(each)]
    return [value for layer in layers for value in vars(layer).values() if _state_of(value) is not None]


def _state_of(value: Any) -> Any:
    """Return the state of a generator of random numbers; None for what is none, and for one of the system's."""
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    is_seeded = isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)
    return value.getstate() if is_seeded else None


def _random_states(generators: Sequence[Any]) -> bytes:
    """Return the states of generators that are not TensorFlow's: what draws from them, draws once a trace."""
    return pickle.dumps((random.getstate(), np.random.get_state(legacy=False), *map(_state_of, generators)))
