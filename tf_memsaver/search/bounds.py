"""What no plan can beat: lower bounds on the time of replays within a budget.

Two bounds, both in bytes of tensors and in the order of the schedule, as the exact planners count them:

* *One level*: the label search over all candidate cuts, of which the tables never claim more than a plan needs. Where a
  cut has more labels than the front holds, a label takes the least bytes and the least time of a range (rounding down),
  so that the answer stays a bound for every plan of store and recompute segments between the candidate cuts. What the
  simulator saw of a cover that does not fit goes into the tables, and the search runs again. It gives up where even
  the ranges are too many, as in a U-Net of many skips.
* *Bytes*: for plans of several levels and for graphs of too many cuts, a bound for any schedule at all that keeps the
  order of the forward and of the backward ops. At a backward op the plain step holds D bytes more than the limit. So
  values of D bytes that are read later are not live there, and each of them is made again: at least what the fractional
  knapsack takes, the cheapest seconds a byte first. The largest of these over several ops of the backward pass.
"""

from __future__ import annotations

import numpy as np

from tf_memsaver.judge.walk import walk
from tf_memsaver.plan.problem import Problem
from tf_memsaver.search.facts import Floats
from tf_memsaver.search.labels import Search
from tf_memsaver.search.one_level import FRONT, TIME_ERROR, Found, OneLevel, candidate_positions

MOST_CUTS = 256
"""Candidate cuts between which all segments are looked at; that takes a second or two."""

ROUNDS = 12
"""Simulations before the bound stays as it is."""

INSTANTS = 32
"""Backward ops at which bytes are counted: the highest of the plain step in each of so many parts of the pass."""


def least_seconds(problem: Problem, found: Found) -> float | None:
    """Return a lower bound on the replay seconds of plans like a given one within the request's budget.

    The class of plans is that of one level. Where ``found`` is of several levels, the step of several passes, or there
    are more than ``MOST_CUTS`` candidate cuts, the bound is that by bytes, which is weaker and holds for any schedule.
    Never above the time of ``found``, and equal to it where that is proven to be the least. None where the request has
    no budget.
    """
    budget = problem.request.budget_bytes
    if budget is None:
        return None
    # The allocator may report less than the bytes of tensors in the schedule's order.
    limit, seconds = max(budget, found.peak_bytes), found.replay_seconds
    if not seconds:
        return 0.0
    of_all = min(by_bytes(problem, limit), seconds)
    several = any(segment.children for segment in found.segments)
    several |= problem.graph.in_one_pass is not problem.graph
    if several or of_all == seconds or len(candidate_positions(problem)) > MOST_CUTS:
        return of_all
    return max(of_all, of_one_level(problem, limit, seconds))


def of_one_level(problem: Problem, limit: int, known_seconds: float, front: int = FRONT) -> float:
    """Return a lower bound on the replay seconds of plans of one level within ``limit`` bytes.

    ``known_seconds`` are those of such a plan: they are the answer where no plan is quicker.
    """
    tables = problem.once(OneLevel).all_tables
    bound = 0.0
    for _ in range(ROUNDS):
        search = Search(tables, limit, front, known_seconds * (1 + TIME_ERROR), rounds_down=True)
        proposal = search.run()
        if search.gave_up:
            break
        if proposal is None:
            return known_seconds
        bound = max(bound, proposal.replay_seconds)
        if bound >= known_seconds * (1 - TIME_ERROR):
            return known_seconds
        measured = problem.simulator.measure(proposal.segments)
        if measured.peak_bytes <= limit or not tables.learn(proposal, measured):
            break
    return bound


def by_bytes(problem: Problem, limit: int) -> float:
    """Return a lower bound on the replay seconds of any schedule within ``limit`` bytes (see the module's words)."""
    prepared, ops = problem.simulator.prepared, problem.graph.ops
    steps = prepared.static
    live, last = walk(steps, prepared.nbytes, prepared.outlive, problem.graph.resident_bytes)
    made = [
        (root, op.index)
        for op in prepared.forward
        if op.unit is not None and not problem.pinned[op.unit]
        for root in prepared.static[op.index].allocates
    ]
    if not made or not prepared.backward:
        return 0.0
    roots, makers = np.array(made).T
    nbytes, ends = np.array(prepared.nbytes, dtype=np.float64)[roots], np.array(last)[roots]
    seconds = np.array([op.seconds for op in ops])
    heights, places = np.array(live), np.array([op.index for op in prepared.backward])
    bound = 0.0
    for part in np.array_split(places, min(INSTANTS, len(places))):
        place = int(part[np.argmax(heights[part])])
        # What the op reads is live, unless it may be overwritten there.
        held = list(set(steps[place].touches) - set(steps[place].overwrites))
        free = (makers < place) & (place < ends) & ~np.isin(roots, held)
        sizes = np.bincount(makers[free], nbytes[free], len(ops)).astype(np.float64)
        bound = max(bound, _knapsack(sizes, seconds, live[place] - limit))
    return bound


def _knapsack(sizes: Floats, seconds: Floats, least: int) -> float:
    """Return the least seconds for ``least`` bytes of items with these sizes and seconds, parts of them allowed."""
    if least <= 0:
        return 0.0
    sizes, seconds = sizes[sizes > 0], seconds[sizes > 0]
    order = np.argsort(seconds / sizes, kind="stable")
    reached, needed = np.cumsum(sizes[order]), np.cumsum(seconds[order])
    return float(np.interp(least, [0.0, *reached], [0.0, *needed]))
