"""What batches of a ``tf.data.Dataset`` look like, beyond what its ``element_spec`` says, and what it keeps in memory.

No element is read. Reading one would change what training sees: each iterator over a shuffled dataset moves on the
order of the next. Where one must be read, it is read from a copy that does not shuffle.

Read from TensorFlow 2.20 and 2.21, in which these files are the same: ``tensorflow/python/data/ops/`` (``dataset_ops``,
``batch_op``, ``padded_batch_op``, ``map_op``, ``zip_op``, ``structured_function``; ``cache_op``, ``shuffle_op``,
``prefetch_op``, ``from_tensors_op`` and ``from_tensor_slices_op``); of a shuffled dataset's graph, from
``tensorflow/core/kernels/data/shuffle_dataset_op.cc``, by which it holds a handle to the state of its order; that a
dataset gets a prefetch at its end, from ``tensorflow/core/grappler/optimizers/data/inject_prefetch.cc``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.data.ops.options import ExternalStatePolicy


def flat_shapes(dataset: tf.data.Dataset) -> list[tf.TensorShape]:
    """Return the shapes of a full batch, flat, so far as the steps that the dataset is made of tell them."""
    said = [spec.shape for spec in tf.nest.flatten(dataset.element_spec)]
    found = _told_by(dataset)
    if found is None or len(found) != len(said):
        return said
    pairs = zip(said, found, strict=True)
    return [mine.merge_with(other) if mine.is_compatible_with(other) else mine for mine, other in pairs]


def _told_by(dataset: Any) -> list[tf.TensorShape] | None:
    """Return what the last step of a dataset makes of the shapes of what it gets, or None if that is not known."""
    inputs = dataset._inputs()
    if type(dataset).__name__ == "_ZipDataset":
        return [shape for each in inputs for shape in flat_shapes(each)]
    if len(inputs) != 1:
        return None
    size = _constant(getattr(dataset, "_batch_size", None))
    if size is not None:
        return [tf.TensorShape([size]).concatenate(spec.shape[1:]) for spec in tf.nest.flatten(dataset.element_spec)]
    function = getattr(getattr(dataset, "_map_func", None), "function", None)
    if function is not None:
        return _mapped(function, flat_shapes(inputs[0]))
    return flat_shapes(inputs[0]) if inputs[0].element_spec == dataset.element_spec else None


def _constant(size: Any) -> int | None:
    value = None if size is None else tf.get_static_value(size)
    return None if value is None or value.ndim else int(value)


def _mapped(function: Any, shapes: list[tf.TensorShape]) -> list[tf.TensorShape] | None:
    """Return the shapes that a concrete function makes of arguments of others than those it was traced with."""
    traced, graph = function.graph, tf.Graph()
    try:
        with graph.as_default():
            given = {
                tensor.name: tf.compat.v1.placeholder(tensor.dtype, shapes[place] if place < len(shapes) else None)
                for place, tensor in enumerate(traced.inputs)
            }
            names = [tensor.name for tensor in traced.outputs]
            made = tf.graph_util.import_graph_def(traced.as_graph_def(), given, names, name="") if names else []
    except (TypeError, ValueError, NotImplementedError) as error:
        logging.debug("the shapes after a map are not known: %s", error)
        return None
    sizes = {shape[0] for shape in shapes if shape.rank}
    size = sizes.pop() if len(sizes) == 1 else None
    return [_with_size(tensor.shape, size) for tensor in made]


def _with_size(shape: tf.TensorShape, size: int | None) -> tf.TensorShape:
    """Return a shape with a batch size where it does not say its own: what maps a batch mostly keeps its size."""
    return tf.TensorShape([size]).concatenate(shape[1:]) if shape.rank and shape[0] is None else shape


def is_shuffled(dataset: tf.data.Dataset) -> bool:
    """Whether a step that a dataset is made of shuffles."""
    return "Shuffle" in type(dataset).__name__ or any(map(is_shuffled, dataset._inputs()))


def unshuffled(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    """Return a copy whose elements come in their first order, None where there can be none.

    Reading from it leaves the order alone in which the dataset's own elements will come.
    """
    try:
        kept = ExternalStatePolicy.IGNORE
        graph = tf.compat.v1.GraphDef.FromString(dataset._as_serialized_graph(external_state_policy=kept).numpy())
        sources = {node.name: node.input[0] for node in graph.node if node.op.startswith("Shuffle")}
        for node in graph.node:
            for place, name in enumerate(node.input):
                while name in sources:
                    name = sources[name]
                node.input[place] = name
        variant = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
        return dataset_ops.from_variant(variant, dataset.element_spec)
    except (tf.errors.OpError, ValueError, RecursionError) as error:
        logging.debug("a shuffled dataset cannot be copied: %s", error)
        return None


class Held(NamedTuple):
    """What data holds in memory beside the batch in use, while a model is trained on it.

    ``buffers`` are pairs: the bytes of a buffer, and how many there are of it. ``batches`` are ready and wait their
    turn. ``not_counted`` are the steps that keep elements, but nobody knows how many: "cache", "shuffle".
    """

    buffers: tuple[tuple[int, int], ...] = ()
    batches: int = 0
    not_counted: tuple[str, ...] = ()


NOTHING_HELD = Held()


def held_by(dataset: tf.data.Dataset) -> Held:
    """Return what a dataset holds, so far as its steps tell it: tensors, the elements that it keeps, and batches."""
    kept = [(step, _elements_kept(step)) for step in _steps(dataset)]
    buffers = [(nbytes, 1) for nbytes in tensors_in(dataset)]
    buffers += (each for step, count in kept if count for each in _kept_by(step, count))
    unknown = {_KEEPING[type(step).__name__] for step, count in kept if count is None}
    return Held(tuple(buffers), _ready_batches(dataset), tuple(sorted(unknown)))


def tensors_in(dataset: tf.data.Dataset) -> Iterator[int]:
    """Yield the bytes of each tensor that a dataset was made of: they are in memory from the start."""
    yield from map(bytes_of, getattr(dataset, "_tensors", ()))
    for each in dataset._inputs():
        yield from tensors_in(each)


def bytes_of(tensor: Any) -> int:
    """Return the bytes of a tensor or of one of a spec, 0 if the shape does not tell them, as with strings."""
    return int(tensor.shape.num_elements() * tensor.dtype.size) if tensor.shape.is_fully_defined() else 0


def _kept_by(step: Any, count: int) -> Iterator[tuple[int, int]]:
    """Yield the buffers of so many elements that a step of a dataset keeps."""
    specs = tf.nest.flatten(step.element_spec)
    if not all(isinstance(spec, tf.TensorSpec) for spec in specs):
        return
    are_views = _are_slices(step)
    for spec, shape in zip(specs, flat_shapes(step), strict=True):
        nbytes = bytes_of(tf.TensorSpec(shape, spec.dtype))
        if not are_views or nbytes % _ALIGNMENT:
            yield nbytes, count


def _steps(dataset: Any) -> Iterator[Any]:
    """Yield all that a dataset is made of, itself first."""
    steps = [dataset]
    while steps:
        step = steps.pop()
        steps += step._inputs()
        yield step


_KEEPING = {"CacheDataset": "cache", "_ShuffleDataset": "shuffle"}
"""Steps that keep elements in memory."""

_ALIGNMENT = 64
"""Slices of a tensor that begin at a multiple of so many bytes are views of it, others are copied (``SubSlice``)."""

_PASSES_ON = (
    *("_ShuffleDataset", "CacheDataset", "_RepeatDataset", "_TakeDataset", "_SkipDataset", "_ZipDataset"),
    "_OptionsDataset",
)


def _are_slices(step: Any) -> bool:
    """Whether the elements of a step are slices of tensors that the dataset was made of, and no new tensors."""
    kind, inputs = type(step).__name__, step._inputs()
    if kind in _PASSES_ON or "Prefetch" in kind:
        return all(map(_are_slices, inputs))
    return kind in ("_TensorSliceDataset", "_TensorDataset")


def _elements_kept(step: Any) -> int | None:
    """Return how many elements a step of a dataset keeps in memory, None where that is not known."""
    kind = type(step).__name__
    if kind not in _KEEPING or (kind == "CacheDataset" and tf.get_static_value(step._filename) != b""):
        return 0
    if all(getattr(spec, "dtype", tf.string) == tf.string for spec in tf.nest.flatten(step.element_spec)):
        return 0  # Text has memory of its own.
    length = int(step.cardinality())
    if length == tf.data.UNKNOWN_CARDINALITY:
        return None
    if kind == "CacheDataset":
        return max(0, length)
    size = _constant(step._buffer_size) or 0
    return size if length == tf.data.INFINITE_CARDINALITY else min(size, length)


def _ready_batches(dataset: Any) -> int:
    """Return how many batches are ready at a time: those of prefetches and parallel steps after the one that batches.

    A prefetch that TensorFlow tunes begins with one, and so does the one that it adds where a dataset ends without.
    """
    count, step = 0 if "Prefetch" in type(dataset).__name__ else 1, dataset
    while _constant(getattr(step, "_batch_size", None)) is None:
        kind = type(step).__name__
        if "Prefetch" in kind:
            count += max(1, _constant(step._buffer_size) or 1)
        count += kind == "_ParallelMapDataset"
        inputs = step._inputs()
        if len(inputs) != 1:
            break
        step = inputs[0]
    return count
