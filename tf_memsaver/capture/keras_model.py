"""Capture: a Keras model and a batch size in, the Graph of one training step out."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from absl import logging

from tf_memsaver.capture.batch import check_batch_size, input_specs
from tf_memsaver.capture.convert import build_graph
from tf_memsaver.capture.layer_calls import check_supported, list_layer_calls
from tf_memsaver.capture.step import trace_step
from tf_memsaver.cost.device import Device, device_named
from tf_memsaver.ir.graph import Graph


def capture_graph(model: Any, *, batch_size: int) -> Graph:
    """Trace one training step of ``model`` at ``batch_size`` and return it as a Graph; nothing is run or changed.

    With a compiled model the step has its loss and its optimizer's update; without, the mean square of the outputs
    stands in for the loss and the step ends with the gradients.

    Raises:
      UnsupportedModelError: another Keras backend, an unbuilt or subclassed model, or nothing to train.
      UnknownDimensionError: an input dimension other than the batch is unknown.
      InvalidRequestError: the batch size is none.
    """
    functional = check_supported(model)
    batch_size = check_batch_size(batch_size)
    input_specs(model, batch_size)
    if not getattr(model, "compiled", False):
        logging.info("model '%s' is not compiled: its optimizer's slots are not counted", model.name)
    sequence = list_layer_calls(model)
    step = trace_step(model, functional, sequence, batch_size)
    return build_graph(model, sequence, step, batch_size, current_device())


def current_device() -> Device:
    """Return the cost model of the device that training uses here: a GPU when TensorFlow sees one."""
    return device_named("GPU" if tf.config.list_physical_devices("GPU") else "CPU")
