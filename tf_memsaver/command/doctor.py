"""The command ``doctor``: what ``optimize`` would do to the model that a script trains, and the line to add."""

from __future__ import annotations

import functools
import os
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import keras
from rich.text import Text

from tf_memsaver import api
from tf_memsaver.command.flags import LIMITS
from tf_memsaver.command.output import Result
from tf_memsaver.command.script import Place, own_traceback, run_script
from tf_memsaver.command.steps import Given, plan_shown, searched
from tf_memsaver.compat.backend import check_backend
from tf_memsaver.compat.fit_calls import TrainingReached, data_prepared, first_training
from tf_memsaver.compat.keras_training import replicas_of
from tf_memsaver.cost.device import processor
from tf_memsaver.display.progress import Progress
from tf_memsaver.errors import InvalidRequestError, MemsaverError
from tf_memsaver.plan.plan import Plan
from tf_memsaver.units import Share

_BATCH_OF_FIT = 32
"""The batch size of ``fit`` where arrays are given and no size is (Keras 3.15: ``data_adapters/array_data_adapter.py``
and ``trainers/trainer.py``)."""

_WIDTH = 76
"""Characters of a line to add."""

_LOOP = (
    "trains in a loop of its own at {place}, not in fit. Give its step to the library: tf_memsaver.optimize(model, "
    "data=..., step=train_step)."
)
_NO_FIT = (
    "ended without a call of fit on a keras.Model. Name the script that trains (its arguments go after --), or use "
    "`tf-memsaver plan` with a function that makes the model."
)


def doctor(source: str, flags: Any, progress: Progress, arguments: Sequence[str] = ()) -> Result:
    """Run a script up to its first ``fit``, train nothing, and plan for the model and the data that it calls it with.

    Raises:
      InvalidRequestError: it failed, ended or trained otherwise before that.
      MemsaverError: what ``search_plan`` raises.
    """
    found: list[Result | Exception] = []

    def hear(model: Any, given: dict[str, Any], frame: FrameType) -> None:
        # The script may catch what is raised in it.
        try:
            found.append(_diagnosed(source, flags, progress, _Fit.of(model, given, frame)))
        except Exception as error:
            found.append(error)

    progress.note(f"running {source} up to its first fit; what it prints follows")
    try:
        with first_training(hear):
            run_script(source, arguments)
    except TrainingReached:
        pass
    except (Exception, SystemExit) as error:
        if not found:
            raise _failed(source, error, progress) from error
    if not found:
        raise InvalidRequestError(f"'{source}' {_NO_FIT}")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """A call of ``fit``: the model, None where something else trains, the arguments by name, and where it stands."""

    model: Any
    given: dict[str, Any]
    place: Place

    @classmethod
    def of(cls, model: Any, given: dict[str, Any], frame: FrameType) -> _Fit:
        return cls(model=model, given=given, place=Place.of(frame))

    @property
    def samples(self) -> int | None:
        """How many samples there are in arrays, which ``fit`` makes batches of; None for datasets."""
        shapes = [getattr(leaf, "shape", None) for leaf in keras.tree.flatten(self.given.get("x"))]
        return int(shapes[0][0]) if shapes and shapes[0] and all(shapes) else None

    @functools.cached_property
    def batches(self) -> dict[str, Any]:
        """What tells a verb of the batches."""
        x, y, weights = (self.given.get(name) for name in ("x", "y", "sample_weight"))
        if self.samples is None:
            # The script goes no further, so that nobody misses a batch of an iterator.
            return {"data": next(x) if isinstance(x, Iterator) else x, "batch_size": None}
        size = min(self.given.get("batch_size") or _BATCH_OF_FIT, self.samples)
        # A verb is told of one replica's batch.
        return {"data": (x, y, weights)[: 2 if weights is None else 3], "batch_size": size // replicas_of(self.model)}

    def written(self, batch_size: int) -> list[str]:
        """Return the arguments that tell ``optimize`` of the batches, as the script would write them."""
        x, y = self.place.argument(0, "x") or "...", self.place.argument(1, "y")
        if self.samples is None and not y:
            return [f"data={x}"]
        return [f"data=({x}, {y})" if y else f"data=({x},)", f"batch_size={batch_size}"]


def _diagnosed(source: str, flags: Any, progress: Progress, fit: _Fit) -> Result:
    """Return what ``optimize`` would do to the model of a call of ``fit``."""
    if os.environ.get("KERAS_BACKEND"):
        # Keras was imported before the script could choose it.
        check_backend(os.environ["KERAS_BACKEND"])
    if fit.model is None:
        raise InvalidRequestError(f"'{source}' {_LOOP.format(place=fit.place)}")
    progress.note(f"{fit.place} calls fit of model '{fit.model.name}'; nothing is trained")
    with data_prepared(fit.model):
        given = Given(fit.model, api.strip(fit.model), fit.batches)
        traced, made = searched(given, flags, progress)
    line = "" if hasattr(fit.model, "memsaver_plan") or not made.recomputed else _line(fit, made, flags)
    document = {
        "file": fit.place.file,
        "line": fit.place.line,
        "variable": fit.place.variable,
        "model": fit.model.name,
        "device": processor(traced.graph.device),
        "add": line,
        "plan": made.to_json(),
    }
    return Result(
        satisfied=True, document=document, shown=(*plan_shown(traced, made, flags), Text(), *_advice(fit, made, line))
    )


def _advice(fit: _Fit, made: Plan, line: str) -> Iterator[str]:
    """Yield what to do, in lines."""
    if hasattr(fit.model, "memsaver_plan"):
        yield f"{fit.place} calls fit of a model that is optimized already: nothing to add."
    elif not made.recomputed:
        yield f"{fit.place} calls fit. Nothing to add: no plan helps this model here."
    else:
        if not fit.place.variable:
            yield f"{fit.place} calls fit of a model without a name."
            yield "Name it (model = ...), and call model.fit."
        where = f"before {fit.place}" if fit.place.variable else "between"
        yield f"Add this line {where}, and `import tf_memsaver` at the top:"
        yield textwrap.indent(line, "    ")


def _line(fit: _Fit, made: Plan, flags: Any) -> str:
    """Return the call that optimizes the model as the flags ask for it, on several lines where one is too long."""
    name = fit.place.variable or "model"
    limits = [f"{each}={_literal(flags[each].value)}" for each in LIMITS if not flags[each].using_default_value]
    arguments = [name, *fit.written(made.batch_size), *limits]
    line = f"{name} = tf_memsaver.optimize({', '.join(arguments)})"
    if len(line) <= _WIDTH:
        return line
    return "\n".join([f"{name} = tf_memsaver.optimize(", *(f"    {each}," for each in arguments), ")"])


def _literal(value: Any) -> str:
    """Return a flag's value as Python text."""
    if isinstance(value, Share):
        return f'"{100 * value:g}%"'
    if isinstance(value, int) and value and not value % 2**20:
        return f'"{value // 2**20}MiB"' if value % 2**30 else f'"{value // 2**30}GiB"'
    return repr(list(value) if isinstance(value, tuple) else value).replace("'", '"')


def _failed(source: str, error: BaseException, progress: Progress) -> MemsaverError:
    """Return what to say of a script that raised something; its traceback is shown."""
    if isinstance(error, SystemExit):
        code = "" if error.code is None else repr(error.code)
        return InvalidRequestError(
            f"'{source}' ended by sys.exit({code}) before it called fit. Arguments that it needs go after --."
        )
    progress.note(own_traceback(source, error).rstrip())
    return InvalidRequestError(
        f"'{source}' failed before it called fit ({type(error).__name__}); its traceback is above."
    )
