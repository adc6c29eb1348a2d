"""The command line: what is printed where, exit codes, and the folders that it writes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from tf_memsaver import cli
from tf_memsaver.check.measurement import Measurement
from tf_memsaver.command import verbs
from tf_memsaver.command.flags import COMMANDS, SCRIPT, new_flags
from tf_memsaver.compat import keras_names
from tf_memsaver.errors import InvalidRequestError
from tf_memsaver.options.table import STRATEGIES
from tf_memsaver.plan.plan import Plan

MODEL_MODULE = """
import keras

def build():
    print("text of the user's own")
    keras.utils.set_random_seed(0)
    layers = [keras.Input((32, 32, 3))]
    for number in range(6):
        layers.append(keras.layers.Conv2D(8, 3, padding="same", name=f"conv{number}"))
        layers.append(keras.layers.ReLU(name=f"relu{number}"))
    layers += [keras.layers.GlobalAveragePooling2D(name="pool"), keras.layers.Dense(4, name="classes")]
    return keras.Sequential(layers, name="small")

def rival():
    # Another run ends while this one loads its model.
    import pathlib
    model = build()
    pathlib.Path("plan.json").write_text('{"schema_version": 1, "of": "the other run"}')
    pathlib.Path("out").mkdir()
    pathlib.Path("out/plan.json").write_text('{"schema_version": 1, "of": "the other run"}')
    return model

def broken():
    raise RuntimeError("no such\\nthing")

def number():
    return 7

def nothing_made():
    pass

def sized(width, depth=2):
    pass

def leaves():
    raise SystemExit(0)
"""
SMALL = ("cli_models:build", "--batch_size=8")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Run a command line in a folder that has cli_models.py; return exit code, stdout and stderr."""
    (tmp_path / "cli_models.py").write_text(MODEL_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "true")

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(["tf-memsaver", *arguments])
        captured = capfd.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    yield call
    sys.modules.pop("cli_models", None)


def the_line(text: str) -> str:
    """Return the error line: progress lines may stand before it, nothing behind it."""
    return text.strip().splitlines()[-1]


# Help and bad command lines


def test_help_lists_the_commands(run: Any) -> None:
    code, out, err = run("--help")
    assert code == 0 and not err
    assert all(f"\n  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_lists_its_flags(run: Any, name: str) -> None:
    code, out, err = run(name, "--help")
    assert code == 0 and not err
    assert all(f"\n  --{flag}" in out for flag in COMMANDS[name].flags)
    assert max(map(len, out.splitlines())) <= 80
    assert all(f"tf-memsaver {name} {arguments}\n" in out for arguments, _ in COMMANDS[name].examples)
    assert ("strategy" in COMMANDS[name].flags) == all(f"\n  {each} " in out for each in STRATEGIES)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_the_help_are_command_lines(name: str) -> None:
    for arguments, _ in COMMANDS[name].examples:
        own, _, of_a_script = arguments.partition(" -- ")
        _, source = new_flags(COMMANDS[name])([name, *own.split()])
        assert source and (len(own.split()) > 1 or COMMANDS[name].source == SCRIPT)
        assert not of_a_script or COMMANDS[name].source == SCRIPT


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "no command was given"),
        (("explode", "x"), "'explode' is not a command. Commands are estimate, plan"),
        (("estimat", "x"), "'estimat' is not a command. Did you mean estimate?"),
        (("plan",), "no MODEL was given"),
        (("plan", "a", "b"), "'b' is one argument too many"),
        (("plan", "x", "--budgget=1GiB"), "there is no option --budgget. Did you mean budget?"),
        (("plan", "x", "--nothing_like_it=1"), "there is no option --nothing_like_it. See: tf-memsaver plan --help"),
        (("plan", "x", "--batch_size=0"), "batch_size must be a whole number from 1"),
        (("estimate", "x", "--budget=1GiB"), "there is no option --budget. It is one of plan, report, max-batch,"),
        (("measure", "x", "--mode=fast"), "mode must be one of fit, eager, graph, xla, got 'fast'"),
    ],
)
def test_bad_command_line_is_one_line_and_2(run: Any, arguments: tuple[str, ...], expected: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2 and not out
    assert len(err.strip().splitlines()) == 1 and expected in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("plan", "cli_models:build"), "Give --batch_size"),
        (("plan", *SMALL, "--budget=lots"), "'lots' is not a number of bytes"),
        (("plan", *SMALL, "--strategy=magic"), "magic"),
        (("plan", *SMALL, "--keep=nothing"), "keep='nothing' matches no layer"),
        (("plan", "no_such_file.keras", "--batch_size=8"), "there is no model file 'no_such_file.keras'"),
        (("plan", ".", "--batch_size=8"), "is a folder"),
        (("plan", "resnet5", "--batch_size=8"), "Did you mean resnet50"),
        (("plan", "no_module:build", "--batch_size=8"), "No module named 'no_module'"),
        (("plan", "cli_models:nothing", "--batch_size=8"), "has no attribute 'nothing'"),
        (("plan", "cli_models:broken", "--batch_size=8"), "RuntimeError: no such thing"),
        (("plan", "cli_models:number", "--batch_size=8"), "gave a int, not a keras.Model"),
        (("plan", "cli_models:nothing_made", "--batch_size=8"), "it returned None"),
        (("plan", "cli_models:sized", "--batch_size=8"), "called without arguments, but needs width."),
        (("plan", "cli_models:leaves", "--batch_size=8"), "it ended the program (sys.exit(0))"),
        (("plan", "cli_models:keras", "--batch_size=8"), "it is a module, neither a function nor a keras.Model"),
        (("plan", *SMALL, "--input_shape=3,3,3"), "input_shape is only for models of keras.applications"),
        (("plan", "resnet50", "--batch_size=8", "--input_shape=big"), "input_shape[0] must be a whole number"),
        (("plan", *SMALL, "--optimizer=magic"), "Keras knows no optimizer named 'magic'"),
        (("optimize", *SMALL), "--output is missing"),
        (("optimize", *SMALL, "--output=missing/out"), "does not exist"),
        (
            ("optimize", *SMALL, "--output=out", "--save_format=onnx"),
            "save_format must be one or more of keras, saved_model",
        ),
        (("verify", *SMALL, "--plan=none.json"), "cannot read a plan from 'none.json'"),
        (("verify", *SMALL, "--plan=none.json", "--strategy=min_peak"), "--strategy is for making a plan"),
    ],
)
def test_bad_input_is_one_error_line_and_2(run: Any, arguments: tuple[str, ...], expected: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2 and not out
    assert the_line(err).startswith("tf-memsaver: ") and expected in the_line(err)


def test_the_names_of_keras_are_read_as_keras_has_them() -> None:
    assert keras_names.applications() == {name for name in dir(keras.applications) if name[0].isupper()}
    # What Keras looks names up in: none that it can make may be refused.
    for module, known in ((keras.losses, keras_names.losses()), (keras.optimizers, keras_names.optimizers())):
        for name in module.deserialize.__globals__["ALL_OBJECTS_DICT"]:
            with contextlib.suppress(TypeError, KeyError, NotImplementedError):  # Those that need arguments.
                assert module.get(name) is None or name in known or name.lower() in known, name


def test_a_plan_that_was_changed_by_hand_is_refused(run: Any) -> None:
    assert run("plan", *SMALL, "--strategy=min_peak", "--output=plan.json")[0] == 0
    data = json.loads(Path("plan.json").read_text())
    data["segments"] = [{"start": 0, "stop": len(data["units"]), "mode": "recompute"}]
    Path("plan.json").write_text(json.dumps(data))
    code, out, err = run("verify", *SMALL, "--plan=plan.json")
    assert code == 2 and not out and "store segment" in the_line(err)


@pytest.mark.parametrize("ending", ["keras", "h5"])
def test_a_damaged_model_file_is_called_so(run: Any, ending: str) -> None:
    Path(f"cut.{ending}").write_bytes(b"PK\x03\x04 and no more")
    code, out, err = run("plan", f"cut.{ending}", "--batch_size=8")
    assert code == 2 and not out
    assert f"'cut.{ending}' is damaged" in the_line(err) and "not found" not in err


def test_a_loss_that_cannot_be_loaded_is_left_out(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Keras writes "mse" into .h5 files in a way that it cannot read."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="only")])
    model.compile("adam", "mse")
    model.train_on_batch(np.zeros((2, 8)), np.zeros((2, 4)))
    model.save("compiled.h5")
    code, out, _ = run("estimate", "compiled.h5", "--batch_size=8", "--format=json")
    assert code == 0 and json.loads(out)["units"][0]["label"] == "only"
    assert "treated as not compiled. To compile it, use --optimizer and --loss" in caplog.text


def test_another_backend_is_one_line_and_2(tmp_path: Path) -> None:
    """Where the backend is missing, the mere import of Keras fails."""
    path = os.pathsep.join(path for path in sys.path if path)
    (tmp_path / "keras.json").write_text('{"backend": "jax"}')
    for settings in ({"KERAS_BACKEND": "jax"}, {"KERAS_BACKEND": "", "KERAS_HOME": str(tmp_path)}):
        done = subprocess.run(
            [sys.executable, "-m", "tf_memsaver", "estimate", "resnet50", "--batch_size=2"],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": path, **settings},
        )
        assert done.returncode == 2 and not done.stdout
        assert done.stderr.count("\n") == 1 and "'jax' backend" in done.stderr
        assert "KERAS_BACKEND=tensorflow" in done.stderr
    verb = "import tf_memsaver; from tf_memsaver import Plan, Problem; tf_memsaver.optimize"
    done = subprocess.run(
        [sys.executable, "-c", verb],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "KERAS_BACKEND": "jax"},
    )
    assert "UnsupportedModelError: Keras runs on its 'jax' backend" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("form", ["text", "json"])
def test_an_error_that_nobody_expects_has_a_code_of_its_own(
    run: Any, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any) -> Any:
        raise ZeroDivisionError("by zero")

    monkeypatch.setitem(verbs.VERBS, "estimate", broken)
    code, out, err = run("estimate", *SMALL, f"--format={form}")
    assert code == cli.UNEXPECTED not in (cli.DONE, cli.NOT_SATISFIED, cli.BAD_INPUT)
    assert "Traceback" in err and "ZeroDivisionError: by zero" in err and "not expected" in the_line(err)
    assert (json.loads(out) if out else {}) == (
        {"error": "ZeroDivisionError", "message": "by zero"} if form == "json" else {}
    )


# What the commands do


def test_estimate_answers_first_and_prints_all_layers_where_asked(run: Any) -> None:
    code, out, _ = run("estimate", *SMALL, "--optimizer=adam")
    lines = out.splitlines()
    assert code == 0 and len(lines) <= 23 and max(map(len, lines)) <= 80
    assert lines[1].startswith("peak now ") and lines[2].startswith("peak planned ")
    assert "× trained weights" in out
    code, out, _ = run("estimate", *SMALL, "--optimizer=adam", "--all")
    assert code == 0 and out.splitlines()[1].startswith("peak now ")
    assert all(f"\n{kind}{number} " in out for number in range(6) for kind in ("conv", "relu"))
    # Made by the model's module while it was built: not a result.
    assert "text of the user's own" not in out


def test_estimate_counts_operations(run: Any) -> None:
    code, out, _ = run("estimate", *SMALL, "--granularity=op", "--format=json")
    assert code == 0
    units = [unit["label"] for unit in json.loads(out)["units"]]
    assert any(unit.endswith("/convolution") for unit in units) and "conv0" not in units


def test_optimizer_flag_counts_slots(run: Any) -> None:
    slots = []
    for optimizer in ("sgd", "adam"):
        code, out, _ = run("estimate", *SMALL, f"--optimizer={optimizer}", "--format=json")
        assert code == 0
        slots.append(json.loads(out)["optimizer_slots"])
    # Beside the slots there are the counter and the learning rate, and gradients of tiny biases are left out.
    assert slots == [pytest.approx(0.0, abs=0.1), pytest.approx(2.0, abs=0.2)]


def test_json_is_one_document_and_nothing_else(run: Any) -> None:
    code, out, err = run("estimate", *SMALL, "--format=json")
    assert code == 0
    assert json.loads(out)["units"][0]["label"] == "conv0"
    assert json.loads(out)["planned"]["peak_bytes"] <= json.loads(out)["peak_bytes"]
    assert "text of the user's own" in err and "tracing" in err


def test_application_by_short_name(run: Any) -> None:
    code, out, _ = run("estimate", "mobilenet-v3_small", "--batch_size=2", "--input_shape=64,64,3", "--format=json")
    assert code == 0
    document = json.loads(out)
    # Two images of 64·64·3 floats, and targets for 1000 classes.
    assert document["input_bytes"] == 2 * (64 * 64 * 3 + 1000) * 4


def test_plan_is_written_and_never_over_something_without_leave(run: Any) -> None:
    code, out, _ = run("plan", *SMALL, "--strategy=min_peak", "--output=plan.json", "--format=json")
    assert code == 0
    plan = Plan.load("plan.json")
    assert plan == Plan.from_json(json.loads(out)) and json.loads(out)["device"] in ("CPU", "GPU")
    assert plan.peak_bytes < plan.plain_peak_bytes
    code, out, err = run("plan", *SMALL, "--strategy=chen_sqrt", "--output=plan.json")
    assert code == 2 and not out and "'plan.json' exists already" in the_line(err)
    assert Plan.load("plan.json") == plan
    code, _, _ = run("plan", *SMALL, "--strategy=chen_sqrt", "--output=plan.json", "--overwrite")
    assert code == 0 and Plan.load("plan.json").strategy == "chen_sqrt"


def test_infeasible_budget_is_1_and_names_the_smallest_that_works(run: Any) -> None:
    code, out, err = run("plan", *SMALL, "--budget=100KiB", "--format=json")
    assert code == 1 and "no plan fits" in the_line(err)
    document = json.loads(out)
    assert document["error"] == "InfeasibleBudgetError" and document["budget_bytes"] == 100 * 1024
    code, out, _ = run("plan", *SMALL, f"--budget={document['least_bytes']}", "--format=json")
    assert code == 0 and json.loads(out)["peak_bytes"] <= document["least_bytes"]


def test_curve_lists_plans_from_plain_to_the_least_peak(run: Any) -> None:
    code, out, _ = run("curve", *SMALL, "--format=json", "--points=8")
    plans = [Plan.from_json(data) for data in json.loads(out)["plans"]]
    assert code == 0 and 2 <= len(plans) <= 10 and plans[0].step_overhead == 0.0
    assert [plan.peak_bytes for plan in plans] == sorted((plan.peak_bytes for plan in plans), reverse=True)
    code, out, _ = run("curve", *SMALL)
    assert code == 0 and "recomputed" in out and "100%" in out


def test_the_largest_batch_and_its_plan(run: Any) -> None:
    arguments = ("max-batch", SMALL[0], "--budget=4MiB", "--predict_only")
    code, out, _ = run(*arguments, "--format=json", "--output=plan.json")
    found = json.loads(out)
    assert code == 0 and found["plain_batch_size"] < found["batch_size"] == Plan.load("plan.json").batch_size
    code, out, _ = run(*arguments)
    assert code == 0 and f"largest batch {found['batch_size']}" in out and "samples a second" in out
    code, out, err = run("max-batch", SMALL[0], "--budget=1KiB", "--predict_only")
    assert code == 1 and not out and "no plan fits" in the_line(err)


def test_optimize_writes_model_saved_model_and_plan(run: Any) -> None:
    code, out, _ = run("optimize", *SMALL, "--strategy=min_peak", "--output=out/")
    assert code == 0 and "planned by min_peak" in out
    assert sorted(os.listdir("out")) == ["model.keras", "plan.json", "saved_model"]
    model = keras.models.load_model("out/model.keras")
    assert model.memsaver_plan == Plan.load("out/plan.json")
    # No half-written or replaced folder is left beside it.
    assert [name for name in os.listdir() if "out" in name] == ["out"]

    code, out, err = run("optimize", *SMALL, "--output=out/")
    assert code == 2 and not out and "exists already" in the_line(err)
    code, _, _ = run("optimize", *SMALL, "--output=out/", "--overwrite", "--save_format=keras")
    assert code == 0 and sorted(os.listdir("out")) == ["model.keras", "plan.json"]

    # The optimized model brings its own plan.
    code, out, _ = run("verify", "out/model.keras", "--steps=1", "--format=json")
    assert code == 0 and json.loads(out)["verification"]["identical"]


def test_optimize_holds_real_steps_to_the_budget(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks: list[int] = []

    def measured(model: Any, **how: Any) -> Any:
        del how
        # The steps of the first plan take more than the budget, those of the second do not.
        budget = model.memsaver_plan.request.budget_bytes
        peaks.append(budget + 1000 if not peaks else budget)
        return SimpleNamespace(peak_bytes=peaks[-1])

    monkeypatch.setattr("tf_memsaver.api.measure", measured)
    monkeypatch.setattr("tf_memsaver.api.bytes_of_others", lambda *_: 0)
    code, _, _ = run("optimize", *SMALL, "--budget=90%", "--calibrate", "--output=out/", "--save_format=keras")
    assert code == 0 and len(peaks) == 2 and peaks[1] < peaks[0]
    assert Plan.load("out/plan.json").request.budget_bytes == peaks[1]


def test_overwrite_spares_what_the_command_did_not_write(run: Any) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years of work")
    assert run("plan", *SMALL, "--output=mine/plan.json")[0] == 0
    code, _, err = run("optimize", *SMALL, "--output=mine", "--overwrite")
    assert code == 2 and "it holds 'thesis.txt', which tf_memsaver does not write" in the_line(err)
    code, _, err = run("plan", *SMALL, "--output=mine/thesis.txt", "--overwrite")
    assert code == 2 and "holds no plan" in the_line(err)
    assert Path("mine/thesis.txt").read_text() == "years of work"
    # Checked before the long work.
    assert "tracing" not in err and "loading" not in err


@pytest.mark.parametrize("command", ["plan", "optimize"])
@pytest.mark.parametrize("output", ["", "/", ".", "..", "~/out", "/dev/null"])
def test_outputs_that_are_never_written(run: Any, command: str, output: str) -> None:
    before = sorted(os.listdir())
    code, out, err = run(command, *SMALL, f"--output={output}", "--overwrite")
    assert code == 2 and not out and len(err.splitlines()) == 1
    assert sorted(os.listdir()) == before and not os.path.isfile("/dev/null")


def test_the_model_is_never_written_over(run: Any) -> None:
    assert run("optimize", *SMALL, "--output=out")[0] == 0
    for command, output in (("plan", "out/model.keras"), ("optimize", "out"), ("optimize", "out/../out/")):
        code, _, err = run(command, "out/model.keras", "--batch_size=8", f"--output={output}", "--overwrite")
        assert code == 2 and "the source" in the_line(err)
    code, _, err = run("optimize", "out/saved_model", "--batch_size=8", "--output=out", "--overwrite")
    assert code == 2 and "the source" in the_line(err)


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
@pytest.mark.parametrize(("command", "output"), [("plan", "plan.json"), ("optimize", "out")])
def test_of_two_runs_the_first_result_stays(run: Any, command: str, output: str, overwrite: tuple[str, ...]) -> None:
    code, out, err = run(command, "cli_models:rival", "--batch_size=8", f"--output={output}", *overwrite)
    assert code == 2 and not out and "in the meantime" in the_line(err)
    assert "the other run" in Path("plan.json").read_text() and os.listdir("out") == ["plan.json"]
    assert "the other run" in Path("out/plan.json").read_text()
    assert sorted(name for name in os.listdir() if "cli_models" not in name) in (
        ["__pycache__", "out", "plan.json"],
        ["out", "plan.json"],
    )


def test_failed_optimize_leaves_nothing(run: Any) -> None:
    code, _, _ = run("optimize", *SMALL, "--output=out", "--budget=1KiB")
    assert code == 1
    assert sorted(os.listdir()) in (["cli_models.py"], ["__pycache__", "cli_models.py"])


def test_verify_with_a_plan_file_of_another_model(run: Any) -> None:
    assert run("plan", *SMALL, "--output=plan.json")[0] == 0
    code, _, err = run("verify", "mobilenet", "--input_shape=32,32,3", "--plan=plan.json")
    assert code == 2 and "the plan was made for another model" in the_line(err)


def test_verify_tells_identical(run: Any) -> None:
    code, out, _ = run("verify", *SMALL, "--strategy=min_peak", "--steps=1")
    assert code == 0 and "bit-identical" in out


def test_measure_compares_plain_and_optimized_with_the_budget(run: Any) -> None:
    # Large enough that the order in which two busy cores run does not decide.
    large = ("cli_models:build", "--batch_size=64")
    assert run("plan", *large, "--strategy=min_peak", "--output=plan.json")[0] == 0
    code, out, _ = run("measure", *large, "--plan=plan.json", "--steps=1", "--budget=1GiB", "--format=json")
    document = json.loads(out)
    assert code == 0 and document["budget_kept"] is True
    plain, optimized = document["measurements"]["plain"], document["measurements"]["optimized"]
    assert optimized["peak_bytes"] < plain["peak_bytes"]
    code, out, _ = run("measure", *large, "--plan=plan.json", "--steps=1", "--budget=10KiB")
    assert code == 1 and "budget NOT kept" in out


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have every measurement find 1 MiB; return the batch sizes that were asked for."""
    sizes: list[int] = []

    def measure(model: Any, *, batch_size: int, mode: Any, steps: int, beside_plain: bool) -> Measurement:
        del model, mode, beside_plain
        sizes.append(batch_size)
        return Measurement(
            device="CPU:0",
            mode="fit",
            batch_size=batch_size,
            peak_bytes=2**20,
            least_peak_bytes=2**20,
            live_bytes=0,
            gradient_bytes=0,
            step_seconds=0.1,
            step_seconds_range=(0.1, 0.1),
            trace_seconds=0.1,
            steps=steps,
        )

    monkeypatch.setattr("tf_memsaver.api.measure", measure)
    return sizes


@pytest.mark.parametrize(
    ("budget", "expected", "kept"),
    [((), None, None), (("--budget=50%",), 2**19, False), (("--budget=auto",), 2**40, True)],
)
def test_measured_steps_are_compared_with_a_budget_beside_a_plan_file(
    run: Any,
    measured: list[int],
    monkeypatch: pytest.MonkeyPatch,
    budget: tuple[str, ...],
    expected: int | None,
    kept: bool | None,
) -> None:
    monkeypatch.setattr("tf_memsaver.api.asked.bytes_left", lambda: 2**40)
    assert run("plan", *SMALL, "--output=plan.json")[0] == 0
    code, out, _ = run("measure", SMALL[0], "--plan=plan.json", *budget, "--format=json")
    document = json.loads(out)
    assert (code, document["budget_kept"]) == (int(kept is False), kept) and measured == [8, 8]
    # Of what is left, a process takes nine tenths.
    assert document["budget_bytes"] == (pytest.approx(0.9 * expected, rel=1e-3) if kept else expected)


def test_a_plan_for_another_batch_size_is_refused_where_it_would_be_ignored(run: Any) -> None:
    assert run("optimize", *SMALL, "--output=out", "--save_format=keras")[0] == 0
    own, file = ("out/model.keras",), (SMALL[0], "--plan=out/plan.json")
    for command in ("optimize", "report"):
        for source, remedy in ((own, "with --strategy=auto"), (file, "without --plan")):
            code, out, err = run(command, *source, "--batch_size=16", "--output=new")
            assert code == 2 and not out and "tracing" not in err and not Path("new").exists()
            assert f"for batch size 8, not 16. Leave --batch_size out, or plan for 16 {remedy}." in the_line(err)
    new = ("optimize", *own, "--batch_size=16", "--strategy=auto", "--output=new", "--save_format=keras")
    assert run(*new)[0] == 0 and Plan.load("new/plan.json").batch_size == 16


def test_nothing_is_predicted_of_steps_of_another_batch_size(run: Any, measured: list[int]) -> None:
    assert run("plan", *SMALL, "--budget=90%", "--output=plan.json")[0] == 0
    given = ("measure", SMALL[0], "--plan=plan.json")
    code, out, _ = run(*given)
    assert "  predicted " in out and "batch size 8" in out and "budget" in out
    code, out, _ = run(*given, "--batch_size=16")
    assert code == 0 and measured == [8, 8, 16, 16] and "batch size 16" in out and "budget" not in out
    assert "  predicted " not in out and "nothing is predicted: the plan was made for batch size 8" in out
    code, out, _ = run(*given, "--batch_size=16", "--budget=10KiB", "--format=json")
    document = json.loads(out)
    assert code == 1 and document["budget_kept"] is False
    assert {each["predicted_peak_bytes"] for each in document["measurements"].values()} == {None}


OWN_MODULE = """
import keras
import numpy as np
import tensorflow as tf

@keras.saving.register_keras_serializable("cli_own")
class Blocks(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.blocks = [
            keras.Sequential([keras.layers.Dense(256, "gelu"), keras.layers.Dense(64, "gelu")]) for _ in range(4)
        ]

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return x

@keras.saving.register_keras_serializable("cli_own")
class Stepped(Blocks):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}

def compiled(model):
    model.compile("sgd", "mse")
    return model

def blocks():
    return compiled(Blocks(name="blocks"))

def stepped():
    return compiled(Stepped(name="stepped"))

def data():
    with open("calls", "a") as file:
        file.write("called ")
    x = np.random.default_rng(0).standard_normal((512, 64)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x)).batch(256)
"""


def in_a_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tf_memsaver", *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("model", ["blocks", "stepped"])
def test_a_plan_file_and_data_for_a_model_with_code_of_its_own(run: Any, model: str) -> None:
    given = (f"cli_own:{model}", "--data=cli_own:data")
    Path("cli_own.py").write_text(OWN_MODULE)
    assert in_a_process("plan", *given, "--strategy=recompute_all", "--output=plan.json").returncode == 0
    assert Plan.load("plan.json").recomputed and Plan.load("plan.json").batch_size == 256
    for verb in (
        ["verify", "--steps=2"],
        ["measure", "--steps=1"],
        ["optimize", "--output=out", "--save_format=keras"],
    ):
        Path("calls").unlink()
        plan = [] if verb[0] == "optimize" else ["--plan=plan.json"]
        done = in_a_process(verb[0], *given, *plan, *verb[1:], "--format=json")
        assert done.returncode == 0, done.stderr[-600:]
        assert Path("calls").read_text() == "called ", verb
    assert sorted(os.listdir("out")) == ["model.keras", "plan.json"]


# The process


@pytest.mark.parametrize("verbosity", [(), ("--verbosity=1",)])
@pytest.mark.parametrize("level", [None, "1"])
def test_a_process_that_goes_on_is_as_before(
    run: Any, monkeypatch: pytest.MonkeyPatch, verbosity: tuple[str, ...], level: str | None
) -> None:
    monkeypatch.setattr("tf_memsaver.compat.counting.takes_onednn", lambda: False)
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH")
    for name in ("TF_CPP_MIN_LOG_LEVEL", "TF_CPU_ALLOCATOR_USE_BFC"):
        monkeypatch.delenv(name, raising=False)
    if level is not None:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    meanwhile: dict[str, str] = {}

    def spied(*given: Any) -> Any:
        meanwhile.update(os.environ)
        raise InvalidRequestError("that is all")

    monkeypatch.setitem(verbs.VERBS, "estimate", spied)
    before, logged = dict(os.environ), logging.get_verbosity()
    try:
        logging.set_verbosity(logging.ERROR)
        assert run("estimate", *SMALL, *verbosity)[0] == 2
        assert logging.get_verbosity() == logging.ERROR
    finally:
        logging.set_verbosity(logged)
    assert dict(os.environ) == before
    changed = {name: value for name, value in meanwhile.items() if before.get(name) != value and name != "TMPDIR"}
    asked = {} if level else {"TF_CPP_MIN_LOG_LEVEL": "2"}
    assert changed == {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "TF_CPU_ALLOCATOR_USE_BFC": "1", **asked}


def test_module_runs_and_keeps_start_up_messages_off_stderr(tmp_path: Path) -> None:
    (tmp_path / "cli_models.py").write_text(MODEL_MODULE)
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    environment["PYTHONPATH"] = str(Path(cli.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "tf_memsaver", "estimate", *SMALL],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "one training step" in done.stdout and "text of the user's own" not in done.stdout
    assert not [line for line in done.stderr.splitlines() if ".cc:" in line or "InitializeLog" in line]


LOUD = """
import atexit, os, sys
import keras
print("a text")
sys.__stdout__.write("to the stream")
os.write(1, b"to the descriptor")
os.system("echo by a shell")
atexit.register(print, "at the end")
atexit.register(os.write, 1, b"at the very end")

def build():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="dense")], name="loud")
"""


def test_a_document_is_valid_whatever_the_users_code_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    monkeypatch.chdir(tmp_path)
    done = in_a_process("estimate", "loud:build", "--batch_size=4", "--format=json")
    assert done.returncode == 0, done.stderr[-600:]
    assert json.loads(done.stdout)["units"][0]["label"] == "dense"
    for text in ("a text", "to the stream", "to the descriptor", "by a shell", "at the end", "at the very end"):
        assert text in done.stderr


def test_a_document_has_null_for_what_is_not_finite(capfd: pytest.CaptureFixture[str]) -> None:
    cli.print_json({"a": [float("nan"), (float("inf"), 1.5)]}, sys.stdout)
    assert json.loads(capfd.readouterr().out, parse_constant=pytest.fail) == {"a": [None, [None, 1.5]]}


def test_importing_the_command_line_does_not_import_tensorflow() -> None:
    code = "import sys, tf_memsaver.cli; sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# SavedModels


def _saved_model(path: Path) -> None:
    weights = [tf.Variable(tf.eye(16) * 0.9) for _ in range(6)]

    def call(x: Any) -> Any:
        for weight in weights:
            x = tf.tanh(x @ weight)
        return x

    root = tf.Module()
    root.weights, root.call = weights, tf.function(call, input_signature=[tf.TensorSpec((None, 16))])
    tf.saved_model.save(root, str(path))


def test_optimize_a_saved_model(run: Any, tmp_path: Path) -> None:
    _saved_model(tmp_path / "source")
    arguments = ("optimize", "source", "--batch_size=4096", "--strategy=min_peak", "--output=out")
    code, out, err = run(*arguments, "--format=json")
    assert code == 0, err
    (plan,) = json.loads(out)["plans"].values()
    assert plan["peak_bytes"] < plan["plain_peak_bytes"]
    x = tf.ones((2, 16))
    plain, ours = (tf.saved_model.load(str(tmp_path / name)) for name in ("source", "out"))
    assert plain.call(x).numpy().tobytes() == ours.call(x).numpy().tobytes()
    assert run(*arguments)[0] == 2
    assert run(*arguments, "--overwrite")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--batch_size=4", "--function=other"), "no function 'other'"),
        (("--batch_size=4", "--optimizer=adam"), "--optimizer is for Keras models"),
        ((), "Give batch_size"),
    ],
)
def test_bad_requests_for_saved_models(run: Any, tmp_path: Path, arguments: tuple[str, ...], expected: str) -> None:
    _saved_model(tmp_path / "source")
    code, out, err = run("optimize", "source", "--output=out", *arguments)
    assert (code, out) == (2, "") and expected in the_line(err)
    assert not (tmp_path / "out").exists()
