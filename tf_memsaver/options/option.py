"""What is said of an option, beside its name and type; and how the command line writes values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tf_memsaver.options.checks import Check, names


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option: what it may be, what it is when it is not given, and what people are told of it.

    ``help`` is one phrase for both the command's help and Python's; ``more`` are sentences for Python's alone. On the
    command line ``value`` stands for the value of a flag ("" for a switch; None where there is no such flag), ``read``
    makes a value of what was written, ``flag`` is the flag's name and ``flag_text`` its help, where these are others.
    """

    check: Check
    help: str
    more: str = ""
    default: Any = None
    value: str | None = None
    read: Callable[[str], Any] = str
    flag: str = ""
    flag_text: str = ""

    @property
    def flag_help(self) -> str:
        """The help text of the flag, with its default where that is a plain value."""
        plain = isinstance(self.default, (str, int)) and not isinstance(self.default, bool)
        text = self.flag_text or self.help
        return f"{text} (default: {self.default})" if plain else text

    @property
    def description(self) -> str:
        """The option's text in the docstring of a verb."""
        return f"{self.help}. {self.more}".rstrip()


def several(help: str, more: str = "", flag: str = "") -> Option:
    """Return an option of any number of names."""
    return Option(check=names, help=help, more=more, default=(), value="NAME,NAME", read=read_list, flag=flag)


def read_int(written: str) -> Any:
    """Return a whole number, or the text where it is none: the check says so."""
    try:
        return int(written)
    except ValueError:
        return written


def read_float(written: str) -> Any:
    """Return a number, or the text where it is none: the check says so."""
    try:
        return float(written)
    except ValueError:
        return written


def read_list(written: str) -> list[str]:
    """Return what stands between commas."""
    return [part.strip() for part in written.split(",") if part.strip()]


def read_ints(written: str) -> list[Any]:
    """Return the whole numbers between commas."""
    return [read_int(part) for part in read_list(written)]
