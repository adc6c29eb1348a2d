"""Plots by matplotlib draw what the library says: no TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.display.reports import report_of, step
from tf_memsaver.display import plots
from tf_memsaver.display.report import Report
from tf_memsaver.judge.estimate import Estimate

pytest.importorskip("matplotlib").use("agg")

MIB = 1 << 20


@pytest.fixture(scope="module")
def report() -> Report:
    return report_of(step())


@pytest.fixture
def axes() -> Iterator[Any]:
    from matplotlib import pyplot

    yield pyplot.subplots()[1]
    pyplot.close("all")


def test_the_timeline_reaches_both_peaks(report: Report, axes: Any) -> None:
    assert plots.timeline("t", report.plain, report.planned, axes) is axes
    highest = sorted({max(patch.get_data().values) for patch in axes.patches})
    assert [value * MIB for value in highest] == [report.planned.peak.live_bytes, report.plain.peak.live_bytes]
    assert [text.get_text().split(":")[0] for text in axes.get_legend().get_texts()] == ["plain", "with the plan"]
    axes.figure.canvas.draw()


def test_the_timeline_of_the_plain_step_alone(report: Report, axes: Any) -> None:
    plots.timeline("t", report.plain, None, axes)
    assert len(axes.get_legend().get_texts()) == 1


def test_the_curve_marks_the_chosen_plan(report: Report, axes: Any) -> None:
    plots.curve("t", report.curve, report.plan, axes)
    possible, plain, chosen = axes.lines
    assert [round(x * MIB) for x in possible.get_xdata()] == [plan.peak_bytes for plan in report.curve]
    assert plain.get_xdata()[0] * MIB == report.plan.plain_peak_bytes
    assert (chosen.get_xdata()[0] * MIB, chosen.get_ydata()[0]) == (
        report.plan.peak_bytes,
        100 * report.plan.step_overhead,
    )


def test_the_layers_that_keep_most_are_drawn_in_order(axes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "MOST_LAYERS", 4)
    estimate = Estimate.from_graph(step(name="cost$model$"))
    plots.layers(estimate, axes)
    kept = sorted((unit.kept_bytes for unit in estimate.units), reverse=True)[:4]
    assert sorted((round(bar.get_width() * MIB) for bar in axes.patches), reverse=True) == kept
    labels = [text.get_text() for text in axes.get_yticklabels()]
    places = [[unit.label for unit in estimate.units].index(label) for label in labels]
    assert places == sorted(places) and "the 4 of 16 layers that keep most" in axes.get_title()
    axes.figure.canvas.draw()


def test_without_axes_there_is_a_new_figure(report: Report, axes: Any) -> None:
    assert plots.curve("t", report.curve, None).figure is not axes.figure
