"""Checkmate's cost model on networks of a few layers, against sizes, costs and peaks worked out by hand."""

from __future__ import annotations

import pytest

from tf_memsaver.ir.graph import Graph, Phase
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tools.published.checkmate_graphs import Network, Node, step_graph
from tools.published.checkmate_judge import judged, largest_batch, retained_peak, schedule_peak, working_set_bytes


def network(*layers: tuple[str, tuple[int, ...], int, int]) -> Network:
    nodes = [Node(name=n, kind="Layer", inputs=i, nbytes=size, cost=cost) for n, i, size, cost in layers]
    return Network(name="small", nodes=tuple(nodes), parameter_bytes=50)


CHAIN = network(("a", (), 10, 1), ("b", (0,), 20, 2), ("c", (1,), 30, 4))
BRANCHED = network(("a", (), 10, 1), ("b", (0,), 20, 2), ("c", (0,), 30, 4), ("d", (1, 2), 40, 8))


def reads(graph: Graph) -> dict[str, set[str]]:
    names = [value.name for value in graph.values]
    return {op.name: {names[v] for v in op.inputs} for op in graph.ops}


def test_wiring_of_a_chain():
    graph = step_graph(CHAIN, 1)
    fixed = "parameters and their gradients"
    assert reads(graph) == {
        "a": {fixed},
        "b": {"a"},
        "c": {"b"},
        "loss": {"c"},
        "Grad<c>": {"loss", "c"},
        "Grad<b>": {"Grad<c>", "c", "b"},
        "Grad<a>": {"Grad<b>", "b", "a"},
    }
    assert [op.name for op in graph.ops] == list(reads(graph))
    assert graph.resident_bytes == 2 * 50


def test_sizes_and_costs_grow_with_the_batch():
    graph = step_graph(CHAIN, 3)
    sizes = {value.name: value.nbytes for value in graph.values if not value.kind.resident}
    assert sizes == {"a": 30, "b": 60, "c": 90, "loss": 12, "Grad<a>": 30, "Grad<b>": 60, "Grad<c>": 90}
    assert graph.resident_bytes == 2 * 50
    assert sum(op.seconds for op in graph.ops if op.phase is Phase.FORWARD) == 3 * CHAIN.forward_cost == 3 * 7
    assert graph.step_seconds == 3 * 3 * 7


def test_a_grad_belongs_to_the_first_reader_and_reads_all_of_them():
    graph = step_graph(BRANCHED, 1)
    assert reads(graph)["Grad<a>"] == {"Grad<b>", "b", "Grad<c>", "Hold<c>", "a"}
    assert reads(graph)["Hold<c>"] == {"c"}
    units = {op.name: op.unit for op in graph.ops}
    assert units["Hold<c>"] == 2
    assert units["Grad<a>"] == 1
    assert units["Grad<b>"] == units["Grad<c>"] == 3
    assert units["Grad<d>"] is None
    backward = [op.unit for op in graph.ops if op.phase is Phase.BACKWARD and op.unit is not None]
    assert backward == sorted(backward, reverse=True)


def test_plain_peaks_by_hand():
    graph = step_graph(CHAIN, 1)
    # Forward 10, 30, 60, loss 64; Grad<c> 94, behind it a, b, c and 30; Grad<b> 110, behind it a, b and 20; Grad<a> 60.
    timeline = Problem.build(graph, Request()).plain
    assert [instant.live_bytes - 100 for instant in timeline.instants] == [10, 30, 60, 64, 94, 110, 60]
    assert schedule_peak(graph, range(7)) == (100 + 110, 5)
    # Nothing freed before the last stage: a, b, c, and Grad<b> beside Grad<c>.
    assert retained_peak(CHAIN) == 60 + 30 + 20
    assert working_set_bytes(graph) == 20 + 30 + 30 + 20


def test_holding_an_output_takes_no_bytes_of_its_own():
    graph = step_graph(BRANCHED, 1)
    timeline = Problem.build(graph, Request()).plain
    assert [graph.ops[instant.op].name for instant in timeline.instants][-3:] == ["Grad<b>", "Hold<c>", "Grad<a>"]
    # d and Grad<d> are gone when c is held: a, b, c, Grad<c> and Grad<b> are left, then Grad<a> beside them.
    assert [instant.live_bytes - 100 for instant in timeline.instants][-2:] == [110, 120]
    executed = [instant.op for instant in timeline.instants]
    assert schedule_peak(graph, executed)[0] == timeline.peak_bytes


def test_largest_batch_counts_parameters_twice_or_four_times():
    assert largest_batch(CHAIN, 100.0) == (16_000_000_000 - 100) / 100
    assert largest_batch(CHAIN, 100.0, fixed_copies=4) == (16_000_000_000 - 200) / 100


def segments(*spans: tuple[int, int, SegmentMode]) -> list[Segment]:
    return [Segment(start=start, stop=stop, mode=mode) for start, stop, mode in spans]


STORE, RECOMPUTE = SegmentMode.STORE, SegmentMode.RECOMPUTE


def test_a_replay_on_a_chain_by_both_judges():
    net = network(("a", (), 10, 1), ("b", (0,), 20, 2), ("c", (1,), 30, 4), ("d", (2,), 5, 8))
    problem = Problem.build(step_graph(net, 1), Request())
    found = judged(problem, net, "by hand", segments((0, 1, STORE), (1, 3, RECOMPUTE), (3, 4, STORE)))
    # b and c run again, c since Grad<b> reads it. At Grad<b> there are a, b, c, Grad<c> and itself.
    # The copy of a that b is made from takes a's place: nobody else reads a any more.
    assert found.checkmate_bytes == found.simulated_bytes == 10 + 20 + 30 + 30 + 20
    assert found.replay_share == pytest.approx((2 + 4) / net.forward_cost)
    assert found.peak_at == "Grad<b>"


def test_replays_where_branches_meet_by_both_judges():
    problem = Problem.build(step_graph(BRANCHED, 1), Request())
    found = judged(problem, BRANCHED, "by hand", segments((0, 2, STORE), (2, 4, RECOMPUTE)))
    # c and d run again. Checkmate: at Grad<b> there are a, b, c, d, Grad<d>, Grad<c> and Grad<b>.
    assert found.checkmate_bytes == 10 + 20 + 30 + 40 + 40 + 30 + 20
    # Ours has b twice: the replay reads a copy of it, and Grad<a> of the first segment the one of the first run.
    assert found.simulated_bytes == found.checkmate_bytes + 20
    assert found.replay_share == pytest.approx((4 + 8) / BRANCHED.forward_cost)


def test_what_was_never_made_cannot_be_read():
    with pytest.raises(ValueError, match="op b reads a, which is not there"):
        schedule_peak(step_graph(CHAIN, 1), [1])
