"""What a caller tells of a training: the model, or the loop that calls it, and the batches that it is trained on."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from tf_memsaver.compat import keras_training
from tf_memsaver.compat.datasets import bytes_of
from tf_memsaver.compat.devices import has_gpu
from tf_memsaver.cost.device import Device
from tf_memsaver.errors import InvalidRequestError
from tf_memsaver.program.batch import synthetic_batch
from tf_memsaver.program.data import Batch, Data, data_of, of_size
from tf_memsaver.program.loop import Loop, loop_of
from tf_memsaver.program.model_check import check_model
from tf_memsaver.program.signature import has_one_batch_size, is_planned_as_a_step, note_batch, note_inputs
from tf_memsaver.program.train_step import has_own_train_step

_WARNED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models whose own step was left out, which was said."""

_NOT_COUNTED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models whose data keeps more in memory than is counted, which was said."""


class Told(NamedTuple):
    """What a caller tells of the batches that a model is trained on; ``data`` is None where only their size is told.

    ``model`` is what is trained: the model, or with ``step`` the loop that calls it.
    """

    model: Any
    batch_size: int
    data: Data | None

    @property
    def has_batches(self) -> bool:
        """Whether there are real batches."""
        return self.data is not None and self.data.batches is not None

    @property
    def fixed_batch(self) -> bool:
        """Whether all batches are known to have this size, or the model takes no other: steps are traced for it."""
        if self.data is not None and self.data.fixed_batch:
            return True
        return not is_planned_as_a_step(self.model) and has_one_batch_size(self.model)

    def data_bytes(self, device: Device) -> int:
        """Return the bytes on a device that the data holds beside the batch in use, as far as that is known.

        On a CPU, data comes from the same allocator as a step's tensors. It stays on the CPU where there is a GPU.
        """
        if self.data is None or not device.pool_grows:
            return 0
        batch = (of_size(self.batch_size, spec) for spec in self.data.specs.leaves)
        waiting = [(bytes_of(spec), self.data.held.batches) for spec in batch]
        found = [each for each in (*self.data.held.buffers, *waiting) if each[0] >= device.pooled_from and each[1]]
        largest, count = max(found, default=(0, 0))
        alone = device.rounded_alone(largest) - device.rounded(largest) if count == 1 else 0
        return alone + sum(count * device.rounded(nbytes) for nbytes, count in found)

    def batches(self, model: Any, count: int) -> list[Batch]:
        """Return batches of this size for a model: real ones where there are any, or else made-up ones.

        Samples of a real batch come again where more are asked for.
        """
        if self.data is None or not self.has_batches:
            return [synthetic_batch(model, self.batch_size, seed=number) for number in range(count)]
        return [batch.mapped(self._cut) for batch in self.data.first(count)]

    def _cut(self, tensor: tf.Tensor) -> tf.Tensor:
        assert self.data is not None
        size = self.data.batch_size
        if size is None or not tensor.shape.rank or tensor.shape[0] != size:
            return tensor
        times = -(-self.batch_size // size)
        return tf.concat([tensor] * times, 0)[: self.batch_size] if times > 1 else tensor[: self.batch_size]


def told_of(model: Any, options: Mapping[str, Any]) -> Told:
    """Note what the options ``data``, ``inputs`` and ``step`` tell of a model's batches; return it with their size.

    Raises:
      InvalidRequestError: the batch size is not told, or the data is not what the model takes.
      UnsupportedModelError: no Keras model, or its call cannot be traced with this.
    """
    model = subject_of(model, options)
    check_model(model, needs_call=options["data"] is None)
    given, size = options["data"], options["batch_size"]
    if options.get("inputs") is not None:
        note_inputs(model, options["inputs"])
    if given is None:
        if size is None:
            raise InvalidRequestError(
                "the batch size is missing, and memory depends on it. Give data= (your training data, as for fit: "
                "a dataset or a batch), or batch_size=."
            )
        if has_own_train_step(model) and not is_planned_as_a_step(model) and model not in _WARNED:
            _WARNED.add(model)
            logging.warning(
                "model '%s' has its own train_step, which cannot be traced without data. Only its call is planned, "
                "as in a step of Keras's own train_step. Give data= (your training data, as for fit).",
                model.name,
            )
        return Told(model, size, None)
    if isinstance(model, Loop):
        # What a loop's step is given is what one of the replicas gets.
        data, replicas = model.data_of(given, size), 1
    else:
        data = data_of(given, keras_training.preprocessing_of(model), batch_size=size)
        replicas = keras_training.replicas_of(model)
    # ``fit`` parts a batch among the replicas.
    own_size = None if data.batch_size is None else max(1, data.batch_size // replicas)
    size = own_size if size is None else size
    if size is None:
        raise InvalidRequestError("data does not give the batch size. Give batch_size=, too.")
    note_batch(model, data.specs, own_size if data.fixed_batch else None)
    _say_what_is_not_counted(model, data)
    return Told(model, size, data)


def _say_what_is_not_counted(model: Any, data: Data) -> None:
    """Warn once for a model of what its data keeps in the CPU's memory, where a step is, if nobody knows how much."""
    if not data.held.not_counted or model in _NOT_COUNTED or has_gpu():
        return
    _NOT_COUNTED.add(model)
    steps = [f"{step}()" for step in data.held.not_counted]
    logging.warning(
        "model '%s': the length of its data is not known, so what %s %s in memory is not counted. Call "
        "dataset.apply(tf.data.experimental.assert_cardinality(...)) before that, or leave room in the budget.",
        model.name,
        " and ".join(steps),
        "keeps" if len(steps) == 1 else "keep",
    )


def subject_of(model: Any, options: Mapping[str, Any]) -> Any:
    """Return what is trained: the model that was given or, with the option ``step``, the loop that calls it or them.

    Raises:
      InvalidRequestError: the step is no function, or there is no data to trace it on.
      UnsupportedModelError: something in it is no Keras model.
    """
    step = options.get("step")
    if step is None:
        return model
    if options["data"] is None:
        raise InvalidRequestError("step= needs data=. Give the dataset that your loop iterates over, or a batch of it.")
    if options.get("inputs") is not None:
        raise InvalidRequestError(
            "step= needs no inputs=, since the inputs are seen when the step is traced. Leave inputs= out."
        )
    return loop_of(model, step)
