"""Measure real training steps: peak bytes by ``tf.config.experimental.get_memory_info``, and seconds.

By default, steps run in a separate process, since the allocator's peak and its cached buffers outlive a model. The
first step is a warm-up; the figures are the largest peak and the median time of the steps after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf
from absl import logging

from tf_memsaver.capture.convert import current_device
from tf_memsaver.check.measurement import Measurement, measure_here
from tf_memsaver.check.running import How
from tf_memsaver.check.worker_job import measure_in_process
from tf_memsaver.compat.counting import counts_all
from tf_memsaver.compat.devices import reserves_gpu
from tf_memsaver.compat.messages import first_line
from tf_memsaver.cost.device import LEAST_COUNTED_STEP
from tf_memsaver.errors import InvalidRequestError, MeasurementError
from tf_memsaver.options.table import MeasureOptions
from tf_memsaver.options.verbs import takes
from tf_memsaver.program import batch
from tf_memsaver.program.told import told_of
from tf_memsaver.rewrite.optimized_model import is_optimized
from tf_memsaver.units import format_bytes

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes(MeasureOptions)
def measure(model: Any, **options: Unpack[MeasureOptions]) -> Measurement:
    """Run real training steps of ``model``, and return their peak memory in bytes and their time in seconds.

    The steps run on one batch of the data, or on a made-up batch. A compiled model is trained by Keras's own ``fit``;
    for a model that is not compiled, the gradients of the mean square of its outputs are computed. If the compiled loss
    cannot be computed on made-up targets, the mean square replaces it, and the log says so. With ``step``, your step
    runs in this process (``isolate=False``) with the model that you give here, plain or optimized. Afterwards, the
    model, its variables and its optimizer are as before.

    Peaks differ from step to step, since TensorFlow's threads run in no fixed order. Below 16 MiB of activations the
    figures are not reliable, since the CPU's allocator does not count small buffers; a warning says so.

    Example::

        print(tf_memsaver.measure(optimized, data=train_ds))
        print(tf_memsaver.measure(optimized, data=train_ds, beside_plain=True))  # also how much longer a step takes

    Args:
      model: a plain or optimized model; with ``step``, as in ``optimize``.
      steps: the number of steps to measure, after one warm-up step.

    Raises:
      InvalidRequestError: an argument is not valid.
      UnsupportedModelError: no Keras model, or its call cannot be traced.
      MeasurementError: the process failed (the message has the end of its log), the steps do not fit into memory, or
        TensorFlow does not count memory on this device.
      OutputError: there is no space for temporary files.
    """
    told = told_of(model, options)
    model = told.model
    if options["step"] is not None and options["isolate"]:
        raise InvalidRequestError(
            "step= can only be measured in this process, since your function cannot be sent to another one. Pass "
            "isolate=False."
        )
    if options["beside_plain"] and not is_optimized(model):
        raise InvalidRequestError(
            "beside_plain compares an optimized model with its plain form, but this model is "
            "plain. Give the model that tf_memsaver.optimize returned."
        )
    batch.batch_specs(model, told.batch_size)
    (given,) = told.batches(model, 1)
    how = How.of(model, told, given, options["mode"])
    alone = options["isolate"] and not reserves_gpu()
    if options["isolate"] and not alone:
        logging.warning(
            "model '%s' is measured in this process, since TensorFlow has reserved all memory of the GPU for it. "
            "Set TF_FORCE_GPU_ALLOW_GROWTH=true in the environment for a process of its own.",
            model.name,
        )
    run = measure_in_process if alone else measure_here
    try:
        measured = run(model, told, given, how, options["steps"], options["beside_plain"])
    except tf.errors.ResourceExhaustedError as error:
        raise MeasurementError(
            f"steps of model '{model.name}' do not fit into the memory that is left ({first_line(error)}). Other "
            "models and data of this process are in it, too."
        ) from error
    counts_all_sizes = measured.device.startswith("GPU") or counts_all()
    if measured.activation_bytes < LEAST_COUNTED_STEP and not counts_all_sizes:
        logging.warning(
            "model '%s': the measured %s of activations are not reliable, since most buffers are too small to be "
            "counted. Measure a larger batch or model, with more than %s of activations.",
            model.name,
            format_bytes(measured.activation_bytes),
            format_bytes(LEAST_COUNTED_STEP),
        )
    return measured.beside(told.data_bytes(current_device())) if alone else measured
