"""Plans as JSON and back, and files that are no plans."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import graphs, requests
from tf_memsaver.errors import InvalidRequestError, OutputExistsError, PlanFormatError, PlanMismatchError
from tf_memsaver.ir.segments import Segment, SegmentMode, check_cover
from tf_memsaver.plan.parts import MOST_LEVELS
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import solve
from tools.shared.nets import chain

STORE, RECOMPUTE = SegmentMode.STORE, SegmentMode.RECOMPUTE


def some_plan() -> Plan:
    request = Request(strategy="min_peak", recompute=("dense_1",), max_overhead=0.5)
    plan = solve(chain([8] * 4), request, versions={"keras": "3.15.1"})
    child = Segment(start=0, stop=1, mode=RECOMPUTE), Segment(start=1, stop=3, mode=STORE)
    nested = Segment(start=0, stop=3, mode=RECOMPUTE, children=child)
    return dataclasses.replace(plan, segments=(nested, Segment(start=3, stop=4, mode=STORE)))


def test_json_round_trip_with_children(tmp_path: Path):
    plan = some_plan()
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_saving_takes_no_name_but_its_own(tmp_path: Path):
    (tmp_path / "plan.json.part").write_text("mine")
    some_plan().save(tmp_path / "plan.json")
    some_plan().save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json.part").read_text() == "mine" and len(list(tmp_path.iterdir())) == 2
    with pytest.raises(OutputExistsError, match="overwrite=True"):
        some_plan().save(tmp_path / "plan.json", overwrite=False)
    with pytest.raises(OutputExistsError, match="holds no plan"):
        some_plan().save(tmp_path / "plan.json.part")
    with pytest.raises(InvalidRequestError, match="empty"):
        some_plan().save("")


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_json_round_trip_of_solved_plans(data: st.DataObject):
    graph = data.draw(graphs())
    plan = solve(graph, data.draw(requests(graph, "min_peak")))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def spoil(*path: str | int, to: Any = None, drop: bool = False) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        inner: Any = data
        for key in path[:-1]:
            inner = inner[key]
        if drop:
            del inner[path[-1]]
        else:
            inner[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (spoil("schema_version", to=99), "schema version 99"),
        (spoil("schema_version", drop=True), "schema_version"),
        (spoil("segments", drop=True), "segments"),
        (spoil("segments", 0, "mode", to="forget"), "forget"),
        (spoil("segments", 0, "stop", to=2), "position"),
        (spoil("segments", 0, "children", 0, "stop", to=2), "position"),
        (spoil("segments", 1, "stop", to=9), "end at position 9"),
        (spoil("segments", to=7), "segments must be a list, got 7"),
        (spoil("request", "colour", to="red"), "colour"),
        (spoil("request", to=None), "request must be a JSON object, got None"),
        (spoil("peak_bytes", to="many"), "many"),
        (spoil("units", 0, "signature", to="Dense(other)"), "changed by hand"),
        (spoil("fingerprint", to="0" * 16), "changed by hand"),
        (spoil("versions", to=3), "versions must be a JSON object, got 3"),
        (spoil("schema_version", to=True), "schema_version must be a whole number"),
        (spoil("batch_size", to=0), "batch_size must be a whole number from 1"),
        (spoil("batch_size", to=-3), "batch_size must be a whole number from 1"),
        (spoil("batch_size", to=10**12), "batch_size must be a whole number from 1"),
        (spoil("batch_size", to="4"), "batch_size must be a whole number from 1"),
        (spoil("peak_bytes", to=10**400), "peak_bytes must be a whole number"),
        (
            spoil("peak_bytes", to=10**5000),
            "peak_bytes must be a whole number of 0 or more, got a int",
        ),
        (spoil("plain_peak_bytes", to=-1), "plain_peak_bytes must be a whole number of 0 or more"),
        (spoil("step_overhead", to=math.nan), "step_overhead must be a finite number, got nan"),
        (spoil("plan_seconds", to=math.inf), "plan_seconds must be a finite number of 0 or more"),
        (spoil("plan_seconds", to=10**400), "plan_seconds must be a finite number of 0 or more"),
        (spoil("bound_seconds", to="soon"), "bound_seconds must be a finite number"),
        (spoil("gap", to=[]), "gap must be a finite number"),
        (spoil("strategy", to=3), "strategy must be a text, got 3"),
        (spoil("planner", to="\ud800"), "planner must be a text of valid Unicode"),
        (spoil("units", 0, "label", to="\ud800"), r"units\[0\].label must be a text of valid Unicode"),
        (spoil("units", 1, to=["dense_1"]), r"units\[1\] must be a JSON object"),
        (spoil("units", 1, "signature", drop=True), r"units\[1\].signature is missing"),
        (spoil("units", to=[]), "changed by hand"),
        (spoil("segments", 0, "start", to=0.7), r"segments\[0\].start must be a whole number"),
        (spoil("segments", 0, "start", to=True), r"segments\[0\].start must be a whole number"),
        (spoil("segments", 0, "children", 1, "stop", to=3.0), r"segments\[0\].children\[1\].stop must be a whole"),
        (spoil("segments", 0, "children", 1, "stop", to=4), "end at position 4, and must cover the units up to 3"),
        (spoil("segments", 0, "children", to="none"), r"segments\[0\].children must be a list"),
        (spoil("segments", 0, "mode", to="store"), "stores, so it cannot have children"),
        (spoil("segments", 0, "mode", to=["store"]), "mode must be one of store, recompute"),
        (spoil("request", "granularity", to="layers"), "request.granularity must be one of auto, layer, op"),
        (spoil("request", "strategy", to=3), "request.strategy must be a text"),
        (spoil("request", "keep", to=[None]), r"request.keep\[0\] must be a text"),
        (spoil("request", "profile", to="no"), "request.profile must be True or False"),
        (spoil("request", "budget_bytes", to=0), "request.budget_bytes must be a whole number of 1 or more"),
        (spoil("request", "max_overhead", to=math.nan), "request.max_overhead must be a finite number of 0 or more"),
        (spoil("versions", "keras", to=3), "versions.keras must be a text"),
    ],
)
def test_malformed_plans(change: Callable[[dict[str, Any]], None], reason: str):
    data = json.loads(json.dumps(some_plan().to_json()))
    change(data)
    with pytest.raises(PlanFormatError, match=reason):
        Plan.from_json(data)


def test_segments_deeper_than_any_planner_nests(tmp_path: Path):
    data = some_plan().to_json()
    for levels in (MOST_LEVELS - 1, MOST_LEVELS, 900):
        segment: dict[str, Any] = {"start": 0, "stop": 4, "mode": "store"}
        for _ in range(levels):
            segment = {"start": 0, "stop": 4, "mode": "recompute", "children": [segment]}
        data["segments"] = [segment]
        if levels < MOST_LEVELS:
            assert Plan.from_json(data).recomputed_units == (0, 1, 2, 3)
            continue
        with pytest.raises(PlanFormatError, match=f"below {MOST_LEVELS} levels"):
            Plan.from_json(data)
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(PlanFormatError, match="nested too deep"):
        Plan.load(path)


def test_a_plan_of_the_first_release_loads():
    data = some_plan().to_json()
    del data["bound_seconds"], data["gap"], data["request"]["profile"], data["request"]["granularity"]
    plan = Plan.from_json(data)
    assert (plan.gap, plan.request.granularity, plan.segments) == (None, "layer", some_plan().segments)


def test_a_plan_keeps_what_was_chosen():
    plan = dataclasses.replace(some_plan(), opened=("call()", "block"), note="why", data_shapes=((2, 87), (5,)))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert str(plan).endswith("; by operations: call(), block")
    assert str(dataclasses.replace(plan, opened=())).endswith("; why")
    assert str(some_plan()).endswith("batch size 2)") and "operations" not in str(some_plan())
    many = dataclasses.replace(plan, opened=("a", "b", "c", "d", "e"))
    assert str(many).endswith("; by operations: a, b, c and 2 more")
    # Plans of the first release know of no choice.
    data = plan.to_json()
    del data["opened"], data["note"], data["data_shapes"]
    assert Plan.from_json(data) == dataclasses.replace(plan, opened=(), note="", data_shapes=())


@pytest.mark.parametrize("path", [3, None, "", "a\0b", b"plan.json"])
def test_what_is_no_path_of_a_plan(path: Any):
    with pytest.raises(InvalidRequestError, match="plan must be a path"):
        Plan.load(path)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "3", '"plan"'])
def test_files_that_hold_no_plan(tmp_path: Path, text: str):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanFormatError, match=r"plan\.json"):
        Plan.load(path)


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(PlanFormatError, match=r"none\.json"):
        Plan.load(tmp_path / "none.json")


def test_a_plan_for_another_model_says_what_differs():
    plan = some_plan()
    plan.check_matches(plan.signatures, plan.labels)
    other = (*plan.signatures[:2], "Conv2D()", *plan.signatures[3:])
    with pytest.raises(PlanMismatchError, match=r"layer call 2 is 'dense_2', Conv2D\(\)"):
        plan.check_matches(other, plan.labels)
    with pytest.raises(PlanMismatchError, match="3 layer calls, the plan was made for 4"):
        plan.check_matches(plan.signatures[:3], plan.labels[:3])


def test_a_store_segment_has_no_children():
    child = Segment(start=0, stop=2, mode=STORE)
    with pytest.raises(PlanFormatError, match="cannot have children"):
        check_cover([Segment(start=0, stop=2, mode=STORE, children=(child,))], 0, 2)


def test_an_empty_segment_is_no_segment():
    with pytest.raises(PlanFormatError, match="does not follow position 0"):
        check_cover([Segment(start=0, stop=0, mode=STORE), Segment(start=0, stop=2, mode=STORE)], 0, 2)
