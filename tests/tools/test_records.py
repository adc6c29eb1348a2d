"""What training leaves is compared by bits, missing parts included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tools.shared.records import Record, assert_close, assert_identical, differences, differing, read, write

ONES = np.ones(3, np.float32)
NEAR = ONES + np.float32(2**-23)
SPARSE = ("sparse", np.arange(2), ONES)


def a_record() -> Record:
    return {("loss", 0): np.float32(0.0), ("gradient", "a/b", 0): ONES, ("gradient", "c", 0): SPARSE, ("none", 0): None}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (("loss", 0), np.float32(-0.0)),
        (("gradient", "a/b", 0), NEAR),
        (("gradient", "a/b", 0), ONES.astype(np.float64)),
        (("gradient", "a/b", 0), None),
        (("gradient", "c", 0), ("sparse", np.arange(2), NEAR)),
        (("none", 0), ONES),
        (("more",), ONES),
    ],
)
def test_any_bit_and_any_missing_part_differs(key: tuple[object, ...], value: object) -> None:
    plain = a_record()
    other = {**a_record(), key: value}
    assert not differing(plain, a_record())
    assert differing(plain, other) == [key] == differing(other, plain)
    with pytest.raises(AssertionError):
        assert_identical(plain, other)


def test_nothing_to_compare_is_not_identical() -> None:
    with pytest.raises(AssertionError):
        assert_identical({("loss", 0): ONES}, {("loss", 0): ONES})


def test_differences_are_units_in_the_last_place() -> None:
    found = differences({"same": ONES, "near": ONES, "gone": ONES}, {"same": ONES, "near": NEAR})
    assert found["same"] == 0 and found["near"] == 1 and found["gone"] == float("inf")


def test_close_is_relative_to_the_largest_number() -> None:
    assert_close({"x": np.array([1e-6, 1.0])}, {"x": np.array([0.0, 1.0])})
    with pytest.raises(AssertionError):
        assert_close({"x": ONES}, {"x": ONES + 0.001})


def test_a_file_keeps_all_but_none(tmp_path: Path) -> None:
    write(tmp_path / "record.npz", a_record())
    found = read(tmp_path / "record.npz")
    assert sorted(found) == ["gradient/a/b/0", "gradient/c/0/indices", "gradient/c/0/values", "loss/0"]
    assert found["gradient/a/b/0"].tobytes() == ONES.tobytes()
