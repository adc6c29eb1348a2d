"""The largest batch within a fixed memory: plain, by the √n plans of Chen et al., and by ours; simulated."""

from __future__ import annotations

from typing import Any

import tf_memsaver
from tf_memsaver.errors import InfeasibleBudgetError, InfeasibleOverheadError
from tools.published.checkmate_models import MODELS

NAMES = ("VGG19", "MobileNet", "ResNet50", "U-Net")
BUDGETS = ("4GiB", "16GiB")
ONE_FORWARD = 1 / 3
"""About what one extra forward pass costs, as a share of the plain step."""

STRATEGIES = {"sqrt": "chen_sqrt", "ours": "auto"}


def largest(name: str, budget: str) -> dict[str, Any]:
    """Return the largest batches of a model that train within a budget and one extra forward pass, as JSON data.

    Steps are of the models of Checkmate's table, compiled with SGD, on this machine's device.
    """
    model = MODELS[name]()
    model.compile("sgd", "categorical_crossentropy")
    row: dict[str, Any] = {"name": name, "budget": budget, "plain": 0}
    for key, strategy in STRATEGIES.items():
        try:
            found = tf_memsaver.max_batch_size(
                model, budget=budget, batch_size=4, strategy=strategy, max_overhead=ONE_FORWARD, predict_only=True
            )
        except (InfeasibleBudgetError, InfeasibleOverheadError):
            row[key] = 0
            continue
        row[key], row[f"{key}_overhead"] = found.batch_size, found.plan.step_overhead
        row["plain"] = max(row["plain"], found.plain_batch_size)
    return row
