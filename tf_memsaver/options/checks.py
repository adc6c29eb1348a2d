"""What the value of an option may be: checks that return it as we use it, or say what is accepted."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any

from tf_memsaver.errors import InvalidRequestError
from tf_memsaver.units import MOST_BYTES, Share, parse_budget, shown

MOST_BATCH = 2**31 - 1
"""Kernels of TensorFlow count the rows of a tensor in 32 bits."""

Check = Callable[[str, Any], Any]
"""Takes an option's name and its value; returns the value as we use it, or raises ``InvalidRequestError``."""


def refused(name: str, accepted: str, value: object) -> InvalidRequestError:
    """Return the error of an option that has none of the accepted values."""
    return InvalidRequestError(f"{name} must be {accepted}, got {shown(value)}.")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the names that are close to one that is none of them; empty if there are none."""
    close = difflib.get_close_matches(name, sorted(known), n=3)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def whole(least: int, most: int = MOST_BYTES) -> Check:
    """Return the check of a whole number between two, in 64 bits; NumPy's are taken, too."""
    accepted = f"a whole number of {least} or more" if most == MOST_BYTES else f"a whole number from {least} to {most}"

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
            raise refused(name, accepted, value)
        return int(value)

    return check


def share(name: str, value: Any) -> float:
    """Return a finite number of 0 or more."""
    return float(number(0.0)(name, value))


def number(least: float = -math.inf) -> Check:
    """Return the check of a finite number."""
    accepted = "a finite number" if least == -math.inf else f"a finite number of {least:g} or more"

    def check(name: str, value: Any) -> float:
        try:
            found = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
        except OverflowError:
            found = math.inf
        if not (math.isfinite(found) and found >= least):
            raise refused(name, accepted, value)
        return found

    return check


def byte_budget(name: str, value: Any) -> int | Share | str:
    """Return a number of bytes that is given as one or as text such as ``"6GiB"``, a share, or ``"auto"``."""
    try:
        return parse_budget(value)
    except ValueError as error:
        raise InvalidRequestError(f"{name}: {error}.") from error


def text(name: str, value: Any) -> str:
    """Return a text that can be written down: no half of a surrogate pair."""
    if not isinstance(value, str):
        raise refused(name, "a text", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise refused(name, "a text of valid Unicode", value) from error
    return str(value)


def name_(name: str, value: Any) -> str:
    """Return a text that is not empty."""
    if not text(name, value):
        raise refused(name, "a text that is not empty", value)
    return str(value)


def names(name: str, value: Any) -> tuple[str, ...]:
    """Return one text, or several, as a tuple."""
    if isinstance(value, str):
        return (text(name, value),)
    if isinstance(value, (bytes, dict)) or not isinstance(value, Iterable):
        raise refused(name, "a text or a list of texts", value)
    return tuple(text(f"{name}[{place}]", item) for place, item in enumerate(value))


def several(check: Check) -> Check:
    """Return the check of a list of things that another check accepts; they come back as a tuple."""

    def checked(name: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise refused(name, "a list", value)
        return tuple(check(f"{name}[{place}]", item) for place, item in enumerate(value))

    return checked


def none_or(check: Check) -> Check:
    """Return the check of what may also be None."""
    return lambda name, value: None if value is None else check(name, value)


def either(one: Check, other: Check, accepted: str) -> Check:
    """Return the check of what one of two accepts."""

    def check(name: str, value: Any) -> Any:
        for each in (one, other):
            with contextlib.suppress(InvalidRequestError):
                return each(name, value)
        raise refused(name, accepted, value)

    return check


def any_value(name: str, value: Any) -> Any:
    """Return anything as it is: it is checked where it is used."""
    del name
    return value


def choice(*choices: str) -> Check:
    """Return the check of one text out of some."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise refused(name, f"one of {', '.join(choices)}", value)
        return str(value)

    return check


def choices(*of: str) -> Check:
    """Return the check of texts out of some, at least one."""

    def check(name: str, value: Any) -> tuple[str, ...]:
        found = names(name, value)
        if not found or not set(found) <= set(of):
            raise refused(name, f"one or more of {', '.join(of)}", value)
        return found

    return check


def sizes(name: str, value: Any) -> tuple[int, ...]:
    """Return a list of sizes as a tuple."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise refused(name, "whole numbers such as 128,128,3", value)
    return tuple(whole(1, MOST_BATCH)(f"{name}[{place}]", item) for place, item in enumerate(value))


def switch(name: str, value: Any) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        raise refused(name, "True or False", value)
    return value


def path(name: str, value: Any) -> str:
    """Return the path of a file or folder as text."""
    try:
        found = os.fspath(value)
    except TypeError as error:
        raise refused(name, "a path", value) from error
    if not found or not isinstance(found, str) or "\0" in found:
        raise refused(name, "a path", value)
    return found
