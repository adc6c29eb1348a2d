"""One cell of the conformance matrix: train a model in one way, plain or optimized, and write down what came out.

Weights, optimizer slots and state are those after five steps; loops that see them also note losses and gradients. The
measured peak is that of the last two steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from tools.shared.records import Record, write

STEPS, WARM = 5, 3


class Cell(NamedTuple):
    """A place in the matrix."""

    model: str
    mode: str
    precision: str = "float32"
    strategy: str = "none"
    granularity: str = "layer"
    plan: str = "min_peak"

    @property
    def name(self) -> str:
        """What tables and files call it."""
        return "-".join(self)

    @property
    def uncompiled(self) -> str:
        """The same mode without XLA, whose results agree but for rounding; the mode itself where there is none."""
        return {"fit_xla": "fit", "loop_xla": "loop_function", "fit_auto": "fit"}.get(self.mode, self.mode)


class Mode(NamedTuple):
    """How a step is run."""

    run: Callable[[Any, Any, int], Record]
    optimizer: Mapping[str, Any] = MappingProxyType({})
    compile: Mapping[str, Any] = MappingProxyType({})


# Ways to train --------------------------------------------------------------------------------------------------------


def _batches(model: Any, size: int) -> list[tuple[Any, Any]]:
    from tf_memsaver.program.batch import synthetic_batch

    return [synthetic_batch(model, size, seed=number)[:2] for number in range(STEPS)]


def _joined(parts: list[Any]) -> Any:
    import keras

    if parts[0] is None:
        return None
    return keras.tree.map_structure(lambda *each: np.concatenate(each), *parts)


def _raw_batches(model: Any, size: int) -> list[tuple[Any, Any]]:
    """Return what the model's own preprocessor takes; the targets may be left to it."""
    return [model.raw_batch(size, seed=number) for number in range(STEPS)]


def _fit(
    model: Any,
    strategy: Any,
    size: int,
    batches_of: Callable[[Any, int], list[tuple[Any, Any]]] = _batches,
    **options: Any,
) -> Record:
    """Return the losses of two calls of ``fit``; ``options`` are functions of the number of samples."""
    batches = batches_of(model, size)
    found: Record = {}
    for name, part in (("warm", batches[:WARM]), ("measured", batches[WARM:])):
        if name == "measured":
            _reset_peak()
        x, y = _joined([x for x, _ in part]), _joined([y for _, y in part])
        given = {key: value(len(part) * size) for key, value in options.items()}
        history = model.fit(x, y, batch_size=size, shuffle=False, verbose=0, **given).history
        found |= {(name, key): np.asarray(values, np.float32) for key, values in history.items()}
    return found


def _fit_dataset(model: Any, strategy: Any, size: int) -> Record:
    """As ``_fit``, from a tf.data.Dataset whose last batch is smaller."""
    import tensorflow as tf

    x, y = (_joined(list(parts)) for parts in zip(*_batches(model, size), strict=True))
    count = (STEPS - 1) * size + size // 2
    # A dataset makes one tensor of a list.
    x = tuple(x) if isinstance(x, list) else x
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).take(count).batch(size)
    history = model.fit(dataset, epochs=2, shuffle=False, verbose=0).history
    return {key: np.asarray(values, np.float32) for key, values in history.items()}


def _train_on_batch(model: Any, strategy: Any, size: int) -> Record:
    found: Record = {}
    for number, (x, y) in enumerate(_batches(model, size)):
        if number == WARM:
            _reset_peak()
        found["loss", number] = np.asarray(model.train_on_batch(x, y), np.float32)
    return found


def _then_evaluate_and_predict(model: Any, strategy: Any, size: int) -> Record:
    import keras

    found = _fit(model, strategy, size)
    x, y = _batches(model, size)[0]
    found["evaluate"] = np.asarray(model.evaluate(x, y, batch_size=size, verbose=0), np.float32)
    for number, output in enumerate(keras.tree.flatten(model.predict(x, batch_size=size, verbose=0))):
        found["predict", number] = output
    return found


def _step(model: Any, x: Any, y: Any, replicas: int = 1) -> tuple[Any, list[Any]]:
    """Train on a batch as a loop of one's own does; return the loss, this replica's share of it, and the gradients."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True), training=True)
        if replicas > 1:
            loss = loss / replicas
        scaled = model.optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled, [v.value for v in model.trainable_variables])
    pairs = zip(gradients, model.trainable_variables, strict=True)
    model.optimizer.apply_gradients([(g, v) for g, v in pairs if g is not None])
    return loss, gradients


def _loop(wrap: Callable[[Any, Any], Any]) -> Callable[[Any, Any, int], Record]:
    def run(model: Any, strategy: Any, size: int) -> Record:
        import tensorflow as tf

        def step(x: Any, y: Any) -> Any:
            return _step(model, x, y)

        batches = _batches(model, size)
        train = wrap(step, batches[0])
        found: Record = {}
        for number, (x, y) in enumerate(batches):
            if number == WARM:
                _reset_peak()
            loss, gradients = train(x, y)
            found["loss", number] = loss.numpy()
            for place, gradient in enumerate(gradients):
                if gradient is not None:
                    found["gradient", place, number] = tf.convert_to_tensor(gradient).numpy()
            del gradients
        return found

    return run


def _as_function(**options: Any) -> Callable[[Any, Any], Any]:
    def wrap(step: Any, example: Any) -> Any:
        import keras
        import tensorflow as tf

        # The batch dimension is free, as in fit: with all shapes known, TensorFlow may add in order of arrival.
        free = keras.tree.map_structure(lambda t: tf.TensorSpec((None, *t.shape[1:]), t.dtype), example)
        return tf.function(step, input_signature=free, **options)

    return wrap


def _distributed_loop(model: Any, strategy: Any, size: int) -> Record:
    """Train as users of tf.distribute write it: a tf.function around ``strategy.run``."""
    import keras
    import tensorflow as tf

    count = strategy.num_replicas_in_sync

    def replica_step(x: Any, y: Any) -> Any:
        return _step(model, x, y, replicas=count)[0]

    @tf.function
    def step(x: Any, y: Any) -> Any:
        return strategy.run(replica_step, args=(x, y))

    found: Record = {}
    for number, batch in enumerate(_batches(model, size)):
        if number == WARM:
            _reset_peak()

        def part(context: Any, batch: Any = batch) -> Any:
            place = context.replica_id_in_sync_group
            return keras.tree.map_structure(lambda t: t[place * size // count : (place + 1) * size // count], batch)

        x, y = strategy.experimental_distribute_values_from_function(part)
        found["loss", number] = strategy.experimental_local_results(step(x, y))[0].numpy()
    return found


TRAINING_MODES: dict[str, Mode] = {
    "loop_eager": Mode(_loop(lambda step, _: step)),
    "loop_function": Mode(_loop(_as_function())),
    "loop_xla": Mode(_loop(_as_function(jit_compile=True))),
    "loop_distributed": Mode(_distributed_loop),
    "fit": Mode(_fit, compile={"jit_compile": False}),
    "fit_xla": Mode(_fit, compile={"jit_compile": True}),
    "fit_auto": Mode(_fit, compile={"jit_compile": "auto"}),
    "fit_eager": Mode(_fit, compile={"run_eagerly": True}),
    "fit_3_steps": Mode(_fit, compile={"jit_compile": False, "steps_per_execution": 3}),
    "fit_dataset": Mode(_fit_dataset, compile={"jit_compile": False}),
    "clipping": Mode(_fit, {"global_clipnorm": 0.1}, {"jit_compile": False}),
    "accumulation": Mode(_fit, {"gradient_accumulation_steps": 2}, {"jit_compile": False}),
    "ema": Mode(_fit, {"use_ema": True, "ema_overwrite_frequency": 2}, {"jit_compile": False}),
    "weight_decay": Mode(_fit, {"weight_decay": 0.01}, {"jit_compile": False}),
    "sample_weight": Mode(
        partial(_fit, sample_weight=lambda count: np.arange(count) % 3 + 0.5), compile={"jit_compile": False}
    ),
    "class_weight": Mode(partial(_fit, class_weight=lambda _: {0: 2.0, 1: 0.5}), compile={"jit_compile": False}),
    "fit_raw": Mode(partial(_fit, batches_of=_raw_batches), compile={"jit_compile": False}),
    "train_on_batch": Mode(_train_on_batch, compile={"jit_compile": False}),
    "evaluate_predict": Mode(_then_evaluate_and_predict, compile={"jit_compile": False}),
}


# One cell -------------------------------------------------------------------------------------------------------------


def _reset_peak() -> None:
    from tools.shared import memory

    memory.reset_peak()


def _peak() -> int:
    from tools.shared import memory

    return memory.peak()


def _scope(strategy: str) -> Any:
    import tensorflow as tf

    if strategy == "none":
        return tf.distribute.get_strategy()
    if strategy == "mirrored":
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    if strategy == "multiworker":
        return tf.distribute.MultiWorkerMirroredStrategy()
    raise ValueError(f"unknown strategy {strategy!r}")


def _begin_anew(precision: str) -> None:
    import keras

    # Not inside a strategy's scope, which it would end.
    keras.backend.clear_session()
    keras.config.set_floatx("float64" if precision == "float64" else "float32")
    keras.config.set_dtype_policy(precision)


def _specs(inputs: Any) -> Any:
    import tensorflow as tf

    if isinstance(inputs, dict):
        return {name: _specs(each) for name, each in inputs.items()}
    return tf.TensorSpec(*inputs)


def _optimized(model: Any, cell: Cell, batch_size: int) -> Any:
    import tf_memsaver
    from tf_memsaver.program.signature import share_signature

    options: dict[str, Any] = {"batch_size": batch_size, "strategy": cell.plan, "granularity": cell.granularity}
    if not hasattr(model, "optimized"):
        return tf_memsaver.optimize(model, **options)
    optimized = model.optimized(**options)
    share_signature(model, optimized)
    optimized.compile(model.optimizer, model.loss, **TRAINING_MODES[cell.mode].compile)
    return optimized


def _model(cell: Cell, steady: bool) -> Any:
    """Return the plain model, compiled with Adam or, where rounding must not grow, with SGD."""
    import keras

    from tf_memsaver.program.signature import note_inputs
    from tools.conformance.models import MODELS

    case, mode = MODELS[cell.model], TRAINING_MODES[cell.mode]
    keras.utils.set_random_seed(0)
    model = case.build()
    if case.inputs is not None:
        note_inputs(model, _specs(case.inputs))
    # Adam makes whole steps of the rounding noise of gradients that are zero, as behind a BatchNorm.
    kind = keras.optimizers.SGD if steady else keras.optimizers.Adam
    momentum = {"momentum": 0.9} if steady else {}
    loss = case.loss() if callable(case.loss) else case.loss
    model.compile(kind(0.01, **momentum, **mode.optimizer), loss, **mode.compile)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return model


def train(cell: Cell, variant: str) -> tuple[Record, dict[str, Any]]:
    """Train a model as the cell says; return what training left, and the peak and the plan.

    ``variant`` is "plain", "optimized" or "uncompiled": the plain model in the same mode without XLA.
    """
    from tools.conformance.models import MODELS

    _begin_anew(cell.precision)
    strategy = _scope(cell.strategy)
    size = MODELS[cell.model].batch_size
    facts: dict[str, Any] = {}
    with strategy.scope():
        steady = cell.uncompiled != cell.mode
        model = _model(cell._replace(mode=cell.uncompiled) if variant == "uncompiled" else cell, steady)
        if variant == "optimized":
            model = _optimized(model, cell, size // strategy.num_replicas_in_sync)
            parts = [part for part in model._flatten_layers() if hasattr(part, "memsaver_plan")]
            facts["recomputed"] = sum(len(part.memsaver_plan.recomputed) for part in parts)
    record = TRAINING_MODES[cell.uncompiled if variant == "uncompiled" else cell.mode].run(model, strategy, size)
    facts["peak_bytes"] = _peak()
    for number, variable in enumerate(model.variables):
        record["variable", number, variable.path] = variable.numpy()
    for number, variable in enumerate(model.optimizer.variables):
        record["slot", number, variable.path] = variable.numpy()
    return record, facts


def _in_short(error: Exception) -> str:
    """Return the line that says what is wrong: the last one that names no file of this machine."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "/" not in line]
    return (lines or [""])[-1][:200]


def run_variant(cell: Cell, variant: str, folder: Path, workers: Sequence[str] = (), number: int = 0) -> None:
    """Run a variant of a cell in this process; write ``VARIANT.npz`` and ``VARIANT.json`` to the folder.

    ``workers`` are the addresses of all workers of a MultiWorkerMirroredStrategy; this one is that of ``number``, and
    the first one writes.
    """
    import tensorflow as tf

    from tools.shared import memory  # noqa: F401 - before the first operation: it has memory counted

    if workers:
        task = {"type": "worker", "index": number}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": list(workers)}, "task": task})
    if cell.strategy == "mirrored":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    try:
        record, facts = train(cell, variant)
        if number == 0:
            write(folder / f"{variant}.npz", record)
    except Exception as error:  # A cell that fails is a row of the table.
        facts = {"error": type(error).__name__, "message": _in_short(error)}
    if number == 0:
        (folder / f"{variant}.json").write_text(json.dumps(facts), encoding="utf-8")
