"""What is left of a device's memory, and a budget of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import tf_memsaver
from tf_memsaver.api import asked
from tf_memsaver.compat import devices
from tf_memsaver.errors import InvalidRequestError
from tools.shared.models import small as models


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "meminfo").write_text("MemTotal: 16 kB\nMemFree:  1 kB\nMemAvailable:       7 kB\n")
    monkeypatch.setattr(devices, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(devices, "_GROUPS", tmp_path)
    monkeypatch.setattr(devices, "_OWN_GROUPS", tmp_path / "cgroup")
    return tmp_path


def test_what_a_machine_has_left(system: Path) -> None:
    assert devices.bytes_left() == 7 << 10
    (system / "memory.current").write_text("1000\n")
    (system / "memory.max").write_text("max\n")
    assert devices.bytes_left() == 7 << 10
    (system / "memory.max").write_text("4000\n")
    assert devices.bytes_left() == 3000
    (system / "meminfo").unlink()
    assert devices.bytes_left() == 3000
    (system / "memory.stat").write_text("anon 500\ninactive_file 200\n")
    assert devices.bytes_left() == 3200, "the system gives up files that it keeps in memory"


@pytest.mark.parametrize(
    ("line", "folder", "limit", "used", "kept"),
    [
        ("0::/job/step", "job/step", "memory.max", "memory.current", "inactive_file"),
        (
            "4:cpu,memory:/job/step",
            "memory/job/step",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ],
)
def test_what_a_group_of_processes_has_left(
    system: Path, line: str, folder: str, limit: str, used: str, kept: str
) -> None:
    (system / "cgroup").write_text(f"7:blkio:/other\n{line}\n")
    inner = system / folder
    inner.mkdir(parents=True)
    assert devices.bytes_left() == 7 << 10
    for place, (most, now) in ((inner, (6000, 1000)), (inner.parent, (5000, 1500))):
        (place / limit).write_text(f"{most}\n")
        (place / used).write_text(f"{now}\n")
    assert devices.bytes_left() == 3500, "the group around it leaves less"
    (inner.parent / "memory.stat").write_text(f"{kept} 900\n")
    assert devices.bytes_left() == 4400


def test_what_a_gpu_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def __init__(self, device_type: str, memory_limit: int) -> None:
            self.device_type, self.memory_limit = device_type, memory_limit

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [kind])
    monkeypatch.setattr(devices.device_lib, "list_local_devices", lambda: [Device("CPU", 1), Device("GPU", 100)])
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda name: {"current": 30})
    assert devices.bytes_left() == 70


@pytest.mark.parametrize(
    ("environment", "growth", "limit", "expected"),
    [
        (None, None, None, True),
        (None, True, None, False),
        (None, None, 1024, False),
        ("true", None, None, False),
        ("false", True, None, True),
        ("false", None, 1024, False),
    ],
)
def test_whether_another_process_finds_memory_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, environment: str | None, growth: bool | None, limit: int | None, expected: bool
) -> None:
    parts = None if limit is None else [tf.config.LogicalDeviceConfiguration(memory_limit=limit)]
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    if environment is not None:
        monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", environment)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [])
    assert not devices.reserves_gpu()
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [kind])
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda gpu: growth)
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: parts)
    assert devices.reserves_gpu() is expected


@pytest.mark.parametrize(
    ("there", "built", "seen", "hidden", "expected"),
    [
        (True, True, False, None, 1),
        (True, True, False, "0", 1),
        (True, True, False, "-1", 0),
        (True, True, False, "", 0),
        (True, True, True, None, 0),
        (True, False, False, None, 0),
        (False, True, False, None, 0),
    ],
)
def test_a_gpu_that_tensorflow_does_not_see_is_told_once(
    there: bool,
    built: bool,
    seen: bool,
    hidden: str | None,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(devices, "_NVIDIA", (tmp_path / "none", tmp_path if there else tmp_path / "neither"))
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: built)
    monkeypatch.setattr(devices, "has_gpu", lambda: seen)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    devices.warn_of_unseen_gpu.cache_clear()
    for _ in range(2):
        tf_memsaver.capture_graph(models.chain(), batch_size=4)
    devices.warn_of_unseen_gpu.cache_clear()
    assert caplog.text.count("TensorFlow sees none") == expected


def test_a_model_on_a_gpu_that_is_reserved_is_measured_in_this_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = models.chain()
    model.compile("sgd", "mse")
    monkeypatch.setattr(tf_memsaver.check.measure, "reserves_gpu", lambda: True)
    monkeypatch.setattr(tf_memsaver.check.measure, "measure_in_process", None)
    assert tf_memsaver.measure(model, batch_size=8, steps=1).steps == 1
    assert "TF_FORCE_GPU_ALLOW_GROWTH=true" in caplog.text


def test_a_budget_of_what_is_left_counts_what_the_model_takes_already(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.chain()
    optimizer = keras.optimizers.Adam()
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    held = sum(v.value.shape.num_elements() * 4 for v in (*model.variables, *optimizer.variables[1:])) + 8
    monkeypatch.setattr(asked, "bytes_left", lambda: 10**9)
    plan = tf_memsaver.search_plan(model, batch_size=8, budget="auto")
    assert plan.request.budget_bytes == 9 * 10**8 + held
    monkeypatch.setattr(asked, "bytes_left", lambda: -5)
    with pytest.raises(InvalidRequestError, match="no memory left"):
        tf_memsaver.search_plan(model, batch_size=8, budget="auto")
    monkeypatch.setattr(asked, "bytes_left", lambda: None)
    with pytest.raises(InvalidRequestError, match="Give bytes"):
        tf_memsaver.search_plan(model, batch_size=8, budget="auto")


def test_slots_of_all_optimizers_are_what_the_model_takes_already(monkeypatch: pytest.MonkeyPatch) -> None:
    class TwoOptimizers(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(64)
            self.head = keras.layers.Dense(1)

        def compile(self, one: Any, other: Any) -> None:
            super().compile()
            self.one, self.other = one, other

        def call(self, x: Any) -> Any:
            return self.head(self.dense(x))

    model = TwoOptimizers()
    model(tf.zeros((4, 64)))
    # The second has the variables of the one inside.
    model.compile(keras.optimizers.Adam(), keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))
    model.one.build(model.dense.trainable_variables)
    model.other.build(model.head.trainable_variables)
    monkeypatch.setattr(asked, "bytes_left", lambda: 10**9)
    weights = sum(4 * int(tf.size(each.value)) for each in model.variables)
    taken = (asked.request_of({"budget": "auto"}, model).budget_bytes or 0) - 9 * 10**8
    assert 3 * weights <= taken < 3.1 * weights
