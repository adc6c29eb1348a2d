"""What a training step takes on a GPU that is not there: ``tools/gpu_memory resnet50 --batch_size=64 --target=h100``.

A model is a name of keras.applications, a ``.keras`` file, ``package.module:function``, or one of
``tools/shared/models/trained.py``. It is compiled with Adam if it is not compiled, and planned as ``fit`` with XLA runs
it here; ``--budget`` and ``--plan`` take another plan. XLA then compiles the plain and the planned step for each
target, in an environment of its own. Nothing is run. What a convolution of cuDNN's works with is not in the figures:
the compiler learns it from a device. With ``--output`` the rows are kept in a JSON file, with a table beside it.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

from tf_memsaver.units import format_bytes
from tools.gpu.compiler import TARGETS
from tools.shared.results import KeptRows

_BATCH = flags.DEFINE_integer("batch_size", None, "examples a step", lower_bound=1, required=True)
_TARGETS = flags.DEFINE_list("target", ["h100"], f"GPUs to compile for: {', '.join(TARGETS)}")
_SIZE = flags.DEFINE_integer("size", 224, "height and width of images, for a model of keras.applications")
_BUDGET = flags.DEFINE_string("budget", None, "budget of the plan, such as 60%, judged by XLA's compiler on this CPU")
_PLAN = flags.DEFINE_string("plan", None, "a plan from tf-memsaver plan, in place of one made here")
_COMPILER = flags.DEFINE_string("compiler", None, "the GPU environment's Python (tools/gpu_memory gives it)")
_OUTPUT = flags.DEFINE_string("output", None, "JSON file that keeps the rows")

KEY = ("model", "batch_size", "target", "variant")


def _model(name: str) -> Any:
    from tf_memsaver.command.model_source import load_model
    from tools.shared.models.trained import MODELS

    if name in MODELS and not flags.FLAGS["size"].present:
        model = MODELS[name][0]()
    else:
        model = load_model(name, input_shape=(_SIZE.value, _SIZE.value, 3))
    if getattr(model, "optimizer", None) is None:
        model.compile("adam", "mse", jit_compile=True)
    return model


def _programs(name: str, folder: Path) -> dict[str, Path]:
    """Write the plain and the planned step of a model as XLA is given them; return the files by variant."""
    import keras
    import tensorflow as tf

    import tf_memsaver
    from tf_memsaver.check.compiled import step_program
    from tf_memsaver.program.data import Batch

    model = _model(name)
    shapes = [(_BATCH.value, *tensor.shape[1:]) for tensor in (*model.inputs, *model.outputs)]
    if any(None in shape for shape in shapes):
        raise app.UsageError(f"{name} leaves sizes open; give a package.module:function whose inputs have full shapes.")
    x = [tf.TensorSpec(shape, each.dtype) for shape, each in zip(shapes, model.inputs, strict=False)]
    specs = keras.tree.pack_sequence_as(model.input, x), tf.TensorSpec(shapes[-1])
    if _PLAN.value:
        planned = tf_memsaver.apply_plan(model, tf_memsaver.Plan.load(_PLAN.value), data=specs)
    else:
        planned = tf_memsaver.optimize(model, data=specs, budget=_BUDGET.value, executor="xla")
    written = {}
    for variant, each in {"plain": model, "planned": planned}.items():
        written[variant] = folder / f"{variant}.pb"
        written[variant].write_bytes(step_program(each, Batch(*specs, None)))
    return written


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return a row for each target and variant of a model."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="gpu_memory_") as folder:
        programs = _programs(name, Path(folder))
        for target in _TARGETS.value:
            command = [_COMPILER.value, str(Path(__file__).with_name("compiler.py")), target]
            done = subprocess.run([*command, *map(str, programs.values())], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"XLA did not compile {name} for {target}: {done.stderr.strip()[-2000:]}")
            told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            begin = {"model": name, "batch_size": _BATCH.value, "target": target}
            rows += [{**begin, "variant": each, **facts} for each, facts in zip(programs, told, strict=True)]
    return rows


def total(row: dict[str, Any]) -> int:
    """Return all bytes of a step. What it returns are updated variables, which TensorFlow has made in their places."""
    return int(row["argument_bytes"] + row["temporary_bytes"])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a table in Markdown, a planned step with its share of the plain one's temporaries."""
    lines = ["| model | batch | GPU | step | arguments | temporaries | in all | of plain |"]
    lines.append("|---|--:|---|---|--:|--:|--:|--:|")
    plain = {tuple(row[name] for name in KEY[:3]): row for row in rows if row["variant"] == "plain"}
    for row in rows:
        begin = f"| {row['model']} | {row['batch_size']} | {row['target']} | {row['variant']} |"
        figures = (row["argument_bytes"], row["temporary_bytes"], total(row))
        of = plain.get(tuple(row[name] for name in KEY[:3]))
        share = f"{row['temporary_bytes'] / of['temporary_bytes']:.0%}" if of else ""
        lines.append(f"{begin} {' | '.join(map(format_bytes, figures))} | {share} |")
    return "\n".join(lines)


def summary(_: Sequence[dict[str, Any]]) -> list[str]:
    """Return what must be known of all rows."""
    return ["Compiled, not run. What cuDNN's convolutions work with is not in it: convolutional networks take more."]


def main(arguments: list[str]) -> int:
    """Print what the models take."""
    if len(arguments) < 2:
        raise app.UsageError("which model? For example: tools/gpu_memory resnet50 --batch_size=64 --target=h100,t4")
    unknown = [each for each in _TARGETS.value if each not in TARGETS]
    if unknown or not _COMPILER.value:
        raise app.UsageError(f"--target is of {', '.join(TARGETS)}; start it as tools/gpu_memory.")
    for name in arguments[1:]:
        rows = rows_of(name)
        if _OUTPUT.value:
            KeptRows(_OUTPUT.value, "Steps compiled for GPUs", KEY, summary, table).add(rows)
        else:
            print(table(rows))
    print("\n".join(summary([])))
    return 0


if __name__ == "__main__":
    app.run(main)
