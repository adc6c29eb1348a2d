"""Estimates and tables, on a hand-made training step: no TensorFlow."""

from __future__ import annotations

import dataclasses
import io
import json
import re

import pytest
from rich.console import Console, Group

from tf_memsaver.display import overview, progress, tables
from tf_memsaver.display.progress import Progress
from tf_memsaver.ir.graph import Graph, MemoryKind, Op, Phase, Unit, Value
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.judge.estimate import Estimate
from tf_memsaver.pace import counted
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.request import Request

KIB = 1024


def two_layer_step() -> Graph:
    """A dense layer and an activation, ``relu(x·w)``, with the gradient of ``w`` and one optimizer slot."""
    sizes = (
        ("x", 8, MemoryKind.INPUT, None),
        ("w", 4, MemoryKind.PARAMETER, None),
        ("slot", 4, MemoryKind.OPTIMIZER, None),
        ("product", 16, MemoryKind.ACTIVATION, None),
        ("reshaped", 0, MemoryKind.ACTIVATION, 3),
        ("relu", 16, MemoryKind.ACTIVATION, None),
        ("loss", 1, MemoryKind.ACTIVATION, None),
        ("d_relu", 16, MemoryKind.GRADIENT, None),
        ("d_product", 16, MemoryKind.GRADIENT, None),
        ("d_w", 4, MemoryKind.WEIGHT_GRADIENT, None),
    )
    values = tuple(
        Value(index=index, name=name, nbytes=size * KIB, kind=kind, alias_of=alias)
        for index, (name, size, kind, alias) in enumerate(sizes)
    )
    steps = (
        ("MatMul", Phase.FORWARD, 0, (0, 1), (3,), 1000),
        ("Reshape", Phase.FORWARD, 0, (3,), (4,), 0),
        ("Relu", Phase.FORWARD, 1, (4,), (5,), 10),
        ("Mean", Phase.FORWARD, None, (5,), (6,), 1),
        ("MeanGrad", Phase.BACKWARD, None, (6,), (7,), 1),
        ("ReluGrad", Phase.BACKWARD, 1, (7, 5), (8,), 10),
        ("MatMul", Phase.BACKWARD, 0, (0, 8), (9,), 1000),
        ("Update", Phase.UPDATE, None, (1, 2, 9), (), 1),
    )
    ops = tuple(
        Op(
            index=i,
            name=f"op{i}",
            type=t,
            phase=phase,
            unit=unit,
            inputs=reads,
            outputs=writes,
            flops=flops,
            seconds=1.0,
        )
        for i, (t, phase, unit, reads, writes, flops) in enumerate(steps)
    )
    units = (
        Unit(index=0, label="dense", kind="Dense", signature="dense"),
        Unit(index=1, label="relu", kind="ReLU", signature="relu"),
    )
    return Graph(name="two", batch_size=4, values=values, ops=ops, units=units, cuts=(), outputs=(6,))


def a_plan() -> Plan:
    return Plan(
        segments=(
            Segment(
                start=0,
                stop=2,
                mode=SegmentMode.RECOMPUTE,
                children=(
                    Segment(start=0, stop=1, mode=SegmentMode.RECOMPUTE),
                    Segment(start=1, stop=2, mode=SegmentMode.STORE),
                ),
            ),
            Segment(start=2, stop=3, mode=SegmentMode.STORE),
        ),
        batch_size=4,
        strategy="auto",
        planner="min_peak",
        peak_bytes=25 * KIB,
        plain_peak_bytes=100 * KIB,
        step_overhead=0.2,
        plan_seconds=0.1,
        request=Request(),
        labels=("first", "second", "third"),
        signatures=("a", "b", "c"),
    )


def shown(*renderables: object) -> str:
    console = Console(file=io.StringIO(), width=140)
    for renderable in renderables:
        console.print(renderable)
    return console.file.getvalue()


def test_estimate_attributes_bytes_to_the_layers_that_own_them() -> None:
    dense, relu = Estimate.from_graph(two_layer_step()).units
    assert (dense.output_bytes, dense.kept_bytes, dense.parameter_bytes, dense.flops) == (16 * KIB, 0, 4 * KIB, 1000)
    # The activation is read by the loss, and kept because its own gradient reads it.
    assert (relu.output_bytes, relu.kept_bytes, relu.parameter_bytes, relu.flops) == (16 * KIB, 16 * KIB, 0, 10)


def test_estimate_totals() -> None:
    estimate = Estimate.from_graph(two_layer_step())
    assert estimate.parameter_bytes == 4 * KIB
    assert estimate.gradient_bytes == 4 * KIB
    assert estimate.optimizer_bytes == 4 * KIB
    assert estimate.optimizer_slots == 1.0
    assert estimate.input_bytes == 8 * KIB
    # The rectified product, and the loss that its gradient reads.
    assert estimate.activation_bytes == 17 * KIB
    assert estimate.rule_of_thumb_bytes == (2 * 32 + 3 * 4 + 8) * KIB
    # While ReluGrad runs: residents 16, relu 16, d_relu 16, d_product 16.
    assert estimate.peak_bytes == 64 * KIB + KIB
    assert estimate.peak_at == "ReluGrad, backward of relu"
    assert estimate.step_seconds == 8.0


def test_an_estimate_says_what_a_cpu_does_not_count() -> None:
    graph = two_layer_step()
    # A thousand times as large: the weight, its slot, gradient and the loss have less than 256 KiB.
    large = dataclasses.replace(
        graph,
        device="CPU",
        values=tuple(
            dataclasses.replace(v, nbytes=v.nbytes * (1000 if v.nbytes > 4 * KIB else 40)) for v in graph.values
        ),
    )
    estimate = Estimate.from_graph(large)
    assert estimate.uncounted_bytes == (2 * 4 + 1 + 4) * 40 * KIB
    assert "not counted" in repr(estimate) and "below 256 KiB" in repr(estimate)
    assert "not counted on a CPU" in shown(*overview.estimate_view(estimate, a_plan()))
    assert Estimate.from_graph(dataclasses.replace(large, device="CPU_BFC")).uncounted_bytes == 0


def test_estimate_is_json() -> None:
    document = json.loads(json.dumps(Estimate.from_graph(two_layer_step()).to_json()))
    assert [unit["label"] for unit in document["units"]] == ["dense", "relu"]
    assert document["rule_of_thumb_bytes"] == 84 * KIB


def test_estimate_tables_show_layers_and_totals() -> None:
    estimate = Estimate.from_graph(two_layer_step())
    text = shown(tables.layers_table(estimate), tables.totals_table(estimate))
    for expected in ("dense", "ReLU", "16.00 KiB", "1.0 × trained weights", "84.00 KiB"):
        assert expected in text


def test_plan_tables_show_shares_and_nested_segments() -> None:
    text = shown(tables.before_after_table(a_plan()), tables.segments_table(a_plan()))
    for expected in ("25%", "120%", "2 of 3", "planned by min_peak", "\n  recompute", "\nstore"):
        assert expected in text


def test_names_are_shown_as_they_are() -> None:
    name = "[red]x[/nope] :smile: \x1b[31m"
    written = "[red]x[/nope] :smile: \\x1b[31m"
    plan = dataclasses.replace(a_plan(), planner=name, labels=(name, "second", "third"))
    graph = two_layer_step()
    units = (dataclasses.replace(graph.units[0], label=name, kind="[/b]"), *graph.units[1:])
    estimate = Estimate.from_graph(dataclasses.replace(graph, units=units, name=name))
    for table in (
        tables.before_after_table(plan),
        tables.segments_table(plan),
        tables.layers_table(estimate),
        Group(*overview.answer(dataclasses.replace(estimate, peak_at=name), plan)),
    ):
        assert written in shown(table)
    assert f"{written}, batch size 4" in shown(tables.layers_table(estimate))


@pytest.mark.parametrize(
    ("gap", "said"),
    [
        (None, "planned by min_peak in 0.10 s\n"),
        (0.0, "no plan of its kind within the budget is quicker"),
        (0.0312, "at most 3.1% longer"),
    ],
)
def test_the_plan_table_says_how_good_the_plan_is(gap: float | None, said: str) -> None:
    assert said in re.sub(r" +\n", "\n", shown(tables.before_after_table(dataclasses.replace(a_plan(), gap=gap))))


class Clock:
    """A clock that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress.time, "perf_counter", lambda: self.now)


def test_progress_names_each_stage_and_its_time() -> None:
    console = Console(file=io.StringIO(), width=80)
    with Progress(console).stage("planning [1] [/x]"):
        pass
    assert re.search(r"planning \[1\] \[/x\]: \d\.\d s", console.file.getvalue())


@pytest.mark.parametrize(("seconds", "is_told"), [(1.9, False), (2.1, True)])
def test_on_a_terminal_only_long_stages_leave_a_line(
    monkeypatch: pytest.MonkeyPatch, seconds: float, is_told: bool
) -> None:
    clock = Clock(monkeypatch)
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with Progress(console).stage("planning"):
        clock.now += seconds
    assert (f"planning: {seconds:.1f} s" in console.file.getvalue()) is is_told


def test_progress_says_what_is_left_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    console = Console(file=io.StringIO(), width=80)
    with Progress(console).stage("measuring"):
        for _ in counted("steps", range(10)):
            # The first step, which is traced, says nothing of the others.
            clock.now += 30 if clock.now == 100 else 4
    lines = [line for line in console.file.getvalue().splitlines() if "left" in line]
    assert lines[0] == "measuring … 42 s (steps: 24 s left, 4 of 10)"
    assert "left" not in console.file.getvalue().splitlines()[-1]
