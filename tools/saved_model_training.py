"""Train a SavedModel with TensorFlow alone.

Usage: python -m tools.saved_model_training FOLDER FUNCTION BATCH.npy RESULT.npz STEPS

A function with a ``training`` argument is called with it. The batch dimension is free. RESULT receives losses, results,
gradients and variables of all steps, and the peak of the last one over what was live before it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from tools.shared.function_training import train_function
from tools.shared.records import write


def main() -> None:
    """Load, train, and write what came out."""
    folder, name, batch_path, result_path, steps = sys.argv[1:]
    loaded = tf.saved_model.load(folder)
    function = getattr(loaded, name)
    training = any(
        "training" in c.structured_input_signature[1] or True in c.structured_input_signature[0]
        for c in function.concrete_functions
    )
    live = 0

    def begin_step() -> None:
        nonlocal live
        live = tf.config.experimental.get_memory_info("CPU:0")["current"]
        tf.config.experimental.reset_memory_stats("CPU:0")

    record = train_function(
        lambda x: function(x, training=True) if training else function(x),
        sorted(loaded.variables, key=lambda v: v.name),
        [tf.constant(np.load(batch_path))],
        steps=int(steps),
        begin_step=begin_step,
    )
    record["peak"] = np.int64(tf.config.experimental.get_memory_info("CPU:0")["peak"] - live)
    if "tf_memsaver" in sys.modules:
        raise SystemExit("tf_memsaver was imported; this was to run without it")
    write(Path(result_path), record)


if __name__ == "__main__":
    main()
