"""How tensors get into a recompute segment: as arguments, held from its first run, or as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tf_memsaver.compat import keras_calls, keras_variables
from tf_memsaver.rewrite.blocks import Block
from tf_memsaver.runtime.replayable import Tensors
from tf_memsaver.tfgraph.operations import has_gradients

_SMALL = 64
"""Elements of an integer tensor, such as a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entering:
    """The slots that a segment reads, by how it gets their tensors.

    ``floats`` and ``weights`` are arguments; ``others``, and the masks of those in ``masked``, are held; the tensors in
    ``resident`` are live anyway, and a replay reads them as they are. An optional input may be None, which stays so.
    """

    floats: tuple[int, ...]
    weights: tuple[int, ...]
    others: tuple[int, ...]
    masked: tuple[int, ...]
    resident: Mapping[int, Any]

    @classmethod
    def of(cls, block: Block, slots: Sequence[Any]) -> Entering:
        """Sort what a segment reads of ``slots``."""
        # Random numbers wait for the gate of a replay by their seeds.
        resident = {slot for slot in block.resident.intersection(block.inputs) if not _is_small_integer(slots[slot])}
        resident.update(slot for slot in block.inputs if slots[slot] is None)
        entering = [slot for slot in block.inputs if slot not in resident]
        floats = [slot for slot in entering if is_differentiable(slots[slot])]
        return cls(
            floats=tuple(slot for slot in floats if slot not in block.weights),
            weights=tuple(slot for slot in floats if slot in block.weights),
            others=tuple(slot for slot in entering if slot not in floats),
            masked=tuple(slot for slot in block.inputs if mask_of(slots[slot]) is not None),
            resident={slot: slots[slot] for slot in block.inputs if slot in resident},
        )

    def filled(self, count: int, floats: Tensors, weights: Tensors, held: Tensors) -> list[Any]:
        """Return ``count`` slots with the tensors that enter."""
        slots: list[Any] = [None] * count
        for slot, tensor in self.resident.items():
            slots[slot] = tensor
        for places, tensors in ((self.weights, weights), (self.floats, floats)):
            for slot, tensor in zip(places, tensors, strict=True):
                slots[slot] = tensor
        for slot, tensor in zip(self.others, held, strict=False):
            slots[slot] = tensor
        for slot, mask in zip(self.masked, held[len(self.others) :], strict=True):
            keras_calls.set_keras_mask(slots[slot], mask)
        return slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Variables:
    """The variables of a segment, by how it gets their values: ``trained`` are arguments, ``held`` are state.

    ``read_again`` has a place among the trained ones for every further read of one. Both it and ``held`` are known
    after a first run, which is given the ``state`` that layers list.
    """

    trained: tuple[Any, ...]
    state: tuple[tuple[Any, Any], ...]
    held: tuple[Any, ...] = ()
    read_again: tuple[int, ...] = ()

    @classmethod
    def of(cls, variables: Sequence[Any]) -> Variables:
        """Sort variables, and read those that are not trained."""
        # Layers may be frozen and unfrozen between runs, so what is trained is asked anew.
        return cls(
            trained=tuple(v for v in variables if keras_variables.is_trained(v)),
            state=tuple((v, keras_variables.read_variable(v)) for v in variables if not keras_variables.is_trained(v)),
        )


def mask_of(tensor: Any) -> Any:
    """Return the mask that Keras has put on a tensor, or None."""
    return None if tensor is None else keras_calls.get_keras_mask(tensor)


def is_differentiable(tensor: Any) -> bool:
    """Return whether gradients are taken for what a slot holds."""
    return isinstance(tensor, tf.Tensor) and has_gradients(tensor.dtype)


def _is_small_integer(tensor: Any) -> bool:
    count = tensor.shape.num_elements() if isinstance(tensor, tf.Tensor) and tensor.dtype.is_integer else None
    return count is not None and count <= _SMALL
