"""The kinds of Keras models: one table of how a model becomes a program, by which it is planned and trained.

A model that says itself what a training step does, and whose data is known, is planned as that step: a program of the
networks that it trains, each of a kind by itself.

A model and the granularity of a request tell the kind, so that a plan need not name it. A new kind is a module with a
subclass of ``program.ModelProgram``, and an entry here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from tf_memsaver.options.table import Granularity
from tf_memsaver.program.block_program import chosen_program, noted
from tf_memsaver.program.layer_program import LayerProgram, runs_layer_by_layer
from tf_memsaver.program.memo import once
from tf_memsaver.program.model_function import check_no_plan_inside, settings_of
from tf_memsaver.program.operation_program import OperationProgram
from tf_memsaver.program.program import ModelProgram
from tf_memsaver.program.signature import is_planned_as_a_step, trained_on
from tf_memsaver.program.step_program import StepProgram
from tf_memsaver.program.sublayer_program import SublayerProgram


class Kind(NamedTuple):
    """The models that ``holds`` is true for, in units of ``granularity``.

    ``program`` makes the program of one. ``check`` refuses a model that no plan can be made for, before it is traced.
    """

    granularity: Granularity
    holds: Callable[[Any], bool]
    program: Callable[[Any], ModelProgram]
    check: Callable[[Any], None] = lambda model: None


KINDS = (
    Kind("layer", runs_layer_by_layer, LayerProgram),
    Kind("layer", lambda model: True, SublayerProgram, check_no_plan_inside),
    Kind("op", lambda model: True, OperationProgram, check_no_plan_inside),
)
"""A model is of the first kind that holds for it."""


def kind_of(model: Any, granularity: Granularity) -> Kind:
    """Return the kind of a model whose call is planned in units of ``granularity``."""
    return next(kind for kind in KINDS if kind.granularity == granularity and kind.holds(model))


def program_of(
    model: Any, granularity: Granularity, opened: Collection[str] | None = None
) -> ModelProgram | StepProgram:
    """Return ``model``, which is only read, as a program.

    With granularity ``"auto"`` the layers in ``opened`` are taken apart; if it is None, those where that pays.

    Raises:
      UnsupportedModelError: its inputs are not known, its call or step cannot be traced, or no plan can be made for it.
    """
    if is_planned_as_a_step(model):
        # What a step calls its networks with is up to it, and a plan of operations is for one kind of call.
        of_networks: Granularity = "layer" if granularity == "auto" else granularity
        make = functools.partial(StepProgram, model, functools.partial(_call_program, of_networks))
        program = once(model, lambda: (granularity, repr(trained_on(model)), settings_of(model)), make)
        if granularity == "auto":
            return noted(program, "by layers alone, since it trains by a step of its own")
        return program
    if granularity == "auto":
        return chosen_program(model, opened, functools.partial(_call_program, "layer"))
    return _call_program(granularity, model)


def _call_program(granularity: Granularity, model: Any) -> ModelProgram:
    kind = kind_of(model, granularity)
    kind.check(model)
    return kind.program(model)
