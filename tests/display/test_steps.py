"""A step as it is shown says what the simulator says: no TensorFlow."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.strategies import graphs
from tf_memsaver.display import steps
from tf_memsaver.display.steps import ShownStep
from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import stored
from tf_memsaver.judge.estimate import Estimate
from tf_memsaver.judge.simulate import Simulator
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import solve
from tools.shared.nets import chain


@given(graphs())
def test_the_plain_step_is_the_simulators(graph: Graph) -> None:
    simulator = Simulator(graph)
    timeline, shown = simulator.run(stored(len(graph.units))), ShownStep.of(simulator, stored(len(graph.units)))
    assert shown.peak.live_bytes == timeline.peak_bytes == max(moment.live_bytes for moment in shown.moments)
    assert sum(nbytes for _, nbytes in shown.peak.by_kind) == timeline.peak_bytes
    assert shown.step_seconds == pytest.approx(timeline.step_seconds)
    assert shown.kept_bytes == tuple(unit.kept_bytes for unit in Estimate.from_graph(graph).units)


def test_thinning_keeps_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "COLUMNS", 3)
    graph = chain([5, 70, 6, 9, 3, 8, 2])
    simulator = Simulator(graph)
    shown = ShownStep.of(simulator, stored(len(graph.units)))
    assert len(shown.moments) <= 3
    assert max(moment.live_bytes for moment in shown.moments) == simulator.run(stored(len(graph.units))).peak_bytes


def test_the_peak_names_the_tensors_alive() -> None:
    graph = chain([5, 7, 90, 6])
    plan = solve(graph, Request(strategy="min_peak", recompute=("dense_0", "dense_1")))
    plain, planned = (ShownStep.of(Simulator(graph), cover) for cover in (stored(len(graph.units)), plan.segments))
    first = plain.peak.largest[0]
    assert (first.nbytes, first.layer, first.operation, first.kind) == (90, "dense_2", "MatMul", "activations")
    assert plain.peak.running.startswith("backward pass of dense_3 (")
    again = [moment for moment in planned.moments if moment.running.startswith("recomputation of dense_")]
    assert again and any("recomputed" in tensor.kind for moment in again for tensor in moment.largest)
