"""What the options of all verbs may be, and that a bad command line is told at once: no TensorFlow here."""

from __future__ import annotations

import dataclasses
import inspect
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from tf_memsaver.errors import InvalidRequestError
from tf_memsaver.options import OPTIONS, checked
from tf_memsaver.options.checks import path
from tf_memsaver.options.table import Mode, Overwrite, RequestOptions, RunOptions, Strategy, options_of
from tf_memsaver.options.verbs import documented, takes
from tf_memsaver.plan.registry import planner_named
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import planner_names
from tf_memsaver.units import Share


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError


HUGE = 10**5000
"""Python does not write such numbers out, not even for the name of a test: cases are numbered."""
NO_WHOLE_NUMBERS = [0, -3, 1.0, 2.5, "4", None, True, 10**30, HUGE, math.inf, math.nan, [4], np.float32(4), b"4"]
NO_SHARES = ["0.3", math.inf, -math.inf, math.nan, -0.1, np.float64("nan"), True, [0.3], 10**400, "30%", 1j]
NO_BUDGETS = [
    "1e400GiB",
    math.inf,
    math.nan,
    3.5,
    "3.5",
    0,
    -1,
    np.int64(0),
    True,
    [1],
    b"6GiB",
    {},
    10**400,
    "",
    "6 x",
    "0%",
    "101%",
    "80 % of it",
    0.8,
]
NO_NAMES = [3, None, "", b"auto", ["auto"], "\ud800", len]
NO_LISTS = [[None], 3, None, [3], b"d0", {"d0": 1}, [["d0"]], ["\ud800"], [b"d0"]]
NO_PATHS = [3, None, "", b"x", "a\0b", ["x"]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[
            pytest.param(name, value, id=f"{name}-{number}")
            for name, values in {
                "batch_size": [*(value for value in NO_WHOLE_NUMBERS if value is not None), 10**12, 2**31],
                "steps": NO_WHOLE_NUMBERS,
                "points": [*NO_WHOLE_NUMBERS, 1, 10**9],
                "max_overhead": [value for value in NO_SHARES if value is not None],
                "budget": NO_BUDGETS,
                "strategy": NO_NAMES,
                "keep": NO_LISTS,
                "recompute": NO_LISTS,
                "candidates": NO_LISTS,
                "functions": NO_LISTS,
                "granularity": [*NO_NAMES, "layers", "OP"],
                "time_chunks": [*(value for value in NO_WHOLE_NUMBERS if value is not None), "sqrt"],
                "mode": [*NO_NAMES, "fast"],
                "profile": ["no", 1, 0, None],
                "isolate": ["no", 1, 0, None],
                "overwrite": ["no", 1, 0, None],
                "calibrate": ["no", 1, 0, None],
            }.items()
            for number, value in enumerate([*values, Unprintable()])
        ]
    ],
)
def test_what_an_option_may_not_be(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{name}(\[0\])?( must be |: )") as caught:
        checked(**{name: value})
    sentence = str(caught.value)
    assert sentence.endswith(".") or name == "budget"
    assert len(sentence) < 250 and "\n" not in sentence and sentence.encode()


@pytest.mark.parametrize("value", [*NO_PATHS, Unprintable()])
def test_what_is_no_path(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^source must be a path"):
        path("source", value)


@pytest.mark.parametrize(
    ("name", "value", "used"),
    [
        ("batch_size", np.int64(8), 8),
        ("steps", np.int8(2), 2),
        ("budget", np.int32(7), 7),
        ("budget", "6GiB", 6 * 2**30),
        ("budget", None, None),
        ("budget", "80%", Share(0.8)),
        ("budget", Share(0.8), Share(0.8)),
        ("budget", " Auto ", "auto"),
        ("max_overhead", None, None),
        ("max_overhead", 0, 0.0),
        ("max_overhead", np.float32(0.5), 0.5),
        ("keep", "conv*", ("conv*",)),
        ("keep", ["a", "b"], ("a", "b")),
        ("keep", (), ()),
        ("functions", "call", ("call",)),
    ],
)
def test_what_an_option_may_be(name: str, value: Any, used: Any) -> None:
    found = checked(**{name: value})[name]
    assert found == used and type(found) is type(used)


@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_said_of_an_option(name: str) -> None:
    option = OPTIONS[name]
    assert option.check(name, option.default) == option.default
    assert option.help and not option.help.endswith(".") and (not option.more or option.more.endswith("."))
    assert option.value != "" or option.default is False


def test_the_strategies_that_editors_offer_are_the_planners_of_this_package() -> None:
    own = [
        name for name in planner_names() if planner_named(name).propose.__module__.startswith("tf_memsaver.planners.")
    ]
    assert sorted(get_args(Strategy)) == own


def test_a_request_has_the_options_that_make_it_up() -> None:
    fields = {field.name for field in dataclasses.fields(Request)}
    assert {name.replace("budget", "budget_bytes") for name in options_of(RequestOptions)} == fields - {"budget_share"}
    assert Request.of({"budget": "80%"}) == Request(budget_share=0.8) == Request(budget_share=0.8).checked()
    assert Request(budget_share=0.5).for_peak(1001).budget_bytes == 500
    assert Request.of({"budget": "1KiB", "keep": "a", "points": 3}) == Request(budget_bytes=1024, keep=("a",))


@takes(RunOptions)
def run(model: Any, *rest: Any, **options: Any) -> Any:
    """Run a model.

    Args:
      model: a model.
      steps: of its own kind.

    Raises:
      ValueError: never.
    """
    return model, rest, options


def test_a_verb_gets_all_its_options_as_we_use_them() -> None:
    taken = {"data": None, "batch_size": 4, "step": None, "mode": "graph", "steps": 3}
    assert run("m", 1, batch_size=np.int64(4)) == ("m", (1,), taken)
    with pytest.raises(InvalidRequestError, match="mode must be one of eager, graph, xla, got 'fast'"):
        run("m", batch_size=4, mode="fast")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"batch_size": 4, "stesp": 3},
            r"run\(\) got an unexpected keyword argument 'stesp'\. Did you mean step or steps\?",
        ),
        ({"colour": 3}, r"unexpected keyword argument 'colour'\. It takes data, batch_size, step, mode, steps\."),
    ],
)
def test_a_wrong_keyword_names_the_right_one(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        run("m", **given)


def test_a_verb_shows_its_options() -> None:
    parameters = inspect.signature(run).parameters
    assert list(parameters) == ["model", "rest", "data", "batch_size", "step", "mode", "steps"]
    assert parameters["batch_size"].default is None and parameters["steps"].default == 3
    assert get_type_hints(run)["mode"] == Mode
    assert run.__doc__ is not None
    arguments = run.__doc__.partition("Args:\n")[2].partition("\n\nRaises:\n  ValueError: never.")[0].splitlines()
    entries = [line.strip().partition(":")[0] for line in arguments if not line.startswith("    ")]
    assert (
        entries == ["model", "steps", "data", "batch_size", "step", "mode"] and "  steps: of its own kind." in arguments
    )


@pytest.mark.parametrize("rest", ["", "\n\nRaises:\n  ValueError: never."])
def test_a_docstring_without_arguments_gets_a_section_for_them(rest: str) -> None:
    text = documented(f"Do it.{rest}", Overwrite)
    assert text is not None
    assert (
        text.startswith("Do it.\n\nArgs:\n  overwrite: ")
        and text.endswith(rest)
        and text.count("\n\n") == (2 if rest else 1)
    )


def test_a_request_checks_its_fields() -> None:
    assert Request(budget_bytes=np.int64(7), keep=["a"]).checked() == Request(budget_bytes=7, keep=("a",))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="granularity must be one of auto, layer, op, got 'layers'"):
        Request(granularity="layers").checked()


# A model's name and flags, and a part of the sentence.
BAD_LINES = """
resnet50                                        | Give --batch_size, or --data
resnet50 --data=nothing:there                   | cannot load data from 'nothing:there': No module named 'nothing'
resnet50 --data=batches                         | must be written package.module:function
resnet50 --batch_size=0                         | batch_size must be a whole number from 1
resnet50 --batch_size=-3                        | batch_size must be a whole number from 1
resnet50 --batch_size=1.5                       | batch_size must be a whole number from 1
resnet50 --batch_size=1000000000000             | batch_size must be a whole number from 1
resnet50 --batch_size=                          | batch_size must be a whole number from 1
resnet50 --batch_size=4 --budget=1e400GiB       | the most that a number of bytes can be
resnet50 --batch_size=4 --budget=inf            | 'inf' is not a number of bytes
resnet50 --batch_size=4 --budget=3.5            | not a whole number of bytes
resnet50 --batch_size=4 --max_overhead=nan      | max_overhead must be a finite number of 0 or more
resnet50 --batch_size=4 --max_overhead=-1       | max_overhead must be a finite number of 0 or more
resnet50 --batch_size=4 --strategy=magic        | there is no strategy 'magic'
resnet50 --batch_size=4 --strategy=             | strategy must be a text that is not empty
resnet50 --batch_size=4 --granularity=layers    | granularity must be one of auto, layer, op
resnet50 --batch_size=4 --keep=\udc80           | keep[0] must be a text of valid Unicode
resnet50 --batch_size=4 --mode=fast             | mode must be one of eager, graph, xla
resnet50 --batch_size=4 --steps=0               | steps must be a whole number of 1 or more
resnet50 --batch_size=4 --loss=nope             | loss='nope' is no loss of Keras
resnet50 --batch_size=4 --loss=MSEE             | Did you mean MSE
resnet50 --batch_size=4 --optimizer=adm         | Did you mean adam
resnet50 --batch_size=4 --input_shape=3,x       | input_shape[1] must be a whole number
resnet50 --batch_size=4 --format=yaml           | format must be one of text, json
resnet50 --batch_size=4 --profile=perhaps       | Non-boolean argument
resnet50 --plan=none.json                       | cannot read a plan from 'none.json'
resnet50 --plan=none.json --strategy=min_peak   | --strategy is for making a plan
resnet50 --plan=none.json --budget=1GiB         | --budget is for making a plan
resnet5 --batch_size=4                          | Did you mean resnet50
none.keras --batch_size=4                       | there is no model file 'none.keras'
modle.keras --batch_size=4                      | Did you mean model.keras?
model.keras --plan=thare.json                   | there is no such file. Did you mean there.json?
mymodels:build --batch_size=4                   | No module named 'mymodels'. Did you mean my_models?
my_models:biuld --batch_size=4                  | has no attribute 'biuld'. Did you mean build?
my_models:build --data=my_models:dta            | has no attribute 'dta'. Did you mean data?
resnet50 --batch_size=4 --strategy=min_peek     | Did you mean min_peak
. --batch_size=4                                | is a folder
no_module:build --batch_size=4                  | No module named 'no_module'
json: --batch_size=4                            | must be written package.module:function
json:loads --batch_size=4 --input_shape=8,8,3   | input_shape is only for models of keras.applications
"""


def test_a_bad_command_line_is_told_before_tensorflow_is_loaded(tmp_path: Path) -> None:
    """In one process of its own, which the first line that loads TensorFlow or Keras would fail."""
    lines = [line.split("|") for line in BAD_LINES.strip().splitlines()]
    cases = [(["verify", *line.split()], sentence.strip()) for line, sentence in lines]
    curve = ["curve", "resnet50", "--batch_size=4"]
    cases += [([*curve, f"--points={points}"], "points must be a whole") for points in ("0", "1", "x", "1000000000")]
    cases += [
        (["optimize", "resnet50", "--batch_size=4"], "--output is missing"),
        (["optimize", "resnet50", "--batch_size=4", "--output=no/out"], "does not exist"),
        (["optimize", "resnet50", "--batch_size=4", "--output=o", "--save_format=onnx"], "save_format must be one or"),
        (["optimize", "resnet50", "--batch_size=4", "--output=o", "--calibrate"], "Give one, such as --budget=80%"),
        (
            ["optimize", "resnet50", "--plan=there.json", "--output=o", "--calibrate"],
            "--calibrate is for making a plan",
        ),
        *(
            ([*line, "--plan=there.json", "--output=o", "--budget=1GiB"], "--budget is for making a plan")
            for line in (["optimize", "resnet50"], ["report", "resnet50"])
        ),
        (["measure", "resnet50", "--plan=there.json", "--budget=1GiB"], "schema_version"),
        (["optimize", "resnet50", "--batch_size=4", "--output=o", "--function=f"], "--function is for SavedModels;"),
        (["plan", "resnet50", "--batch_size=4", "--output=there.json"], "exists already"),
    ]
    (tmp_path / "there.json").write_text("{}")
    (tmp_path / "model.keras").write_text("")
    (tmp_path / "my_models.py").write_text("import keras\n\ndef build(): ...\n\ndata = build\n")
    program = f"""
import contextlib, io, sys
from tf_memsaver import cli
for line, sentence in {cases!a}:
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main(["tf-memsaver", *line])
    except SystemExit as ended:
        code = ended.code
    assert (code, out.getvalue(), err.getvalue().count("\\n")) == (2, "", 1), (line, code, err.getvalue())
    assert sentence in err.getvalue(), (line, sentence, err.getvalue())
    assert not {{"tensorflow", "keras"}} & set(sys.modules), line
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)
