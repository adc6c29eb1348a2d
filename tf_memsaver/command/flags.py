"""The sub-commands, their flags and help texts. Every command has a set of flags of its own. No TensorFlow here."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from absl import flags

from tf_memsaver.errors import MemsaverError
from tf_memsaver.options.flags import DetailFlags, FormatFlags, ModelFlags, OutputFlags, PlanFlags, SaveFlags
from tf_memsaver.options.option import Option
from tf_memsaver.options.table import (
    STRATEGIES,
    CalibratedOptions,
    CurveOptions,
    EstimateOptions,
    LargestBatchOptions,
    MeasureOptions,
    Overwrite,
    PlanOptions,
    ReportOptions,
    RequestOptions,
    RunOptions,
    SavedModelOptions,
    Strategy,
    options_of,
)
from tf_memsaver.units import Share

PROGRAM = "tf-memsaver"
MODEL, SCRIPT = "MODEL", "SCRIPT"
"""What a command line names after its command."""

_WIDTH = 80
"""Columns of a help text."""

_ABOUT = (
    "Train a Keras model in less memory, with identical results: gradient checkpointing (rematerialization) by an "
    "automatic plan."
)

_MODEL_HELP = """\
MODEL is one of
  a .keras or .h5 file
  package.module:function, which takes no arguments and returns a model; modules
    in the current directory are found
  a model of keras.applications, such as resnet50, in upper or lower case; it is
    built without trained weights
  the folder of a SavedModel (optimize only); its Python code is not needed"""

_SCRIPT_HELP = """\
SCRIPT is a Python program that trains a model with fit. doctor runs it as
`python SCRIPT ARGUMENTS` does, and stops it at its first call of fit, so
nothing is trained. The script's own output goes to stderr."""

_EXIT_HELP = """\
Results go to stdout, progress and logs to stderr.
Exit codes: 0 success, 1 failure (no plan fits, the budget was not kept,
verification failed), 2 bad input, 3 an unexpected error (with a traceback)."""


def flags_of(*groups: Any) -> dict[str, Option]:
    """Return the options in some groups of the table that have flags, by the flag's name."""
    options = {name: option for group in groups for name, option in options_of(group).items()}
    return {option.flag or name: option for name, option in options.items() if option.value is not None}


LIMITS = tuple(flags_of(RequestOptions))
"""The flags that describe the plan. A plan file replaces them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A sub-command: its one-line summary, examples of arguments with their purpose, and its flags.

    ``source`` is what it works on: a model, or a script, whose own arguments follow after ``--``.
    """

    name: str
    summary: str
    examples: tuple[tuple[str, str], ...]
    flags: dict[str, Option]
    source: str = MODEL

    @property
    def usage(self) -> str:
        """The command line in general."""
        return f"{PROGRAM} {self.name} {self.source} [flags]{' [-- ARGUMENTS]' if self.source == SCRIPT else ''}"


COMMANDS = {
    command.name: command
    for command in (
        Command(
            name="estimate",
            summary="Show where the memory of one training step goes, layer by layer.",
            examples=(
                ("resnet50 --batch_size=32 --optimizer=adam", "a model of Keras, with Adam's slots"),
                ("my_models:build --data=my_models:data", "your own model and data"),
                ("model.keras --batch_size=32 --all", "every layer of a saved model"),
            ),
            flags=flags_of(ModelFlags, EstimateOptions, DetailFlags),
        ),
        Command(
            name="plan",
            summary="Choose the layers to recompute, show the plan, and write it to a file.",
            examples=(
                ("resnet50 --batch_size=32", "the smallest peak for at most 30% more time"),
                (
                    "resnet50 --batch_size=32 --budget=1GiB --output=plan.json",
                    "the quickest step within 1 GiB, as a file",
                ),
                (
                    "model.keras --batch_size=32 --max_overhead=0.1 --keep=stem",
                    "at most 10% more time; the layer 'stem' is kept",
                ),
            ),
            flags=flags_of(ModelFlags, PlanOptions, OutputFlags, Overwrite, DetailFlags),
        ),
        Command(
            name="curve",
            summary="Show memory against time: plans from the plain step to the smallest peak.",
            examples=(
                ("resnet50 --batch_size=32 --points=24", "24 plans"),
                ("my_models:build --data=my_models:data --format=json", "output for a program"),
            ),
            flags=flags_of(ModelFlags, CurveOptions),
        ),
        Command(
            name="report",
            summary="Write an HTML page: memory over time, what is alive at the peak, and what is kept or recomputed.",
            examples=(
                ("resnet50 --batch_size=32 --output=report.html", "the default plan"),
                ("model.keras --batch_size=8 --budget=1GiB --output=page.html", "the plan for a budget"),
            ),
            flags=flags_of(ModelFlags, ReportOptions, PlanFlags, OutputFlags),
        ),
        Command(
            name="max-batch",
            summary="Find the largest batch that trains within a budget, and its plan.",
            examples=(
                ("resnet50 --budget=8GiB --optimizer=adam", "within 8 GiB"),
                ("my_models:build --data=my_models:data", "within the memory that this device has left"),
            ),
            flags=flags_of(ModelFlags, LargestBatchOptions, OutputFlags, Overwrite),
        ),
        Command(
            name="optimize",
            summary="Write a model that trains in less memory to a folder, as a .keras file and a SavedModel.",
            examples=(
                ("resnet50 --batch_size=32 --budget=1GiB --output=out/", "within 1 GiB"),
                ("model.keras --plan=plan.json --output=out/", "by an existing plan"),
                ("saved_model/ --batch_size=32 --output=out/", "a SavedModel, without its Python code"),
            ),
            flags=flags_of(ModelFlags, CalibratedOptions, PlanFlags, OutputFlags, SaveFlags, SavedModelOptions),
        ),
        Command(
            name="verify",
            summary="Check that results are the same: train plain and optimized, and compare all numbers bit by bit.",
            examples=(
                ("resnet50 --batch_size=8 --optimizer=adam", "with the default plan"),
                ("my_models:build --batch_size=8 --strategy=min_peak", "with the plan of another strategy"),
            ),
            flags=flags_of(ModelFlags, PlanOptions, PlanFlags, RunOptions),
        ),
        Command(
            name="measure",
            summary="Measure peak memory and step time of the plain and the optimized model, each in its own process.",
            examples=(
                ("resnet50 --batch_size=32 --optimizer=adam --budget=1GiB", "in fit, compared with a budget"),
                ("resnet50 --plan=plan.json --mode=xla", "with a plan file, under XLA"),
            ),
            flags=flags_of(ModelFlags, PlanOptions, PlanFlags, MeasureOptions),
        ),
        Command(
            name="doctor",
            summary="Run a training script up to its first fit; show the plan for its model and the line to add.",
            examples=(
                ("train.py", "the smallest peak for at most 30% more time"),
                ("train.py --budget=6GiB -- --epochs=10", "within 6 GiB; the script gets --epochs=10"),
            ),
            flags=flags_of(FormatFlags, RequestOptions, DetailFlags),
            source=SCRIPT,
        ),
    )
}


_VERBOSITY_HELP = "log level: -1 for warnings, 0 for information, 1 for debugging (default: -1)"


class _Parser(flags.ArgumentParser):  # type: ignore[misc]
    """Reads and checks a flag's value as its option says; a default is as it is."""

    def __init__(self, name: str, option: Option) -> None:
        self._name, self._option = name, option

    def parse(self, argument: Any) -> Any:
        """Return the value of a flag.

        Raises:
          ValueError: it has no meaning; absl puts the flag's name before the sentence.
        """
        if not isinstance(argument, str):
            return argument
        try:
            return self._option.check(self._name, self._option.read(argument))
        except MemsaverError as error:
            raise ValueError(str(error)) from error


def new_flags(command: Command) -> flags.FlagValues:
    """Return a fresh set of the command's flags, not parsed yet, with absl's own ``--verbosity``."""
    values = flags.FlagValues()
    for name, option in command.flags.items():
        if option.value:
            flags.DEFINE(_Parser(name, option), name, option.default, option.flag_help, flag_values=values)
        else:
            flags.DEFINE_boolean(name, option.default, option.flag_help, flag_values=values)
    values["verbosity"] = flags.FLAGS["verbosity"]
    return values


def command_line(command: str, source: str, values: flags.FlagValues) -> str:
    """Return the command line that parsed flags stand for, without those that have their defaults."""
    given = [values[name] for name in COMMANDS[command].flags if not values[name].using_default_value]
    return shlex.join([PROGRAM, command, source, *(f"--{flag.name}{_written(flag.value)}" for flag in given)])


def _written(value: Any) -> str:
    """Return a flag's value as a command line has it, with the sign before it."""
    if value is True:
        return ""
    if isinstance(value, Share):
        return f"={100 * value:g}%"
    return f"={','.join(map(str, value))}" if isinstance(value, tuple) else f"={value}"


def program_help() -> str:
    """Return the help text of the program."""
    commands = [(command.name, command.summary) for command in COMMANDS.values()]
    examples = [(f"{PROGRAM} {command.name} {command.examples[0][0]}", "") for command in COMMANDS.values()]
    return "\n\n".join(
        (
            textwrap.fill(_ABOUT, _WIDTH),
            f"Usage: {PROGRAM} COMMAND MODEL [flags]\n       {PROGRAM} doctor SCRIPT [flags] [-- ARGUMENTS]",
            _section("Commands", commands),
            _MODEL_HELP,
            _section("Examples", examples),
            _EXIT_HELP,
            f"{PROGRAM} COMMAND --help shows the examples and flags of a command.",
        )
    )


def command_help(command: Command) -> str:
    """Return the help text of a command."""
    flags = [
        (f"--{name}={option.value}" if option.value else f"--{name}", option.flag_help)
        for name, option in command.flags.items()
    ]
    flags.append(("--verbosity=N", _VERBOSITY_HELP))
    examples = "\n".join(f"  # {what}\n  {PROGRAM} {command.name} {line}" for line, what in command.examples)
    strategies = [(name, STRATEGIES.get(name, "")) for group in get_args(Strategy) for name in _names_in(group)]
    return "\n\n".join(
        (
            textwrap.fill(command.summary, _WIDTH),
            f"Usage: {command.usage}",
            f"Examples\n{examples}",
            _MODEL_HELP if command.source == MODEL else _SCRIPT_HELP,
            _section("Flags", flags),
            *([_section("Strategies", strategies)] if "strategy" in command.flags else []),
            _EXIT_HELP,
        )
    )


def _names_in(group: Any) -> tuple[str, ...]:
    return get_args(group) or (group,)


def _section(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return a heading and rows of a name and a text beside it; long texts go on below themselves."""
    width = max(len(head) for head, _ in rows) + 4
    lines = [
        textwrap.fill(text, _WIDTH, initial_indent=f"  {head:<{width - 2}}", subsequent_indent=" " * width)
        if text
        else f"  {head}"
        for head, text in rows
    ]
    return "\n".join([title, *lines])
