"""What is made of a model once, and kept with it: as long as it lives, and no longer.

It is an attribute that Keras neither tracks nor saves; copies of the model begin without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras


class _Memo:
    """What was made. It has slots, so that ``kept_objects`` puts nothing of it back."""

    __slots__ = ("made",)

    def __init__(self) -> None:
        self.made: dict[Any, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


def once(model: Any, key: Callable[[], Any], make: Callable[[], Any]) -> Any:
    """Return what was made of a model for what ``key`` returns, which says all that decides what is made.

    It is asked again afterwards: to make something of a model may build its layers.
    """
    memo = vars(model).get("memsaver_memo")
    if memo is None:
        memo = _Memo()
        object.__setattr__(model, "memsaver_memo", memo)
    if key() in memo.made:
        return memo.made[key()]
    made = make()
    memo.made[key()] = made
    return made


def forget(model: Any) -> None:
    """Forget what was made of a model: it may have changed in ways that no key tells."""
    if isinstance(model, keras.Model):  # What is none is refused later, in words.
        vars(model).pop("memsaver_memo", None)
