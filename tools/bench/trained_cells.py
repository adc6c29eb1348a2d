"""What is trained for tables of memory: models with an optimizer and a batch size each, and the examples."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from tf_memsaver.errors import InfeasibleBudgetError
from tools.examples.comparing import examples
from tools.shared.models.trained import MODELS
from tools.shared.processes import in_own_process
from tools.shared.results import error_text

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"learning_rate": 0.01}),
    "momentum": ("SGD", {"learning_rate": 0.01, "momentum": 0.9}),
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
    "lion": ("Lion", {"learning_rate": 1e-4}),
    "clipped": ("Adam", {"global_clipnorm": 1.0}),
    "mixed": ("Adam", {}),
}
"""Classes and options; ``mixed`` is for mixed precision."""

QUICK = (
    "MobileNetV2/adam/16",
    "ResNet50/momentum/16",
    "DenseNet121/sgd/16",
    "EfficientNetB0/lion/16",
    "bert/adamw/16",
    "encoder/clipped/32",
    "encoder/mixed/32",
    "unet/adam/8",
    "lstm/adam/32",
    "example/unet",
    "example/siamese",
    "example/swin",
)


class Cell(NamedTuple):
    """What is trained: a model with an optimizer and a batch size, or an example with its own."""

    model: str
    optimizer: str = ""
    batch_size: int = 0

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.model}/{self.optimizer}/{self.batch_size}" if self.optimizer else f"example/{self.model}"


def cells(names: Sequence[str] = ()) -> list[Cell]:
    """Return all cells, or those of these names.

    These are each model with two optimizers, one for each batch size, in turn, those of ``QUICK``, and the examples.
    """
    found, kinds = [], list(OPTIMIZERS)
    for number, (model, (_, sizes)) in enumerate(MODELS.items()):
        found += [Cell(model, kinds[(2 * number + place) % len(kinds)], size) for place, size in enumerate(sizes)]
    found += [Cell(model, kind, int(size)) for model, kind, size in (n.split("/") for n in QUICK if n.count("/") == 2)]
    made = [*dict.fromkeys(found), *map(Cell, examples())]
    return [cell for cell in made if cell.name in names] if names else made


def named(begins: Sequence[str], found: Sequence[Cell]) -> list[Cell]:
    """Return the cells whose names begin with one of some models or kinds, or all if there are none."""
    return [cell for cell in found if not begins or any(f"{cell.name}/".startswith(f"{each}/") for each in begins)]


def made(cell: Cell, *, jit_compile: bool = False) -> Any:
    """Return a compiled model and its data, four batches where these are made for it."""
    import keras

    if not cell.optimizer:
        return importlib.import_module(f"tools.examples.{cell.model}").make()
    if cell.optimizer == "mixed":
        keras.mixed_precision.set_global_policy("mixed_float16")
    model = MODELS[cell.model][0]()
    return made_of(model, cell.optimizer, cell.batch_size, jit_compile=jit_compile)


def made_of(model: Any, optimizer: str, batch_size: int, *, jit_compile: bool) -> tuple[Any, Any]:
    """Compile a model of one output with an optimizer of ``OPTIMIZERS``; return it and four made-up batches."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tools.shared.training import batch_for

    name, options = OPTIMIZERS[optimizer]
    model.compile(getattr(keras.optimizers, name)(**options), "mse", jit_compile=jit_compile)
    x = batch_for(model, 4 * batch_size, vocabulary=50)
    shape = (4 * batch_size, *model.outputs[0].shape[1:])
    y = np.random.default_rng(0).random(shape, np.float32)
    return model, tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size, drop_remainder=True)


def train_cell(cell: Cell, memsaver: bool, options: dict[str, Any]) -> Any:
    """Return what comes out of training a cell."""
    from tools.examples.running import train

    return train(lambda: made(cell), memsaver=memsaver, **options)


def outcome_of(cell: Cell, memsaver: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Return what a cell takes, trained in a process of its own, as the fields of a row.

    Where that fails there is ``error``, and ``least_bytes`` if no plan is within the budget.
    """
    try:
        outcome = in_own_process(train_cell, cell, memsaver, options)
    except InfeasibleBudgetError as error:
        return {"error": f"InfeasibleBudgetError: {error}", "least_bytes": error.least_bytes}
    except Exception as error:
        return {"error": error_text(error)}
    row = {"measured_bytes": outcome.peak_bytes}
    if memsaver:
        row |= {"predicted_bytes": outcome.predicted_bytes, "plain_predicted_bytes": outcome.plain_predicted_bytes}
        row["warns"] = outcome.warns
    return row


def least_budget_of(cell: Cell) -> int:
    """Return the least budget that an error names, in bytes; planned in a process of its own."""
    return int(in_own_process(_least_budget, cell))


def _least_budget(cell: Cell) -> int:
    import tf_memsaver

    model, data = made(cell)
    try:
        return tf_memsaver.search_plan(model, data=data, budget=1).peak_bytes
    except InfeasibleBudgetError as error:
        return error.least_bytes
