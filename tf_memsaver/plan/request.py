"""A request: the limits and hints for a plan."""

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
    """The checked options of ``optimize`` that describe a plan.

    ``budget_bytes`` limits the peak of a whole training step. ``budget_share`` does the same as a share of the plain
    step's peak; the request of a finished plan then has both. ``max_overhead`` limits the predicted extra step time as
    a share of the plain step's time. ``strategy`` is the name of the planner.

    Hints are names or ``fnmatch`` patterns of layers. ``keep`` layers are never recomputed, ``recompute`` layers always
    are. If ``candidates`` are given, segments end only after them.

    ``granularity`` is the unit of the plan: a layer call (``"layer"``), a few operations (``"op"``), or either, chosen
    for each layer (``"auto"``). ``time_chunks`` is the number of time steps in a chunk of a recurrent layer (None:
    layers are not divided). ``profile`` says whether times were measured on the device. ``order`` says whether the step
    runs in the planned order. ``executor`` is what runs the step and decides how peaks are computed: ``"graph"`` (the
    simulator) or ``"xla"`` (XLA's compiler).
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
        """Return the request from a verb's options; options that do not describe a plan are ignored.

        Raises:
          InvalidRequestError: an option has an invalid value.
        """
        found = checked(**{name: options[name] for name in options_of(RequestOptions) if name in options})
        budget = found.pop("budget", None)
        if budget == AUTO:
            raise InvalidRequestError(
                "budget='auto' cannot be used here, since it needs a device. Give bytes, or a share such as '80%'."
            )
        name = "budget_share" if isinstance(budget, Share) else "budget_bytes"
        return cls(**{name: budget}, **found)

    def checked(self) -> Request:
        """Return the request with every field checked and converted.

        Raises:
          InvalidRequestError: a field has an invalid value.
        """
        budget = self.budget_bytes if self.budget_share is None else Share(self.budget_share)
        others = {name: getattr(self, name) for name in options_of(RequestOptions) if name != "budget"}
        return Request.of({"budget": budget, **others})

    def for_peak(self, plain_bytes: int) -> Request:
        """Return the request with ``budget_bytes`` computed from ``budget_share``, if there is one."""
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
