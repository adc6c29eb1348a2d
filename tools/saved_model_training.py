"""Train a SavedModel with TensorFlow alone.

Usage: python -m tools.saved_model_training FOLDER FUNCTION BATCH.npy RESULT.npz STEPS

A function with a ``training`` argument is called with it. The batch dimension is free. RESULT receives losses,
gradients and variables of all steps, and the peak of the last one over what was live before it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import tensorflow as tf


def main() -> None:
    """Load, train, and write what came out."""
    folder, name, batch_path, result_path, steps = sys.argv[1:]
    loaded = tf.saved_model.load(folder)
    x = tf.constant(np.load(batch_path))
    function = getattr(loaded, name)
    training = any(
        "training" in c.structured_input_signature[1] or True in c.structured_input_signature[0]
        for c in function.concrete_functions
    )
    variables = sorted(loaded.variables, key=lambda v: v.name)
    weights = [v for v in variables if v.trainable]

    @tf.function(input_signature=[tf.TensorSpec((None, *x.shape[1:]), x.dtype)], autograph=False)
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            results = function(batch, training=True) if training else function(batch)
            floats = [t for t in tf.nest.flatten(results) if t is not None and t.dtype.is_floating]
            loss = tf.add_n([tf.reduce_mean(tf.square(t)) for t in floats])
        return loss, tape.gradient(loss, weights)

    found: dict[str, Any] = {}
    for number in range(int(steps)):
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        tf.config.experimental.reset_memory_stats("CPU:0")
        loss, gradients = step(x)
        found[f"loss {number}"] = loss.numpy()
        found["peak"] = tf.config.experimental.get_memory_info("CPU:0")["peak"] - before
        for place, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            if gradient is not None:
                found[f"gradient {number} {place}"] = tf.convert_to_tensor(gradient).numpy()
                weight.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        found |= {f"variable {number} {place}": v.numpy() for place, v in enumerate(variables)}
        del loss, gradients
    if "tf_memsaver" in sys.modules:
        raise SystemExit("tf_memsaver was imported; this was to run without it")
    np.savez(result_path, **found)


if __name__ == "__main__":
    main()
