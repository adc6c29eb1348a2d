"""The command ``tf-memsaver``, also ``python -m tf_memsaver``. The only module that prints results, and exits.

The exit codes are ``DONE``, ``NOT_SATISFIED`` (no plan fits, the budget was not kept, or verification failed),
``BAD_INPUT``, and ``UNEXPECTED`` for errors that we do not raise on purpose: they keep their traceback.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

from absl import app, flags, logging
from rich.console import Console

from tf_memsaver.command.arguments import check_arguments
from tf_memsaver.command.flags import COMMANDS, PROGRAM, SCRIPT, command_help, new_flags, program_help
from tf_memsaver.command.output import Result, results_only
from tf_memsaver.command.stopping import stopped_by_signals
from tf_memsaver.command.surroundings import (
    GROWTH,
    LOG_LEVEL,
    quiet_start,
    temporary_files_go,
    variables_kept,
    verbosity_kept,
)
from tf_memsaver.compat.backend import check_backend
from tf_memsaver.compat.versions import __version__
from tf_memsaver.display.progress import Progress
from tf_memsaver.errors import InfeasibleBudgetError, InfeasibleOverheadError, MeasurementError, MemsaverError
from tf_memsaver.options.checks import did_you_mean

DONE, NOT_SATISFIED, BAD_INPUT, UNEXPECTED = 0, 1, 2, 3
_UNSATISFIED = (InfeasibleBudgetError, InfeasibleOverheadError, MeasurementError)
_HELP = frozenset({"-h", "-help", "--help"})
_LONGEST_LINE = 1000
"""Characters of an error; it may repeat what it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """A parsed command line; ``restore`` says that the process goes on after it.

    ``source`` is the model or the script that it names, ``arguments`` are the script's.
    """

    command: str
    source: str
    arguments: tuple[str, ...]
    flags: flags.FlagValues
    restore: bool


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line ``argv``, and exit with one of the codes above.

    If it is None, ``sys.argv`` is run, and this is the whole process. If not, the process may go on, with the
    environment, log level, streams and handlers that it had. SIGINT, SIGTERM and SIGHUP end the process as they would
    by default, but with one line, and nothing left behind.
    """
    with stopped_by_signals(restore=argv is not None), verbosity_kept():
        parse = functools.partial(_parse, restore=argv is not None)
        app.run(_run, argv=list(sys.argv if argv is None else argv), flags_parser=parse)


# The command line ---------------------------------------------------------------------------------------------------


def _parse(argv: Sequence[str], *, restore: bool) -> Invocation:
    """Return what the command line asks for, or exit: with help, or with one line that says what is wrong."""
    arguments, its_own = _parted(argv[1:])
    name = arguments[0] if arguments else ""
    command = COMMANDS.get(name)
    if _HELP.intersection(arguments):
        _leave(program_help() if command is None else command_help(command))
    if name == "--version":
        _leave(f"tf_memsaver {__version__}")
    if command is None:
        reason = f"'{name}' is not a command.{did_you_mean(name, COMMANDS)}" if name else "no command was given."
        _reject(f"{reason} Commands are {', '.join(COMMANDS)}")
    values = new_flags(command)
    try:
        _, *rest = values([argv[0], *arguments])
    except flags.UnrecognizedFlagError as error:
        known = did_you_mean(error.flagname, command.flags) or _said_of(error.flagname)
        _reject(f"there is no option --{error.flagname}.{known}", name)
    except flags.Error as error:
        _reject(str(error), name)
    if len(rest) != 2:
        hint = ". A script's own arguments go after --" if command.source == SCRIPT else ""
        _reject(
            f"'{rest[2]}' is one argument too many{hint}" if len(rest) > 2 else f"no {command.source} was given", name
        )
    if its_own and command.source != SCRIPT:
        _reject(f"'{its_own[0]}' is one argument too many", name)
    # absl asks that its own flags count as parsed; without --verbosity it would log at level INFO.
    flags.FLAGS.mark_as_parsed()
    if flags.FLAGS["verbosity"].using_default_value:
        flags.FLAGS.verbosity = logging.WARNING
    return Invocation(command=name, source=rest[1], arguments=its_own, flags=values, restore=restore)


def _parted(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return what stands before ``--`` and what stands after it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return list(arguments[:end]), tuple(arguments[end + 1 :])


def _said_of(flag: str) -> str:
    having = [command.name for command in COMMANDS.values() if flag in command.flags]
    return f" It is one of {', '.join(having)}." if having else ""


def _leave(text: str) -> NoReturn:
    print(text)
    sys.exit(DONE)


def _reject(reason: str, command: str = "") -> NoReturn:
    call = " ".join(filter(None, (PROGRAM, command, "--help")))
    print(f"{PROGRAM}: {_ended(_one_line(reason))} See: {call}", file=sys.stderr)
    sys.exit(BAD_INPUT)


def _ended(line: str) -> str:
    """Return a line that ends as a sentence."""
    return line if line.endswith("?") else f"{line}."


def _one_line(text: str) -> str:
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE // 2]} … {line[-_LONGEST_LINE // 2 :]}"


# Running ------------------------------------------------------------------------------------------------------------


def _run(invocation: Invocation) -> int:
    """Run a command, print what it found or what went wrong, and return the exit code."""
    with results_only(restore=invocation.restore) as results:
        as_json = invocation.flags.format == "json"
        try:
            with temporary_files_go():
                result = _call(invocation)
        except Exception as error:
            if as_json:
                fields = vars(error) if isinstance(error, MemsaverError) else {}
                print_json({"error": type(error).__name__, "message": str(error), **fields}, results)
            return _told(error)
        if as_json:
            print_json(result.document, results)
        else:
            console = Console(file=results)
            for part in result.shown:
                console.print(part, highlight=False, markup=False, emoji=False)
        return DONE if result.satisfied else NOT_SATISFIED


def _told(error: Exception) -> int:
    """Say on stderr what went wrong, in one line if we raised it on purpose; return the exit code."""
    if isinstance(error, MemsaverError):
        print(f"{PROGRAM}: {_ended(_one_line(str(error)))}", file=sys.stderr)
        return NOT_SATISFIED if isinstance(error, _UNSATISFIED) else BAD_INPUT
    traceback.print_exception(error)
    print(
        f"{PROGRAM}: this error was not expected. If it is not from your own code, please report it.", file=sys.stderr
    )
    return UNEXPECTED


def print_json(document: Any, results: TextIO) -> None:
    """Print a document; JSON has no numbers that are not finite, and null stands for them."""
    print(json.dumps(_finite(document), indent=1, default=str, allow_nan=False), file=results)


def _finite(item: Any) -> Any:
    if isinstance(item, dict):
        return {str(name): _finite(part) for name, part in item.items()}
    if isinstance(item, (list, tuple)):
        return [_finite(part) for part in item]
    return None if isinstance(item, float) and not math.isfinite(item) else item


def _call(invocation: Invocation) -> Result:
    check_backend()
    check_arguments(invocation.command, invocation.source, invocation.flags)
    given = [invocation.source, invocation.flags, Progress(Console(stderr=True))]
    if COMMANDS[invocation.command].source == SCRIPT:
        given.append(invocation.arguments)
    with variables_kept(LOG_LEVEL, GROWTH):
        # Measuring runs in processes of their own, which need device memory that this process must not take.
        os.environ.setdefault(GROWTH, "true")
        with quiet_start():
            from tf_memsaver.command.verbs import VERBS
            from tf_memsaver.compat.counting import VARIABLE, count_memory
        with variables_kept(VARIABLE):
            count_memory()
            return VERBS[invocation.command](*given)
