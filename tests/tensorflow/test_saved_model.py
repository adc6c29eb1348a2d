"""SavedModels rewritten without their code: trained in fresh processes with TensorFlow alone."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tf_memsaver.errors import InvalidRequestError, OutputExistsError, UnsupportedModelError
from tf_memsaver.files.targets import EXTRA_FOLDER, REWRITTEN_PLANS
from tools.shared.function_training import free_spec
from tools.shared.models import functions
from tools.shared.models import small as models
from tools.shared.processes import run_module
from tools.shared.records import Record, differing, read


def _module(build: Callable[[], functions.Case], folder: Path) -> tuple[str, str, Any]:
    """A plain SavedModel of one function; its folder, the function's name, and a batch."""
    function, variables, arguments = build()
    root = tf.Module()
    root.variables_ = variables
    root.step = tf.function(
        lambda *batch: function(*batch), input_signature=[free_spec(t) for t in arguments], autograph=False
    )
    root.table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a", "b"], [3, 4]), -1)
    root.look_up = tf.function(lambda key: root.table.lookup(key), input_signature=[tf.TensorSpec([], tf.string)])
    path = str(folder / "source")
    tf.saved_model.save(_listed(root, variables), path)
    return path, "step", arguments[0].numpy()


def _listed(root: Any, variables: list[tf.Variable]) -> Any:
    holder = tf.__internal__.tracking.AutoTrackable()
    holder.variables, holder.step, holder.table, holder.look_up = variables, root.step, root.table, root.look_up
    return holder


def _reusable(folder: Path) -> tuple[str, str, Any]:
    """A Keras model as a Reusable SavedModel: ``__call__`` with and without training, and a serving signature."""
    x = inputs = keras.Input((32,))
    for _ in range(8):
        x = layers.Dropout(0.1)(layers.BatchNormalization()(layers.Dense(32, activation="gelu")(x)))
    model = keras.Model(inputs, layers.Dense(3)(x))
    root = tf.__internal__.tracking.AutoTrackable()
    root.variables = [v.value for v in model.variables]
    root.__call__ = tf.function(lambda x, training=False: model(x, training=bool(training)), autograph=False)
    spec = tf.TensorSpec((None, 32))
    for training in (False, True):
        root.__call__.get_concrete_function(spec, training=training)
    path = str(folder / "source")
    serving = tf.function(lambda x: {"y": model(x, training=False)}).get_concrete_function(spec)
    tf.saved_model.save(root, path, signatures={"serving_default": serving})
    return path, "__call__", np.random.default_rng(0).standard_normal((8192, 32)).astype(np.float32)


def _trained(folder: str, name: str, batch: Any, scratch: Path, steps: int) -> Record:
    np.save(scratch / "batch.npy", batch)
    result = scratch / "result.npz"
    done = run_module("tools.saved_model_training", folder, name, scratch / "batch.npy", result, steps)
    assert done.returncode == 0, done.stderr[-2000:]
    return read(result)


# test_function.py has more of them, and those marked long, too, in this process.
@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        ("reusable", "min_peak"),
        pytest.param("reusable", "nested", marks=pytest.mark.long),
        ("recurrent", "min_peak"),
        ("module", "min_peak"),
        pytest.param("convolutions", "min_peak", marks=pytest.mark.long),
        pytest.param("attention", "min_peak", marks=pytest.mark.long),
    ],
)
def test_source_and_rewritten_train_alike(case: str, strategy: str, tmp_path: Path) -> None:
    made = _reusable(tmp_path) if case == "reusable" else _module(getattr(functions, case), tmp_path)
    source, name, batch = made
    target = str(tmp_path / "rewritten")
    plans = tf_memsaver.rewrite_saved_model(source, target, batch_size=len(batch), strategy=strategy)
    assert plans and all(key.startswith(name) for key in plans)
    nests = [any(segment.children for segment in plan.segments) for plan in plans.values()]
    assert any(nests) == (strategy == "nested")
    plain, ours = (_trained(folder, name, batch, tmp_path, steps=3) for folder in (source, target))
    peaks = plain.pop("peak"), ours.pop("peak")
    assert any(key.startswith("gradient") for key in plain)
    assert differing(plain, ours) == []
    if case == "reusable":
        assert peaks[1] < 0.5 * peaks[0]


def test_all_else_is_carried_over(tmp_path: Path) -> None:
    source, _, batch = _reusable(tmp_path)
    target = str(tmp_path / "rewritten")
    plans = tf_memsaver.rewrite_saved_model(source, target, batch_size=64)
    assert list(plans) == ["__call__#2"]
    assert json.loads((tmp_path / "rewritten" / EXTRA_FOLDER / REWRITTEN_PLANS).read_text()).keys() == plans.keys()
    plain, ours = (tf.saved_model.load(folder) for folder in (source, target))
    assert [v.name for v in plain.variables] == [v.name for v in ours.variables]
    x = tf.constant(batch[:5])
    for result in ("__call__", "serving_default"):
        left, right = (
            m(x, training=False) if result == "__call__" else m.signatures[result](x=x)["y"] for m in (plain, ours)
        )
        assert left.numpy().tobytes() == right.numpy().tobytes()


def test_tables_are_carried_over(tmp_path: Path) -> None:
    source, _, _ = _module(functions.dense, tmp_path)
    tf_memsaver.rewrite_saved_model(source, tmp_path / "rewritten", batch_size=64)
    assert tf.saved_model.load(str(tmp_path / "rewritten")).look_up(tf.constant("b")).numpy() == 4


def test_files_that_belong_to_it_are_carried_over(tmp_path: Path) -> None:
    words = tmp_path / "words.txt"
    words.write_text("alpha\nbeta\n")
    weight = tf.Variable(tf.ones((2, 2)))
    root = tf.Module()
    root.weight = weight
    names = tf.lookup.TextFileInitializer(
        str(words), tf.string, tf.lookup.TextFileIndex.WHOLE_LINE, tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER
    )
    root.table = tf.lookup.StaticHashTable(names, -1)

    def step(x: tf.Tensor, words: tf.Tensor) -> Any:
        return tf.tanh(x @ weight), root.table.lookup(words)

    root.step = tf.function(step, input_signature=[tf.TensorSpec((None, 2)), tf.TensorSpec([None], tf.string)])
    tf.saved_model.save(root, str(tmp_path / "source"))
    tf_memsaver.rewrite_saved_model(tmp_path / "source", tmp_path / "rewritten", batch_size=4)
    words.unlink()
    shutil.rmtree(tmp_path / "source")
    loaded = tf.saved_model.load(str(tmp_path / "rewritten"))
    with tf.GradientTape() as tape:
        y, places = loaded.step(tf.ones((2, 2)), tf.constant(["beta", "gamma"]))
    assert places.numpy().tolist() == [1, -1] and tape.gradient(y, loaded.weight) is not None
    assert (tmp_path / "rewritten" / "assets" / "words.txt").read_text() == "alpha\nbeta\n"


def test_as_a_keras_layer(tmp_path: Path) -> None:
    source, _, batch = _reusable(tmp_path)
    target = str(tmp_path / "rewritten")
    tf_memsaver.rewrite_saved_model(source, target, batch_size=64, strategy="min_peak")
    x = tf.constant(batch[:64])
    found = []
    for folder in (source, target):
        layer = keras.layers.TFSMLayer(folder, call_endpoint="serving_default")
        found.append(keras.tree.flatten(layer(x))[0].numpy())
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("verb", ["optimize", "optimize a Keras model", "plan"])
def test_a_full_disk_leaves_nothing_behind(verb: str, tmp_path: Path) -> None:
    if verb == "optimize":
        source, _, _ = _module(functions.dense, tmp_path)
    else:
        source = str(tmp_path / "model.keras")
        models.chain(depth=20).save(source)
    before = sorted(p.name for p in tmp_path.iterdir())

    def limit() -> None:
        # Stands for a full disk: no file may grow beyond this.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    command = [sys.executable, "-m", "tf_memsaver", verb.split()[0], source]
    done = subprocess.run(
        [*command, f"--output={tmp_path / 'out'}", "--batch_size=8"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
    )
    assert done.returncode == 2, done.stderr
    assert "cannot be written" in done.stderr and "Traceback" not in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_bad_input_leaves_nothing_behind(tmp_path: Path) -> None:
    source, _, _ = _module(functions.dense, tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = tmp_path / "broken"
    tf.saved_model.save(tf.Module(), str(broken))
    (broken / "saved_model.pb").write_bytes((broken / "saved_model.pb").read_bytes()[:100])
    untrained = tmp_path / "untrained"
    root = tf.Module()
    root.f = tf.function(lambda x: x + 1.0, input_signature=[tf.TensorSpec((None, 2))])
    tf.saved_model.save(root, str(untrained))
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").write_text("precious")
    before = sorted(p.name for p in tmp_path.iterdir())
    for folder, error, says in (
        (tmp_path / "none", InvalidRequestError, "not a SavedModel"),
        (empty, InvalidRequestError, "not a SavedModel"),
        (broken, InvalidRequestError, "cannot be loaded"),
        (untrained, UnsupportedModelError, "trained"),
    ):
        with pytest.raises(error, match=says):
            tf_memsaver.rewrite_saved_model(folder, tmp_path / "out", batch_size=4)
    with pytest.raises(OutputExistsError):
        tf_memsaver.rewrite_saved_model(source, taken, batch_size=4)
    with pytest.raises(InvalidRequestError, match="no function 'other'"):
        tf_memsaver.rewrite_saved_model(source, tmp_path / "out", batch_size=4, functions=["other"])
    with pytest.raises(InvalidRequestError, match="batch_size"):
        tf_memsaver.rewrite_saved_model(source, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_file_that_was_cut_short_is_bad_input(tmp_path: Path) -> None:
    source, _, _ = _reusable(tmp_path)
    (data,) = Path(source, "variables").glob("variables.data-*")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(InvalidRequestError, match="may be damaged or incomplete"):
        tf_memsaver.rewrite_saved_model(source, tmp_path / "target", batch_size=8)


def test_what_has_a_plan_is_not_rewritten_again(tmp_path: Path) -> None:
    source, _, _ = _reusable(tmp_path)
    tf_memsaver.rewrite_saved_model(source, tmp_path / "once", batch_size=8192, strategy="min_peak")
    with pytest.raises(InvalidRequestError, match="already has a plan"):
        tf_memsaver.rewrite_saved_model(tmp_path / "once", tmp_path / "twice", batch_size=8192)
    assert not (tmp_path / "twice").exists()


def test_neither_a_folder_in_use_nor_the_source_is_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _, _ = _module(functions.dense, tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(path for path in tmp_path.rglob("*"))
    for target in ("", "/", ".", "..", source, os.path.join(source, "out"), os.path.dirname(source)):
        with pytest.raises(InvalidRequestError, match="output path"):
            tf_memsaver.rewrite_saved_model(source, target, batch_size=4, overwrite=True)
    assert sorted(path for path in tmp_path.rglob("*")) == before
