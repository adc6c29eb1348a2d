"""What a caller asks of a planner (Request), what it answers (Segment, Plan), and the plan's JSON form."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tf_memsaver.errors import PlanFormatError, PlanMismatchError
from tf_memsaver.files import written
from tf_memsaver.ir.graph import fingerprint
from tf_memsaver.targets import Kind, Target, check_target
from tf_memsaver.units import format_bytes

SCHEMA_VERSION = 1
DEFAULT_MAX_OVERHEAD = 0.3
"""Without a budget: the smallest peak whose predicted step is at most this share longer (design, section 7)."""


class SegmentMode(enum.Enum):
    """What happens to a segment's inner activations after the forward pass."""

    STORE = "store"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Units ``(start, stop]``: the 0-based units ``start .. stop - 1``, which run, and are replayed, as one function.

    A recompute segment may hold child segments that cover it: they are segments again while it is replayed.
    """

    start: int
    stop: int
    mode: SegmentMode
    children: tuple[Segment, ...] = ()

    def walk(self) -> Iterator[Segment]:
        """Yield the segment and all segments below it."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the caller asks: limits, the planner's name, and hints (names or ``fnmatch`` patterns of layers).

    ``budget_bytes`` bounds the peak of a whole training step; ``max_overhead`` bounds the extra predicted step time as
    a share of the plain step. ``keep`` layers are never replayed, ``recompute`` layers always are, and where
    ``candidates`` are given, segments end only behind them. ``granularity`` says what a unit of the plan is: a call of
    a layer (``"layer"``) or a few operations (``"op"``). ``profile`` says that times were to be measured on the device
    at hand, operation by operation.
    """

    budget_bytes: int | None = None
    max_overhead: float | None = None
    strategy: str = "auto"
    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()
    granularity: str = "layer"
    profile: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A certified plan: contiguous segments over a model's units, and what the simulator predicts for it.

    ``peak_bytes`` and ``plain_peak_bytes`` are the predicted peaks of a whole training step with and without the plan;
    ``step_overhead`` is the predicted extra step time as a share of the plain step; ``plan_seconds`` is the planning
    time without capture. ``strategy`` is the name that was asked for, ``planner`` the one that made the plan.

    ``bound_seconds`` is a proven lower bound on the replay seconds of such plans within the budget, and ``gap`` how far
    the plan's step time is above the bound's, as a share of the latter: 0 where no plan of one level is quicker (see
    ``bounds.least_seconds`` for what is proven of which plans). Both are None without a budget.
    """

    segments: tuple[Segment, ...]
    batch_size: int
    strategy: str
    planner: str
    peak_bytes: int
    plain_peak_bytes: int
    step_overhead: float
    plan_seconds: float
    request: Request
    labels: tuple[str, ...]
    signatures: tuple[str, ...]
    versions: tuple[tuple[str, str], ...] = ()
    bound_seconds: float | None = None
    gap: float | None = None

    @property
    def fingerprint(self) -> str:
        """The digest of the model that the plan was made for."""
        return fingerprint(self.signatures)

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Labels of the layers that are replayed in the backward pass, in order."""
        return tuple(self.labels[unit] for unit in self.recomputed_units)

    @property
    def recomputed_units(self) -> tuple[int, ...]:
        """The places of those layers among the units."""
        chosen = [s for s in self.segments if s.mode is SegmentMode.RECOMPUTE]
        return tuple(unit for s in chosen for unit in range(s.start, s.stop))

    def check_matches(self, signatures: Sequence[str], labels: Sequence[str]) -> None:
        """Check that the plan was made for a model with these units.

        Raises:
          PlanMismatchError: it names the first layer that differs.
        """
        for place, (mine, theirs) in enumerate(zip(self.signatures, signatures, strict=False)):
            if mine != theirs:
                raise PlanMismatchError(
                    f"layer call {place} is '{labels[place]}', {theirs}; the plan has '{self.labels[place]}', {mine}"
                )
        if len(self.signatures) != len(signatures):
            raise PlanMismatchError(
                f"the model has {len(signatures)} layer calls, the plan was made for {len(self.signatures)}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON data; ``from_json`` reads it back to an equal plan."""
        return {
            "schema_version": SCHEMA_VERSION,
            "batch_size": self.batch_size,
            "strategy": self.strategy,
            "planner": self.planner,
            "peak_bytes": self.peak_bytes,
            "plain_peak_bytes": self.plain_peak_bytes,
            "step_overhead": self.step_overhead,
            "plan_seconds": self.plan_seconds,
            "bound_seconds": self.bound_seconds,
            "gap": self.gap,
            "request": dataclasses.asdict(self.request),
            "versions": dict(self.versions),
            "fingerprint": self.fingerprint,
            "segments": [_segment_to_json(segment) for segment in self.segments],
            "units": [{"label": a, "signature": b} for a, b in zip(self.labels, self.signatures, strict=True)],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Read a plan from what ``to_json`` returned.

        Raises:
          PlanFormatError: a field is missing or malformed, the schema is another, or segments do not cover the units.
        """
        try:
            version = data["schema_version"]
            if version != SCHEMA_VERSION:
                raise PlanFormatError(
                    f"the plan has schema version {version!r}, this version reads {SCHEMA_VERSION}. Make a new plan."
                )
            request: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data["request"].items()}
            plan = cls(
                segments=tuple(_segment_from_json(segment) for segment in data["segments"]),
                batch_size=int(data["batch_size"]),
                strategy=str(data["strategy"]),
                planner=str(data["planner"]),
                peak_bytes=int(data["peak_bytes"]),
                plain_peak_bytes=int(data["plain_peak_bytes"]),
                step_overhead=float(data["step_overhead"]),
                plan_seconds=float(data["plan_seconds"]),
                request=Request(**request),
                labels=tuple(str(unit["label"]) for unit in data["units"]),
                signatures=tuple(str(unit["signature"]) for unit in data["units"]),
                versions=tuple(sorted((str(k), str(v)) for k, v in data["versions"].items())),
                # Plans of the first release have neither.
                bound_seconds=_float_or_none(data.get("bound_seconds")),
                gap=_float_or_none(data.get("gap")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanFormatError(f"this is not a plan of tf_memsaver: {type(error).__name__}: {error}") from error
        if plan.fingerprint != data.get("fingerprint"):
            raise PlanFormatError("the plan's fingerprint does not match its units: the file was changed by hand.")
        check_cover(plan.segments, 0, len(plan.labels))
        return plan

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = True) -> None:
        """Write the plan as JSON, beside and renamed, so that a reader never sees half a file.

        ``overwrite`` says whether another plan at ``path`` may be replaced; nothing else is.

        Raises:
          InvalidRequestError: ``path`` can be no target, such as an empty path.
          OutputExistsError: ``path`` exists, and holds no plan or may not be replaced.
          OutputError: the file could not be written, such as on a full disk.
        """
        self.save_to(check_target(path, Kind.FILE, overwrite=overwrite))

    def save_to(self, target: Target) -> None:
        """Write the plan as ``save`` does, to a target that was checked before."""
        with written(target) as fresh, fresh.open("w", encoding="utf-8") as file:
            json.dump(self.to_json(), file, indent=1)
            file.write("\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that ``save`` wrote.

        Raises:
          PlanFormatError: the file cannot be read, or is not a plan.
        """
        try:
            with open(path, encoding="utf-8") as file:
                data = json.load(file)
        except (OSError, ValueError) as error:
            raise PlanFormatError(f"cannot read a plan from '{os.fspath(path)}': {error}") from error
        if not isinstance(data, dict):
            raise PlanFormatError(f"'{os.fspath(path)}' holds no plan of tf_memsaver, but a {type(data).__name__}.")
        return cls.from_json(data)

    def __str__(self) -> str:
        count = sum(segment.mode is SegmentMode.RECOMPUTE for segment in self.segments)
        return (
            f"{self.planner}: {count} recompute segments of {len(self.segments)}, predicted peak "
            f"{format_bytes(self.peak_bytes)} (plain {format_bytes(self.plain_peak_bytes)}), "
            f"step {self.step_overhead:+.1%}"
        )


def check_cover(segments: Sequence[Segment], start: int, stop: int) -> None:
    """Check that segments are contiguous, not empty, and cover ``(start, stop]``; and so for their children.

    Raises:
      PlanFormatError: it names the first position that is wrong.
    """
    position = start
    for segment in segments:
        if segment.start != position or segment.stop <= segment.start:
            raise PlanFormatError(f"segment ({segment.start}, {segment.stop}] does not follow position {position}")
        if segment.children:
            if segment.mode is not SegmentMode.RECOMPUTE:
                raise PlanFormatError(f"store segment ({segment.start}, {segment.stop}] cannot have children")
            check_cover(segment.children, segment.start, segment.stop)
        position = segment.stop
    if position != stop:
        raise PlanFormatError(f"segments end at position {position}, the model has {stop} units")


def _float_or_none(value: Any) -> float | None:
    return None if value is None else float(value)


def _segment_to_json(segment: Segment) -> dict[str, Any]:
    data: dict[str, Any] = {"start": segment.start, "stop": segment.stop, "mode": segment.mode.value}
    if segment.children:
        data["children"] = [_segment_to_json(child) for child in segment.children]
    return data


def _segment_from_json(data: Mapping[str, Any]) -> Segment:
    return Segment(
        start=int(data["start"]),
        stop=int(data["stop"]),
        mode=SegmentMode(data["mode"]),
        children=tuple(_segment_from_json(child) for child in data.get("children", ())),
    )
