"""The sub-commands, their flags and help texts. Every command has a set of flags of its own. No TensorFlow here."""

from __future__ import annotations

import shlex
import textwrap
from dataclasses import dataclass
from typing import Any

from absl import flags

from tf_memsaver.errors import MemsaverError
from tf_memsaver.options.flags import ModelFlags, OutputFlags, PlanFlags, SaveFlags
from tf_memsaver.options.option import Option
from tf_memsaver.options.table import (
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
    options_of,
)
from tf_memsaver.units import Share

PROGRAM = "tf-memsaver"
_WIDTH = 110

_ABOUT = "Trains a Keras model in less memory, with identical results, by recomputing well-chosen activations."

_MODEL_HELP = """\
MODEL is one of
  a .keras or .h5 file
  package.module:function   a function without arguments that returns a model; the current directory is importable
  a name of keras.applications, in any case and without separators (resnet50), built without trained weights
  the folder of a SavedModel (optimize only): its functions are rewritten, without the code that made it"""

_EXIT_HELP = """\
Results go to stdout, progress and logs to stderr.
Exit codes: 0 done, 1 not satisfied (no plan fits, the budget was not kept, verification failed), 2 bad input."""


def flags_of(*groups: Any) -> dict[str, Option]:
    """Return the options of some groups of the table that the command has flags for, by the flag's name."""
    options = {name: option for group in groups for name, option in options_of(group).items()}
    return {option.flag or name: option for name, option in options.items() if option.value is not None}


LIMITS = tuple(flags_of(RequestOptions))
"""The flags that say what to plan; a plan file takes their place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A sub-command: its one-line summary, the arguments of an example, and its flags."""

    name: str
    summary: str
    example: str
    flags: dict[str, Option]


COMMANDS = {
    command.name: command
    for command in (
        Command(
            name="estimate",
            summary="Show where the memory of one training step goes, layer by layer.",
            example="resnet50 --batch_size=32 --optimizer=adam",
            flags=flags_of(ModelFlags, EstimateOptions),
        ),
        Command(
            name="plan",
            summary="Choose what to recompute, show it, and write it to a plan file.",
            example="resnet50 --batch_size=32 --budget=1GiB --output=plan.json",
            flags=flags_of(ModelFlags, PlanOptions, OutputFlags, Overwrite),
        ),
        Command(
            name="curve",
            summary="Show what memory costs in time: plans from the plain step to the least peak.",
            example="resnet50 --batch_size=32 --points=24",
            flags=flags_of(ModelFlags, CurveOptions),
        ),
        Command(
            name="report",
            summary="Write one page of HTML: memory over time, what is kept and recomputed, and where the peak falls.",
            example="resnet50 --batch_size=32 --budget=1GiB --output=report.html",
            flags=flags_of(ModelFlags, ReportOptions, PlanFlags, OutputFlags),
        ),
        Command(
            name="max-batch",
            summary="Find the largest batch that trains within a budget, and the plan for it.",
            example="resnet50 --budget=8GiB --optimizer=adam --max_overhead=0.3",
            flags=flags_of(ModelFlags, LargestBatchOptions, OutputFlags, Overwrite),
        ),
        Command(
            name="optimize",
            summary="Plan, rewrite the model, and write it to a folder (a Keras model as .keras file and SavedModel).",
            example="resnet50 --batch_size=32 --budget=1GiB --output=out/",
            flags=flags_of(ModelFlags, CalibratedOptions, PlanFlags, OutputFlags, SaveFlags, SavedModelOptions),
        ),
        Command(
            name="verify",
            summary="Train the plain and the optimized model side by side; compare loss, gradients and state by bits.",
            example="my_package.models:build --batch_size=8 --strategy=min_peak",
            flags=flags_of(ModelFlags, PlanOptions, PlanFlags, RunOptions),
        ),
        Command(
            name="measure",
            summary="Measure peak memory and step time of the plain and the optimized model, each in its own process.",
            example="resnet50 --batch_size=32 --budget=1GiB --mode=xla",
            flags=flags_of(ModelFlags, PlanOptions, PlanFlags, MeasureOptions),
        ),
    )
}


_VERBOSITY_HELP = "log level: -1 warnings, 0 information, 1 debugging (default: -1)"


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
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS.values())
    return "\n\n".join(
        (
            _ABOUT,
            f"Usage: {PROGRAM} COMMAND MODEL [flags]",
            f"Commands\n{commands}",
            _MODEL_HELP,
            _EXIT_HELP,
            f"{PROGRAM} COMMAND --help lists the flags of a command.",
        )
    )


def command_help(command: Command) -> str:
    """Return the help text of a command."""
    rows = [
        (f"--{name}={option.value}" if option.value else f"--{name}", option.flag_help)
        for name, option in command.flags.items()
    ]
    rows.append(("--verbosity=N", _VERBOSITY_HELP))
    width = max(len(head) for head, _ in rows) + 4
    lines = [
        textwrap.fill(text, _WIDTH, initial_indent=f"  {head:<{width - 2}}", subsequent_indent=" " * width)
        for head, text in rows
    ]
    return "\n\n".join(
        (
            command.summary,
            f"Usage: {PROGRAM} {command.name} MODEL [flags]\nExample: {PROGRAM} {command.name} {command.example}",
            _MODEL_HELP,
            "\n".join(["Flags", *lines]),
            _EXIT_HELP,
        )
    )
