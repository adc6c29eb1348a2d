"""What ``fit`` is given, as far as a plan needs it: the shapes of a batch, and batches to measure and verify with.

A ``tf.data.Dataset`` tells its shapes (``compat.datasets``); where it leaves some open, the first elements are read.
Anything else that can be read from the start again and again, such as a ``keras.utils.PyDataset``, is asked for its
first batch. A batch or specs of one are taken as they are.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tf_memsaver.compat import datasets
from tf_memsaver.compat.datasets import NOTHING_HELD, Held
from tf_memsaver.errors import InvalidRequestError
from tf_memsaver.units import shown

_ACCEPTED = (
    "a tf.data.Dataset, a keras.utils.PyDataset, a batch such as (x, y) or (x, y, sample_weight), or specs of one such "
    "as (tf.TensorSpec((32, 224, 224, 3)), tf.TensorSpec((32,), 'int64'))"
)


Prepare = Callable[[Any, Any, Any], Any]
"""Makes of ``x``, ``y`` and ``sample_weight`` an element of the data that a model is trained on."""


class Batch(NamedTuple):
    """One batch: structures of tensors or of specs, whose first dimension is the batch; None where there is nothing."""

    x: Any
    y: Any = None
    sample_weight: Any = None

    @property
    def leaves(self) -> list[Any]:
        """Its tensors or specs, without what is None."""
        return _leaves(tuple(self))

    def filled(self, leaves: Iterable[Any]) -> Batch:
        """Return a batch of the same structure with others for ``leaves``."""
        given = iter(leaves)
        return self.mapped(lambda _: next(given))

    def mapped(self, function: Callable[[Any], Any]) -> Batch:
        """Return a batch of the same structure, with what a function returns for each of the leaves."""
        return Batch(
            *(keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), part) for part in self)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """What a model is trained with.

    ``specs`` are those of a batch, with a free first dimension where that is the batch, and all others known, so far as
    the data tells them. ``batch_size`` is that of the same batch, None where specs with a free first dimension were
    given.
    ``batches`` makes an iterator over real batches from the start; there are none where only specs were given.
    ``fixed_batch`` says that all batches are known to be of one size, so that ``fit`` traces its step for that.
    ``held`` is what the data holds in memory beside a batch, so far as that is known.
    """

    specs: Batch
    batch_size: int | None
    batches: Callable[[], Iterator[Batch]] | None
    fixed_batch: bool = False
    held: Held = NOTHING_HELD

    def first(self, count: int) -> list[Batch]:
        """Return the first batches as tensors; where there are fewer, they come again."""
        assert self.batches is not None
        with random_states_kept():
            found = list(itertools.islice(self.batches(), count))
        types = [spec.dtype for spec in self.specs.leaves]
        tensors = [batch.filled(map(tf.convert_to_tensor, batch.leaves, types)) for batch in found]
        return [tensors[place % len(tensors)] for place in range(count)]


def data_of(
    given: Any,
    prepared: Prepare | None = None,
    unpack: Callable[[Any], Batch] | None = None,
    batch_size: int | None = None,
) -> Data:
    """Return what was given as ``data=``; ``prepared`` is what a model makes of each batch before it is trained on it.

    ``unpack`` makes a batch of an element; without, Keras's rule does. Arrays that are longer than ``batch_size`` are
    batched, as ``fit`` does it, which knows that all batches have one size where the last one is full.

    Of a ``tf.data.Dataset`` nothing is read but what its steps say of themselves and, if that leaves shapes open, its
    first elements: the largest counts. They are read from a copy that does not shuffle, so that their order stays as it
    was.

    Raises:
      InvalidRequestError: it is nothing that ``fit`` takes, has no first batch, or can be read only once.
    """
    if isinstance(given, Iterator):
        raise InvalidRequestError(
            "data is an iterator: reading a batch from it would take that batch away from training. Give one batch "
            "of it, data=next(iterator), or the dataset that it comes from."
        )
    unpack, fixed, is_open = unpack or unpacked, False, False
    if isinstance(given, tf.data.Dataset):
        if given.cardinality() == 0:
            raise _no_batch()
        shapes = datasets.flat_shapes(given)
        is_open = not all(shape.is_fully_defined() for shape in shapes)
    if isinstance(given, tf.data.Dataset) and prepared is None:
        said = unpack(given.element_spec)
        if not all(isinstance(leaf, tf.TensorSpec) for leaf in said.leaves):
            raise _no_tensors()
        known = said.filled(map(tf.TensorSpec, shapes, (leaf.dtype for leaf in said.leaves)))
        if not is_open:
            fixed = all(leaf.shape.is_fully_defined() for leaf in said.leaves)
            return replace(
                _of_batch(known),
                batches=lambda: map(unpack, iter(_to_look_at(given))),
                fixed_batch=fixed,
                held=datasets.held_by(given),
            )
    elif _is_batch(given):
        batch = unpack(given)
        count = _of_batch(batch).batch_size or 0
        is_of_specs = _is_of_specs(batch)
        if batch_size is None or count <= batch_size or is_of_specs:
            if batch_size is None and count > _MANY and not is_of_specs:
                _warn_of_many(count)
            return _of_batch(batch if prepared is None else unpack(prepared(*batch)))
        given, fixed = _Slices(given, count, batch_size), count % batch_size == 0

    def read() -> Iterator[Batch]:
        for element in _batches_of(_to_look_at(given))():
            batch = unpack(element)
            yield batch if prepared is None else unpack(prepared(*batch))

    with random_states_kept():
        place, largest = _largest(itertools.islice(read(), _LOOKED_AT if is_open else 1))
    if largest is None:
        raise _no_batch()

    def batches() -> Iterator[Batch]:
        # Read anew: kept, it would take memory beside the steps.
        return itertools.chain(itertools.islice(read(), place, place + 1), read()) if place else read()

    return replace(_of_batch(largest), batches=batches, fixed_batch=fixed, held=_held_by(given))


_LOOKED_AT = 32
"""Batches of a dataset that are looked at where it does not tell their sizes."""


def _largest(found: Iterable[Batch]) -> tuple[int, Batch | None]:
    """Return the place of the largest of the first batches, and the batch; warn where others may be larger."""
    sizes: list[list[tf.TensorSpec]] = []
    largest, most, place = None, -1, 0
    for batch in found:
        sizes.append(list(map(_spec, batch.leaves)))
        taken = sum(map(datasets.bytes_of, sizes[-1]))
        if taken > most:
            largest, most, place = batch, taken, len(sizes) - 1
    if len(sizes) == _LOOKED_AT and any(each != sizes[0] for each in sizes):
        logging.warning(
            "the batches of data are of different sizes. The plan is for the largest of the first %d: %s. Steps with "
            "larger ones take more memory. To plan for these, give the specs of the largest batch as data=.",
            len(sizes),
            ", ".join(str(tuple(spec.shape)) for spec in sizes[place]),
        )
    return place, largest


_MANY = 1024
"""Samples in arrays from which on they are hardly one batch: ``fit`` makes batches of 32 where nobody says."""


def _warn_of_many(count: int) -> None:
    """Warn of arrays that are taken for one batch, and are probably all that there is to train on."""
    logging.warning(
        "data is arrays of %d samples, which count as one batch. If fit divides them into batches, give their size "
        "(fit's default is batch_size=32). If it is one batch, give batch_size=%d.",
        count,
        count,
    )


class _Slices:
    """Arrays, read batch by batch; the samples at their end that fill no batch are left out."""

    def __init__(self, given: Any, count: int, batch_size: int) -> None:
        self._given, self._count, self._size = given, count, batch_size

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, self._count - self._size + 1, self._size):
            yield keras.tree.map_structure(functools.partial(self._cut, start), self._given)

    def sizes(self) -> Iterator[int]:
        """Return the bytes of each array, as the tensor that Keras makes of it."""
        return map(datasets.bytes_of, map(_spec, _leaves(self._given)))

    def _cut(self, start: int, leaf: Any) -> Any:
        has_batch = leaf is not None and len(leaf.shape) > 0 and leaf.shape[0] == self._count
        return leaf[start : start + self._size] if has_batch else leaf


_READY_OF_ARRAYS = 3
"""Batches of arrays that Keras has ready (``array_data_adapter``: a parallel map and a prefetch, both tuned)."""


def _held_by(given: Any) -> Held:
    """Return what data holds in memory: arrays are copied as a whole, and all but loops of one's own look ahead."""
    if isinstance(given, tf.data.Dataset):
        return datasets.held_by(given)
    if isinstance(given, _Slices):
        return Held(tuple((nbytes, 1) for nbytes in given.sizes()), _READY_OF_ARRAYS)
    return Held(batches=1)


def _to_look_at(given: Any) -> Any:
    """Return what an element may be read from without changing what training will see."""
    if not isinstance(given, tf.data.Dataset) or not datasets.is_shuffled(given):
        return given
    copy = datasets.unshuffled(given)
    if copy is None:
        logging.warning(
            "an element of data (%s) is read from the dataset itself, since it cannot be copied. The dataset is "
            "shuffled, and each iterator over it has its own order, so training will see the order that would have "
            "come one epoch later. To keep the order, give one batch or specs: data=(tf.TensorSpec((32, 128)), "
            "tf.TensorSpec((32,))).",
            given.element_spec,
        )
    return given if copy is None else copy


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """Put the random numbers of Python and NumPy back: data may draw from them when it is read."""
    before = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _batches_of(given: Any) -> Callable[[], Iterator[Any]]:
    """Return what makes an iterator over the elements of a dataset, from the start.

    Raises:
      InvalidRequestError: it is no dataset, and no batch either.
    """
    if isinstance(given, keras.utils.PyDataset):
        count = given.num_batches
        return lambda: (given[place] for place in (itertools.count() if count is None else range(count)))
    if isinstance(given, Iterable) and not isinstance(given, (str, bytes, Mapping, tuple, list)):
        return lambda: iter(given)
    leaves = keras.tree.flatten(given) if isinstance(given, (tuple, list, Mapping)) else []
    value = next((leaf for leaf in leaves if isinstance(leaf, (bool, int, float))), None)
    if value is not None and any(hasattr(leaf, "shape") for leaf in leaves):
        raise InvalidRequestError(
            f"data has {value!r} ({type(value).__name__}) beside its tensors. Make it one, as tf.constant({value!r}). "
            "If a loop's step reads it in Python, give as step= a tf.function that fills it in: "
            "step=tf.function(lambda x: train_step(x, True)), with data= for what is left."
        )
    raise InvalidRequestError(f"data must be {_ACCEPTED}, got {shown(given)}.")


def _of_batch(batch: Batch) -> Data:
    specs = batch.mapped(_spec)
    # Not all parts have the batch in front: a batch of graphs has as many nodes and edges as there are.
    size = next((spec.shape[0] for part in (specs.y, specs.x) for spec in _leaves(part) if spec.shape.rank), None)
    return Data(
        specs=specs.mapped(functools.partial(freed, size)),
        batch_size=size,
        batches=None if _is_of_specs(batch) else lambda: itertools.repeat(batch),
    )


def _is_of_specs(batch: Batch) -> bool:
    return any(isinstance(leaf, (tf.TypeSpec, keras.KerasTensor, keras.InputSpec)) for leaf in batch.leaves)


def unpacked(element: Any) -> Batch:
    """Return an element of a dataset as Keras reads it (``keras.utils.unpack_x_y_sample_weight``)."""
    if isinstance(element, (tuple, list)) and len(element) > 3:
        raise InvalidRequestError(
            f"data: a batch is x, (x, y) or (x, y, sample_weight), but this one has {len(element)} parts. Put "
            "several inputs into a tuple or dict: ((x1, x2), y)."
        )
    return Batch(*keras.utils.unpack_x_y_sample_weight(element))


def _is_batch(given: Any) -> bool:
    """Whether something is tensors, arrays or specs, or a tuple, list or dict of such."""
    if isinstance(given, Mapping):
        return bool(given) and all(map(_is_batch, given.values()))
    if isinstance(given, (tuple, list)) and not hasattr(given, "shape"):
        parts = [each for each in given if each is not None]
        return bool(parts) and all(map(_is_batch, parts))
    return hasattr(given, "shape") and hasattr(given, "dtype")


def _leaves(structure: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(structure) if leaf is not None]


def _spec(leaf: Any) -> tf.TensorSpec:
    """Return the spec of a tensor, array or spec; arrays of numbers as Keras converts them."""
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor, tf.RaggedTensorSpec, tf.SparseTensorSpec)):
        raise _no_tensors()
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OUSf":
        return tf.TensorSpec(leaf.shape, keras.config.floatx() if leaf.dtype.kind == "f" else tf.string)
    return tf.TensorSpec(tuple(leaf.shape), leaf.dtype)


def freed(size: int | None, spec: tf.TensorSpec) -> tf.TensorSpec:
    """Return a spec with a free first dimension, if that is the batch, which has this size; as it is without one."""
    if not spec.shape.rank or spec.shape[0] != size:
        return spec
    return with_free_batch(spec)


def with_free_batch(tensor: Any) -> tf.TensorSpec:
    """Return the spec of a tensor, or of what has a shape and a dtype as one, with a free first dimension."""
    shape = tuple(tensor.shape)
    return tf.TensorSpec((None, *shape[1:]) if shape else (), tensor.dtype)


def of_size(batch_size: int, spec: tf.TensorSpec) -> tf.TensorSpec:
    """Return the spec of a batch's part with this batch size, where it leaves that open."""
    return tf.TensorSpec([batch_size, *spec.shape[1:]], spec.dtype, spec.name) if spec.shape[:1] == [None] else spec


def _no_batch() -> InvalidRequestError:
    return InvalidRequestError("data is empty. Give data with at least one batch.")


def _no_tensors() -> InvalidRequestError:
    return InvalidRequestError(
        "data has ragged or sparse tensors: their sizes depend on the data, so no plan can be made. Convert them to "
        "dense tensors of one length (to_tensor(shape=...)) before the model."
    )
