"""Processors on which TensorFlow does not count by itself: without oneDNN there are no figures of the CPU's memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PLAIN = {name: value for name, value in os.environ.items() if name != "TF_CPU_ALLOCATOR_USE_BFC"}
_UNCOUNTED = {**_PLAIN, "TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
_MODEL = """
import keras, numpy as np, tf_memsaver, tf_memsaver.callbacks
from tf_memsaver.errors import MeasurementError
model = keras.Sequential([keras.Input((1024,)), keras.layers.Dense(1024), keras.layers.Dense(1024)])
model.compile("sgd", "mse")
x = np.zeros((512, 1024), "float32")
"""


def _run(lines: str, first: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-c", first + _MODEL + lines], env=_UNCOUNTED, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_measure_counts_in_a_process_of_its_own() -> None:
    printed = _run("print(tf_memsaver.measure(model, data=(x, x), steps=2).peak_bytes)")
    assert int(printed) > 8 << 20  # The weights alone.


@pytest.mark.parametrize(
    "call", ["tf_memsaver.callbacks.MemoryMonitor()", "tf_memsaver.measure(model, data=(x, x), isolate=False)"]
)
def test_who_counts_in_place_is_told_how(call: str) -> None:
    printed = _run(f"""
try:
    {call}
except MeasurementError as error:
    print(error)
""")
    assert "os.environ['TF_CPU_ALLOCATOR_USE_BFC'] = '1' before the first" in printed


def test_what_they_are_told_works() -> None:
    printed = _run(
        "print(model.fit(x, x, verbose=0, callbacks=[tf_memsaver.callbacks.MemoryMonitor()]).history)",
        first='import os; os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"\n',
    )
    assert "peak_bytes" in printed


@pytest.mark.parametrize("first", ["", 'import os; os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"\n'])
def test_predictions_are_for_what_counts_there(first: str) -> None:
    # Without oneDNN, only the allocator counts that GPUs have.
    assert "CPU_BFC" in _run("print(tf_memsaver.capture_graph(model, batch_size=8).device)", first)
