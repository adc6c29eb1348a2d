"""Which granularity a model is planned at where nobody says: by layers, or some of its layers by operations.

A plan of operations runs copies of traced operations, which have the plain step's bits in a graph that XLA does not
compile. So it is chosen only where ``fit`` runs such a graph.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras

from tf_memsaver.compat import keras_models
from tf_memsaver.compat.keras_training import fit_compiles
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.program.block_calls import BlockCalls
from tf_memsaver.program.layer_calls import ModelEntry, list_layer_calls
from tf_memsaver.program.layer_program import runs_layer_by_layer
from tf_memsaver.program.model_function import check_no_plan_inside
from tf_memsaver.program.operation_program import OperationProgram
from tf_memsaver.program.program import Wanted
from tf_memsaver.program.train_step import has_own_train_step


class BlockProgram(OperationProgram):
    """The training call of a model, some of whose layers are taken apart."""

    def __init__(self, model: Any, blocks: BlockCalls) -> None:
        """Take what ``model`` was traced as."""
        super().__init__(model, blocks)
        self.sequence = replace(self.sequence, opened=blocks.opened)

    @classmethod
    def of(cls, model: Any, wanted: Wanted) -> Any:
        """Return ``model`` as a program in which layers are taken apart, or else the one by layers.

        Raises:
          UnsupportedModelError: there is none by layers, or the layers are named and the call cannot be traced.
        """
        if wanted.time_chunks is not None:
            return wanted.by_layers(model)
        if wanted.opened is None:
            if has_nothing_to_open(model):
                return wanted.by_layers(model)
            reason = _not_by_operations(model) if wanted.given is None else ""
            if reason:
                return wanted.by_layers(model).noted(f"by layers alone, since {reason}")
        elif not wanted.opened:
            return wanted.by_layers(model)
        check_no_plan_inside(model)
        try:
            blocks = BlockCalls(model, wanted.given, wanted.opened)
        except UnsupportedModelError as error:
            if wanted.opened is not None:
                raise
            return wanted.by_layers(model).noted(f"by layers alone: {error}")
        if blocks.opened:
            return cls(model, blocks)
        by_layers = wanted.by_layers(model)
        return by_layers.noted(f"by layers alone, since {blocks.whole_since}") if blocks.whole_since else by_layers


_READ_WHAT_COMES_OUT = frozenset({"linear", "relu", "sigmoid", "softmax", "tanh"})
"""Activations of Keras whose gradients read their results alone: to cut before one keeps no less."""


def has_nothing_to_open(model: Any) -> bool:
    """Whether all that a model calls one after another are layers of Keras's own that compute one thing each.

    Between those a plan cuts anyhow.
    """
    if not runs_layer_by_layer(model):
        return False
    operations = (call.operation for call in list_layer_calls(model).calls)
    return all(_computes_one_thing(each) for each in operations if not isinstance(each, ModelEntry))


def _computes_one_thing(layer: Any) -> bool:
    """Whether a layer of Keras's own keeps nothing inside, as attention does, and a GELU after a product."""
    activation = getattr(getattr(layer, "activation", None), "__name__", "linear")
    inside = keras_models.sublayers(layer) if isinstance(layer, keras.layers.Layer) else ()
    is_single = keras_models.is_built_in(layer) and not inside
    return is_single and (activation in _READ_WHAT_COMES_OUT or isinstance(layer, keras.layers.Activation))


def _not_by_operations(model: Any) -> str:
    """Return why a call that a model makes of itself is not planned by operations, or an empty string."""
    own_step = "it has a train_step of its own, whose data was not given" if has_own_train_step(model) else ""
    return not_in_graph(model) or own_step


def not_in_graph(model: Any) -> str:
    """Return why a model's steps are no graph, or one that XLA compiles; an empty string where they are a plain one."""
    if not getattr(model, "compiled", False):
        return "it is not compiled (compile it first if fit trains it), and the steps of other loops may be eager"
    if model.run_eagerly:
        return "its steps are eager"
    return "XLA compiles its steps" if fit_compiles(model) else ""
