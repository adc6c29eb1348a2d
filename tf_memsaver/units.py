"""Bytes as text and back: parsed at the edge, ``int`` everywhere inside. And any value as an error shows it."""

from __future__ import annotations

import re
from numbers import Integral, Real
from typing import Any

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
MOST_BYTES = 2**63 - 1
"""No count of bytes is larger: programs keep them in 64 bits."""
_WRITE_IT = "is not a number of bytes; write it like '6GiB', '512MiB' or 16000000000"


def parse_bytes(text: Any) -> int:
    """Return the number of bytes that ``text`` names.

    Accepts a whole number (also one of NumPy, or a whole ``float``) or text such as ``"6GiB"``, ``"512 MiB"``,
    ``"16GB"`` (10⁹) or ``"4g"`` (2³⁰).

    Raises:
      ValueError: not a number with a unit of bytes, not whole bytes, not positive, or beyond ``MOST_BYTES``.
    """
    factor = 1
    if isinstance(text, str):
        match = _PATTERN.fullmatch(text)
        if match is None or match[2].lower() not in _FACTORS:
            raise ValueError(f"{shown(text)} {_WRITE_IT}")
        digits, factor = match[1], _FACTORS[match[2].lower()]
        count = int(digits) if digits.isdecimal() and len(digits) < 40 else float(digits)
    elif isinstance(text, bool) or not isinstance(text, Real):
        raise ValueError(f"{shown(text)} {_WRITE_IT}")
    else:
        count = int(text) if isinstance(text, Integral) else float(text)
    total = count * factor
    if total > MOST_BYTES:
        raise ValueError(f"it is above {MOST_BYTES}, the most that a number of bytes can be; write it like '6GiB'")
    if not total > 0 or round(total) == 0:
        raise ValueError(f"{shown(text)} is not a positive number of bytes; write it like '6GiB'")
    if factor == 1 and total != int(total):
        raise ValueError(f"{shown(text)} is not a whole number of bytes; write it like '6GiB', '512MiB' or 16000000000")
    return round(total)


class Share(float):
    """A budget that is a share of the plain step's peak: above 0, and at most 1."""


AUTO = "auto"
"""A budget that is what the device has left."""

_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


def parse_budget(value: Any) -> int | Share | str:
    """Return a budget: bytes as ``parse_bytes`` reads them, the ``Share`` that a text such as ``"80%"`` names, or AUTO.

    Raises:
      ValueError: it is none of them.
    """
    if isinstance(value, Share) or (isinstance(value, str) and value.strip().lower() == AUTO):
        return value if isinstance(value, Share) else AUTO
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return parse_bytes(value)
    share = float(match[1]) / 100
    if not 0 < share <= 1:
        raise ValueError(f"{shown(value)} is not above 0% and at most 100% of the plain step's peak")
    return Share(share)


def format_bytes(count: int | float) -> str:
    """Return ``count`` bytes as text with a binary unit and at most four digits, such as ``1.25 GiB``."""
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= factor:
            value = count / factor
            return f"{value:.2f} {unit}" if value < 100 else f"{value:.1f} {unit}"
    return f"{int(count)} B"


def shown(value: object) -> str:
    """Return a value as an error message shows it: on one line, and not at any length."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # Its own code, or a number of too many digits.
        return f"a {type(value).__name__}"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 80 else f"{text[:60]}… ({type(value).__name__})"
