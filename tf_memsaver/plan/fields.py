"""The fields of a plan's JSON, read one by one: each is there and what it may be, or an error names it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tf_memsaver.errors import InvalidRequestError, PlanFormatError
from tf_memsaver.options import Check
from tf_memsaver.units import shown

NEW_PLAN = "Make a new plan with tf_memsaver.search_plan."


class Fields:
    """The fields of one JSON object; ``place`` says where it stands, such as ``segments[3]``."""

    def __init__(self, data: Any, place: str = "") -> None:
        """Take an object.

        Raises:
          PlanFormatError: it is none.
        """
        self.place = place
        if not isinstance(data, Mapping):
            raise malformed(place or "a plan", f"must be a JSON object, got {shown(data)}")
        self._data = data

    def get(self, name: str, check: Check) -> Any:
        """Return a field's value as ``check`` returns it.

        Raises:
          PlanFormatError: it is missing, or the check refuses it.
        """
        if name not in self._data:
            raise malformed(self._named(name), "is missing")
        try:
            return check(self._named(name), self._data[name])
        except InvalidRequestError as error:
            raise PlanFormatError(f"not a plan that can be used: {error} {NEW_PLAN}") from error

    def get_or_none(self, name: str, check: Check) -> Any:
        """Return the same, or None where the field is missing or null."""
        return None if self._data.get(name) is None else self.get(name, check)

    def object(self, name: str) -> Fields:
        """Return a field that is an object."""
        return Fields(self.get(name, _as_it_is), self._named(name))

    def objects(self, name: str) -> Iterator[Fields]:
        """Yield the objects of a field that is a list of them."""
        found = self.get(name, _as_it_is)
        if not isinstance(found, (list, tuple)):
            raise malformed(self._named(name), f"must be a list, got {shown(found)}")
        for place, item in enumerate(found):
            yield Fields(item, f"{self._named(name)}[{place}]")

    def names(self) -> list[Any]:
        """Return the names of all fields."""
        return list(self._data)

    def _named(self, name: str) -> str:
        return f"{self.place}.{name}" if self.place else name

    def __contains__(self, name: str) -> bool:
        return self._data.get(name) is not None


def malformed(place: str, what: str) -> PlanFormatError:
    """Return the error of a field: where it stands, and what is wrong with it."""
    return PlanFormatError(f"not a plan that can be used: {place} {what}. {NEW_PLAN}")


def _as_it_is(name: str, value: Any) -> Any:
    del name
    return value
