"""What ``solve`` refuses, and what it writes into a plan."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tf_memsaver.errors import (
    CertificationError,
    InfeasibleBudgetError,
    InfeasibleOverheadError,
    InvalidRequestError,
)
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.judge.simulate import Simulator
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.registry import Choice, register_planner
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import curve, planner_names, solve
from tools.shared.nets import Net, chain

STORE, RECOMPUTE = SegmentMode.STORE, SegmentMode.RECOMPUTE


def proposing(*segments: tuple[int, int, str]) -> None:
    @register_planner("mine")
    def mine(problem: Problem) -> Sequence[Segment]:
        return [Segment(start=a, stop=b, mode=SegmentMode(mode)) for a, b, mode in segments]


def test_an_unknown_strategy_names_all_planners():
    with pytest.raises(InvalidRequestError, match="'fastest'") as caught:
        solve(chain([8] * 3), Request(strategy="fastest"))
    assert all(name in str(caught.value) for name in planner_names())


@pytest.mark.parametrize("overhead", [-0.1, float("nan")])
def test_a_negative_overhead_is_refused(overhead: float):
    with pytest.raises(InvalidRequestError, match="max_overhead"):
        solve(chain([8] * 3), Request(max_overhead=overhead))


@pytest.mark.parametrize("budget", [0, -5])
def test_a_budget_that_is_not_positive_is_refused(budget: int):
    with pytest.raises(InvalidRequestError, match="budget"):
        solve(chain([8] * 3), Request(budget_bytes=budget))


def test_min_time_needs_a_budget():
    with pytest.raises(InvalidRequestError, match="budget"):
        solve(chain([8] * 3), Request(strategy="min_time"))


def test_an_infeasible_budget_names_the_least():
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(chain([8] * 6), Request(budget_bytes=37))
    assert (caught.value.budget_bytes, caught.value.least_bytes) == (37, 38)


def test_planning_leaves_the_collector_of_garbage_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, found = chain([4] * 8), list[bool]()
    measured = Simulator.measure
    monkeypatch.setattr(Simulator, "measure", lambda *given: found.append(gc.isenabled()) or measured(*given))
    solve(graph, Request())
    assert found and not any(found) and gc.isenabled()
    with pytest.raises(InfeasibleBudgetError):
        solve(graph, Request(budget_bytes=1))
    assert gc.isenabled()
    gc.disable()
    try:
        solve(graph, Request())
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_explicit_overhead_is_kept_or_refused():
    graph = chain([8] * 6)
    free = solve(graph, Request(strategy="min_peak"))
    with pytest.raises(InfeasibleOverheadError) as caught:
        solve(graph, Request(strategy="min_peak", max_overhead=free.step_overhead / 2))
    assert caught.value.least_overhead == free.step_overhead
    assert solve(graph, Request(strategy="min_peak", max_overhead=free.step_overhead)).peak_bytes == free.peak_bytes
    assert solve(graph, Request(max_overhead=0.0)).peak_bytes == free.plain_peak_bytes


def test_an_overhead_above_the_default_buys_several_levels():
    graph = chain([8] * 64)
    plans = {overhead: solve(graph, Request(max_overhead=overhead)) for overhead in (0.3, 0.35, 0.6)}
    assert [plan.planner for plan in plans.values()] == ["min_peak_within", "nested", "nested"]
    assert all(plan.step_overhead <= overhead for overhead, plan in plans.items())
    assert plans[0.6].peak_bytes < plans[0.35].peak_bytes < solve(graph, Request(strategy="min_peak")).peak_bytes


@pytest.mark.usefixtures("scratch_table")
@pytest.mark.parametrize(
    ("segments", "reason"),
    [
        ([(0, 2, "store")], "end at position 2"),
        ([(0, 1, "store"), (2, 3, "store")], "does not follow"),
        ([(0, 3, "recompute")], "'dense_1'"),
        ([], "position 0"),
    ],
)
def test_a_broken_proposal_is_not_certified(segments: list[tuple[int, int, str]], reason: str):
    net = Net()
    x = net.dense(net.dense(net.dense(net.input(4), 8), 8, pinned="draws from hidden state"), 8)
    proposing(*segments)
    with pytest.raises(CertificationError, match=reason) as caught:
        solve(net.graph(x), Request(strategy="mine"))
    assert caught.value.strategy == "mine"


def test_what_a_certificate_refuses():
    net = Net()
    x = net.dense(net.dense(net.dense(net.dense(net.input(4), 8), 8), 8, pinned="draws from hidden state"), 8)
    graph = dataclasses.replace(net.graph(net.dense(x, 8)), joined=(1,))
    problem = Problem.build(graph, Request())
    child = Segment(start=0, stop=1, mode=RECOMPUTE), Segment(start=1, stop=2, mode=STORE)
    for segments, reason in (
        ([(0, 3, RECOMPUTE), (3, 5, STORE)], "'dense_2' lies in a recompute segment, and it draws from hidden state"),
        ([(0, 1, RECOMPUTE), (1, 5, STORE)], "begins or ends between 'dense_0' and 'dense_1'"),
        ([(0, 1, STORE), (1, 2, RECOMPUTE), (2, 5, STORE)], "begins or ends between 'dense_0' and 'dense_1'"),
        ([(0, 2, RECOMPUTE, child), (2, 5, STORE)], "begins or ends between 'dense_0' and 'dense_1'"),
        ([(0, 2, RECOMPUTE)], "end at position 2"),
    ):
        with pytest.raises(CertificationError, match=reason):
            problem.certify([segment_of(*each) for each in segments], "mine")
    # A border between what is stored either way is none for the results.
    for accepted in (
        [(0, 2, RECOMPUTE), (2, 5, STORE)],
        [(0, 1, STORE), (1, 3, STORE), (3, 4, RECOMPUTE), (4, 5, STORE)],
    ):
        problem.certify([segment_of(*each) for each in accepted], "mine")


def segment_of(start: int, stop: int, mode: SegmentMode, children: tuple[Segment, ...] = ()) -> Segment:
    return Segment(start=start, stop=stop, mode=mode, children=children)


@pytest.mark.usefixtures("scratch_table")
def test_a_proposal_that_breaks_a_hint_is_not_certified():
    proposing((0, 3, "store"))
    with pytest.raises(CertificationError, match="'dense_1' lies in a store segment"):
        solve(chain([8] * 3), Request(strategy="mine", recompute=("dense_1",)))


@pytest.mark.usefixtures("scratch_table")
def test_a_planner_of_ones_own_is_certified_like_the_others():
    proposing((0, 2, "recompute"), (2, 3, "store"))
    plan = solve(chain([8] * 3), Request(strategy="mine"), versions={"keras": "3", "a": "1"})
    assert (plan.strategy, plan.planner) == ("mine", "mine")
    assert (plan.peak_bytes, plan.plain_peak_bytes) == (26, 33)
    assert plan.step_overhead == 8 / (24 + 1 + 16 + 6 + 32)
    assert plan.versions == (("a", "1"), ("keras", "3"))
    assert plan.plan_seconds > 0
    assert plan.recomputed == ("dense_0", "dense_1")


@pytest.mark.usefixtures("scratch_table")
def test_a_planner_that_chooses_names_its_choice():
    @register_planner("chooser")
    def chooser(problem: Problem) -> Choice:
        return Choice(planner="other", segments=(Segment(start=0, stop=3, mode=SegmentMode.STORE),))

    plan: Plan = solve(chain([8] * 3), Request(strategy="chooser"))
    assert (plan.strategy, plan.planner) == ("chooser", "other")


@pytest.mark.usefixtures("scratch_table")
def test_an_installed_package_brings_a_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "others.py").write_text(
        "from tf_memsaver import Segment, SegmentMode\n"
        "def whole(problem):\n"
        "    units = len(problem.graph.units)\n"
        "    return [Segment(start=0, stop=units, mode=SegmentMode.RECOMPUTE)]\n"
    )
    described = tmp_path / "others-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Name: others\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[tf_memsaver.planners]\nwhole = others:whole\ngone = others:gone\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {"whole", "gone", "auto"} <= set(planner_names())
    plan = solve(chain([8] * 3), Request(strategy="whole"))
    assert (plan.planner, plan.recomputed) == ("whole", ("dense_0", "dense_1", "dense_2"))
    with pytest.raises(InvalidRequestError, match=r"'gone' \('others:gone'\) .* cannot be loaded: AttributeError"):
        solve(chain([8] * 3), Request(strategy="gone"))


def test_a_curve_goes_from_plain_to_the_least_peak():
    graph = chain([8 + place % 3 for place in range(60)])
    plans = curve(graph, Request())
    assert len(plans) >= 20
    assert (plans[0].planner, plans[0].step_overhead, plans[0].peak_bytes) == ("plain", 0.0, plans[0].plain_peak_bytes)
    assert plans[-1].peak_bytes <= solve(graph, Request(strategy="min_peak")).peak_bytes
    for above, below in itertools.pairwise(plans):
        assert above.peak_bytes > below.peak_bytes and above.step_overhead < below.step_overhead
    assert [plan.segments for plan in curve(graph, Request())] == [plan.segments for plan in plans]


def test_a_curve_keeps_hints_and_has_two_points():
    graph = chain([8] * 12)
    plans = curve(graph, Request(keep=("dense_3",), recompute=("dense_7",)))
    assert all("dense_3" not in plan.recomputed and "dense_7" in plan.recomputed for plan in plans)
    for points in (1, 0, -3, 10**12, 2.0, "24", None, True):
        with pytest.raises(InvalidRequestError, match="points must be a whole number from 2 to"):
            curve(graph, Request(), points=points)  # type: ignore[arg-type]


def test_products_are_kept_and_what_is_made_of_them_is_replayed():
    net = Net()
    x = net.input(4)
    for _ in range(6):
        x = net.relu(net.norm(net.dense(x, 8)))
    graph = net.graph(x)
    plan = solve(graph, Request(strategy="keep_products"))
    instants = Problem.build(graph, Request()).simulator.run(plan.segments).instants
    replayed = Counter(graph.ops[instant.op].type for instant in instants if instant.replay)
    # All but the last, whose backward pass is the first.
    assert replayed["Relu"] == 5 and not replayed["MatMul"]
    assert plan.peak_bytes < plan.plain_peak_bytes


def test_a_budget_as_a_share_of_the_plain_peak() -> None:
    graph = chain([100] * 12)
    plain = solve(graph, Request(strategy="plain"))
    plan = solve(graph, Request(budget_share=0.7))
    assert plan.request.budget_bytes == int(0.7 * plain.peak_bytes) >= plan.peak_bytes
    assert plan.segments == solve(graph, Request(budget_bytes=plan.request.budget_bytes)).segments
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(graph, Request(budget_share=0.01))
    assert caught.value.budget_bytes == int(0.01 * plain.peak_bytes)
    with pytest.raises(InvalidRequestError, match="needs a device"):
        Request.of({"budget": "auto"})


@pytest.mark.parametrize("strategy", ["auto", "min_time"])
def test_a_budget_is_kept_by_what_the_allocator_takes_at_most(strategy: str) -> None:
    graph = dataclasses.replace(chain([8, 12, 5, 9, 7, 11, 6, 10], scale=2**20), device="CPU")
    simulator = Simulator(graph)
    least = solve(graph, Request(strategy="min_peak"))
    most = simulator.highest_peak(least.segments)
    overheads = []
    for budget in range(
        least.peak_bytes, simulator.highest_peak(solve(graph, Request(strategy="plain")).segments), 2**20
    ):
        plan = solve(graph, Request(strategy=strategy, budget_bytes=budget))
        assert plan.peak_bytes <= budget
        highest = simulator.highest_peak(plan.segments)
        assert highest <= budget or budget < most
        # Where nothing keeps that, the plan says so and what helps.
        assert ("calibrate=True" in plan.advice) == (highest > budget)
        if highest <= budget:
            overheads.append(plan.step_overhead)
    assert overheads == sorted(overheads, reverse=True)
    assert most > least.peak_bytes
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(graph, Request(strategy=strategy, budget_bytes=least.peak_bytes - 2**20))
    assert caught.value.least_bytes <= most
    # From the predicted peak on, a budget gets a plan and that warning.
    assert caught.value.predicted_bytes == least.peak_bytes
    assert solve(graph, Request(strategy=strategy, budget_bytes=caught.value.predicted_bytes)).advice


@pytest.mark.usefixtures("scratch_table")
def test_where_the_plan_that_keeps_a_budget_is_too_slow_the_quicker_one_that_is_said_to_keep_it_is_taken() -> None:
    graph = dataclasses.replace(chain([8, 12, 5, 9, 7, 11, 6, 10], scale=2**20), device="CPU")
    simulator, count = Simulator(graph), len(graph.units)
    ends = range(1, count)
    plans = [[Segment(start=0, stop=e, mode=RECOMPUTE), Segment(start=e, stop=count, mode=STORE)] for e in ends]
    plans += [
        [
            *(Segment(start=a, stop=b, mode=RECOMPUTE) for a, b in ((0, e), (e, d))),
            Segment(start=d, stop=count, mode=STORE),
        ]
        for e, d in itertools.combinations(ends, 2)
    ]
    plans.sort(key=lambda plan: simulator.measure(plan).replay_seconds)
    overheads = [simulator.measure(plan).replay_seconds / graph.step_seconds for plan in plans]
    slow = min(plans, key=simulator.highest_peak)
    budget = simulator.highest_peak(slow)
    quick = next(plan for plan in plans if simulator.reported_peak(plan) <= budget)
    assert simulator.highest_peak(quick) > budget
    between = (overheads[plans.index(quick)] + overheads[plans.index(slow)]) / 2

    @register_planner("mine", falls_back_to=["slowly"])
    def mine(problem: Problem) -> Sequence[Segment]:
        kept = [each for each in plans if simulator.measure(each).peak_bytes <= problem.request.budget_bytes]
        if not kept:
            raise InfeasibleBudgetError(problem.request.budget_bytes, budget)
        return kept[0]

    @register_planner("slowly")
    def slowly(problem: Problem) -> Sequence[Segment]:
        return slow

    def found(most: float) -> Plan:
        return solve(graph, Request(strategy="mine", budget_bytes=budget, max_overhead=most))

    assert found(10.0).segments == tuple(slow)
    assert found(between).step_overhead <= between and found(between).peak_bytes <= budget


@pytest.mark.usefixtures("scratch_table")
def test_an_overhead_that_is_refused_names_the_quickest_plan_within_the_budget():
    """The planner's own answer is slower than that of a planner that it falls back to."""
    graph = chain([8] * 6)

    @register_planner("quick")
    def quick(problem: Problem) -> Sequence[Segment]:
        return [segment_of(0, 2, RECOMPUTE), segment_of(2, 6, STORE)]

    @register_planner("mine", falls_back_to=("quick",))
    def mine(problem: Problem) -> Sequence[Segment]:
        return [segment_of(0, 5, RECOMPUTE), segment_of(5, 6, STORE)]

    slow, least = (solve(graph, Request(strategy=name)) for name in ("mine", "quick"))
    budget = max(slow.peak_bytes, least.peak_bytes)
    assert 0 < least.step_overhead < slow.step_overhead and budget < slow.plain_peak_bytes
    with pytest.raises(InfeasibleOverheadError) as caught:
        solve(graph, Request(strategy="mine", budget_bytes=budget, max_overhead=least.step_overhead / 2))
    assert caught.value.least_overhead == least.step_overhead
