"""Bytes as text and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_memsaver.units import MOST_BYTES, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (1, 1),
        (16_000_000_000, 16_000_000_000),
        (2.0, 2),
        ("512", 512),
        ("512 B", 512),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("6GiB", 6 * 2**30),
        ("6 gib", 6 * 2**30),
        (" 1.5 GiB ", 3 * 2**29),
        ("16GB", 16 * 10**9),
        ("4g", 4 * 2**30),
        ("2M", 2 * 2**20),
        ("1TiB", 2**40),
        ("1e9", 10**9),
        ("1.6e10", 16 * 10**9),
        (np.int64(7), 7),
        (np.float32(4.0), 4),
        ("1.3GiB", 1395864371),
        ("9223372036854775807", MOST_BYTES),
    ],
)
def test_parse(text: int | float | str, count: int):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "six GiB", "6 GiBs", "6 Gi B", "1,5GiB", "0", 0, -3, 0.0, True, "0.0001k", "nan"]
)
def test_what_is_no_number_of_bytes(text: int | float | str):
    with pytest.raises(ValueError, match="number of bytes"):
        parse_bytes(text)


@pytest.mark.parametrize("text", [3.5, "3.5", "3.5B", math.nan, None, [1], b"3", 3j, object()])
def test_what_is_no_whole_number_of_bytes(text: Any):
    with pytest.raises(ValueError, match="number of bytes"):
        parse_bytes(text)


# Numbers of so many digits cannot be written out, not even in the name of a test.
@pytest.mark.parametrize(
    "text", ["1e400GiB", "1e99999", "9" * 5000, 10**400, pytest.param(10**5000, id="huge"), math.inf, 2**63, "9e9GiB"]
)
def test_more_bytes_than_can_be_counted(text: Any):
    with pytest.raises(ValueError, match="the most that a number of bytes can be"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (5 * 2**30 // 4, "1.25 GiB"),
        (200 * 2**20, "200.0 MiB"),
        (3 * 2**40, "3.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_format(count: int, text: str):
    assert format_bytes(count) == text


@given(st.integers(min_value=1, max_value=2**50))
def test_what_is_formatted_parses_to_nearly_the_same(count: int):
    again = parse_bytes(format_bytes(count))
    assert abs(again - count) <= max(0.005 * count, 0.5)


@given(st.integers(min_value=1, max_value=MOST_BYTES))
def test_whole_numbers_are_kept_exactly(count: int):
    assert parse_bytes(count) == count
