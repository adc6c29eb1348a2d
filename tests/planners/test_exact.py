"""``min_peak`` and ``min_time`` against brute force: every cover of one level, judged by the simulator."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.strategies import brute_force, graphs, requests, within_a_budget
from tf_memsaver.ir.graph import Graph
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import solve
from tf_memsaver.search.one_level import OneLevel
from tools.shared.nets import Net, chain

examples = settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@examples
@given(st.data())
def test_min_peak_is_the_least_peak_and_the_quickest_of_those(data: st.DataObject):
    graph = data.draw(graphs())
    problem = Problem.build(graph, data.draw(requests(graph, "min_peak")))
    least = min((m.peak_bytes, m.replay_seconds) for m in brute_force(problem))
    found = OneLevel(problem).smallest
    assert (found.peak_bytes, found.replay_seconds) == least


@examples
@given(st.data())
def test_min_time_is_the_least_time_within_the_budget(data: st.DataObject):
    problem, plans, budget = within_a_budget(data, "min_time")
    found = OneLevel(problem).quickest(budget)
    assert found is not None
    assert found.peak_bytes <= budget
    assert found.replay_seconds == min(plan.replay_seconds for plan in plans if plan.peak_bytes <= budget)


@examples
@given(st.data())
def test_within_is_the_least_peak_for_the_time(data: st.DataObject):
    graph = data.draw(graphs())
    problem = Problem.build(graph, data.draw(requests(graph, "auto")))
    plans = brute_force(problem)
    seconds = data.draw(st.sampled_from(sorted({plan.replay_seconds for plan in plans})))
    found = OneLevel(problem).within(seconds)
    assert found.replay_seconds <= seconds
    assert found.peak_bytes == min(plan.peak_bytes for plan in plans if plan.replay_seconds <= seconds)


def long_graph() -> Graph:
    net = Net()
    x = first = net.dense(net.input(4), 9)
    x = net.norm(x)
    second = x = net.relu(net.dense(x, 7))
    x = net.dense(net.dropout(x), 7)
    x = net.add(x, second)
    x = net.dense(x, 5, workspace=4)
    return net.graph(net.concat(net.reshape(x), first))


def test_a_graph_of_ten_units():
    graph = long_graph()
    problem = Problem.build(graph, Request())
    assert len(graph.units) == 10
    plans = brute_force(problem)
    least = min((m.peak_bytes, m.replay_seconds) for m in plans)
    found = OneLevel(problem).smallest
    assert (found.peak_bytes, found.replay_seconds) == least
    assert len(plans) > 10_000


@pytest.mark.parametrize(
    ("budget", "peak", "seconds"),
    # Six layers of 8 bytes. Plain peaks at the last weight gradient: resident 10, the loss, that weight gradient, five
    # kept outputs and a gradient, 60. Each of the first two outputs dropped takes 8 off and costs a replay of 8 s; with
    # three dropped a segment's own backward is the highest point: brute force over all 486 plans says 39.
    [(10**6, 60, 0), (60, 60, 0), (59, 52, 8), (52, 52, 8), (51, 44, 16), (44, 44, 16), (43, 39, 24), (39, 39, 24)],
)
def test_table_of_budgets_on_a_chain(budget: int, peak: int, seconds: int):
    graph = chain([8] * 6)
    plan = solve(graph, Request(strategy="min_time", budget_bytes=budget))
    assert plan.peak_bytes == peak
    assert plan.step_overhead * graph.step_seconds == pytest.approx(seconds)
