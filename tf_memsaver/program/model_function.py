"""The training call of a Keras model as a traced function, for plans whose units are operations."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_memsaver.compat import keras_calls, keras_models, keras_training, keras_variables
from tf_memsaver.compat.released import release
from tf_memsaver.compat.replicas import AnyReplica, in_one_replica
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.ir.segments import Segment
from tf_memsaver.parity.scopes import unscoped_operations
from tf_memsaver.program.calls import Call
from tf_memsaver.program.function_calls import FunctionCalls, by_size
from tf_memsaver.program.model_call import CallArguments
from tf_memsaver.program.op_calls import OpCall
from tf_memsaver.program.program import ModelProgram
from tf_memsaver.program.signature import Given, tensors_in, trace_call, usual_call


class ModelFunction:
    """A model's call in training, listed operation by operation; it stands for the layers' settings then.

    Beside its outputs the function returns what Keras hangs on them (masks, logits that a loss looks through to) and
    the losses that layers add.
    """

    def __init__(self, model: Any, given: Given | None = None) -> None:
        """Trace ``model``, which is only read, for what it is given; called as ``fit`` does if nothing is.

        Raises:
          UnsupportedModelError: its inputs are not known, or its call cannot be traced.
        """
        self._structure: Any = None
        self._owners: list[int] = []
        """The places of the layers that add the losses, among all of the model's."""
        self.given = usual_call(model) if given is None else given

        unscoped: Collection[str] = ()

        def traced(*flat: Any) -> dict[str, list[Any]]:
            nonlocal unscoped
            local = keras_variables.read_as_local(model.variables)
            with self.replica(model), local, unscoped_operations() as unscoped:
                outputs = self.called(model, flat)
            self._structure = keras.tree.map_structure(lambda _: None, outputs, none_is_leaf=False)
            made = keras.tree.flatten(outputs)
            added = [
                (place, loss)
                for place, layer in enumerate(keras_models.all_layers(model))
                for loss in keras_training.own_losses(layer)
            ]
            self._owners = [place for place, _ in added]
            return {
                "losses": [loss for _, loss in added],
                "masks": [keras_calls.get_keras_mask(tensor) for tensor in made],
                "logits": [keras_training.get_logits(tensor) for tensor in made],
                "outputs": made,
            }

        concrete = trace_call(model, traced, self.specs(model))
        scopes = {operation.name.partition("/")[0] for operation in concrete.graph.get_operations() if operation.inputs}
        self.scope = min(scopes, key=lambda name: not name.startswith(model.name))
        frozen = [keras_variables.local_variable(v) for v in model.variables if not v.trainable]
        self.calls = FunctionCalls(concrete, scope=self.scope, unscoped=unscoped, group=self.group, frozen=frozen)
        release(concrete.graph)

    def again(self, model: Any, given: Given) -> ModelFunction:
        """Return the call with other arguments or settings, cut as this one is."""
        return ModelFunction(model, given)

    def specs(self, model: Any) -> list[tf.TensorSpec]:
        """Return the specs of the flat inputs that the call is traced with."""
        functional = keras_models.inner_functional(model)
        cast = model.compute_dtype if functional is None and model.autocast else None
        return [_spec(tensor, cast) for tensor in self.given.specs]

    def group(
        self, calls: Sequence[OpCall], outputs: Sequence[int], resident: frozenset[int], slots: Mapping[int, int]
    ) -> tuple[Call, ...]:
        """Return operations as calls (a ``function_calls.Grouping``)."""
        return by_size(calls, outputs, resident, slots)

    def segments(self, planned: Sequence[Segment]) -> tuple[Segment, ...]:
        """Return a plan's segments over the calls of this trace."""
        return tuple(planned)

    def replica(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Return what has the call traced as any replica of the model's strategy runs it."""
        return in_one_replica(model.distribute_strategy, AnyReplica)

    def called(self, model: Any, flat: Sequence[Any]) -> Any:
        """Return what ``model`` makes of flat inputs in training."""
        return self.given.called(model, flat)

    def flat_inputs(self, model: Any, inputs: Any, tensors: Mapping[str, Any] | None = None) -> list[Any]:
        """Return the flat tensors that the function takes for what ``model`` is called with (see ``Given``)."""
        functional = keras_models.inner_functional(model)
        if functional is not None:
            return keras_models.standardize_inputs(functional, inputs)
        flat, specs = tensors_in((inputs, tensors or {})), self.calls.argument_specs
        return [tf.cast(each, spec.dtype) for each, spec in zip(flat, specs, strict=True)]

    def finish(self, model: Any, flat: Sequence[Any]) -> Any:
        """Return the outputs of ``model`` for the tensors of ``calls.sequence.outputs``.

        Its layers get the losses that they add: a step of one's own may ask any of them.
        """
        result, owners = self.calls.finish(flat), keras_models.all_layers(model) if self._owners else []
        for place, loss in zip(self._owners, result["losses"], strict=True):
            # A Functional model has an add_loss of its own, for symbolic tensors alone.
            keras.layers.Layer.add_loss(owners[place], loss)
        for output, mask, logits in zip(result["outputs"], result["masks"], result["logits"], strict=True):
            if mask is not None:
                keras_calls.set_keras_mask(output, mask)
            if logits is not None:
                keras_training.set_logits(output, logits)
        return keras.tree.pack_sequence_as(self._structure, result["outputs"])


class TracedProgram(ModelProgram):
    """What programs have in common that are listed in a trace of their model's training call.

    No loss sees through their outputs: the trace returns the logits, too.
    """

    def __init__(self, model: Any, function: ModelFunction) -> None:
        """Take what ``model`` was traced as."""
        self.model, self.function = model, function
        self.sequence = function.calls.sequence

    def enter(self, inputs: Any) -> list[Any]:
        """Return the flat inputs, and what is hoisted, which is run."""
        return self.function.calls.enter(self.function.flat_inputs(self.model, inputs))

    def enter_call(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the tensors for ``sequence.inputs`` of a call with these arguments."""
        given = CallArguments.of(model, args, kwargs)
        # Keras makes tensors of arrays, which a plan counts as constants.
        tensors = {name: given.tensors[name] for name in self.function.given.tensors}
        return self.function.calls.enter(self.function.flat_inputs(self.model, given.inputs, tensors))

    def finish(self, flat: Sequence[Any]) -> Any:
        """Return the outputs; the layers of the model get the losses that they add."""
        return self.function.finish(self.model, flat)


def check_no_plan_inside(model: Any) -> None:
    """Check that no layer of ``model`` trains by a plan: the trace would go through its segments.

    Raises:
      UnsupportedModelError: one does.
    """
    for layer in keras_models.all_layers(model)[1:]:
        if keras_models.own_class(layer) is not type(layer):
            raise UnsupportedModelError(
                f"'{layer.name}' inside model '{model.name}' already has a plan, and trains by it. Call the model "
                "as it is, or first put the plain network back in its place: tf_memsaver.strip(network)."
            )


def _spec(tensor: Any, cast: str | None) -> tf.TensorSpec:
    """Return the spec of an input; ``cast`` is the type that Keras casts floating inputs to before the call."""
    dtype = tf.as_dtype(tensor.dtype)
    return tf.TensorSpec(tuple(tensor.shape), cast if cast and dtype.is_floating else dtype, name=tensor.name)


def settings_of(model: Any) -> Any:
    """Return what of a model decides what its call traces, and may change later: flags, and what layers read in Python.

    Of the latter only numbers, texts and flags are compared.
    """
    return trainable_in(model), values_in(model)


def values_in(model: Any) -> tuple[Any, ...]:
    """Return the numbers, texts and flags that the layers of a model read in Python."""
    values = map(keras_models.python_values, keras_models.all_layers(model))
    return tuple(tuple((n, type(v), v) for n, v in sorted(each.items())) for each in values)


def trainable_in(model: Any) -> tuple[bool, ...]:
    """Return the ``trainable`` flags of a model's layers and variables."""
    flags = [layer.trainable for layer in keras_models.all_layers(model)]
    return (*flags, *(variable.trainable for variable in model.variables))
