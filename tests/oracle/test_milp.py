"""The oracle against a search through all schedules of tiny steps, against plans, and against Revolve's closed form."""

from __future__ import annotations

import heapq
import itertools
import math
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.strategies import brute_force, graphs, requests
from tf_memsaver.errors import MissingExtraError
from tf_memsaver.ir.graph import Graph, Phase
from tf_memsaver.oracle import milp
from tf_memsaver.oracle.milp import least_replay
from tf_memsaver.oracle.stages import Stages
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import solve
from tf_memsaver.search.bounds import by_bytes
from tf_memsaver.search.nested import quickest_nested, several_levels
from tf_memsaver.search.one_level import OneLevel
from tools.shared.nets import Net, chain

needs_highs = pytest.mark.skipif(not milp.is_available(), reason="HiGHS is not installed: pip install highspy")
examples = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


# All schedules of a tiny step ---------------------------------------------------------------------------------------


def least_by_search(graph: Graph, budget: int) -> float:
    """Dijkstra over what is live before each backward op; replays between two ops that read run in graph order.

    Bytes are counted while backward ops run and while replays run, with all that is live then.
    """
    step = Stages(graph)
    nbytes, static, resident = step.nbytes, step.prepared.static, step.facts.resident_bytes
    facts = step.facts
    order = sorted(
        (op for op in (*facts.loss_ops, *itertools.chain(*facts.backward_ops.values()))), key=lambda op: op.place
    )
    order = [op for op in order if graph.ops[op.place].phase is not Phase.FORWARD]
    reads = [frozenset(step.reads(op.place)) for op in order]

    def heirs(op: int, live: frozenset[int], fresh: tuple[int, ...]) -> Iterator[frozenset[int]]:
        """What may be given up for the op's outputs: nothing, or one input of the size of one of them."""
        yield frozenset()
        for root in static[op].overwrites:
            value = step.value_of.get(root)
            if value in live and nbytes[value] in fresh:
                yield frozenset([value])

    def size(values: frozenset[int]) -> int:
        return sum(nbytes[value] for value in values)

    every = range(len(nbytes))
    queue: list[tuple[float, int, int, tuple[int, ...]]] = []
    for count in range(len(nbytes) + 1):
        for kept in itertools.combinations(every, count):
            if all(live + size(frozenset(kept) & frozenset(dead)) <= budget for live, dead in step.forward()):
                heapq.heappush(queue, (0.0, 0, -1, kept))
    seen = set()
    while queue:
        seconds, place, latest, kept = heapq.heappop(queue)
        if (place, latest, kept) in seen:
            continue
        seen.add((place, latest, kept))
        if place == len(order):
            return seconds
        live = frozenset(kept)

        def go(cost: float, at: int, after: int, values: frozenset[int]) -> None:
            heapq.heappush(queue, (cost, at, after, tuple(sorted(values))))

        for value in live:
            go(seconds, place, latest, live - {value})
        op = order[place]
        if reads[place] <= live:
            for given_up in heirs(op.place, live, op.fresh):
                if op.live + resident + size(live) - size(given_up) <= budget:
                    go(seconds, place + 1, -1 if reads[place] else latest, live - given_up)
        before = op.live + resident - graph.ops[op.place].workspace_bytes - sum(op.fresh)
        for value in every:
            again = step.makers[value]
            if value in live or value <= latest or not step.replayable[value] or not set(step.reads(again)) <= live:
                continue
            for given_up in heirs(again, live, (nbytes[value],)):
                needs = before + size(live) + nbytes[value] - size(given_up) + static[again].workspace
                if needs <= budget:
                    go(seconds + graph.ops[again].seconds, place, value, (live - given_up) | {value})
    return math.inf


@needs_highs
@examples
@given(st.data())
def test_no_schedule_is_quicker_and_what_fits_is_the_quickest(data: st.DataObject):
    graph = data.draw(graphs(max_units=4))
    plain = Problem.build(graph, Request()).plain.peak_bytes
    budget = data.draw(st.integers(min_value=(graph.resident_bytes + plain) // 2, max_value=plain))
    oracle, least = least_replay(graph, budget), least_by_search(graph, budget)
    assert oracle.proven
    assert oracle.bound_seconds <= least + 1e-6
    if oracle.peak_bytes <= budget and oracle.seconds < math.inf:
        assert oracle.seconds == pytest.approx(least)


@needs_highs
@examples
@given(st.data())
def test_no_plan_of_one_or_more_levels_is_quicker(data: st.DataObject):
    graph = data.draw(graphs())
    problem = Problem.build(graph, data.draw(requests(graph, "min_time")))
    plans = [(plan.peak_bytes, plan.replay_seconds) for plan in brute_force(problem)]
    plans += [(found.peak_bytes, found.replay_seconds) for found in problem.once(several_levels)]
    budget = data.draw(st.sampled_from(sorted({peak for peak, _ in plans})))
    oracle = least_replay(graph, budget)
    assert oracle.proven
    assert oracle.bound_seconds <= min(seconds for peak, seconds in plans if peak <= budget) + 1e-6
    assert oracle.bound_seconds >= by_bytes(problem, budget) - 1e-6


@needs_highs
@pytest.mark.parametrize("budget", [60, 52, 44])
def test_on_short_chains_one_level_is_the_best(budget: int):
    graph = chain([8] * 6)
    plan = solve(graph, Request(budget_bytes=budget))
    oracle = least_replay(graph, budget)
    assert oracle.proven and oracle.peak_bytes <= budget
    assert oracle.seconds == plan.bound_seconds == pytest.approx(plan.step_overhead * graph.step_seconds)


@needs_highs
def test_a_plan_to_start_with_is_the_worst_that_comes_back():
    graph = chain([8] * 20)
    problem = Problem.build(graph, Request())
    smallest = problem.once(OneLevel).smallest
    oracle = least_replay(graph, smallest.peak_bytes, 0.5, smallest.segments)
    assert oracle.bound_seconds <= oracle.seconds <= smallest.replay_seconds


@needs_highs
def test_nothing_to_replay_and_nothing_that_fits():
    graph = chain([8] * 6)
    plain = least_replay(graph, 60)
    assert (plain.seconds, plain.bound_seconds, plain.proven, plain.peak_bytes) == (0.0, 0.0, True, 60)
    none = least_replay(graph, 20)
    assert (none.seconds, none.bound_seconds, none.proven) == (math.inf, math.inf, True)
    net = Net()
    pinned = net.graph(net.dense(net.dense(net.input(4), 8, pinned="draws"), 8, pinned="draws"))
    assert least_replay(pinned, 1000).seconds == 0.0


def test_without_highs_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "highspy", None)
    assert not milp.is_available()
    with pytest.raises(MissingExtraError, match="pip install highspy"):
        least_replay(chain([8] * 3), 100)


# Revolve --------------------------------------------------------------------------------------------------------------


def revolve(steps: int, slots: int) -> int:
    """Forward steps that Revolve runs in all (Griewank & Walther 2000, theorem 1): r·l − C(s + r, r − 1).

    r is the unique number with C(s + r − 1, r − 1) < l ≤ C(s + r, r).
    """
    repeats = next(r for r in itertools.count(1) if steps <= math.comb(slots + r, r))
    return repeats * steps - math.comb(slots + repeats, repeats - 1)


def weightless_chain(steps: int) -> Graph:
    net = Net()
    x = net.input(4)
    for _ in range(steps):
        x = net.dense(x, 8, weight=0)
    return net.graph(x)


def budget_of(slots: int) -> int:
    """The bytes of what Revolve has with so many slots, in states of 8, beside the input and the loss.

    Revolve's slots hold the initial state, which is our input, and slots − 1 others; beside them it has the state that
    a step is reversed from. Our gradients take a state's place too, two while one is made of the other, when the
    reversed state is dead. Its count has the steps of the first forward pass, all but the last, which it never runs.
    """
    return (slots - 1 + 2) * 8 + 4 + 1


@needs_highs
@pytest.mark.parametrize(
    ("steps", "slots"), [(4, 2), (6, 2), (6, 3), (8, 3), (10, 3), (10, 4), (12, 4), (12, 5), (15, 4), (15, 5)]
)
def test_equal_chains_cost_what_revolve_says(steps: int, slots: int):
    graph = weightless_chain(steps)
    oracle = least_replay(graph, budget_of(slots))
    assert oracle.proven and oracle.peak_bytes <= budget_of(slots)
    assert oracle.seconds == (revolve(steps, slots) - (steps - 1)) * 8


@needs_highs
@pytest.mark.parametrize("steps", [10, 12])
def test_with_two_slots_running_again_needs_more_room_than_revolve_has(steps: int):
    """A step that runs again has its input and its output live; Revolve writes the one over the other."""
    oracle = least_replay(weightless_chain(steps), budget_of(2))
    assert oracle.proven
    assert oracle.seconds > (revolve(steps, 2) - (steps - 1)) * 8


@pytest.mark.parametrize(("steps", "slots"), list(itertools.product((6, 8, 10, 12, 15), (2, 3, 4, 5))))
def test_nested_plans_of_equal_chains_are_revolve_s_with_at_most_one_slot_more(steps: int, slots: int):
    """A replay reads copies of what enters it, which may take one more state; then it is as quick."""
    problem = Problem.build(weightless_chain(steps), Request())
    least = (revolve(steps, slots) - (steps - 1)) * 8
    same, more = (quickest_nested(problem, budget_of(slots) + extra) for extra in (0, 8))
    assert same.peak_bytes > budget_of(slots) or same.replay_seconds >= least
    assert more.peak_bytes <= budget_of(slots) + 8
    assert more.replay_seconds <= least
