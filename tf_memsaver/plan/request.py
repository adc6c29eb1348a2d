"""What a caller asks of a planner."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tf_memsaver.errors import InvalidRequestError
from tf_memsaver.options import OPTIONS, checked, whole
from tf_memsaver.options.checks import share
from tf_memsaver.options.table import Executor, Granularity, RequestOptions, TimeChunks, options_of
from tf_memsaver.plan.fields import Fields, malformed
from tf_memsaver.units import AUTO, Share, shown

_OWN_CHECKS = {"budget_bytes": whole(1), "budget_share": share}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the caller asks: the options of ``RequestOptions``, as we use them.

    ``budget_bytes`` bounds the peak of a whole training step, ``budget_share`` does so as a share of the plain step's
    peak, until a plan is made for it: its request has both; ``max_overhead`` bounds the extra predicted step time as
    a share of the plain step. Hints are names or ``fnmatch`` patterns of layers: ``keep`` layers are never replayed,
    ``recompute`` layers always are, and where ``candidates`` are given, segments end only after them.
    ``granularity`` says what a unit of the plan is: a call of a layer (``"layer"``), a few operations (``"op"``), or
    either, as it pays for each layer (``"auto"``).
    ``time_chunks`` says into chunks of how many steps recurrent layers are cut (None: they are not).
    ``profile`` says that times were to be measured on the device at hand, operation by operation.
    ``order`` says that the step is to run in the planned order. ``executor`` is what runs it, and so what judged the
    peaks of a plan: the simulator (``"graph"``) or XLA's compiler (``"xla"``).
    """

    budget_bytes: int | None = OPTIONS["budget"].default
    budget_share: float | None = None
    max_overhead: float | None = OPTIONS["max_overhead"].default
    strategy: str = OPTIONS["strategy"].default
    keep: tuple[str, ...] = OPTIONS["keep"].default
    recompute: tuple[str, ...] = OPTIONS["recompute"].default
    candidates: tuple[str, ...] = OPTIONS["candidates"].default
    granularity: Granularity = OPTIONS["granularity"].default
    time_chunks: TimeChunks = OPTIONS["time_chunks"].default
    profile: bool = OPTIONS["profile"].default
    order: bool = OPTIONS["order"].default
    executor: Executor = OPTIONS["executor"].default

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Request:
        """Return the request that a verb's options make up; those that say other things are left aside.

        Raises:
          InvalidRequestError: an option has a value of no meaning.
        """
        found = checked(**{name: options[name] for name in options_of(RequestOptions) if name in options})
        budget = found.pop("budget", None)
        if budget == AUTO:
            raise InvalidRequestError("budget='auto' asks for a device: give bytes, or a share such as '80%'.")
        name = "budget_share" if isinstance(budget, Share) else "budget_bytes"
        return cls(**{name: budget}, **found)

    def checked(self) -> Request:
        """Return the request with every field checked (see ``options``) and as we use it.

        Raises:
          InvalidRequestError: a field has a value of no meaning.
        """
        budget = self.budget_bytes if self.budget_share is None else Share(self.budget_share)
        others = {name: getattr(self, name) for name in options_of(RequestOptions) if name != "budget"}
        return Request.of({"budget": budget, **others})

    def for_peak(self, plain_bytes: int) -> Request:
        """Return the request with ``budget_bytes`` for a plain step of this peak, where a share is asked for."""
        if self.budget_share is None:
            return self
        return replace(self, budget_bytes=int(self.budget_share * plain_bytes))

    def without_limits(self) -> Request:
        """Return the request of whatever ``auto`` finds without a budget."""
        return replace(self, strategy="auto", budget_bytes=None, budget_share=None, max_overhead=None)

    @classmethod
    def from_json(cls, fields: Fields) -> Request:
        """Read a request from the fields that a plan's JSON has of it; one that is not there has its default.

        Raises:
          PlanFormatError: a field is unknown or malformed.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = [name for name in fields.names() if name not in known]
        if unknown:
            raise malformed(fields.place, f"has a field {shown(unknown[0])} that this version does not know")
        checks = {name: _OWN_CHECKS.get(name) or OPTIONS[name].check for name in fields.names()}
        found = {name: fields.get(name, check) for name, check in checks.items() if name in fields}
        # Plans of before there was a choice are by layers, and judged by the simulator.
        return cls(**{"granularity": "layer", "executor": "graph", **found})
