"""Exact plans of one level: search the tables, simulate, put what the simulator saw into the tables, search again.

The tables never claim more than a plan of their kind needs, up to the cases that ``tables`` names. So when the best
proposal under the tables simulates as the tables say, no other plan of one level can be better, and the loop ends. On
captured networks that is the first round or the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from tf_memsaver.ir.segments import Segment, tidied
from tf_memsaver.judge.simulate import Measured
from tf_memsaver.pace import counted
from tf_memsaver.plan.problem import Problem
from tf_memsaver.search.labels import INFINITE, Search
from tf_memsaver.search.least_peak import least_peak
from tf_memsaver.search.repeats import Repeat, repeats, tilings
from tf_memsaver.search.tables import Proposal, Tables
from tf_memsaver.search.thinning import thinned

THIN_CUTS = 128
"""A graph of more candidate cuts is *large*: there, searches narrow what they look at."""

MOST_ROUNDS = 100
"""Simulations before a search settles for the best plan that it has simulated so far."""

THIN_ROUNDS = 12
"""The same in large graphs."""

FRONT = 256
"""Pareto-optimal labels kept at a cut, for each pattern of values kept already; exact while fewer are needed."""

LARGE_FRONT = 128
"""The same in large graphs, where labels differ in more bytes."""

NEAR_FRONT = 16
"""The same for plans that are only candidates beside others."""

TIME_ERROR = 1e-9
"""More than the share by which sums of times in different orders differ."""

REACH = 16
"""In large graphs, the cuts that a segment from any cut to any other may span."""

PEAK_STEPS = 250
"""In large graphs the search for the least peak ends when it is known to one part in this many."""

LIMIT_STEPS = 50
"""In large graphs the search for the least peak within an overhead ends when it is known to one part in this many."""


MOST_TILINGS = 48
"""Plans of equal blocks that are simulated for one repeat; of more, about so many at equal distances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Segments and what the simulator says of them."""

    segments: tuple[Segment, ...]
    measured: Measured

    @property
    def peak_bytes(self) -> int:
        """The simulated peak of the whole step."""
        return self.measured.peak_bytes

    @property
    def replay_seconds(self) -> float:
        """The simulated extra time of the step."""
        return self.measured.replay_seconds

    @property
    def rank(self) -> tuple[int, float, int]:
        """Order by peak, then time, then number of segments."""
        return self.peak_bytes, self.replay_seconds, len(self.segments)


class OneLevel:
    """The plans of one level of a problem: store and recompute segments between candidate cuts."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.all_tables = Tables(problem, candidate_positions(problem))
        """Of all segments between candidate cuts."""
        self._is_large = len(self.all_tables.positions) > THIN_CUTS
        self._narrowed: dict[tuple[int, ...], Tables] = {}
        self._rounds = THIN_ROUNDS if self._is_large else MOST_ROUNDS
        self._front = LARGE_FRONT if self._is_large else FRONT

    @cached_property
    def _repeats(self) -> tuple[Repeat, ...]:
        """The rows of equal blocks of a large graph."""
        return repeats(self._problem) if self._is_large else ()

    @cached_property
    def plain(self) -> Found | None:
        """Everything stored, where the hints allow it."""
        if any(self._problem.forced):
            return None
        return self._simulated(self._problem.store_all)

    @cached_property
    def smallest(self) -> Found:
        """The plan of least simulated peak; of those, the quickest that was found."""
        known = least_peak(self.thinned_tables(()), tolerance=1 / PEAK_STEPS) if self._is_large else None
        tables = self._tables(known.segments if known else ())
        best, least = self.plain, 0.0
        for _ in range(self._rounds):
            if self._is_large:
                most = INFINITE if best is None else best.peak_bytes
                proposal = least_peak(tables, known, 1 / PEAK_STEPS, least=least, most=most)
            else:
                proposal = least_peak(tables, known)
            if proposal is None or (best is not None and proposal.peak_bytes > best.peak_bytes):
                break
            # What is learnt only adds to what tables say, so that no later proposal is of less.
            least = proposal.peak_bytes * (1 - 1 / PEAK_STEPS)
            found = self._simulated(proposal.segments)
            best = found if best is None or found.rank < best.rank else best
            if self._is_as_told(found, proposal, PEAK_STEPS) or not tables.learn(proposal, found.measured):
                break
            known = None
        if best is None:
            raise AssertionError("consistent hints always leave a cover of store and recompute segments")
        quick = self.quickest(best.peak_bytes, best.segments)
        return best if quick is None else min(best, quick, key=lambda found: found.rank)

    def quickest(self, limit: int, around: Sequence[Segment] = ()) -> Found | None:
        """Return the plan of least time whose simulated peak is within ``limit``, or None when none was found.

        Of plans of one time, the one of least peak, so that a smaller limit never gives a larger peak. In graphs with
        many cuts only short replays are looked at between all of them, and longer ones between some, always with those
        of the segments ``around``; and the first plan found is returned.
        """
        if self.plain is not None and self.plain.peak_bytes <= limit:
            return self.plain
        tables = self._tables(around)
        found: Found | None = None
        seconds = INFINITE
        for _ in range(self._rounds):
            proposal = Search(tables, limit, front=self._front, seconds_limit=seconds).run()
            if proposal is None:
                break
            next_found = self._simulated(proposal.segments)
            if next_found.peak_bytes <= limit:
                # Sums of the same times in another order differ in their last digits.
                found, limit = next_found, next_found.peak_bytes - 1
                seconds = proposal.replay_seconds * (1 + TIME_ERROR)
                if self._is_large:
                    break
            elif not tables.learn(proposal, next_found.measured):
                break
        return found

    def within(self, seconds: float) -> Found:
        """Return the plan of least simulated peak, as far as found, whose replays take at most ``seconds``.

        Raises:
          ValueError: the hints force more recomputation than that.
        """
        limit, smallest = seconds, self.smallest
        if smallest.replay_seconds <= seconds:
            return smallest
        tables = self._tables(smallest.segments)
        best = self.plain
        low, known, step = float(smallest.peak_bytes), None, INFINITE
        if self._is_large:
            known = self._least_within(self.thinned_tables(smallest.segments), seconds, low)
        for _ in range(self._rounds):
            proposal = self._least_within(tables, seconds, low, known, step)
            if proposal is None or (best is not None and proposal.peak_bytes > best.peak_bytes):
                break
            found = self._simulated(proposal.segments)
            if found.replay_seconds > limit:
                seconds, known = proposal.replay_seconds * (1 - TIME_ERROR), None
                continue
            best = found if best is None or found.rank < best.rank else best
            if self._is_as_told(found, proposal, LIMIT_STEPS) or not tables.learn(proposal, found.measured):
                break
            # What was learnt seldom adds much: the next answer is a little above this one.
            low, known, step = proposal.peak_bytes, None, proposal.peak_bytes / LIMIT_STEPS
        if best is None:
            raise ValueError("the hints force more recomputation than the time allows")
        return best

    def near(self, factor: float, seconds: float) -> Iterator[tuple[Segment, ...]]:
        """Yield the plans of least kept bytes and of least time for ``factor`` times the least transient bytes."""
        resident = self._problem.graph.resident_bytes
        limit = resident + (self.smallest.peak_bytes - resident) * factor
        tables = self.thinned_tables(self.smallest.segments)
        for front in (1, NEAR_FRONT):
            proposal = Search(tables, limit, front=front, seconds_limit=seconds).run()
            if proposal is not None:
                yield proposal.segments

    def with_equal_blocks(
        self,
        segments: Sequence[Segment],
        seconds: float,
        limit: float = INFINITE,
        rank: Callable[[Found], tuple[float, ...]] = lambda found: found.rank,
    ) -> Found | None:
        """Return the best plan that cuts equal blocks alike, made from given segments, or None if there is none.

        Of those whose replays take at most ``seconds`` and whose simulated peak is within ``limit``, by ``rank``. Small
        graphs are searched through anyway: nothing is made for them.
        """
        best: Found | None = None
        for repeat in self._repeats:
            given = segments if best is None else best.segments
            quick = [
                tiling
                for tiling in tilings(given, repeat, self.all_tables.positions)
                if self.all_tables.costs.replay_seconds_of(tiling.replayed_until) <= seconds * (1 + TIME_ERROR)
            ]
            chosen = quick[:: max(1, math.ceil(len(quick) / MOST_TILINGS))]
            different = list(dict.fromkeys(tidied(tiling.segments) for tiling in chosen))
            tried = [self._simulated(tiled) for tiled in counted("equal blocks", different)]
            fitting = [found for found in tried if found.replay_seconds <= seconds and found.peak_bytes <= limit]
            best = min([*fitting, *([] if best is None else [best])], key=rank, default=None)
        return best

    def _is_as_told(self, found: Found, proposal: Proposal, steps: int) -> bool:
        """Whether a plan takes what its proposal said: to one part in so many in large graphs, else exactly."""
        return found.peak_bytes <= proposal.peak_bytes * (1 + self._is_large / steps)

    def _least_within(
        self, tables: Tables, seconds: float, low: float, known: Proposal | None = None, step: float = INFINITE
    ) -> Proposal | None:
        """Bisect the limit, from a known proposal down, to the least that allows one within ``seconds``.

        To one part in ``LIMIT_STEPS`` in large graphs, else exactly. The first limits are no more than ``step`` above
        ``low``, then twice as much, and so on.
        """
        best = known
        high = INFINITE if known is None else known.peak_bytes
        trial = (low + high) / 2
        if known is None and self.plain is not None:
            trial = float(self.plain.peak_bytes)
        trial = min(trial, low + step)
        while low < high:
            front = self._front // 4 if self._is_large else self._front
            search = Search(tables, trial, front=front, seconds_limit=seconds)
            found = search.run()
            if found is not None:
                best, high = found, found.peak_bytes
            elif search.next_limit == INFINITE:
                return best
            else:
                low = max(search.next_limit, trial)
            if best is not None and self._is_large and high - low <= high / LIMIT_STEPS:
                return best
            step *= 2
            trial = low if high - low < 1.0 else min((low + high) / 2, low + step)
        return best

    def _simulated(self, segments: Sequence[Segment]) -> Found:
        return Found(segments=tuple(segments), measured=self._problem.simulator.measure(segments))

    def _tables(self, around: Sequence[Segment]) -> Tables:
        """Return the tables to search: of fewer segments where the graph is large. What is learnt stays in them."""
        if not self._is_large:
            return self.all_tables
        chosen = tuple(self._thinned(around))
        if chosen not in self._narrowed:
            self._narrowed[chosen] = self.all_tables.narrowed(chosen, REACH)
        return self._narrowed[chosen]

    def _thinned(self, around: Sequence[Segment]) -> list[int]:
        wanted = {segment.stop for segment in tidied(around)} | set(borders(self._problem))
        return thinned(self.all_tables, wanted, THIN_CUTS)

    def thinned_tables(self, around: Sequence[Segment]) -> Tables:
        """Return tables of about ``THIN_CUTS`` positions, or of all where there are no more (see ``_thinned``)."""
        return self.all_tables.restricted(self._thinned(around))


def candidate_positions(problem: Problem) -> list[int]:
    """Return 0, the positions of the candidate cuts and of the borders of hints, and the number of units."""
    cuts = {cut.position for cut in problem.cuts} - set(problem.graph.joined)
    return sorted({0, *cuts, *borders(problem), len(problem.graph.units)})


def borders(problem: Problem) -> list[int]:
    """Return the positions between units of which only one is pinned, or only one is forced."""
    flags = list(zip(problem.pinned, problem.forced, strict=True))
    return [position for position in range(1, len(flags)) if flags[position - 1] != flags[position]]
