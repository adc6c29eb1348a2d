"""Rewrite SavedModels without their code, and train source and result side by side in fresh processes.

Usage: python -m tools.bench.saved_models [--cases=lstm,module] [--steps=5] [--output=FILE.json]

Three processes a case: one makes the SavedModel, one rewrites it (least peak), one trains each of the two with
TensorFlow alone. Losses, gradients and variables of all steps are compared by bits. Results go to a JSON file, and as a
Markdown table to stdout.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags

from tf_memsaver.units import format_bytes
from tools.shared.processes import in_own_process, run_module
from tools.shared.records import Record, differing, read
from tools.shared.results import RESULTS, write_rows

_RESULTS = RESULTS / "bench_saved_models.json"
_STEPS = flags.DEFINE_integer("steps", 5, "training steps", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", str(_RESULTS), "where to write the JSON")
_CASES = flags.DEFINE_list("cases", [], "names of cases (default: all)")


# Models ---------------------------------------------------------------------------------------------------------------


def _normal(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _save_keras(model: Any, folder: str, spec: Any) -> None:
    """Export a Keras 3 model with an endpoint for inference and one for training."""
    import keras

    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", lambda x: model(x, training=False), input_signature=[spec])
    archive.add_endpoint("train", lambda x: model(x, training=True), input_signature=[spec])
    archive.write_out(folder, verbose=False)


def _application(name: str) -> Callable[[str], Any]:
    def make(folder: str) -> Any:
        import tensorflow as tf

        from tools.shared.models.real import application

        _save_keras(application(name, 96, classes=10), folder, tf.TensorSpec((None, 96, 96, 3)))
        return _normal(16, 96, 96, 3)

    return make


def _lstm(folder: str) -> Any:
    import keras
    import tensorflow as tf

    x = inputs = keras.Input((20, 64))
    for _ in range(6):
        x = keras.layers.Dense(256, activation="gelu")(x)
    x = keras.layers.LSTM(64, return_sequences=True)(x)
    for _ in range(6):
        x = keras.layers.Dense(256, activation="tanh")(x)
    _save_keras(keras.Model(inputs, keras.layers.Dense(4)(x)), folder, tf.TensorSpec((None, 20, 64)))
    return _normal(128, 20, 64)


def _dropout_and_batchnorm(folder: str) -> Any:
    import keras
    import tensorflow as tf

    x = inputs = keras.Input((256,))
    for _ in range(16):
        x = keras.layers.Dense(256, activation="relu")(x)
        x = keras.layers.Dropout(0.1)(keras.layers.BatchNormalization()(x))
    _save_keras(keras.Model(inputs, keras.layers.Dense(4)(x)), folder, tf.TensorSpec((None, 256)))
    return _normal(2048, 256)


def _transformer(folder: str) -> Any:
    import keras
    import tensorflow as tf

    x = inputs = keras.Input((128, 128))
    for _ in range(6):
        y = keras.layers.LayerNormalization()(x)
        x = keras.layers.Add()([x, keras.layers.Dropout(0.1)(keras.layers.MultiHeadAttention(4, 32)(y, y))])
        y = keras.layers.Dense(512, activation="gelu")(keras.layers.LayerNormalization()(x))
        x = keras.layers.Add()([x, keras.layers.Dropout(0.1)(keras.layers.Dense(128)(y))])
    _save_keras(keras.Model(inputs, x), folder, tf.TensorSpec((None, 128, 128)))
    return _normal(32, 128, 128)


def _plain_module(folder: str, use_custom_gradient: bool = False) -> Any:
    import tensorflow as tf

    generator = np.random.default_rng(1)
    weights = [
        tf.Variable(generator.standard_normal((128, 128)).astype(np.float32) / 11, name=f"w{i}") for i in range(16)
    ]
    count = tf.Variable(0, trainable=False, dtype=tf.int64, name="count")

    @tf.custom_gradient
    def clipped(x: Any) -> Any:
        return tf.tanh(x), lambda upstream: tf.clip_by_norm(upstream, 1.0)

    def train(x: Any) -> Any:
        count.assign_add(1)
        for weight in weights:
            x = x @ weight
            x = clipped(x) if use_custom_gradient else tf.nn.gelu(x)
        if not use_custom_gradient:
            x = tf.cond(tf.reduce_sum(x) > 0.0, lambda: x * 2.0, lambda: x - 1.0)
            for _ in tf.range(3):
                x = tf.tanh(x @ weights[0])
        return {"x": x, "count": count.read_value()}

    root = tf.__internal__.tracking.AutoTrackable()
    root.variables = [*weights, count]
    root.train = tf.function(train, input_signature=[tf.TensorSpec((None, 128))])
    tf.saved_model.save(root, folder)
    return _normal(4096, 128)


def _keras_hub(name: str, **sizes: int) -> Callable[[str], Any]:
    """A KerasHub backbone: a Keras model of its own class, with a dictionary of inputs."""

    def make(folder: str) -> Any:
        import keras_hub
        import tensorflow as tf

        backbone = getattr(keras_hub.models, name)(vocabulary_size=1000, **sizes)

        class Model(type(backbone)):  # type: ignore[misc]
            """Takes the token ids alone."""

            def __call__(self, ids: Any, training: bool) -> Any:
                kinds = {"token_ids": ids, "padding_mask": tf.ones_like(ids), "segment_ids": tf.zeros_like(ids)}
                return super().__call__({tensor.name: kinds[tensor.name] for tensor in self.inputs}, training=training)

        backbone.__class__ = Model
        _save_keras(backbone, folder, tf.TensorSpec((None, 128), tf.int32))
        return np.random.default_rng(0).integers(1, 1000, (16, 128)).astype(np.int32)

    return make


def _keras_2_application(name: str) -> Callable[[str], Any]:
    def make(folder: str) -> Any:
        import tf_keras

        # Keras 2 drops with hidden random state: with a seed it is the same in two processes.
        tf_keras.utils.set_random_seed(0)
        model = getattr(tf_keras.applications, name)(weights=None, input_shape=(96, 96, 3), classes=10)
        model.save(folder, save_format="tf")
        return _normal(16, 96, 96, 3)

    return make


def _keras_2_text(folder: str) -> Any:
    import tf_keras
    from tf_keras import layers

    tf_keras.utils.set_random_seed(0)
    ids = tf_keras.Input((64,), dtype="int32")
    x = layers.Embedding(500, 128)(ids)
    for _ in range(3):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 32)(x, x))
        y = layers.Dropout(0.1, seed=1)(layers.Dense(512, activation="gelu")(x))
        x = layers.LayerNormalization()(x + layers.Dense(128)(y))
    x = layers.GlobalAveragePooling1D()(x)
    tf_keras.Model(ids, layers.Dense(4, kernel_regularizer="l2")(x)).save(folder, save_format="tf")
    return np.random.default_rng(0).integers(0, 500, (32, 64)).astype(np.int32)


def _keras_2_recurrent(folder: str) -> Any:
    import tf_keras
    from tf_keras import layers

    tf_keras.utils.set_random_seed(0)
    inputs = tf_keras.Input((48, 32))
    x = inputs
    for _ in range(3):
        x = layers.LayerNormalization()(layers.Dense(256, activation="gelu")(x))
        x = layers.LSTM(64, return_sequences=True)(layers.Dense(64)(x))
    x = layers.GRU(64)(x)
    tf_keras.Model(inputs, layers.Dense(4)(x)).save(folder, save_format="tf")
    return _normal(32, 48, 32)


CASES: dict[str, Callable[[str], Any]] = {
    "MobileNetV2": _application("MobileNetV2"),
    "DenseNet121": _application("DenseNet121"),
    "EfficientNetB0": _application("EfficientNetB0"),
    "transformer": _transformer,
    "lstm": _lstm,
    "dropout_batchnorm": _dropout_and_batchnorm,
    "keras_hub_bert": _keras_hub("BertBackbone", num_layers=4, num_heads=4, hidden_dim=128, intermediate_dim=512),
    "keras_hub_gpt2": _keras_hub("GPT2Backbone", num_layers=4, num_heads=4, hidden_dim=128, intermediate_dim=512),
    "keras_2_mobilenet": _keras_2_application("MobileNetV2"),
    "keras_2_efficientnet": _keras_2_application("EfficientNetB0"),
    "keras_2_text": _keras_2_text,
    "keras_2_recurrent": _keras_2_recurrent,
    "module_control_flow": _plain_module,
    "module_custom_gradient": lambda folder: _plain_module(folder, use_custom_gradient=True),
}

_KERAS_2 = "keras_2_"
"""Cases whose function is called ``__call__``, not ``train``."""


# The benchmark --------------------------------------------------------------------------------------------------------


def _make(case: str, source: str, batch: str) -> int:
    """Save the model and the batch of a case; return how many examples there are."""
    examples = CASES[case](source)
    np.save(batch, examples)
    return len(examples)


def _rewrite(source: str, target: str, batch_size: int, function: str) -> None:
    import tf_memsaver

    tf_memsaver.rewrite_saved_model(source, target, batch_size=batch_size, strategy="min_peak", functions=[function])


def _trained(folder: str, function: str, batch: str, result: Path) -> Record:
    done = run_module("tools.saved_model_training", folder, function, batch, result, _STEPS.value)
    if done.returncode:
        raise RuntimeError(" | ".join(done.stderr.strip().splitlines()[-3:]))
    return read(result)


def bench(case: str) -> dict[str, Any]:
    """Return one row."""
    with tempfile.TemporaryDirectory() as scratch:
        source, target, batch = (os.path.join(scratch, name) for name in ("source", "target", "batch.npy"))
        size = in_own_process(_make, case, source, batch)
        begin = time.perf_counter()
        name = "__call__" if case.startswith(_KERAS_2) else "train"
        in_own_process(_rewrite, source, target, size, name)
        row: dict[str, Any] = {"case": case, "batch_size": size, "rewrite_seconds": time.perf_counter() - begin}
        plain, ours = (_trained(folder, name, batch, Path(scratch) / "result.npz") for folder in (source, target))
    row["plain_peak_bytes"], row["peak_bytes"] = int(plain.pop("peak")), int(ours.pop("peak"))
    row["compared"] = len(plain)
    wrong = differing(plain, ours)
    row["differing"], row["first_differing"] = len(wrong), wrong[:5]
    return row


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table; peaks are over what was live before the step."""
    lines = [
        "| SavedModel | batch | plain peak | rewritten | share | tensors compared | parity |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['case']} | – | – | – | – | – | {row['error']} |")
            continue
        parity = "identical" if not row["differing"] else f"{row['differing']} differ"
        lines.append(
            f"| {row['case']} | {row['batch_size']} | {format_bytes(row['plain_peak_bytes'])} | "
            f"{format_bytes(row['peak_bytes'])} | {row['peak_bytes'] / row['plain_peak_bytes']:.0%} | "
            f"{row['compared']} | {parity} |"
        )
    return "\n".join(lines)


def main(_: list[str]) -> int:
    """Run the benchmark; return 1 when a case fails or differs."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    rows = []
    for case in _CASES.value or CASES:
        try:
            rows.append(bench(case))
        except Exception as error:  # A case that fails is a row of the table.
            rows.append({"case": case, "error": str(error)})
        print(f"{case}: {rows[-1]}", file=sys.stderr, flush=True)
    write_rows(_OUTPUT.value, rows, steps=_STEPS.value)
    print(markdown(rows))
    return 1 if any("error" in row or row["differing"] for row in rows) else 0


if __name__ == "__main__":
    app.run(main)
