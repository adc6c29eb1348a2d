"""A report's page: all parts are there, it loads nothing, and names cannot break it. No TensorFlow."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from tests.display.reports import HOSTILE, report_of, step
from tf_memsaver.display.page import page
from tf_memsaver.display.report import Report, call_of
from tf_memsaver.errors import PlanMismatchError
from tf_memsaver.judge.simulate import Simulator
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import Plans
from tf_memsaver.units import format_bytes

pytest.importorskip("plotly")


class Parsed(HTMLParser):
    """What stands in a page: its elements, what it would load, and its text outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._inside):
            self.texts.append(data)

    @property
    def loads(self) -> list[str]:
        names = ("src", "href", "srcset", "data", "action", "poster")
        return [value for _, attrs in self.elements for name, value in attrs.items() if name in names and value]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def count(self, tag: str) -> int:
        return sum(each == tag for each, _ in self.elements)


@pytest.fixture(scope="module")
def report() -> Report:
    return report_of(step())


@pytest.fixture(scope="module")
def parsed(report: Report) -> Parsed:
    return Parsed(page(report))


def test_the_answer_comes_first(report: Report, parsed: Parsed) -> None:
    begin = parsed.text[:600]
    for nbytes in (report.plan.peak_bytes, report.plan.plain_peak_bytes):
        assert format_bytes(nbytes) in begin
    assert "less memory, for a step that is" in begin and "The results stay the same." in begin


def test_all_parts_are_there(report: Report, parsed: Parsed) -> None:
    ids = {attrs.get("id") for _, attrs in parsed.elements}
    assert {"timeline", "curve", "layers"} <= ids
    for heading in (
        "Memory over one training step",
        "Memory against time",
        "What is alive at the peak",
        "What is kept, and what is recomputed",
        "How this was made",
    ):
        assert heading in parsed.text
    for row in report.layers:
        assert row.label in parsed.text
    for tensor in (*report.plain.peak.largest, *report.planned.peak.largest):
        assert tensor.name in parsed.text and format_bytes(tensor.nbytes) in parsed.text
    assert "1 layer pinned: it draws from hidden state" in parsed.text
    assert "tf-memsaver report net" in parsed.text and "1.2.3" in parsed.text
    assert parsed.count("details") > 1


def test_units_that_are_no_layers_are_called_what_they_are() -> None:
    report = report_of(step(), granularity="op")
    text = Parsed(page(report)).text
    assert f"{len(report.plan.recomputed)} of 16 groups of operations recomputed" in text
    assert "1 group of operations pinned: it draws from hidden state" in text


def test_it_loads_nothing(parsed: Parsed, report: Report) -> None:
    assert parsed.loads == ["data:,"]
    assert parsed.count("iframe") == parsed.count("img") == 0
    (policy,) = [attrs["content"] for _, attrs in parsed.elements if "http-equiv" in attrs]
    assert policy is not None and policy.startswith("default-src 'none'")
    style = page(report).partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style and "@import" not in style


def test_names_cannot_break_the_page(report: Report, parsed: Parsed) -> None:
    graph = step(name=HOSTILE)
    units = tuple(dataclasses.replace(unit, label=f"{unit.label}{HOSTILE}") for unit in graph.units)
    hostile = Parsed(page(report_of(dataclasses.replace(graph, units=units))))
    assert hostile.loads == parsed.loads and hostile.count("img") == 0
    assert hostile.count("script") == parsed.count("script")
    assert f"dense_3{HOSTILE}" in hostile.text


def test_the_figures_show_what_the_simulator_says(report: Report) -> None:
    from tf_memsaver.display.figures import curve_figure, layers_figure, timeline_figure

    plain, planned = timeline_figure(report).data
    mib = 1 << 20
    assert max(plain.y) * mib == report.plain.peak.live_bytes
    assert max(planned.y) * mib == report.planned.peak.live_bytes
    largest = report.plain.peak.largest[0]
    assert any(largest.name in text and format_bytes(largest.nbytes) in text for text in plain.hovertext)
    possible, _, chosen = curve_figure(report).data
    assert chosen.x[0] * mib == report.plan.peak_bytes
    assert [round(x * mib) for x in possible.x] == [plan.peak_bytes for plan in report.curve]
    kept, with_plan = layers_figure(report).data
    assert sum(kept.y) * mib == sum(row.plain_bytes for row in report.layers)
    assert sum(with_plan.y) < sum(kept.y)


def test_a_budget_is_shown(report: Report) -> None:
    budget = report.plan.plain_peak_bytes * 8 // 10
    text = Parsed(page(report_of(step(), strategy="auto", budget_bytes=budget))).text
    assert f"Budget {format_bytes(budget)} kept" in text


def test_a_plan_that_saves_nothing_says_so() -> None:
    text = Parsed(page(report_of(step(), strategy="plain"))).text
    assert "this plan does not save memory" in text and "less memory, for" not in text


def test_of_xla_results_are_said_to_be_the_same_within_rounding(report: Report) -> None:
    request = dataclasses.replace(report.plan.request, executor="xla")
    compiled = dataclasses.replace(report, plan=dataclasses.replace(report.plan, request=request))
    text = Parsed(page(compiled)).text
    assert "The results stay the same, within rounding." in text


def test_a_plan_of_another_model_or_batch_is_refused() -> None:
    graph = step()
    plan = Plans(graph).plan(Request())
    with pytest.raises(PlanMismatchError, match="its batch size is 2, the plan's is 7"):
        Report.of(Simulator(graph), dataclasses.replace(plan, batch_size=7), (), "")
    with pytest.raises(PlanMismatchError, match="layer call 0 is 'dense_0'"):
        Report.of(Simulator(graph), dataclasses.replace(plan, signatures=("x", *plan.signatures[1:])), (), "")


def test_the_call_that_plans_alike() -> None:
    plan = Plans(step()).plan(Request(budget_share=0.9, keep=("dense_3",)))
    assert call_of(plan) == "tf_memsaver.search_plan(model, batch_size=2, budget='90%', keep=('dense_3',))"


def test_pages_of_one_plan_are_alike(report: Report) -> None:
    times = re.compile(r"planned in \S+ s")
    assert times.sub("", page(report)) == times.sub("", page(report))
