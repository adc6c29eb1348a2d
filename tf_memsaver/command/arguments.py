"""All that is wrong with a command line and can be told before TensorFlow is loaded, which takes seconds."""

from __future__ import annotations

import enum
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Collection
from typing import Any

from tf_memsaver.command.flags import COMMANDS, LIMITS, SCRIPT
from tf_memsaver.command.script import check_text
from tf_memsaver.command.sources import top_level_names
from tf_memsaver.compat import keras_names
from tf_memsaver.errors import InvalidRequestError
from tf_memsaver.files.targets import Target, TargetKind, check_target
from tf_memsaver.options.checks import did_you_mean
from tf_memsaver.plan.plan import Plan

_FILE_ENDINGS = (".keras", ".h5", ".hdf5")
_MOST_FILES = 5
"""Files that an error names where none is close."""

_OF_KERAS = (
    "data",
    "input_shape",
    "optimizer",
    "loss",
    "plan",
    "save_format",
    "granularity",
    "time_chunks",
    "executor",
    "calibrate",
)
"""Flags that mean nothing for a SavedModel."""

_OF_SAVED_MODELS = ("function",)
"""Flags that mean nothing for a Keras model."""


class SourceKind(enum.Enum):
    """What kind of thing a command line names as its model."""

    FILE = "file"
    SAVED_MODEL = "SavedModel"
    FUNCTION = "function"
    APPLICATION = "application"


def kind_of(source: str) -> SourceKind:
    """Return what kind of model ``source`` names.

    Raises:
      InvalidRequestError: it names a file that is not there, or a folder that is no SavedModel.
    """
    if source.lower().endswith(_FILE_ENDINGS):
        if not os.path.isfile(source):
            raise InvalidRequestError(f"there is no model file '{source}'.{_close_files(source, _FILE_ENDINGS)}")
        return SourceKind.FILE
    if os.path.isfile(os.path.join(source, "saved_model.pb")):
        return SourceKind.SAVED_MODEL
    if os.path.isdir(source):
        raise _no_model(source)
    return SourceKind.FUNCTION if ":" in source else SourceKind.APPLICATION


def check_arguments(command: str, source: str, flags: Any) -> None:
    """Check a command line, so far as its model is not needed; values of flags are checked when they are parsed.

    Raises:
      MemsaverError: what the command would raise later.
    """
    if COMMANDS[command].source == SCRIPT:
        _check_script(source)
        return
    kind = kind_of(source)
    if kind is SourceKind.SAVED_MODEL:
        if command != "optimize":
            raise _no_model(source)
        _refuse(_OF_KERAS, flags, f"is for Keras models; '{source}' is a SavedModel")
    else:
        _refuse(_OF_SAVED_MODELS, flags, f"is for SavedModels; '{source}' is a Keras model")
        _check_model(kind, source, flags)
        if flags.data is not None:
            _check_module(flags.data, "load data from")
        _check_plan(kind, command, flags)
    if "strategy" in flags and kind is not SourceKind.FUNCTION:
        # A module of the user's own may register a planner when it is imported.
        _check_strategy(flags.strategy)
    if command in ("optimize", "report") or (command in ("plan", "max-batch") and flags.output is not None):
        output_target(source, flags, TargetKind.FOLDER if command == "optimize" else TargetKind.FILE)


def output_target(source: str, flags: Any, kind: TargetKind) -> Target:
    """Return the place that --output names, checked.

    Raises:
      MemsaverError: none is named, or it cannot be written to (see ``files.targets``).
    """
    if flags.output is None:
        raise InvalidRequestError("--output is missing. Say where to write, such as --output=out.")
    return check_target(flags.output, kind, overwrite=flags.overwrite, sources=[source])


def check_application(source: str, known: Collection[str]) -> str:
    """Return the name of keras.applications that ``source`` means, in any case and without separators.

    Raises:
      InvalidRequestError: none of ``known``; it shows names that are close.
    """
    builders = {_plain(name): name for name in known}
    if _plain(source) in builders:
        return builders[_plain(source)]
    raise InvalidRequestError(
        f"'{source}' is not a model of keras.applications.{did_you_mean(_plain(source), builders)} "
        f"A model may also be a .keras or .h5 file, or package.module:function."
    )


def _refuse(names: Collection[str], flags: Any, why: str) -> None:
    for name in names:
        if name in flags and flags[name].present:
            raise InvalidRequestError(f"--{name} {why}. Leave it out.")


def _check_model(kind: SourceKind, source: str, flags: Any) -> None:
    if kind is not SourceKind.APPLICATION:
        if flags.input_shape:
            raise InvalidRequestError(
                "--input_shape is only for models of keras.applications; other models have their own input shape. "
                "Leave it out."
            )
        if kind is SourceKind.FUNCTION:
            _check_module(source, "make a model from")
        return
    known = keras_names.applications()
    if known:
        check_application(source, known)
    # Names of other classes are registered by modules, which are imported with other models.
    for what, name, known in (
        ("optimizer", flags.optimizer and flags.optimizer.lower(), keras_names.optimizers()),
        ("loss", flags.loss, keras_names.losses()),
    ):
        if name and known and name not in known:
            raise InvalidRequestError(
                f"{what}='{getattr(flags, what)}' is no {what} of Keras.{did_you_mean(name, known)} "
                f"Give a name of keras.{what}{'es' if what == 'loss' else 's'}."
            )


def _check_script(path: str) -> None:
    if not os.path.isfile(path):
        raise InvalidRequestError(f"there is no script '{path}'.{_close_files(path, ('.py',))}")
    check_text(path)


def _check_module(source: str, what: str) -> None:
    """Check that ``package.module:function`` has both parts, and that there is such a package; nothing is imported."""
    module, _, function = source.partition(":")
    package = module.partition(".")[0]
    if not package or not function:
        raise InvalidRequestError(f"'{source}' must be written package.module:function, such as my_models:build.")
    here = importlib.machinery.PathFinder.find_spec(package, [os.getcwd()])
    if here is None and package not in sys.modules and importlib.util.find_spec(package) is None:
        raise InvalidRequestError(
            f"cannot {what} '{source}': No module named '{package}'.{did_you_mean(package, _modules_here())} "
            "Install it, or run this command in the folder that contains it."
        )
    names = top_level_names(module)
    name = function.partition(".")[0]
    if names is not None and name not in names:
        hint = did_you_mean(name, {each for each in names if not each.startswith("_")})
        raise InvalidRequestError(f"cannot {what} '{source}': module '{module}' has no attribute '{name}'.{hint}")


def _modules_here() -> set[str]:
    return {name.removesuffix(".py") for name in os.listdir() if name.endswith(".py")}


def _close_files(path: str, endings: tuple[str, ...]) -> str:
    """Return a sentence with the files of some kinds whose names are close to a path's; empty if there are none."""
    folder, name = os.path.split(path)
    try:
        there = [each for each in os.listdir(folder or ".") if each.lower().endswith(endings)]
    except OSError:
        return f" There is no folder '{folder}'."
    close = did_you_mean(name, there)
    return close or (f" There are {', '.join(sorted(there)[:_MOST_FILES])}." if there else "")


def _check_plan(kind: SourceKind, command: str, flags: Any) -> None:
    given = [name for name in (*LIMITS, "calibrate") if name in flags and not flags[name].using_default_value]
    if "plan" in flags and flags.plan is not None:
        # Measured steps can be compared with any budget.
        clash = [name for name in given if (name, command) != ("budget", "measure")]
        if clash:
            raise InvalidRequestError(
                f"--{clash[0]} is for making a plan, but --plan gives an existing one. Leave one of them out."
            )
        if not os.path.exists(flags.plan):
            close = _close_files(flags.plan, (".json",))
            raise InvalidRequestError(f"cannot read a plan from '{flags.plan}': there is no such file.{close}")
        Plan.load(flags.plan)
        return
    if "calibrate" in given and flags.budget is None:
        raise InvalidRequestError("--calibrate compares real steps with a budget. Give one, such as --budget=80%.")
    # An optimized model in a file brings its plan, and that its batch size.
    brings_a_plan = kind is SourceKind.FILE and not given and command in ("optimize", "verify", "measure", "report")
    if flags.batch_size is None and flags.data is None and not brings_a_plan and command != "max-batch":
        raise InvalidRequestError("the batch size is missing. Give --batch_size, or --data=package.module:function.")


def _check_strategy(name: str) -> None:
    # All planners enter their names in the table when they are imported, with NumPy alone.
    from tf_memsaver.planners.solve import check_strategy

    check_strategy(name)


def _no_model(folder: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"'{folder}' is a folder; the model must be a .keras or .h5 file, package.module:function, or a name of "
        f"keras.applications. (The command optimize takes the folder of a SavedModel, too.)"
    )


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
