"""What results say of themselves in a few lines."""

from __future__ import annotations

import dataclasses

import pytest

from tf_memsaver import pace
from tf_memsaver.check.measurement import Measurement
from tf_memsaver.check.verify import Comparison, Verification
from tf_memsaver.judge.estimate import Estimate
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.largest import LargestBatch
from tf_memsaver.planners.solve import solve
from tf_memsaver.summary import MOST_LINES, Summarized, shortened
from tools.shared.nets import chain

GRAPH = chain([2**20] * 200)
PLAN = dataclasses.replace(
    solve(GRAPH, Request(strategy="min_peak", budget_bytes=2**40, max_overhead=9.0)),
    advice="why it saves little, and what to try: " + "much more " * 50,
    note="a note",
)
MEASUREMENT = Measurement(
    device="CPU:0",
    mode="fit",
    batch_size=8,
    peak_bytes=300,
    least_peak_bytes=200,
    live_bytes=50,
    gradient_bytes=50,
    step_seconds=0.5,
    step_seconds_range=(0.4, 0.6),
    trace_seconds=1.0,
    steps=20,
    plain_step_seconds=0.4,
    slowdown_range=(0.2, 0.3),
)
CHECKS = tuple(
    Comparison(
        kind=f"kind {kind}", name=str(name), step=0, identical=True, largest_difference=0.0, relative_difference=0.0
    )
    for kind in range(20)
    for name in range(50)
)
RESULTS = {
    "Graph": dataclasses.replace(GRAPH, opened=tuple(f"layer{n}" for n in range(99))),
    "Estimate": Estimate.from_graph(GRAPH),
    "Plan": PLAN,
    "Measurement": MEASUREMENT,
    "Verification": Verification(mode="graph", batch_size=8, steps=3, deterministic_ops=False, checks=CHECKS),
    "LargestBatch": LargestBatch(batch_size=8, plan=PLAN, plain_batch_size=4, rates=()),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_show_themselves_in_ten_lines(name: str) -> None:
    lines = repr(RESULTS[name]).splitlines()
    assert 4 <= len(lines) <= MOST_LINES and max(map(len, lines)) <= 100
    assert lines[0].startswith(name)
    html = RESULTS[name]._repr_html_()
    assert html.startswith("<table>") and html.count("<tr>") == len(lines) - 1


def test_a_plan_shows_its_answer() -> None:
    shown = repr(PLAN)
    assert f"{PLAN.peak_bytes / PLAN.plain_peak_bytes:.0%}" in shown
    assert f"{PLAN.step_overhead:+.1%}" in shown and f"{len(PLAN.recomputed)} of 200" in shown


def test_html_is_escaped() -> None:
    class Named(Summarized):
        def summary(self):
            return "<script>", [("a & b", "<b>")]

    assert "<script>" not in Named()._repr_html_() and "&lt;b&gt;" in Named()._repr_html_()
    assert repr(Named()) == "<script>\n  a & b  <b>"


@pytest.mark.parametrize(
    ("width", "expected"), [(9, "abcdefghi"), (8, "abcd…ghi"), (5, "ab…hi"), (2, "a…"), (1, "…"), (0, "…")]
)
def test_texts_are_shortened_in_the_middle(width: int, expected: str) -> None:
    assert shortened("abcdefghi", width) == expected


def test_loops_are_heard_where_somebody_listens() -> None:
    heard: list[tuple[str, int, int]] = []
    assert list(pace.counted("letters", "abc")) == ["a", "b", "c"]
    with pace.heard_by(lambda *said: heard.append(said)):
        assert list(pace.counted("letters", "ab")) == ["a", "b"]
        pace.report_progress("unknown", 3, 0)
    pace.report_progress("letters", 1, 2)
    assert heard == [("letters", 0, 2), ("letters", 1, 2), ("letters", 2, 2)]
