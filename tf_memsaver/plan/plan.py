"""A plan: certified segments with their predictions, and its JSON form."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tf_memsaver.errors import PlanFormatError, PlanMismatchError
from tf_memsaver.files.targets import Target, TargetKind, check_target
from tf_memsaver.files.writing import written
from tf_memsaver.ir.graph import fingerprint
from tf_memsaver.ir.segments import Segment, SegmentMode, check_cover
from tf_memsaver.options import OPTIONS, checks, number, text, whole
from tf_memsaver.options.checks import names, several
from tf_memsaver.plan.fields import NEW_PLAN, Fields
from tf_memsaver.plan.layers import PlannedLayer, decision_of, is_by_layers, units_in_words
from tf_memsaver.plan.parts import of_units, segment_to_json, segments_from_json, units_to_json
from tf_memsaver.plan.request import Request
from tf_memsaver.summary import Rows, Summarized
from tf_memsaver.units import format_bytes

SCHEMA_VERSION = 1
_NAMED = 3
"""The most layers that the one-line text of a plan names."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(Summarized):
    """A plan: which layers of a model are recomputed, and the predicted memory and time of a training step.

    What happens to each layer: ``recomputed``, ``kept`` and ``pinned`` (layers that must be kept) are names of layers;
    ``layers`` has one row for each layer, with its bytes and the reason (``pandas.DataFrame(plan.layers)`` is a table).
    ``segments`` are the runs of layers that are stored or recomputed together. ``labels``, ``signatures``,
    ``activation_bytes`` and ``reasons`` have one entry for each unit; the last two are empty in older plan files.

    Memory, in bytes: ``peak_bytes`` and ``plain_peak_bytes`` are the predicted peaks of a whole training step with and
    without the plan. The first includes what the device's allocator usually wastes.
    ``highest_peak_bytes`` is about the most that any step takes; a budget is compared with it (0 in older plan files).
    ``measured_peak_bytes`` is the most that real steps took, if ``calibrate`` ran some (else 0).

    Time: ``step_overhead`` is the predicted extra step time as a share of the plain step's time. ``plan_seconds`` is
    the time that planning took, without tracing. ``bound_seconds`` is a proven lower bound on the seconds that such
    plans within the budget recompute, and ``gap`` is how much longer the plan's step is than a step at that bound, as a
    share of the latter. A gap of 0 means that no plan of one level is quicker (``search.bounds.least_seconds`` says
    what is proven). Both are None without a budget.

    Texts: ``advice`` says why the plan saves little and what to try. It is empty if the plan saves 3% of the peak or
    more, unless a recurrent layer makes up most of the rest. ``note`` says why granularity ``"auto"`` could plan by
    layers only, and which recurrent layers were not divided along time.

    Origin: ``strategy`` is the requested name, ``planner`` the planner that made the plan, and ``request`` all that was
    requested. ``opened`` are the layers that granularity ``"auto"`` planned by operations; ``"call()"`` is the model's
    own code between layers. ``data_shapes`` are shapes that are known from a batch of the data only, such as the length
    of its longest text. ``versions`` are those of the packages that made the plan.
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
    advice: str = ""
    opened: tuple[str, ...] = ()
    note: str = ""
    data_shapes: tuple[tuple[int, ...], ...] = ()
    activation_bytes: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()
    highest_peak_bytes: int = 0
    measured_peak_bytes: int = 0

    @property
    def fingerprint(self) -> str:
        """A digest of the model that the plan was made for."""
        return fingerprint(self.signatures)

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The names of the layers that are recomputed in the backward pass, in order."""
        return tuple(self.labels[unit] for unit in self.recomputed_units)

    @property
    def recomputed_units(self) -> tuple[int, ...]:
        """The positions of these layers among all units, from 0."""
        chosen = [s for s in self.segments if s.mode is SegmentMode.RECOMPUTE]
        return tuple(unit for s in chosen for unit in range(s.start, s.stop))

    @property
    def kept(self) -> tuple[str, ...]:
        """The names of the layers whose activations the planner chose to keep, in order."""
        return tuple(each.layer for each in self.layers if each.decision == "kept")

    @property
    def pinned(self) -> tuple[str, ...]:
        """The names of the layers that must be kept, in order; ``layers`` says why. Empty in older plan files."""
        return tuple(each.layer for each in self.layers if each.decision == "pinned")

    @property
    def layers(self) -> tuple[PlannedLayer, ...]:
        """What the plan does with each layer, and why, in order. ``pandas.DataFrame(plan.layers)`` is a table."""
        return tuple(
            PlannedLayer(
                layer=self.labels[unit],
                decision=decision_of(segment.mode, self.reasons[unit] if self.reasons else ""),
                activation_bytes=self.activation_bytes[unit] if self.activation_bytes else None,
                segment=number,
                reason=(self.reasons[unit] if self.reasons else "") or f"chosen by planner {self.planner}",
            )
            for number, segment in enumerate(self.segments)
            for unit in range(segment.start, segment.stop)
        )

    @property
    def is_by_layers(self) -> bool:
        """Whether every unit of the plan is a whole layer."""
        return is_by_layers(self.request.granularity, self.opened)

    def units_in_words(self, count: int) -> str:
        """Return a number of units with the noun for what the plan's units are, such as ``"3 layers"``."""
        return units_in_words(count, self.request.granularity, self.opened)

    @property
    def recomputed_in_words(self) -> str:
        """How much of the model is recomputed, such as ``"3 of 9 layers"``."""
        return f"{len(self.recomputed_units)} of {self.units_in_words(len(self.labels))}"

    def check_matches(self, signatures: Sequence[str], labels: Sequence[str]) -> None:
        """Check that the plan was made for a model with these units.

        Raises:
          PlanMismatchError: a layer differs; the message names the first one.
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
        """Return the plan as plain JSON data, from which ``from_json`` makes an equal plan."""
        return {
            "schema_version": SCHEMA_VERSION,
            "batch_size": self.batch_size,
            "strategy": self.strategy,
            "planner": self.planner,
            "peak_bytes": self.peak_bytes,
            "plain_peak_bytes": self.plain_peak_bytes,
            "highest_peak_bytes": self.highest_peak_bytes,
            "measured_peak_bytes": self.measured_peak_bytes,
            "step_overhead": self.step_overhead,
            "plan_seconds": self.plan_seconds,
            "bound_seconds": self.bound_seconds,
            "gap": self.gap,
            "advice": self.advice,
            "opened": list(self.opened),
            "note": self.note,
            "data_shapes": [list(shape) for shape in self.data_shapes],
            "request": dataclasses.asdict(self.request),
            "versions": dict(self.versions),
            "fingerprint": self.fingerprint,
            "segments": [segment_to_json(segment) for segment in self.segments],
            "units": units_to_json(self.labels, self.signatures, self.activation_bytes, self.reasons),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Return the plan that ``to_json`` described.

        Raises:
          PlanFormatError: a field is missing or not valid, the schema version is another, or the segments do not cover
            all units.
        """
        fields = Fields(data)
        version = fields.get("schema_version", whole(0))
        if version != SCHEMA_VERSION:
            raise PlanFormatError(
                f"the plan file has schema version {version!r}, but this version of tf_memsaver reads "
                f"{SCHEMA_VERSION}. Make a new plan with tf_memsaver.search_plan."
            )
        versions = fields.object("versions")
        units = list(fields.objects("units"))
        plan = cls(
            segments=segments_from_json(fields, "segments"),
            batch_size=fields.get("batch_size", OPTIONS["batch_size"].check),
            strategy=fields.get("strategy", text),
            planner=fields.get("planner", text),
            peak_bytes=fields.get("peak_bytes", whole(0)),
            plain_peak_bytes=fields.get("plain_peak_bytes", whole(0)),
            step_overhead=fields.get("step_overhead", number()),
            plan_seconds=fields.get("plan_seconds", number(0.0)),
            request=Request.from_json(fields.object("request")),
            labels=tuple(unit.get("label", text) for unit in units),
            signatures=tuple(unit.get("signature", text) for unit in units),
            versions=tuple(sorted((text("versions", name), versions.get(name, text)) for name in versions.names())),
            # Older plans have none of these.
            bound_seconds=fields.get_or_none("bound_seconds", number(0.0)),
            gap=fields.get_or_none("gap", number()),
            advice=fields.get_or_none("advice", text) or "",
            opened=fields.get_or_none("opened", names) or (),
            note=fields.get_or_none("note", text) or "",
            data_shapes=fields.get_or_none("data_shapes", several(several(whole(0)))) or (),
            activation_bytes=of_units(units, "activation_bytes", whole(0)),
            reasons=of_units(units, "reason", text),
            highest_peak_bytes=fields.get_or_none("highest_peak_bytes", whole(0)) or 0,
            measured_peak_bytes=fields.get_or_none("measured_peak_bytes", whole(0)) or 0,
        )
        if plan.fingerprint != fields.get("fingerprint", text):
            raise PlanFormatError(
                f"the plan's fingerprint does not match its units: the file was changed by hand. {NEW_PLAN}"
            )
        try:
            check_cover(plan.segments, 0, len(plan.labels))
        except PlanFormatError as error:
            raise PlanFormatError(f"not a plan that can be used: {error}. {NEW_PLAN}") from error
        return plan

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = True) -> None:
        """Write the plan to a JSON file. The file appears at once, so a reader never sees half of it.

        Args:
          path: the file to write.
          overwrite: whether an existing plan at ``path`` may be replaced; other files are never replaced.

        Raises:
          InvalidRequestError: ``path`` cannot be a file, for example if it is empty.
          OutputExistsError: ``path`` exists and is not a plan, or may not be replaced.
          OutputError: the file could not be written, for example on a full disk.
        """
        self.save_to(check_target(path, TargetKind.FILE, overwrite=overwrite))

    def save_to(self, target: Target) -> None:
        """Write the plan as ``save`` does, to a target that is already checked."""
        with written(target) as fresh, fresh.open("w", encoding="utf-8") as file:
            json.dump(self.to_json(), file, indent=1)
            file.write("\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Return the plan in a file that ``save`` wrote.

        Raises:
          InvalidRequestError: ``path`` is no path.
          PlanFormatError: the file cannot be read, or is not a plan.
        """
        name = checks.path("plan", path)
        try:
            with open(name, encoding="utf-8") as file:
                data = json.load(file)
        except RecursionError as error:
            raise PlanFormatError(
                f"cannot read a plan from '{name}': its segments are nested too deep. {NEW_PLAN}"
            ) from error
        except (OSError, ValueError) as error:
            raise PlanFormatError(
                f"cannot read a plan from '{name}': {error}. Give a file that Plan.save wrote."
            ) from error
        if not isinstance(data, dict):
            raise PlanFormatError(
                f"'{name}' is not a plan of tf_memsaver: it contains a {type(data).__name__}. Give a file that "
                "Plan.save wrote."
            )
        return cls.from_json(data)

    @property
    def judged(self) -> str:
        """Where the two peaks come from, in words."""
        return "as XLA compiles it" if self.request.executor == "xla" else "predicted"

    def summary(self) -> tuple[str, Rows]:
        """Return what ``repr`` shows."""
        pinned = len(self.pinned)
        share = f" ({self.peak_bytes / self.plain_peak_bytes:.0%})" if self.plain_peak_bytes else ""
        at_most = self._at_most()
        rows = [
            ("peak now", format_bytes(self.plain_peak_bytes)),
            ("peak planned", f"{format_bytes(self.peak_bytes)}{share}{at_most and f', {at_most}'}"),
            ("step time", f"{self.step_overhead:+.1%}"),
            ("recomputed", f"{self.recomputed_in_words}, in {self._segments()}"),
            ("kept", f"{self.units_in_words(len(self.kept))}, and {pinned} that must be"),
            ("limits", self._limits()),
        ]
        rows += [(name, told) for name, told in (("advice", self.advice), ("note", self.note)) if told]
        return f"Plan for batch size {self.batch_size}, {self.judged} (planner {self.planner})", rows

    def _segments(self) -> str:
        count = sum(segment.mode is SegmentMode.RECOMPUTE for segment in self.segments)
        return f"{count} segment{'' if count == 1 else 's'}"

    def _at_most(self) -> str:
        """Return the most that any step takes, in words; nothing if that is the predicted peak."""
        if self.measured_peak_bytes:
            return f"real steps took at most {format_bytes(self.measured_peak_bytes)}"
        if self.highest_peak_bytes <= self.peak_bytes:
            return ""
        return f"at most about {format_bytes(self.highest_peak_bytes)}"

    def _limits(self) -> str:
        budget, overhead = self.request.budget_bytes, self.request.max_overhead
        limits = [] if budget is None else [f"budget {format_bytes(budget)}"]
        limits += [] if overhead is None else [f"step at most {overhead:+.1%}"]
        return ", ".join(limits) or "none given"

    def __str__(self) -> str:
        judged = "peak as XLA compiles the step" if self.request.executor == "xla" else "predicted peak"
        at_most = self._at_most()
        return (
            f"{judged} {format_bytes(self.peak_bytes)}{at_most and f' ({at_most})'} instead of "
            f"{format_bytes(self.plain_peak_bytes)}, step "
            f"{self.step_overhead:+.1%}; {self.recomputed_in_words} are recomputed, in {self._segments()} "
            f"(planner {self.planner}, batch size {self.batch_size}){self._chosen()}"
        )

    def _chosen(self) -> str:
        """Return the parts of the model that were planned by operations, in words."""
        if not self.opened:
            return f"; {self.note}" if self.note else ""
        more = f" and {len(self.opened) - _NAMED} more" if len(self.opened) > _NAMED else ""
        return f"; by operations: {', '.join(self.opened[:_NAMED])}{more}"
