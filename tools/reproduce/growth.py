"""How fast something grows. No TensorFlow here."""

from __future__ import annotations

import math
from collections.abc import Sequence


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the power of the size that seconds grow with: the slope of the line through their logarithms."""
    x, y = [math.log(size) for size in sizes], [math.log(each) for each in seconds]
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    across = sum((a - middle_x) ** 2 for a in x)
    return sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True)) / across
