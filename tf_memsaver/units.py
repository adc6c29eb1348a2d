"""Bytes as text and back: parsed at the edge, ``int`` everywhere inside."""

from __future__ import annotations

import re

_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: int | float | str) -> int:
    """Return the number of bytes that ``text`` names.

    Accepts an ``int``, a whole ``float`` or text such as ``"6GiB"``, ``"512 MiB"``, ``"16GB"`` (10⁹) or ``"4g"`` (2³⁰).

    Raises:
      ValueError: not a number with a unit of bytes, or not positive.
    """
    if isinstance(text, bool):
        raise ValueError(f"{text!r} is not a number of bytes")
    if isinstance(text, (int, float)):
        count = float(text)
        factor = 1
    else:
        match = _PATTERN.fullmatch(text)
        if match is None or match[2].lower() not in _FACTORS:
            raise ValueError(f"{text!r} is not a number of bytes; write it like '6GiB', '512MiB' or 16000000000")
        count, factor = float(match[1]), _FACTORS[match[2].lower()]
    total = text if isinstance(text, int) else round(count * factor)
    if total <= 0:
        raise ValueError(f"{text!r} is not a positive number of bytes")
    return total


def format_bytes(count: int | float) -> str:
    """Return ``count`` bytes as text with a binary unit and at most four digits, such as ``1.25 GiB``."""
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= factor:
            value = count / factor
            return f"{value:.2f} {unit}" if value < 100 else f"{value:.1f} {unit}"
    return f"{int(count)} B"
