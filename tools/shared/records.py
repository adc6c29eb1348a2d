"""What training leaves, number by number: written down, kept in files, and compared. No TensorFlow here."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Record = dict[Any, Any]
"""Arrays by what they are, as ``("gradient", "dense/kernel", 0)``; None stands for no gradient, and ``("sparse",
indices, values)`` for a sparse one."""


def array_of(tensor: Any) -> Any:
    """Return what a record holds of a tensor, a variable or a gradient."""
    if tensor is None:
        return None
    if hasattr(tensor, "indices"):
        return "sparse", tensor.indices.numpy(), tensor.values.numpy()
    return tensor.numpy()


def write(path: Path, record: Mapping[Any, Any]) -> None:
    """Write a record to a file; the parts of a key become a path, and what is None is left out."""
    arrays: dict[str, Any] = {}
    for key, value in record.items():
        name = "/".join(str(part) for part in (key if isinstance(key, tuple) else (key,)))
        if isinstance(value, tuple):
            arrays |= {f"{name}/indices": value[1], f"{name}/values": value[2]}
        elif value is not None:
            arrays[name] = value
    np.savez(path, **arrays)


def read(path: Path) -> Record:
    """Return the arrays of a file by name."""
    with np.load(path) as arrays:
        return dict(arrays)


# Compared -------------------------------------------------------------------------------------------------------------


def _bits(item: Any) -> Hashable:
    if item is None or isinstance(item, str):
        return item
    if isinstance(item, tuple):
        return tuple(_bits(part) for part in item)
    array = np.asarray(item)
    return array.dtype.name, array.shape, array.tobytes()


def differing(plain: Mapping[Any, Any], other: Mapping[Any, Any]) -> list[Any]:
    """Return the keys under which two records differ in any bit, or that only one of them has."""
    missing = object()
    return [
        key
        for key in {**plain, **other}
        if (plain.get(key, missing) is missing or other.get(key, missing) is missing)
        or _bits(plain[key]) != _bits(other[key])
    ]


def assert_identical(plain: Mapping[Any, Any], other: Mapping[Any, Any]) -> None:
    """Check equal bits of every loss, output, gradient and variable, and that there was something to compare."""
    assert any(key[0] == "gradient" and value is not None for key, value in plain.items())
    wrong = differing(plain, other)
    assert not wrong, f"{len(wrong)} of {len(plain)} differ, the first: {wrong[:3]}"


def assert_close(plain: Mapping[Any, Any], other: Mapping[Any, Any], tolerance: float = 1e-4) -> None:
    """Check equality within rounding, as XLA gives it: each tensor's largest error over its largest magnitude."""
    assert plain.keys() == other.keys()
    for key, value in plain.items():
        theirs = other[key]
        assert (value is None) == (theirs is None), key
        if value is None:
            continue
        left, right = np.asarray(value, np.float64), np.asarray(theirs, np.float64)
        scale = max(float(np.max(np.abs(left))), 1e-3) if left.size else 1.0
        assert float(np.max(np.abs(left - right), initial=0.0)) <= tolerance * scale, key


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, float]:
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
