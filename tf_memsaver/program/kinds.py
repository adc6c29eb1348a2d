"""The kinds of Keras models: one table of how a model becomes a program, by which it is planned and trained.

A model that says itself what a training step does, and whose data is known, is planned as that step: a program of the
networks that it trains, each of a kind by itself.

A model and the granularity of a request tell the kind, so that a plan need not name it. A new kind is a module with a
subclass of ``program.ModelProgram``, and an entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

from tf_memsaver.options.table import Granularity, TimeChunks
from tf_memsaver.program.block_program import BlockProgram, has_nothing_to_open
from tf_memsaver.program.layer_calls import list_layer_calls
from tf_memsaver.program.layer_program import LayerProgram, runs_layer_by_layer
from tf_memsaver.program.loop_program import LoopProgram, is_loop
from tf_memsaver.program.model_function import check_no_plan_inside
from tf_memsaver.program.operation_program import OperationProgram
from tf_memsaver.program.program import ModelProgram, TrainingProgram, Wanted
from tf_memsaver.program.signature import is_planned_as_a_step
from tf_memsaver.program.step_program import StepProgram
from tf_memsaver.program.sublayer_program import SublayerProgram
from tf_memsaver.program.train_step import has_own_train_step

ANY: Literal["any"] = "any"
"""A kind that says by itself what the granularity of a request is for."""


class Kind(NamedTuple):
    """The models that ``holds`` is true for, in units of ``granularity``.

    ``program`` is what one becomes. ``check`` refuses a model that no plan can be made for, before it is traced.
    """

    granularity: Granularity | Literal["any"]
    holds: Callable[[Any], bool]
    program: type[TrainingProgram]
    check: Callable[[Any], None] = lambda model: None


KINDS = (
    Kind(ANY, is_loop, LoopProgram),
    Kind(ANY, is_planned_as_a_step, StepProgram),
    Kind("layer", runs_layer_by_layer, LayerProgram),
    Kind("layer", lambda model: True, SublayerProgram, check_no_plan_inside),
    Kind("op", lambda model: True, OperationProgram, check_no_plan_inside),
    Kind("auto", lambda model: True, BlockProgram),
)
"""A model is of the first kind that holds for it, and its call of the first that runs no step."""


_NOT_CUT = "nothing is cut along time, which is done in Functional and Sequential models that are planned by layers"


def program_of(
    model: Any,
    granularity: Granularity,
    opened: Collection[str] | None = None,
    time_chunks: TimeChunks = None,
) -> ModelProgram | StepProgram:
    """Return ``model``, which is only read, as a program.

    With granularity ``"auto"`` the layers in ``opened`` are taken apart; if it is None, those where that pays.
    Recurrent layers are cut into chunks of ``time_chunks``.

    Raises:
      UnsupportedModelError: its inputs are not known, its call or step cannot be traced, or no plan can be made for it.
    """
    return _program(model, Wanted(granularity, opened, time_chunks, _program_of_call), KINDS)


def _program_of_call(model: Any, wanted: Wanted) -> ModelProgram:
    return _program(model, wanted, [kind for kind in KINDS if not kind.program.runs_step])


def _program(model: Any, wanted: Wanted, kinds: Sequence[Kind]) -> Any:
    kind = next(kind for kind in kinds if kind.granularity in (wanted.granularity, ANY) and kind.holds(model))
    kind.check(model)
    program = kind.program.of(model, wanted)
    if wanted.time_chunks is not None and not program.cuts_time:
        return program.noted(_NOT_CUT)
    return program


def labels_known(model: Any, granularity: Granularity) -> tuple[str, ...] | None:
    """Return the labels that the units of a model will have; None where they are known only when it is traced."""
    by_layers = granularity == "layer" or (granularity == "auto" and has_nothing_to_open(model))
    if not by_layers or has_own_train_step(model) or not runs_layer_by_layer(model):
        return None
    return tuple(call.label for call in list_layer_calls(model).calls)
