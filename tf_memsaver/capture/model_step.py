"""Capture: a Keras model and a batch size in, the Graph of one training step out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from absl import logging

from tf_memsaver.capture.convert import traced_graph
from tf_memsaver.capture.data_shapes import DataShapes
from tf_memsaver.capture.heard_step import HeardStep
from tf_memsaver.capture.step import Resident, TracedStep, Weight, residents_of
from tf_memsaver.capture.trace import trace_step
from tf_memsaver.compat import keras_training, keras_variables
from tf_memsaver.compat.datasets import NOTHING_HELD
from tf_memsaver.compat.messages import first_line
from tf_memsaver.compat.replicas import in_one_replica, other_devices
from tf_memsaver.compat.unallocated import variables_unallocated
from tf_memsaver.cost.device import device_named
from tf_memsaver.ir.graph import Graph, MemoryKind, Value
from tf_memsaver.options.table import CaptureOptions, Granularity, TimeChunks
from tf_memsaver.options.verbs import takes
from tf_memsaver.program import batch
from tf_memsaver.program.kept_objects import KeptObjects
from tf_memsaver.program.kinds import program_of
from tf_memsaver.program.losses import needs_stand_in, training_loss
from tf_memsaver.program.model_function import settings_of
from tf_memsaver.program.program import ModelProgram
from tf_memsaver.program.signature import trained_on
from tf_memsaver.program.told import Told, told_of
from tf_memsaver.program.train_step import Placeholders

if TYPE_CHECKING:
    from typing_extensions import Unpack

_CAPTURED: weakref.WeakKeyDictionary[Any, dict[Any, Graph]] = weakref.WeakKeyDictionary()
"""By model and how it was captured: its graph without values and operations."""


@takes(CaptureOptions)
def capture_graph(model: Any, **options: Unpack[CaptureOptions]) -> Graph:
    """Trace one training step of ``model`` and return its graph. The step is not run, and the model does not change.

    The units of the graph are the calls of the model's layers; with granularity ``"op"``, groups of a few operations.
    With ``profile``, each operation is run on made-up values to measure its time.

    The step of a compiled model has its loss and its optimizer's update. For a model that is not compiled, the loss is
    the mean square of the outputs, and the step ends with the gradients.

    Args:
      model: a built Keras model; with ``step``, a model, or a tuple, list or dict of several.

    Raises:
      UnsupportedModelError: Keras runs on another backend, the model is not built, its ``call`` cannot be divided into
        segments, or it has nothing to train.
      UnknownDimensionError: the size of a dimension other than the batch is not known.
      InvalidRequestError: an argument is not valid, or the batch size is missing.
    """
    told = told_of(model, options)
    fixed_batch = told.data is not None and told.data.fixed_batch
    shapes = functools.partial(DataShapes, _batch_of(told), fixed_batch=fixed_batch)
    graph = _capture(
        told.model,
        told.batch_size,
        granularity=options["granularity"],
        time_chunks=options["time_chunks"],
        shapes=shapes,
        profile=options["profile"],
    )
    return _beside_data(graph, told)


def _beside_data(graph: Graph, told: Told) -> Graph:
    """Return a step beside what the data holds, which no operation reads."""
    if told.data is None or told.data.held == NOTHING_HELD:
        return graph
    nbytes = told.data_bytes(device_named(graph.device))
    data = Value(index=len(graph.values), name="data in memory", nbytes=nbytes, kind=MemoryKind.DATA)
    return dataclasses.replace(graph, values=(*graph.values, data))


def _batch_of(told: Told) -> Callable[[], Sequence[Any]] | None:
    """Return what reads the tensors of a real batch, once; None where there is none."""
    return functools.cache(lambda: told.batches(told.model, 1)[0].leaves) if told.has_batches else None


def _capture(
    model: Any,
    batch_size: int,
    opened: Collection[str] | None = None,
    *,
    granularity: Granularity,
    time_chunks: TimeChunks,
    shapes: Callable[[], DataShapes],
    profile: bool = False,
) -> Graph:
    batch.batch_specs(model, batch_size)
    program = program_of(model, granularity, opened, time_chunks)
    if program.runs_step:
        graph = traced_graph(HeardStep(model, batch_size, program), batch_size, shapes(), profile=profile)
    else:
        graph = _graph_of_call(model, batch_size, program, shapes, profile=profile)
    program.check_units(graph.units)
    slim = dataclasses.replace(graph, values=(), ops=(), cuts=(), outputs=())
    how = _how(model, batch_size, granularity, time_chunks, slim.opened, slim.data_shapes)
    _CAPTURED.setdefault(model, {})[how] = slim
    return graph


def _graph_of_call(
    model: Any, batch_size: int, program: ModelProgram, shapes: Callable[[], DataShapes], *, profile: bool
) -> Graph:
    """Return the graph of a step that calls the model once, with its update, if that can be traced."""
    if not getattr(model, "compiled", False):
        logging.info(
            "model '%s' is not compiled: the memory of its optimizer is not counted. Call compile() first.", model.name
        )
    source = ModelStep(model, batch_size, program)
    try:
        return traced_graph(source, batch_size, shapes(), profile=profile)
    except UpdateError as error:
        logging.warning(
            "model '%s': the update of its optimizer %s cannot be traced (%s). Its slots are counted as build() makes "
            "them; other memory of the update is not counted, so leave some room in the budget.",
            model.name,
            type(model.optimizer).__name__,
            error,
        )
    # Out of the block, so that the error holds the first graph no longer.
    source.optimizer = None
    return traced_graph(source, batch_size, shapes(), profile=profile)


def captured_units(
    model: Any,
    *,
    batch_size: int,
    granularity: Granularity,
    time_chunks: TimeChunks = None,
    opened: tuple[str, ...] = (),
    data_shapes: tuple[tuple[int, ...], ...] = (),
) -> Graph:
    """Return what says how a model's step may be cut: its graph without values and operations.

    ``time_chunks`` is that of the request. ``opened`` are the layers that granularity ``"auto"`` has chosen,
    ``data_shapes`` the shapes that the data told.

    The model is captured if it was not, or has changed since: other layers are trained, or with other losses.

    Raises:
      MemsaverError: what ``capture_graph`` raises.
    """
    found = _CAPTURED.get(model, {}).get(_how(model, batch_size, granularity, time_chunks, opened, data_shapes))
    if found is not None:
        return found
    shapes = functools.partial(DataShapes, known=data_shapes)
    return _capture(model, batch_size, opened, granularity=granularity, time_chunks=time_chunks, shapes=shapes)


def _how(model: Any, batch_size: int, granularity: Granularity, *chosen: Any) -> Any:
    """Return what of a model and a request decides how it is captured, and may change."""
    specs = tuple(batch.batch_specs(model, batch_size).leaves)
    return granularity, chosen, specs, settings_of(model), keras_training.last_compiled(model)


class UpdateError(Exception):
    """An optimizer's update cannot be traced."""


class ModelStep:
    """The training step of a Keras model (see ``step.CalledStep``)."""

    def __init__(self, model: Any, batch_size: int, program: ModelProgram) -> None:
        """Prepare the step of a model, which is only read, by its program."""
        self._model, self._batch_size, self._program = model, batch_size, program
        self.name: str = model.name
        self.sequence = program.sequence
        trained = [v for v in model.trainable_variables if keras_variables.is_trained(v)]
        local = [keras_variables.local_variable(v) for v in trained]
        self.weights = [
            Weight(path=v.path, variable=variable, owner=v) for v, variable in zip(trained, local, strict=True)
        ]
        self._kept = KeptObjects(*keras_training.compiled_parts(model))
        self._stand_in = needs_stand_in(model, batch_size)
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
                "model '%s': its optimizer %s cannot be built (%s). The memory of its slots is not counted, so "
                "leave room for it in the budget.",
                self._model.name,
                type(optimizer).__name__,
                first_line(error),
            )
            return None
        return optimizer

    def residents(self) -> Sequence[Resident]:
        """Return the model's variables and the optimizer's."""
        return residents_of(self._model.variables, self._slots)

    def enter(self, placeholders: Placeholders) -> list[Any]:
        """Make the batch."""
        specs = batch.batch_specs(self._model, self._batch_size)
        self._given = specs.filled(placeholders(specs.leaves))
        return self._program.enter(self._given.x)

    def loss(self, outputs: list[Any]) -> Any:
        """Return the compiled loss, or what stands in for it."""
        results = self._program.finish(outputs)
        return training_loss(self._model, self._given, results, stand_in=self._stand_in)

    def metrics(self, outputs: list[Any]) -> None:
        """Add the compiled metrics, where data tells what they are given; their variables take no memory."""
        if not trained_on(self._model) or self._stand_in:
            return
        x, y, weight = self._given
        try:
            with variables_unallocated():
                results = self._program.finish(outputs)
                self._model.compute_metrics(x=x, y=y, y_pred=results, sample_weight=weight)
        except Exception as error:  # Whatever a metric that somebody wrote may raise.
            logging.warning(
                "model '%s': its metrics cannot be traced (%s). Their memory is not counted, so leave some room in "
                "the budget.",
                self._model.name,
                first_line(error),
            )

    def update(self, gradients: list[tuple[Any, Any]]) -> None:
        """Let the optimizer update the weights; slots that it makes only now take no memory either.

        Raises:
          UpdateError: the optimizer fails.
        """
        try:
            with variables_unallocated(), in_one_replica(self._model.distribute_strategy):
                self.optimizer.apply_gradients(gradients)
        except Exception as error:  # Whatever an optimizer that somebody wrote may raise.
            raise UpdateError(first_line(error)) from error
        self._slots = KeptObjects(self.optimizer).variables

    def losses_of(self, operation: Any) -> list[Any]:
        """Return the losses that a layer has added."""
        return keras_training.losses_of(operation)

    def seen_through(self, output: Any) -> list[Any]:
        """Return the tensors that a loss may take instead of ``output``."""
        return self._program.seen_through(output)

    def trace(self, graph: Any) -> TracedStep:
        """Trace the step (``trace.trace_step``)."""
        step = trace_step(self, graph)
        step.elsewhere = other_devices(self._model.distribute_strategy)
        return step

    def close(self) -> None:
        """Forget the losses that tracing added to the layers, and put optimizer, losses and metrics back."""
        keras_training.clear_losses(self._model)
        self._kept.restore()
