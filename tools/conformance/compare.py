"""What two trainings left, compared tensor by tensor."""

from __future__ import annotations

from typing import Any

import numpy as np


def compare(left: dict[str, Any], right: dict[str, Any]) -> dict[str, float]:
    """Return, by name, the largest difference in units in the last place of the largest number; inf where none is.

    Zero stands for equal bits.
    """
    return {name: _difference(left.get(name), right.get(name)) for name in {**left, **right}}


def _difference(left: Any, right: Any) -> float:
    if left is None or right is None or left.dtype != right.dtype or left.shape != right.shape:
        return float("inf")
    if left.tobytes() == right.tobytes():
        return 0.0
    if left.dtype.kind != "f":
        return float("inf")
    unit = float(np.spacing(np.max(np.abs(left))))
    with np.errstate(invalid="ignore"):
        largest = float(np.max(np.abs(left.astype(np.float64) - right.astype(np.float64)))) / unit
    return max(largest, 1e-9) if np.isfinite(largest) else float("inf")
