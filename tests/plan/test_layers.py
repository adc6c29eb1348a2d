"""What a plan says of each layer: kept, recomputed or pinned, the bytes, and why."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tf_memsaver.errors import HintError, InvalidRequestError
from tf_memsaver.judge.estimate import Estimate
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.registry import check_strategy
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import Plans, solve
from tools.shared.nets import chain

REASON = "draws from Python's random numbers"


def some_plan() -> Plan:
    graph = chain([2**20] * 12)
    names = [unit.label for unit in graph.units]
    units = (*graph.units[:-1], dataclasses.replace(graph.units[-1], pinned=REASON))
    graph = dataclasses.replace(graph, units=units)
    return solve(graph, Request(strategy="min_peak", keep=(names[4],), recompute=(names[8],)))


def test_every_layer_is_one_of_three() -> None:
    plan = some_plan()
    by_decision = [plan.kept, plan.recomputed, plan.pinned]
    assert sorted(label for labels in by_decision for label in labels) == sorted(plan.labels)
    assert plan.pinned == (plan.labels[4], plan.labels[-1]) and plan.recomputed
    assert [layer.layer for layer in plan.layers] == list(plan.labels)
    for layer in plan.layers:
        assert (layer.layer in plan.recomputed) == (layer.decision == "recomputed")
        segment = plan.segments[layer.segment]
        assert layer.layer in plan.labels[segment.start : segment.stop]


def test_reasons_are_those_of_the_graph_and_the_hints() -> None:
    layers = some_plan().layers
    assert layers[-1].reason == REASON
    assert layers[4].reason == "is named in keep=" and layers[4].decision == "pinned"
    assert layers[8].reason == "is named in recompute=" and layers[8].decision == "recomputed"
    assert layers[2].reason == "chosen by planner min_peak"


def test_bytes_are_those_that_the_plain_step_keeps() -> None:
    graph = chain([2**20, 2**21, 2**22, 2**20])
    plans = Plans(graph)
    kept = tuple(unit.kept_bytes for unit in Estimate.from_graph(graph).units)
    assert any(kept) and plans.plan(Request(strategy="min_peak")).activation_bytes == kept
    assert all(plan.activation_bytes == kept for plan in plans.curve(Request()))


def test_layers_travel_in_files_and_older_files_have_none() -> None:
    plan = some_plan()
    data = json.loads(json.dumps(plan.to_json()))
    assert Plan.from_json(data).layers == plan.layers
    for unit in data["units"]:
        del unit["activation_bytes"], unit["reason"]
    older = Plan.from_json(data)
    assert older.recomputed == plan.recomputed and older.pinned == ()
    assert {layer.activation_bytes for layer in older.layers} == {None}
    assert repr(older)


def test_pandas_takes_the_layers() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(some_plan().layers)
    assert list(table.columns) == ["layer", "decision", "activation_bytes", "segment", "reason"]


def test_a_wrong_name_of_a_layer_or_strategy_shows_what_was_meant() -> None:
    graph = chain([8] * 12)
    label = graph.units[3].label
    with pytest.raises(HintError, match=rf"matches no layer. Did you mean .*{label}"):
        solve(graph, Request(keep=(label + "x",)))
    with pytest.raises(InvalidRequestError, match="Did you mean min_peak"):
        check_strategy("min_peek")
