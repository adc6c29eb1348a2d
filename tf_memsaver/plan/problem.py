"""The input of a planner: the graph, the request with its hints resolved to units, and the simulator."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tf_memsaver.errors import CertificationError, HintError, PlanFormatError
from tf_memsaver.ir.graph import Cut, Graph, Unit
from tf_memsaver.ir.segments import Segment, SegmentMode, check_cover, stored
from tf_memsaver.ir.topology import articulation_points
from tf_memsaver.judge.estimate import units_of
from tf_memsaver.judge.simulate import Simulator, Timeline
from tf_memsaver.options.checks import did_you_mean
from tf_memsaver.plan.request import Request

T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """The input of a planner: a graph and a request, with the hints resolved to units.

    ``pinned[u]`` says that unit ``u`` must be in a store segment (it cannot be recomputed, or a ``keep`` hint names
    it). ``forced[u]`` says that it must be in a recompute segment. ``cuts`` are the candidate cuts, in order: the
    positions where a segment may end.
    """

    graph: Graph
    request: Request
    pinned: tuple[bool, ...]
    forced: tuple[bool, ...]
    cuts: tuple[Cut, ...]
    _made: dict[Callable[[Problem], Any], Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def build(cls, graph: Graph, request: Request) -> Problem:
        """Resolve the hints of ``request`` on ``graph``.

        Raises:
          HintError: a pattern matches no layer, or hints contradict each other or the graph.
        """
        keep = _matches(graph, "keep", request.keep)
        named = _replayable(graph, request.recompute)
        candidates = _matches(graph, "candidates", request.candidates)
        for unit in graph.units:
            if named[unit.index] and (keep[unit.index] or unit.pinned):
                reason = unit.pinned or "is also named in keep"
                raise HintError(f"layer '{unit.label}' cannot be recomputed: it {reason}. Take it out of recompute=.")
        pinned = _spread(graph, [keep[unit.index] or bool(unit.pinned) for unit in graph.units])
        recompute = _spread(graph, named)
        for unit in graph.units:
            if recompute[unit.index] and pinned[unit.index]:
                raise HintError(
                    f"layer '{unit.label}' cannot be recomputed: it shares a tensor with a layer that must be kept, "
                    f"and a cut between the two would change the order of a sum. Take one of them out of the hints."
                )
        cuts = graph.cuts
        if request.candidates:
            chosen = {u + 1 for u in range(len(graph.units)) if candidates[u]}
            edges = {p for p in range(1, len(graph.units)) if _border(pinned, p) or _border(recompute, p)}
            cuts = tuple(cut for cut in cuts if cut.position in chosen or cut.position in edges)
        return cls(graph=graph, request=request, pinned=pinned, forced=recompute, cuts=cuts)

    def once(self, make: Callable[[Problem], T]) -> T:
        """Return ``make(self)``, made once for this problem and those that differ in nothing but their limits.

        So what it makes may not depend on the budget, the overhead and the strategy of the request.
        """
        if make not in self._made:
            self._made[make] = make(self)
        found: T = self._made[make]
        return found

    @property
    def kept_bytes(self) -> tuple[int, ...]:
        """The bytes that the plain step keeps of each unit for the backward pass."""
        return self.once(_kept_bytes)

    @property
    def simulator(self) -> Simulator:
        """The judge of this problem's plans."""
        return self.once(_simulator)

    @property
    def plain(self) -> Timeline:
        """The plain step: everything stored."""
        return self.once(_plain)

    @property
    def store_all(self) -> tuple[Segment, ...]:
        """The cover that replays nothing."""
        return stored(len(self.graph.units))

    @property
    def plain_reported_peak(self) -> int:
        """The peak of the plain step as the allocator reports it."""
        return self.simulator.reported_peak(self.store_all)

    @property
    def reasons(self) -> tuple[str, ...]:
        """For each unit, why it must be kept or recomputed; empty where the planner may choose."""
        return self.once(_reasons)

    def with_limits(self, request: Request) -> Problem:
        """Return the problem of a request with the same hints; what was computed for this one is shared."""
        return replace(self, request=request)

    def with_budget(self, budget_bytes: int | None, strategy: str | None = None) -> Problem:
        """Return the same problem with another budget, and strategy; what was computed for this one is shared."""
        strategy = strategy or self.request.strategy
        return self.with_limits(replace(self.request, budget_bytes=budget_bytes, strategy=strategy))

    @property
    def articulation_points(self) -> tuple[Cut, ...]:
        """The candidate cuts that exactly one value crosses."""
        return articulation_points(self.cuts)

    def misplaced(self, segments: Sequence[Segment]) -> tuple[int, SegmentMode] | None:
        """Return the first unit that a cover stores or replays against a hint, and which of the two; None if none."""
        for segment in segments:
            unwanted = self.pinned if segment.mode is SegmentMode.RECOMPUTE else self.forced
            if any(unwanted[segment.start : segment.stop]):
                return unwanted.index(True, segment.start), segment.mode
        return None

    def certify(self, segments: Sequence[Segment], planner: str) -> None:
        """Check that a plan's segments train the model as it is; ``planner`` is the name of who proposed them.

        They must cover the units, keep every hint, replay nothing that cannot be replayed, and no replay may begin or
        end where that would change the rounding of a result; in segments of all levels.

        Raises:
          CertificationError: they do not; it names the layer.
        """
        units = self.graph.units
        try:
            check_cover(segments, 0, len(units))
        except PlanFormatError as error:
            raise CertificationError(planner, str(error)) from error
        misplaced = self.misplaced(segments)
        if misplaced is not None:
            unit, mode = misplaced
            reason = ""
            if mode is SegmentMode.RECOMPUTE:
                hinted = "must be stored: a hint says so, or a cut beside it would change the order of a sum"
                reason = f", and it {units[unit].pinned or hinted}"
            raise CertificationError(planner, f"layer '{units[unit].label}' lies in a {mode.value} segment{reason}")
        joined = set(self.graph.joined)
        for segment in (inner for top in segments for inner in top.walk()):
            torn = joined.intersection((segment.start, segment.stop)) if segment.mode is SegmentMode.RECOMPUTE else ()
            for position in torn:
                raise CertificationError(
                    planner,
                    f"a recompute segment begins or ends between '{units[position - 1].label}' and "
                    f"'{units[position].label}', where a cut changes the order of a sum and so the results",
                )

    def overhead(self, replay_seconds: float) -> float:
        """Return the time of replays as a share of the plain step."""
        plain = self.plain.step_seconds
        return replay_seconds / plain if plain > 0 else 0.0


def _kept_bytes(problem: Problem) -> tuple[int, ...]:
    return tuple(unit.kept_bytes for unit in units_of(problem.graph))


def _simulator(problem: Problem) -> Simulator:
    return Simulator(problem.graph)


def _plain(problem: Problem) -> Timeline:
    return problem.simulator.run(problem.store_all)


def _reasons(problem: Problem) -> tuple[str, ...]:
    keep = _matches(problem.graph, "keep", problem.request.keep)
    named = _matches(problem.graph, "recompute", problem.request.recompute)

    def reason(unit: Unit) -> str:
        if not problem.pinned[unit.index] and not problem.forced[unit.index]:
            return ""
        if unit.pinned:
            return unit.pinned
        for hint, is_named in (("keep", keep), ("recompute", named)):
            if is_named[unit.index]:
                return f"is named in {hint}="
        return "shares a tensor with such a layer: a cut between the two would change the order of a sum"

    return tuple(map(reason, problem.graph.units))


def _spread(graph: Graph, flags: Sequence[bool]) -> tuple[bool, ...]:
    """Return flags that are equal within each run of units between which no segment may end: any of them counts."""
    joined, spread = set(graph.joined), list(flags)
    start = 0
    for stop in range(1, len(spread) + 1):
        if stop == len(spread) or stop not in joined:
            spread[start:stop] = [any(spread[start:stop])] * (stop - start)
            start = stop
    return tuple(spread)


def _border(flags: Sequence[bool], position: int) -> bool:
    return flags[position - 1] != flags[position]


def _names(label: str) -> tuple[str, str, str]:
    """Return what a person may call something with a label."""
    return label, label.split("#")[0], label.rsplit("/", 1)[-1].split("#")[0]


def check_names(labels: Sequence[str], hints: Mapping[str, Sequence[str]]) -> None:
    """Check that every pattern of some hints, by their names, matches one of the labels that units will have.

    Raises:
      HintError: one does not; it names labels that are close.
    """
    for hint, patterns in hints.items():
        for pattern in patterns:
            if not any(_is_named(label, pattern) for label in labels):
                raise _no_such_layer(hint, pattern, labels)


def _no_such_layer(hint: str, pattern: str, labels: Sequence[str], opened: Sequence[str] = ()) -> HintError:
    """Return the error of a pattern that matches nothing, with names that are close or, where none is, with some."""
    names = {label.split("#")[0] for label in labels} | set(opened)
    close = did_you_mean(pattern, names) or f" Layers are named like: {', '.join(labels[:5])}, …"
    return HintError(f"{hint}={pattern!r} matches no layer.{close}")


def _matches(graph: Graph, hint: str, patterns: Sequence[str]) -> tuple[bool, ...]:
    """Return, for each unit, whether a pattern names it (label or last part of the label) or an opened layer around it.

    Raises:
      HintError: a pattern matches nothing.
    """
    flags = [False] * len(graph.units)
    for pattern in patterns:
        inside = _inside(graph, pattern)
        found = [part or _is_named(unit.label, pattern) for unit, part in zip(graph.units, inside, strict=True)]
        if not any(found):
            raise _no_such_layer(hint, pattern, [unit.label for unit in graph.units], graph.opened)
        flags = [flag or new for flag, new in zip(flags, found, strict=True)]
    return tuple(flags)


def _replayable(graph: Graph, patterns: Sequence[str]) -> tuple[bool, ...]:
    """Return the units that patterns of ``recompute`` mean: of a layer that was taken apart, all that can be replayed.

    Raises:
      HintError: a pattern matches nothing, or nothing of the layer that it names can be replayed.
    """
    fixed = _spread(graph, [bool(unit.pinned) for unit in graph.units])
    flags = [False] * len(graph.units)
    for pattern in patterns:
        named, inside = _matches(graph, "recompute", (pattern,)), _inside(graph, pattern)
        meant = [n and not (part and is_fixed) for n, part, is_fixed in zip(named, inside, fixed, strict=True)]
        if not any(meant):
            raise HintError(
                f"recompute={pattern!r}: nothing in that layer can be recomputed. Take it out of recompute=. The "
                "field pinned of the units of tf_memsaver.capture_graph(...) says why."
            )
        flags = [flag or new for flag, new in zip(flags, meant, strict=True)]
    return tuple(flags)


def _inside(graph: Graph, pattern: str) -> tuple[bool, ...]:
    """Return, for each unit, whether it is a part of a layer that was taken apart and that a pattern names."""
    named = [layer for layer in graph.opened if _is_named(layer, pattern)]
    return tuple(any(unit.label.startswith(f"{layer}/") for layer in named) for unit in graph.units)


def _is_named(label: str, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in _names(label))
