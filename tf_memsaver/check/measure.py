"""Measure a training step for real: peak bytes by ``tf.config.experimental.get_memory_info``, seconds by the clock.

Each variant runs in a process of its own, because the allocator's peak and its cached buffers outlive a model. The
first step warms up; the figures are the largest peak and the median time of the steps after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from absl import logging

from tf_memsaver.check.measurement import Measurement, measure_here
from tf_memsaver.check.running import How
from tf_memsaver.check.worker_job import measure_in_process
from tf_memsaver.errors import InvalidRequestError
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
    """Run training steps of ``model`` on a batch of its data, or on a made-up one, and return what they took.

    A compiled model is trained by Keras's own ``fit``; one that is not computes the gradients of the mean square of its
    outputs. Where the compiled loss cannot be computed on made-up targets, that stands in for it, in a step of our own,
    and the log says so. With ``step`` that runs, in this process (``isolate=False``), and calls the model that is given
    here, plain or optimized, by whichever name it knows it. The model, its variables and its optimizer are as before
    when this returns.

    A step's peak differs from that of the next where threads race. Below 16 MiB of activations the figures say little,
    since the allocator of CPUs does not count small buffers: a warning says so.

    Args:
      model: a plain or optimized model; with ``step`` as in ``optimize``.
      steps: how many steps to measure after the first one, which warms up.

    Raises:
      InvalidRequestError: an argument has no meaning.
      MeasurementError: the process failed; the message carries the end of its log.
      OutputError: there is no room for temporary files.
    """
    told = told_of(model, options)
    model = told.model
    if options["step"] is not None and options["isolate"]:
        raise InvalidRequestError(
            "step= is measured in this process: a function of your own cannot be sent to another one. Pass "
            "isolate=False."
        )
    if options["beside_plain"] and not is_optimized(model):
        raise InvalidRequestError("beside_plain compares an optimized model with its plain form: this one is plain.")
    batch.batch_specs(model, told.batch_size)
    (given,) = told.batches(model, 1)
    how = How.of(model, told, given, options["mode"])
    measured = (measure_in_process if options["isolate"] else measure_here)(
        model, told, given, how, options["steps"], options["beside_plain"]
    )
    if measured.activation_bytes < LEAST_BYTES:
        logging.warning(
            "model '%s': measured activations of %s say little: below %s most buffers are too small to be counted.",
            model.name,
            format_bytes(measured.activation_bytes),
            format_bytes(LEAST_BYTES),
        )
    return measured


LEAST_BYTES = 16 << 20
"""Where measured activations begin to mean something: the CPU's pool counts buffers of 256 KiB and more."""
