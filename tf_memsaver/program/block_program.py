"""Which granularity a model is planned at where nobody says: by layers, or some of its layers by operations.

A plan of operations runs copies of traced operations, which have the plain step's bits in a graph that is no replica's
and that XLA does not compile. So it is chosen only where ``fit`` runs such a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, TypeVar

import tensorflow as tf

from tf_memsaver.compat import keras_models
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.program.block_calls import BlockCalls
from tf_memsaver.program.layer_calls import ModelEntry, list_layer_calls
from tf_memsaver.program.layer_program import runs_layer_by_layer
from tf_memsaver.program.model_function import check_no_plan_inside
from tf_memsaver.program.operation_program import OperationProgram
from tf_memsaver.program.program import ModelProgram
from tf_memsaver.program.step_program import StepProgram
from tf_memsaver.program.train_step import has_own_train_step

Program = TypeVar("Program", ModelProgram, StepProgram)

ByLayers = Callable[[Any], ModelProgram]
"""Makes the program of a model by layers."""


class BlockProgram(OperationProgram):
    """The training call of a model, some of whose layers are taken apart."""

    def __init__(self, model: Any, blocks: BlockCalls) -> None:
        """Take what ``model`` was traced as."""
        super().__init__(model, blocks)
        self.sequence = replace(self.sequence, opened=blocks.opened)


def chosen_program(model: Any, opened: Collection[str] | None, by_layers: ByLayers) -> ModelProgram:
    """Return ``model`` as a program in which the layers in ``opened`` are taken apart; it is chosen here if None.

    Raises:
      UnsupportedModelError: what ``by_layers`` raises, or the layers are named and the model's call cannot be traced.
    """
    if opened is None:
        if _is_of_layers_of_keras(model):
            return by_layers(model)
        reason = _not_by_operations(model)
        if reason:
            return noted(by_layers(model), f"by layers alone, since {reason}")
    elif not opened:
        return by_layers(model)
    check_no_plan_inside(model)
    try:
        blocks = BlockCalls(model, opened=opened)
    except UnsupportedModelError as error:
        if opened is not None:
            raise
        return noted(by_layers(model), f"by layers alone: {error}")
    return BlockProgram(model, blocks) if blocks.opened else by_layers(model)


def noted(program: Program, note: str) -> Program:
    """Return a program whose plans tell why layers were not taken apart."""
    program.sequence = replace(program.sequence, note=note)
    return program


def _is_of_layers_of_keras(model: Any) -> bool:
    """Whether all that a model calls one after another are layers of Keras's own: between those a plan cuts anyhow."""
    if not runs_layer_by_layer(model):
        return False
    operations = [call.operation for call in list_layer_calls(model).calls]
    return all(isinstance(each, ModelEntry) or keras_models.is_built_in(each) for each in operations)


def _not_by_operations(model: Any) -> str:
    """Return why a model is not planned by operations unless one asks for it, or an empty string."""
    if model.distribute_strategy is not tf.distribute.get_strategy() or tf.distribute.has_strategy():
        return "it trains under a tf.distribute strategy"
    if not getattr(model, "compiled", False):
        return "it is not compiled, and the steps of a loop of one's own may be eager"
    if has_own_train_step(model):
        return "it has a train_step of its own"
    if model.run_eagerly:
        return "its steps are eager"
    return "XLA compiles its steps" if model.jit_compile else ""
