"""The executor: what runs at once, what waits, and what that does to the peak."""

from __future__ import annotations

import dataclasses

import pytest

from tf_memsaver.cost.device import CPU
from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.ir.text import parse
from tf_memsaver.judge import simulate
from tf_memsaver.judge.simulate import Simulator

MIB = 2**20


def stored(graph: Graph) -> tuple[Segment, ...]:
    return (Segment(start=0, stop=len(graph.units), mode=SegmentMode.STORE),)


def peak(graph: Graph, threads: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """MiB of the first play, on a device whose pool adds nothing, so every buffer counts as it is."""
    device = dataclasses.replace(CPU, threads=threads, pool_grows=False, pool_share=0.0)
    monkeypatch.setattr(simulate, "device_named", lambda _: device)
    return Simulator(graph).played_peak(stored(graph), plays=1) / MIB


def branches(after: str = "") -> Graph:
    """Two chains of a large and a small tensor from one input, and their sum."""
    return parse(
        f"""
        graph "branches" batch=1 device=CPU
        unit 0 "a" kind="K" signature="s"
        value 0 "x" activation {MIB}
        value 1 "big_left" activation {8 * MIB}
        value 2 "left" activation {MIB}
        value 3 "big_right" activation {8 * MIB}
        value 4 "right" activation {MIB}
        value 5 "loss" activation 4
        op 0 "x" X forward unit=0 writes=0 seconds=0.001
        op 1 "big_left" B forward unit=0 reads=0 writes=1 seconds=0.01
        op 2 "left" S forward unit=0 reads=1 writes=2 seconds=0.001
        op 3 "big_right" B forward unit=0 reads=0 writes=3 {after} seconds=0.01
        op 4 "right" S forward unit=0 reads=3 writes=4 seconds=0.001
        op 5 "loss" L forward reads=2,4 writes=5 seconds=0.001
        outputs 5
        """
    )


def test_one_thread_runs_one_branch_behind_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    # One large tensor at a time, with the small one made of it, and what the other branch waits for or has left.
    assert peak(branches(), 1, monkeypatch) == pytest.approx(10, abs=0.1)


def test_two_threads_run_both_branches_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak(branches(), 2, monkeypatch) == pytest.approx(18, abs=0.1)


def calls_of_one_network(weights: tuple[int, int]) -> Graph:
    """Two calls of two layers, each with a backward pass of its own; the second reads these weights."""
    rows = []
    for call, (first, second) in enumerate([(0, 1), weights]):
        slot = 5 + 3 * call
        rows += [
            f'value {slot} "a{call}" activation {8 * MIB}',
            f'value {slot + 1} "b{call}" activation {8 * MIB}',
            f'value {slot + 2} "g{call}" gradient 4',
            f'op {3 * call} "a{call}" B forward unit=0 reads=4,{first} writes={slot} seconds=0.01',
            f'op {3 * call + 1} "b{call}" B forward unit=0 reads={slot},{second} writes={slot + 1} seconds=0.01',
            f'op {3 * call + 2} "g{call}" B backward unit=0 reads={slot},{slot + 1} writes={slot + 2} seconds=0.01',
        ]
    rows.sort(key=lambda row: row.startswith("op"))
    weight_rows = [f'value {number} "w{number}" parameter 4' for number in range(4)]
    return parse(
        "\n".join(
            [
                'graph "calls" batch=1 device=CPU',
                'unit 0 "a" kind="K" signature="s"',
                *weight_rows,
                'value 4 "x" input 4',
                *rows,
                "outputs 7 10",
            ]
        )
    )


@pytest.mark.parametrize(("weights", "expected"), [((0, 1), 24), ((2, 3), 16)], ids=["shared", "own"])
def test_calls_of_one_network_advance_together(
    weights: tuple[int, int], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert peak(calls_of_one_network(weights), 1, monkeypatch) == pytest.approx(expected, abs=0.1)


def test_an_op_waits_for_what_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak(branches("after=2"), 2, monkeypatch) == pytest.approx(10, abs=0.1)


def test_more_plays_vary_the_times_and_repeat_exactly() -> None:
    simulator = Simulator(branches())
    first, many = (simulator.played_peak(stored(simulator.graph), plays) for plays in (1, 7))
    assert many == Simulator(branches()).played_peak(stored(simulator.graph), 7)
    assert first > 0 and many > 0


@pytest.mark.parametrize(("reader", "copied"), [("backward", True), ("update", False)])
def test_a_variable_that_others_have_yet_to_read_is_copied_where_it_changes(
    reader: str, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A decay of weights waits for no gradient: it runs while the backward pass has yet to read the weight.
    graph = parse(
        f"""
        graph "decay" batch=1 device=CPU
        unit 0 "a" kind="K" signature="s"
        value 0 "weight" parameter {8 * MIB}
        value 1 "x" activation {MIB}
        value 2 "decay" gradient 4
        value 3 "gradient" gradient {MIB}
        op 0 "x" X forward unit=0 reads=0 writes=1 seconds=0.001
        op 1 "decay" D update reads=1 writes=2 seconds=0.001
        op 2 "assign" AssignSubVariableOp update reads=0,2 seconds=0.001
        op 3 "gradient" G {reader} reads=0,1 writes=3 seconds=0.01
        outputs 3
        """
    )
    assert peak(graph, 1, monkeypatch) == pytest.approx(8 + 2 + 8 * copied, abs=0.1)
