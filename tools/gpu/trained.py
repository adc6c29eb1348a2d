"""What ``tools/gpu_check`` trains: a model in a mode, plain or in less memory, in a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from tools.bench.trained_cells import made_of
from tools.examples.running import Outcome
from tools.shared.models.trained import MODELS, built_by
from tools.shared.results import error_text

PLAIN, AGAIN, REMAT_SCOPE = "plain", "plain again", "RematScope"

PLANS: dict[str, dict[str, Any]] = {PLAIN: {"strategy": "plain"}, "ours": {}, "sqrt": {"strategy": "chen_sqrt"}}
"""Options of plans. ``RematScope`` has none: Keras recomputes what is built in the scope, here activations."""

VARIANTS = (PLAIN, "ours", "sqrt", REMAT_SCOPE, AGAIN)
MODES = ("graph", "xla")


class Trained(NamedTuple):
    """A model of real size, and of one that a CPU trains in a second; each with a batch size."""

    optimizer: str
    build: Callable[[], Any]
    batch_size: int
    build_reduced: Callable[[], Any]
    reduced_batch_size: int


_SMALL_UNET = built_by("unet", levels=1, filters=8, pixels=64)
_SMALL_BERT = built_by("bert", layers=2, width=64, heads=2, length=64, vocabulary=100)

TRAINED = {
    "ResNet50": Trained("momentum", built_by("application", "ResNet50", 224), 32, _SMALL_UNET, 8),
    "BERT-base": Trained("adam", built_by("bert", length=256, vocabulary=30522), 16, _SMALL_BERT, 8),
    "MobileNetV2": Trained("adam", built_by("application", "MobileNetV2", 224), 32, _SMALL_UNET, 8),
    "ConvNeXtTiny": Trained("adamw", built_by("application", "ConvNeXtTiny", 224), 16, _SMALL_UNET, 8),
    "U-Net": Trained("adam", built_by("unet", levels=4, filters=32, pixels=128), 16, _SMALL_UNET, 8),
    "GPT-2": Trained("adamw", built_by("gpt2", length=256, vocabulary=5000), 8, _SMALL_BERT, 8),
    "LSTM": Trained("adam", MODELS["lstm"][0], 64, MODELS["lstm"][0], 32),
}
"""By name; in a reduced run small models stand in for all but the last: a U-Net, and two narrow layers of BERT's."""

USUAL = ("ResNet50", "BERT-base")
"""Those that are trained unless others are asked for."""


class Checked(NamedTuple):
    """What is trained in one process."""

    model: str
    mode: str
    variant: str
    reduced: bool
    deterministic: bool


def outcome_of(checked: Checked, turns: str) -> tuple[dict[str, Any], Outcome | None]:
    """Return what is told of a step before it is run, as the fields of a row, and what comes out of training.

    What fails is told in ``error``, in words: errors of TensorFlow's may hold what cannot go to another process.
    ``turns`` is a file that is locked while steps are timed.
    """
    told: dict[str, Any] = {}
    try:
        return told, _train(checked, told, turns)
    except Exception as error:
        return {**told, "error": error_text(error, 500)}, None


def _train(checked: Checked, told: dict[str, Any], turns: str) -> Outcome:
    import tensorflow as tf

    from tf_memsaver.check.watch import device_name
    from tools.examples.running import train
    from tools.gpu.turns import TakesTurns
    from tools.shared.memory import one_region

    if checked.deterministic:
        tf.config.experimental.enable_op_determinism()
    if device_name() == "CPU:0":
        one_region()

    def make() -> tuple[Any, Any]:
        model, data = _made(checked)
        begun = time.perf_counter()
        if checked.variant in PLANS:
            model, fields = _planned(model, data, PLANS[checked.variant])
            told.update(fields, plan_seconds=time.perf_counter() - begun)
        return model, data

    return train(make, memsaver=False, callbacks=[TakesTurns(turns)])


def _made(checked: Checked) -> tuple[Any, Any]:
    import keras

    trained = TRAINED[checked.model]
    scope = keras.RematScope(mode="activations") if checked.variant == REMAT_SCOPE else contextlib.nullcontext()
    with scope:
        model = (trained.build_reduced if checked.reduced else trained.build)()
    batch_size = trained.reduced_batch_size if checked.reduced else trained.batch_size
    return made_of(model, trained.optimizer, batch_size, jit_compile=checked.mode == "xla")


def _planned(model: Any, data: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a model that trains by a plan, with what TensorFlow's executor should take, and what XLA's compiler says.

    The executor's is that of the simulator, for steps that XLA compiles, too.
    """
    import tf_memsaver
    from tf_memsaver.judge.simulate import Simulator

    traced = tf_memsaver.trace(model, data=data)
    plan = traced.plan(**options)
    compiled = plan.peak_bytes if plan.request.executor == "xla" else None
    fields = {
        "predicted_bytes": Simulator(traced.graph).reported_peak(plan.segments) if compiled else plan.peak_bytes,
        "compiled_bytes": compiled,
        "predicted_step_overhead": plan.step_overhead,
        "layers_recomputed": len(plan.recomputed_units),
        "advice": plan.advice,
    }
    return traced.apply(plan) if plan.recomputed_units else model, fields


def device() -> dict[str, Any]:
    """Return what trains here: GPUs by TensorFlow, its build, the driver; ``gpus`` is empty on a machine without.

    ``bytes_left`` is what the first GPU has left, 0 where there is none.
    """
    import tensorflow as tf

    from tf_memsaver.compat.devices import bytes_left

    gpus = tf.config.list_physical_devices("GPU")
    build = tf.sysconfig.get_build_info()
    return {
        "gpus": [tf.config.experimental.get_device_details(gpu) for gpu in gpus],
        "built_for": {name: build.get(name) for name in ("cuda_version", "cudnn_version")},
        "driver": _driver() if gpus else None,
        "bytes_left": (bytes_left() or 0) if gpus else 0,
    }


def _driver() -> str | None:
    """Return the version of NVIDIA's driver and the memory of each GPU, as its tool says, if it is there."""
    asked = ["nvidia-smi", "--query-gpu=driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
