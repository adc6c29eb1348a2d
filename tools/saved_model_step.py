"""One training step on a SavedModel with TensorFlow alone: what the demo runs in a fresh process.

Usage: python -m tools.saved_model_step SAVED_MODEL BATCH.npz RESULT.npz

BATCH holds x and y (class numbers). RESULT receives the loss, every gradient, and the bytes: peak, live before the
step, and the sum of the gradients. tf_memsaver is not imported (TensorFlow imports keras by itself).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def one_operation_at_a_time() -> None:
    """Let operations run one after the other, each still on all cores; before TensorFlow runs anything.

    TensorFlow adds three or more gradients up in an order that depends on which of them is free first. Without this,
    two runs of one and the same model differ in the last bits.
    """
    tf.config.threading.set_inter_op_parallelism_threads(1)


def gradient_step(call: Callable[[Any], Any], variables: Sequence[Any], x: Any, y: Any) -> tuple[Any, list[Any]]:
    """Return the loss of one batch, and its gradients, from one run in graph mode.

    The batch dimension is left free, as in ``fit``: with all shapes known TensorFlow's memory optimizer adds up sums of
    three and more terms in the order of arrival, and last bits differ from run to run.
    """
    signature = [tf.TensorSpec((None, *tensor.shape[1:]), tf.as_dtype(tensor.dtype)) for tensor in (x, y)]

    @tf.function(input_signature=signature)
    def step(x: Any, y: Any) -> tuple[Any, list[Any]]:
        with tf.GradientTape() as tape:
            chosen = tf.gather(call(x), y, batch_dims=1)
            loss = -tf.reduce_mean(tf.math.log(chosen + 1e-7))
        return loss, tape.gradient(loss, variables)

    return step(x, y)


def main() -> None:
    """Load, run one step, and write what it gave."""
    folder, batch_path, result_path = sys.argv[1:]
    one_operation_at_a_time()
    device = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
    with np.load(batch_path) as batch:
        x, y = tf.constant(batch["x"]), tf.constant(batch["y"])
    loaded = tf.saved_model.load(folder)
    variables = loaded.trainable_variables
    before = tf.config.experimental.get_memory_info(device)["current"]
    tf.config.experimental.reset_memory_stats(device)
    loss, gradients = gradient_step(lambda images: loaded(images, training=True), variables, x, y)
    # Reading the loss waits for the step to end.
    result = {"loss": loss.numpy(), "live_bytes": before}
    result["peak_bytes"] = tf.config.experimental.get_memory_info(device)["peak"]
    result["gradient_bytes"] = sum(gradient.numpy().nbytes for gradient in gradients)
    result |= {f"gradient{number}": gradient.numpy() for number, gradient in enumerate(gradients)}
    if "tf_memsaver" in sys.modules:
        raise SystemExit("tf_memsaver was imported; this was to run without it")
    np.savez(result_path, **result)


if __name__ == "__main__":
    main()
