"""Capture: a Keras model and a batch size in, the Graph of one training step out."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_memsaver.capture.convert import traced_graph
from tf_memsaver.capture.step import Placeholders, Weight
from tf_memsaver.compat import keras_models, keras_training, keras_variables
from tf_memsaver.compat.unallocated import variables_unallocated
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.ir.graph import Graph, MemoryKind
from tf_memsaver.options import checked
from tf_memsaver.program import batch
from tf_memsaver.program.batch import input_specs
from tf_memsaver.program.calls import CallSequence
from tf_memsaver.program.kept_objects import KeptObjects
from tf_memsaver.program.layer_calls import list_layer_calls, runs_as_python
from tf_memsaver.program.model_function import ModelFunction, settings_of
from tf_memsaver.program.signature import check_model
from tf_memsaver.program.sublayer_calls import SublayerCalls

_CAPTURED: weakref.WeakKeyDictionary[Any, dict[Any, Graph]] = weakref.WeakKeyDictionary()
"""By model and how it was captured: its graph without values and operations."""


def capture_graph(model: Any, *, batch_size: int, granularity: str = "layer", profile: bool = False) -> Graph:
    """Trace one training step of ``model`` at ``batch_size`` and return it as a Graph; nothing is run or changed.

    Its units are the calls of the model's layers or, with granularity ``"op"``, a few operations each. With ``profile``
    its operations are timed, one by one, on made-up values.

    With a compiled model the step has its loss and its optimizer's update; without, the mean square of the outputs
    stands in for the loss and the step ends with the gradients.

    Raises:
      UnsupportedModelError: another Keras backend, an unbuilt model, a call() that cannot be cut, or nothing to train.
      UnknownDimensionError: an input dimension other than the batch is unknown.
      InvalidRequestError: an argument has no meaning.
    """
    options = checked(batch_size=batch_size, granularity=granularity, profile=profile)
    batch_size = options["batch_size"]
    check_model(model)
    input_specs(model, batch_size)
    if not getattr(model, "compiled", False):
        logging.info("model '%s' is not compiled: its optimizer's slots are not counted", model.name)
    source = _source(model, batch_size, granularity)
    try:
        graph = traced_graph(source, batch_size, profile=profile)
    except UpdateError as error:
        logging.warning(
            "model '%s': the update of its optimizer %s cannot be traced (%s): its slots are counted as they are "
            "after build(), and what else the update takes is not",
            model.name,
            type(model.optimizer).__name__,
            error,
        )
        source.optimizer = None
        graph = traced_graph(source, batch_size, profile=profile)
    if isinstance(source, KerasSublayerStep):
        if all(unit.pinned for unit in graph.units):
            raise _nothing_to_replay(model, graph, source.nested)
        if source.nested:
            logging.warning(
                "model '%s' calls a whole network, which a plan for the model replays as one or not at all. %s",
                model.name,
                _by_itself(model, source.nested),
            )
    slim = dataclasses.replace(graph, values=(), ops=(), cuts=(), outputs=())
    _CAPTURED.setdefault(model, {})[_how(model, batch_size, granularity)] = slim
    return graph


def captured_units(model: Any, *, batch_size: int, granularity: str) -> Graph:
    """Return what says how a model's step may be cut: its graph without values and operations.

    The model is captured if it was not, or has changed since: other layers are trained, or with other losses.

    Raises:
      MemsaverError: what ``capture_graph`` raises.
    """
    found = _CAPTURED.get(model, {}).get(_how(model, batch_size, granularity))
    return capture_graph(model, batch_size=batch_size, granularity=granularity) if found is None else found


def _how(model: Any, batch_size: int, granularity: str) -> Any:
    """Return what of a model and a request decides how it is captured, and may change."""
    # The losses by id: they may refer to the model, which would then live for ever.
    losses = id(model.loss) if getattr(model, "compiled", False) else None
    return granularity, tuple(input_specs(model, batch_size)), settings_of(model), losses


def _source(model: Any, batch_size: int, granularity: str) -> KerasStep:
    if granularity == "layer" and not runs_as_python(model):
        return KerasStep(model, batch_size)
    for layer in keras_models.all_layers(model)[1:]:
        if keras_models.own_class(layer) is not type(layer):
            raise UnsupportedModelError(
                f"'{layer.name}' inside of model '{model.name}' has a plan already, and trains by it. Call the model "
                f"as it is, or put the plain network back in its place first: tf_memsaver.strip(network)."
            )
    return (KerasOpStep if granularity == "op" else KerasSublayerStep)(model, batch_size)


def _by_itself(model: Any, nested: Mapping[str, Any]) -> str:
    """Return the advice to optimize networks inside a model instead of it."""
    names = {id(value): f"self.{name}" for name, value in vars(model).items() if isinstance(value, keras.Model)}
    found = [names.get(id(network), f"network '{path}'") for path, network in nested.items()]
    target = found[0] if found[0] in names.values() else "network"
    return (
        f"Optimize {' and '.join(found)} by itself, where the model makes it: "
        f"{target} = tf_memsaver.optimize({target}, batch_size=...)"
    )


def _nothing_to_replay(model: Any, graph: Graph, nested: Mapping[str, Any]) -> UnsupportedModelError:
    if nested:
        return UnsupportedModelError(
            f"model '{model.name}' ({type(model).__name__}) computes in its own call(), and hands on what it gets to a "
            f"whole network. {_by_itself(model, nested)}."
        )
    layers = [unit for unit in graph.units if unit.kind != "Python"]
    found = "".join(f" Layer '{unit.label}' {unit.pinned}." for unit in layers[:3])
    return UnsupportedModelError(
        f"model '{model.name}' ({type(model).__name__}) computes in its own call(), and none of the layers that it "
        f"calls can be replayed.{found or ' It calls none.'} Put what repeats into layers "
        f"(keras.layers.Layer) that get their tensors as arguments and return them, or cut between operations: "
        f"tf_memsaver.optimize(..., granularity='op')."
    )


class UpdateError(Exception):
    """An optimizer's update cannot be traced."""


class KerasStep:
    """The training step of a Keras model (see ``step.StepSource``)."""

    def __init__(self, model: Any, batch_size: int) -> None:
        """Prepare the step; the model is only read."""
        self._model, self._batch_size = model, batch_size
        self.name: str = model.name
        self.sequence = self._sequence()
        trained = [v for v in model.trainable_variables if keras_variables.is_trained(v)]
        local = [keras_variables.local_variable(v) for v in trained]
        self.weights = [
            Weight(path=v.path, variable=variable, owner=v, is_distributed=variable is not v.value)
            for v, variable in zip(trained, local, strict=True)
        ]
        self._kept = KeptObjects(*keras_training.compiled_parts(model))
        self._stand_in = batch.needs_stand_in(model, batch_size)
        self._slots: list[Any] = []
        try:
            self.optimizer: Any = self._ready_optimizer(trained)
        except BaseException:
            self.close()
            raise

    def _ready_optimizer(self, trained: list[Any]) -> Any | None:
        """Return the model's own optimizer; one that is not built is built with slots that take no memory.

        It is left as it was by ``close``.
        """
        optimizer = keras_training.own_optimizer(self._model)
        if optimizer is None or not trained:
            return None
        strategy = self._model.distribute_strategy
        scope = contextlib.nullcontext() if strategy is tf.distribute.get_strategy() else strategy.scope()
        try:
            with scope, variables_unallocated():
                if not optimizer.built:
                    optimizer.build(trained)
            self._slots = KeptObjects(optimizer).variables
        except Exception as error:  # Whatever an optimizer that somebody wrote may raise.
            logging.warning(
                "model '%s': its optimizer %s cannot be built to count its slots (%s): they are not counted",
                self._model.name,
                type(optimizer).__name__,
                batch.first_line(error),
            )
            return None
        return optimizer

    def _sequence(self) -> CallSequence:
        return list_layer_calls(self._model)

    def residents(self) -> Sequence[tuple[str, tf.Variable, MemoryKind]]:
        """Return the model's variables and the optimizer's."""
        # An optimizer lists the model's variables, too, and those that it made itself may be of TensorFlow.
        variables = [(v, MemoryKind.PARAMETER) for v in self._model.variables]
        variables += [(v, MemoryKind.OPTIMIZER) for v in self._slots]
        found: dict[int, tuple[str, tf.Variable, MemoryKind]] = {}
        for each, kind in variables:
            variable = keras_variables.local_variable(each)
            found.setdefault(id(variable), (getattr(each, "path", each.name), variable, kind))
        return list(found.values())

    def enter(self, placeholders: Placeholders) -> list[Any]:
        """Make the inputs of the model and convert them as its call does."""
        functional = keras_models.inner_functional(self._model)
        return keras_models.standardize_inputs(functional, self._made_inputs(placeholders))

    def _made_inputs(self, placeholders: Placeholders) -> Any:
        self._x = batch.pack_inputs(self._model, placeholders(input_specs(self._model, self._batch_size)))
        return self._x

    def loss(self, placeholders: Placeholders, outputs: list[Any]) -> Any:
        """Return the compiled loss, or what stands in for it."""
        targets = placeholders([spec for spec, _ in batch.target_specs(self._model, self._batch_size)])
        results = self._results(outputs)
        packed = batch.pack_targets(self._model, targets)
        return batch.training_loss(self._model, self._x, packed, results, stand_in=self._stand_in)

    def update(self, gradients: list[tuple[Any, Any]]) -> None:
        """Let the optimizer update the weights; slots that it makes only now take no memory either.

        Raises:
          UpdateError: the optimizer fails.
        """
        try:
            with variables_unallocated():
                self.optimizer.apply_gradients(gradients)
        except Exception as error:  # Whatever an optimizer that somebody wrote may raise.
            raise UpdateError(batch.first_line(error)) from error
        self._slots = KeptObjects(self.optimizer).variables

    def _results(self, outputs: list[Any]) -> Any:
        return keras_models.pack_outputs(keras_models.inner_functional(self._model), outputs)

    def losses_of(self, operation: Any) -> list[Any]:
        """Return the losses that a layer has added."""
        return keras_training.losses_of(operation)

    def seen_through(self, output: Any) -> list[Any]:
        """Return the logits that a Keras loss takes instead of ``output``: it looks through softmax and sigmoid."""
        logits = keras_training.get_logits(output)
        if logits is not None:
            return [logits]
        last = output.op if isinstance(output, tf.Tensor) else None
        return [last.inputs[0]] if last is not None and last.type in ("Softmax", "Sigmoid") else []

    def close(self) -> None:
        """Forget the losses that tracing added to the layers, and put optimizer, losses and metrics back."""
        keras_training.clear_losses(self._model)
        self._kept.restore()


class KerasOpStep(KerasStep):
    """The same step, with operations for units."""

    def _sequence(self) -> CallSequence:
        self._function = self._traced()
        return self._function.calls.sequence

    def _traced(self) -> ModelFunction:
        return ModelFunction(self._model)

    def enter(self, placeholders: Placeholders) -> list[Any]:
        """Make the inputs of the model, and run what is hoisted."""
        return self._function.calls.enter(self._function.flat_inputs(self._model, self._made_inputs(placeholders)))

    def _results(self, outputs: list[Any]) -> Any:
        return self._function.finish(self._model, outputs)

    def seen_through(self, output: Any) -> list[Any]:
        """Return nothing: the function returns the logits, too."""
        del output
        return []


class KerasSublayerStep(KerasOpStep):
    """The same step, with sublayers that the model's own call calls for units."""

    def _traced(self) -> ModelFunction:
        traced = SublayerCalls(self._model)
        self.nested = traced.nested
        return traced
