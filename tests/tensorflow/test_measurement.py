"""Measured memory: two-sided, on models whose bytes can be reckoned by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import pytest
from keras import layers

import tf_memsaver
from tests.tensorflow.plans import optimized_by_hand
from tf_memsaver.check import measurement
from tf_memsaver.check.measurement import ROUNDS, Measurement
from tf_memsaver.command.model_source import load_model
from tf_memsaver.errors import InvalidRequestError, MeasurementError, UnsupportedModelError
from tools.shared.models import small as models

MIB = 2**20
WIDTH, DEPTH, BATCH = 64, 24, 4096
LAYER_BYTES = WIDTH * BATCH * 4


def _deep() -> Any:
    x = inputs = keras.Input((WIDTH,))
    for number in range(DEPTH):
        x = layers.Dense(WIDTH, activation="tanh", use_bias=False, name=f"d{number}")(x)
    return keras.Model(inputs, layers.Dense(1, name="head")(x))


def _optimized(model: Any) -> Any:
    return optimized_by_hand(model, *((f"d{i}", f"d{i + 4}") for i in range(0, 20, 5)), ("d20", "d23"))


def _least(model: Any, mode: str) -> Measurement:
    """Measure three times: a thread that has to wait for a busy machine leaves more alive, never less."""
    measured = [tf_memsaver.measure(model, batch_size=BATCH, mode=mode, isolate=False) for _ in range(3)]
    return min(measured, key=lambda each: each.activation_bytes)


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_activations_before_and_after(mode: str) -> None:
    model = _deep()
    plain = _least(model, mode)
    # Every layer keeps its output, which the last gradients and two scratch tensors come on top of.
    assert DEPTH * LAYER_BYTES <= plain.activation_bytes < (DEPTH + 5) * LAYER_BYTES
    ours = _least(_optimized(model), mode)
    # Five inputs of segments, the five outputs of one, and as much scratch.
    assert 8 * LAYER_BYTES < ours.activation_bytes < 14 * LAYER_BYTES
    assert ours.gradient_bytes == plain.gradient_bytes == (DEPTH * WIDTH * WIDTH + WIDTH + 1) * 4
    assert plain.step_seconds > 0 and plain.mode == mode and plain.batch_size == BATCH


def test_nothing_of_a_step_stays_allocated() -> None:
    """A sum of three gradients, in a step that TensorFlow reckons to be short of memory (more than 200 MiB on CPUs)."""
    x = inputs = keras.Input((WIDTH,))
    for number in range(DEPTH):
        y = layers.Dense(WIDTH, activation="tanh", name=f"d{number}")(x)
        x = layers.Add(name=f"add{number}")([x, y, layers.Activation("tanh", name=f"tanh{number}")(x)])
    model = keras.Model(inputs, layers.Dense(1, name="head")(x))
    measured = tf_memsaver.measure(model, batch_size=5 * BATCH, isolate=False)
    assert measured.activation_bytes > 300 * MIB
    # The batch takes 5 MiB, in a chunk of up to twice as many. With a known batch size the zeros of 24 accumulators
    # would stay, as many bytes each.
    assert measured.live_bytes < 3 * 5 * LAYER_BYTES


def test_in_a_process_of_its_own() -> None:
    model = _deep()
    model.compile("sgd", "mse")
    optimized = _optimized(model)
    before = [v.numpy().tobytes() for v in model.variables]
    measured = tf_memsaver.measure(optimized, batch_size=BATCH, steps=2)
    here = tf_memsaver.measure(optimized, batch_size=BATCH, steps=2, isolate=False)
    assert [v.numpy().tobytes() for v in model.variables] == before
    # Ops of parallel branches run at once or not, as threads come: up to three outputs more or less are live.
    transient = measured.peak_bytes - measured.live_bytes, here.peak_bytes - here.live_bytes
    assert transient[0] == pytest.approx(transient[1], abs=3 * LAYER_BYTES)
    assert measured.steps == 2 and measured.trace_seconds > 0
    assert measured.to_json()["activation_bytes"] == measured.activation_bytes and "peak" in str(measured)


def test_custom_layers_in_a_process_of_their_own() -> None:
    x = inputs = keras.Input((64,))
    x = models.Counter()(layers.Dense(64)(x))
    model = keras.Model(inputs, layers.Dense(1)(x))
    # The allocator of the CPU counts large buffers only.
    assert tf_memsaver.measure(model, batch_size=BATCH, steps=1).peak_bytes > LAYER_BYTES


def test_a_process_that_fails_says_why() -> None:
    class Unknown(layers.Layer):
        def call(self, x: Any) -> Any:
            return x

    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(1)(Unknown()(inputs)))
    with pytest.raises(MeasurementError, match="Unknown"):
        tf_memsaver.measure(model, batch_size=8)


@pytest.mark.parametrize("options", [{"mode": "fast"}, {"steps": 0}, {"batch_size": 0}])
def test_arguments_without_meaning(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        tf_memsaver.measure(models.chain(), **{"batch_size": 4, **options})


def test_something_that_is_no_model() -> None:
    with pytest.raises(UnsupportedModelError, match=r"keras\.Model"):
        tf_memsaver.measure(lambda x: x, batch_size=4)


# What the process of its own may import


@models.register
class Noted(layers.Layer):
    """Keeps plain data that looks like what Keras writes of a class."""

    def __init__(self, note: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.note = note

    def call(self, x: Any) -> Any:
        return x

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "note": self.note}


def _leaves_a_trace(path: Path) -> Path:
    """Write a module that leaves a trace when it runs; return the trace."""
    trace = path.with_suffix(".ran")
    path.write_text(f"open({str(trace)!r}, 'w').close()\n")
    return trace


def test_nothing_that_a_file_names_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = _leaves_a_trace(tmp_path / "named_by_a_file.py")
    inputs = keras.Input((8,))
    note = {"module": "named_by_a_file", "registered_name": "named_by_a_file>Layer"}
    keras.Model(inputs, layers.Dense(1)(Noted(note)(inputs))).save(tmp_path / "model.keras")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    model = keras.saving.load_model("model.keras")
    assert tf_memsaver.measure(model, batch_size=8, steps=1).steps == 1
    assert not trace.exists()


def test_modules_in_the_working_folder_are_not_taken_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = [_leaves_a_trace(tmp_path / f"{name}.py") for name in ("random", "keras", "tensorflow")]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert tf_memsaver.measure(models.chain(), batch_size=8, steps=1).steps == 1
    # A model from a module that lies there is found again, and nothing else.
    Path("json_models.py").write_text(
        "import keras\n\n"
        "class NotRegistered(keras.layers.Dense):\n    pass\n\n"
        "def build():\n    return keras.Sequential([keras.Input((8,)), NotRegistered(4)])\n"
    )
    model = load_model("json_models:build")
    assert tf_memsaver.measure(model, batch_size=8, steps=1).steps == 1
    assert not any(trace.exists() for trace in traces)


def test_python_code_in_a_file_is_refused_unless_keras_was_told_otherwise() -> None:
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(1)(layers.Lambda(lambda x: 2 * x)(inputs)))
    with pytest.raises(MeasurementError, match="enable_unsafe_deserialization"):
        tf_memsaver.measure(model, batch_size=8, steps=1)
    keras.config.enable_unsafe_deserialization()
    assert tf_memsaver.measure(model, batch_size=8, steps=1).steps == 1


def test_the_quartiles_are_those_of_the_steps_whose_median_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps beside plain ones take longer here than those before them."""

    class Runner:
        def __init__(self, *seconds: float) -> None:
            self.seconds = iter(seconds)

        def run(self, count: int) -> Any:
            each = next(self.seconds)
            return type("Found", (), {"seconds": [each] * count, "peaks": [1] * count, "lives": [1] * count})

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

    runners = iter([Runner(1.0, 1.0, *(2.0,) * ROUNDS), Runner(1.0, *(1.5,) * ROUNDS)])
    monkeypatch.setattr(measurement, "runner_of", lambda *_: next(runners))
    found = tf_memsaver.measure(_optimized(_deep()), batch_size=64, steps=4, beside_plain=True, isolate=False)
    assert (found.step_seconds, found.step_seconds_range, found.plain_step_seconds) == (2.0, (2.0, 2.0), 1.5)
