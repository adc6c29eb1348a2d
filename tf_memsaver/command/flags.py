"""The sub-commands, their flags and help texts. Every command has a set of flags of its own. No TensorFlow here."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from absl import flags

from tf_memsaver.errors import MemsaverError
from tf_memsaver.options import OPTIONS

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A sub-command: its one-line summary, the arguments of an example, and the names of its flags."""

    name: str
    summary: str
    example: str
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flag:
    """A flag: what stands for its value in a help text ("" for a switch), the help text, and its default."""

    value: str
    text: str
    default: Any = None


_MODEL = ("batch_size", "input_shape", "optimizer", "loss", "format")
LIMITS = ("budget", "max_overhead", "strategy", "keep", "recompute", "candidates", "granularity", "profile")
"""The flags that say what to plan; a plan file takes their place."""

COMMANDS = {
    command.name: command
    for command in (
        Command(
            name="estimate",
            summary="Show where the memory of one training step goes, layer by layer.",
            example="resnet50 --batch_size=32 --optimizer=adam",
            flags=(*_MODEL, "granularity"),
        ),
        Command(
            name="plan",
            summary="Choose what to recompute, show it, and write it to a plan file.",
            example="resnet50 --batch_size=32 --budget=1GiB --output=plan.json",
            flags=(*_MODEL, *LIMITS, "output", "overwrite"),
        ),
        Command(
            name="curve",
            summary="Show what memory costs in time: plans from the plain step to the least peak.",
            example="resnet50 --batch_size=32 --points=24",
            flags=(*_MODEL, "points", "keep", "recompute", "candidates", "granularity", "profile"),
        ),
        Command(
            name="optimize",
            summary="Plan, rewrite the model, and write it to a folder (a Keras model as .keras file and SavedModel).",
            example="resnet50 --batch_size=32 --budget=1GiB --output=out/",
            flags=(*_MODEL, *LIMITS, "plan", "output", "overwrite", "save_format", "function"),
        ),
        Command(
            name="verify",
            summary="Train the plain and the optimized model side by side; compare loss, gradients and state by bits.",
            example="my_package.models:build --batch_size=8 --strategy=min_peak",
            flags=(*_MODEL, *LIMITS, "plan", "mode", "steps"),
        ),
        Command(
            name="measure",
            summary="Measure peak memory and step time of the plain and the optimized model, each in its own process.",
            example="resnet50 --batch_size=32 --budget=1GiB --mode=xla",
            flags=(*_MODEL, *LIMITS, "plan", "mode", "steps"),
        ),
    )
}


_FLAGS = {
    "batch_size": _Flag(value="N", text="examples in a training batch; needed, because bytes depend on it"),
    "input_shape": _Flag(value="H,W,C", text="shape of one example, for a name of keras.applications", default=()),
    "optimizer": _Flag(value="NAME", text="compile the model with this optimizer, so that its slots count"),
    "loss": _Flag(value="NAME", text="compile the model with this loss"),
    "format": _Flag(
        value="text|json", text="what to print: tables, or one JSON document (default: text)", default="text"
    ),
    "budget": _Flag(value="BYTES", text="peak memory of a whole training step, like 6GiB, 512MiB or 16000000000"),
    "max_overhead": _Flag(
        value="SHARE",
        text="longest extra step time allowed, as a share of the plain step (default without a budget: 0.3)",
    ),
    "strategy": _Flag(
        value="NAME",
        text="planner: auto, min_peak, min_time; to compare with: plain, recompute_all, keep_products, chen_sqrt, "
        "chen_greedy; or one of an installed package (default: auto)",
        default="auto",
    ),
    "keep": _Flag(
        value="NAMES",
        text="layers never to recompute: names or patterns (conv1_*), separated by commas",
        default=(),
    ),
    "recompute": _Flag(value="NAMES", text="layers always to recompute", default=()),
    "candidates": _Flag(value="NAMES", text="cut only behind these layers", default=()),
    "granularity": _Flag(
        value="layer|op",
        text="what is counted and cut: layers, or single operations, names being theirs then (default: layer)",
        default="layer",
    ),
    "profile": _Flag(
        value="", text="time the step's operations on this device instead of predicting their times", default=False
    ),
    "points": _Flag(value="N", text="plans on the curve (default: 24)", default=24),
    "plan": _Flag(value="FILE", text="apply this plan file instead of planning"),
    "output": _Flag(value="PATH", text="where to write; never over something that is there, unless --overwrite"),
    "overwrite": _Flag(value="", text="replace an output of this program; anything else stays", default=False),
    "save_format": _Flag(
        value="NAMES",
        text="what to write beside plan.json: keras, saved_model (default: both)",
        default=("keras", "saved_model"),
    ),
    "function": _Flag(
        value="NAMES",
        text="functions of a SavedModel to rewrite (default: all that can be trained through)",
        default=(),
    ),
    "mode": _Flag(value="MODE", text="how to run the steps: eager, graph or xla (default: graph)", default="graph"),
    "steps": _Flag(value="N", text="training steps to run (default: 3)", default=3),
}
_VERBOSITY_HELP = "log level: -1 warnings, 0 information, 1 debugging (default: -1)"


class _Parser(flags.ArgumentParser):  # type: ignore[misc]
    """Reads and checks a flag's value as its option says; a default is as it is."""

    def __init__(self, name: str) -> None:
        self._name, self._option = name, OPTIONS[name]

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
    for name in command.flags:
        flag = _FLAGS[name]
        if flag.value:
            flags.DEFINE(_Parser(name), name, flag.default, flag.text, flag_values=values)
        else:
            flags.DEFINE_boolean(name, flag.default, flag.text, flag_values=values)
    values["verbosity"] = flags.FLAGS["verbosity"]
    return values


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
        (f"--{name}={_FLAGS[name].value}" if _FLAGS[name].value else f"--{name}", _FLAGS[name].text)
        for name in command.flags
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
