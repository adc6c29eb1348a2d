"""The verb ``report``, in Python and on the command line, and plots of a traced step, with small Keras models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import pytest

import tf_memsaver
from tf_memsaver import cli
from tf_memsaver.command.flags import COMMANDS, command_line, new_flags

MODULE = """
import keras

def build():
    keras.utils.set_random_seed(0)
    convolutions = [keras.layers.Conv2D(8, 3, padding="same", activation="relu", name=f"conv{n}") for n in range(8)]
    head = [keras.layers.GlobalAveragePooling2D(name="pool"), keras.layers.Dense(4, name="classes")]
    model = keras.Sequential([keras.Input((32, 32, 3)), *convolutions, *head], name="small")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""
GIVEN = ("report", "report_models:build", "--batch_size=64", "--points=4")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Run a command line in a folder that has report_models.py; return exit code and the last line of stderr."""
    (tmp_path / "report_models.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def call(*arguments: str) -> tuple[Any, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["tf-memsaver", *arguments])
        return ended.value.code or 0, capfd.readouterr().err.strip().splitlines()[-1]

    yield call
    sys.modules.pop("report_models", None)


@pytest.fixture
def model() -> keras.Model:
    names: dict[str, Any] = {}
    exec(MODULE, names)
    return names["build"]()


def test_the_command_writes_a_page(run: Any) -> None:
    pytest.importorskip("plotly")
    assert run(*GIVEN, "--strategy=min_peak", "--keep=conv2", "--output=report.html")[0] == 0
    text = Path("report.html").read_text(encoding="utf-8")
    assert "tf-memsaver report report_models:build --batch_size=64" in text and "--keep=conv2" in text
    assert all(f">conv{n} <" in text for n in range(8)) and "less memory, for a step that is" in text
    assert "is named in keep=" in text

    # What is there is replaced with leave, and only if it is a report or a plan.
    code, line = run(*GIVEN, "--output=report.html")
    assert code == 2 and "exists already" in line
    assert run(*GIVEN, "--output=report.html", "--overwrite")[0] == 0
    Path("mine.html").write_text("<p>years of work</p>")
    code, line = run(*GIVEN, "--output=mine.html", "--overwrite")
    assert code == 2 and "holds no plan and no report" in line
    assert Path("mine.html").read_text() == "<p>years of work</p>"


def test_the_command_shows_a_plan_from_a_file(run: Any) -> None:
    pytest.importorskip("plotly")
    assert run("plan", *GIVEN[1:3], "--strategy=min_peak", "--output=plan.json")[0] == 0
    plan = tf_memsaver.Plan.load("plan.json")
    assert run("report", GIVEN[1], "--plan=plan.json", "--output=report.html")[0] == 0
    assert plan.fingerprint in Path("report.html").read_text(encoding="utf-8")


def test_a_missing_extra_is_told_before_the_model_is_loaded(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    code, line = run(*GIVEN, "--output=report.html")
    assert code == 2 and "pip install plotly" in line
    assert "report_models" not in sys.modules and not Path("report.html").exists()


def test_plots_without_matplotlib(model: keras.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(tf_memsaver.MissingExtraError, match="pip install matplotlib"):
        tf_memsaver.trace(model, batch_size=8).plot_layers()


def test_report_in_python(model: keras.Model, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    plan = tf_memsaver.report(model, tmp_path / "a.html", batch_size=64, strategy="min_peak", points=4)
    traced = tf_memsaver.trace(model, batch_size=64)
    traced.report(plan, tmp_path / "b.html", points=4)
    assert plan.recomputed
    first, second = ((tmp_path / name).read_text(encoding="utf-8") for name in ("a.html", "b.html"))
    assert first == second and "search_plan(model, batch_size=64, strategy=&#x27;min_peak&#x27;)" in first
    with pytest.raises(tf_memsaver.OutputExistsError):
        tf_memsaver.report(model, tmp_path / "a.html", batch_size=64)
    traced.report(plan, tmp_path / "a.html", points=4, overwrite=True)
    with pytest.raises(tf_memsaver.PlanMismatchError, match="its batch size is 8"):
        tf_memsaver.trace(model, batch_size=8).report(plan, tmp_path / "c.html")
    assert not (tmp_path / "c.html").exists()


def test_plots_of_a_traced_step(model: keras.Model) -> None:
    pytest.importorskip("matplotlib").use("agg")
    from matplotlib import pyplot

    traced = tf_memsaver.trace(model, batch_size=64)
    plan = traced.plan(strategy="min_peak")
    for axes in (traced.plot_timeline(plan), traced.plot_curve(plan, points=4), traced.plot_layers()):
        assert "small, batch size 64" in axes.get_title()
    pyplot.close("all")


@pytest.mark.parametrize(
    "given",
    [
        "--batch_size=8 --output=r.html",
        "--data=a.b:c --budget=80% '--keep=conv 1,b*' --overwrite --output=r.html",
        "--input_shape=8,8,3 --max_overhead=0.2 --budget=auto --output=r.html",
    ],
)
def test_the_command_line_of_parsed_flags_parses_alike(given: str) -> None:
    import shlex

    def parsed(line: list[str]) -> dict[str, Any]:
        values = new_flags(COMMANDS["report"])
        values(line[1:])
        return {name: values[name].value for name in COMMANDS["report"].flags}

    values = new_flags(COMMANDS["report"])
    values(["report", "net", *shlex.split(given)])
    line = command_line("report", "net", values)
    assert parsed(shlex.split(line)) == {name: values[name].value for name in COMMANDS["report"].flags}
    assert line.startswith("tf-memsaver report net --")
