"""A Keras model as a program of operations: its training call is traced, and a few operations each are a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from tf_memsaver.compat import keras_calls, keras_models
from tf_memsaver.compat.tapes import could_possibly_record
from tf_memsaver.errors import PlanMismatchError, UnsupportedModelError
from tf_memsaver.ir.segments import Segment
from tf_memsaver.plan.plan import Plan
from tf_memsaver.program.model_call import CallArguments, is_constant, plain_call
from tf_memsaver.program.model_function import ModelFunction, TracedProgram, settings_of, trainable_in
from tf_memsaver.program.moved_cuts import MovedCuts
from tf_memsaver.program.program import Segmenter, TrainingCall, Wanted
from tf_memsaver.program.signature import Given


class OperationProgram(TracedProgram):
    """The operations of a model's training call."""

    @classmethod
    def of(cls, model: Any, wanted: Wanted) -> Any:
        """Trace ``model``, which is only read, and return its operations.

        Raises:
          UnsupportedModelError: its inputs are not known, or its call cannot be traced.
        """
        return cls(model, ModelFunction(model, wanted.given))

    def in_segments(self, plan: Plan, segmenter: Segmenter) -> TrainingCall:
        """Return the call that runs operations in segments, in place of the model's code."""
        return OperationsInSegments(self.model, self.function, plan, segmenter)


class _Segmented(NamedTuple):
    """A traced call of a model, what runs it in a graph, and what runs it eagerly (in a graph of its own)."""

    function: ModelFunction
    in_graph: Any
    eagerly: Any

    @classmethod
    def of(cls, function: ModelFunction, segments: Sequence[Segment], segmenter: Segmenter) -> _Segmented:
        calls = segmenter.prepare(function.calls.sequence, segments)

        def run(*flat: Any) -> list[Any]:
            return calls(function.calls.enter(flat), training=function.given.arguments.get("training"))

        def run_in_scope(*flat: Any) -> list[Any]:
            with tf.name_scope(function.scope):
                return run(*flat)

        return cls(function, run, tf.function(run_in_scope, autograph=False))


class OperationsInSegments:
    """Runs the operations of the model's traced call in segments.

    It is traced anew when layers were frozen or unfrozen, for other arguments beside the inputs, for a graph in which
    the shapes of the inputs are known, and where somebody asks for that.
    """

    def __init__(self, model: Any, function: ModelFunction, plan: Plan, segmenter: Segmenter) -> None:
        self._model, self._plan, self._segmenter = model, plan, segmenter
        self._planned: dict[Any, _Segmented | None] = {}
        self._known: dict[Any, _Segmented | None] = {}
        self._said: set[str] = set()
        self._function = function
        self._trainable = trainable_in(model)
        self._sequence = function.calls.sequence
        self._planned[self._key(function.given.arguments)] = self._segmented(function)

    def renew(self, model: Any | None) -> None:
        """Trace the call anew when it is made next: what layers read in Python may have changed.

        ``model`` is the plain model as it is now; None if it is the one that was planned.
        """
        self._model = self._model if model is None else model
        self._planned.clear()
        self._known.clear()

    def _segmented(self, function: ModelFunction) -> _Segmented:
        return _Segmented.of(function, function.segments(self._plan.segments), self._segmenter)

    def _key(self, arguments: Mapping[str, Any]) -> Any:
        return settings_of(self._model), tuple(sorted(arguments.items()))

    def _ready(self, arguments: Mapping[str, Any]) -> _Segmented | None:
        """Return the call for these arguments, with a free batch dimension; None if the plan does not fit it."""
        key = self._key(arguments)
        if key not in self._planned:
            function = self._function.again(self._model, self._given(arguments))
            sequence = function.calls.sequence
            try:
                self._plan.check_matches(sequence.signatures, sequence.labels)
            except PlanMismatchError:
                self._planned[key] = self._moved(arguments, *self._changes(arguments))
            else:
                self._planned[key] = self._segmented(function)
        return self._planned[key]

    def _given(self, arguments: Mapping[str, Any]) -> Given:
        return self._function.given._replace(arguments=arguments)

    def _changes(self, arguments: Mapping[str, Any]) -> tuple[str, str]:
        """Return how a call is trained and what was planned for, which are not the same."""
        trained, planned = [], []
        if trainable_in(self._model) != self._trainable:
            trained.append("with layers frozen or unfrozen since")
            planned.append("them as they were")
        of_plan = self._function.given.arguments
        if arguments != of_plan:
            trained.append(f"with {_spelled(arguments)}")
            planned.append(_spelled(of_plan))
        if not trained:
            return "after its code or settings changed", "it as it was before"
        return " and ".join(trained), " and ".join(planned)

    def _moved(self, arguments: Mapping[str, Any], trained: str, planned: str) -> _Segmented | None:
        """Return the call where it runs other operations than were planned, cut where the planned one is."""
        function = MovedCuts(self._model, self._sequence, self._given(arguments))
        try:
            moved = self._segmented(function)
        except PlanMismatchError as error:
            self._runs_plain(f"trained {trained}, {error.difference}")
            return None
        self._differs(trained, planned)
        return moved

    def _differs(self, trained: str, planned: str) -> None:
        """Say, once for each way, that a call is not trained as it was planned for."""
        if trained not in self._said:
            self._said.add(trained)
            logging.warning(
                "model '%s' is trained %s, but its plan was made for %s. Results may differ in their last bits "
                "from the plain step's. A plan by layers (granularity='layer') gives the same bits in both.",
                self._model.name,
                trained,
                planned,
            )

    def _runs_plain(self, reason: str) -> None:
        """Say, once for each reason, that a call trains without the plan."""
        if reason not in self._said:
            self._said.add(reason)
            name = self._model.name
            logging.warning("model '%s' trains without its plan here and saves no memory: %s", name, reason)

    def _ready_for(self, planned: _Segmented, flat: Sequence[Any], free_batch: bool) -> _Segmented | None:
        """Return the call for such inputs, or with ``free_batch`` for any batch; None if the plan does not fit it.

        Layers may ask for the sizes of their inputs, and sizes that the trace knew are constants in it. So a call whose
        sizes are others, or are not known, is traced anew.
        """
        specs = planned.function.specs(self._model)
        shapes = [_shape_for(tensor, spec, free_batch) for tensor, spec in zip(flat, specs, strict=True)]
        fits = all(map(_fits, specs, shapes))
        if fits and not all(shape.is_fully_defined() for shape in shapes):
            return planned
        key = self._key(planned.function.given.arguments), tuple(map(str, shapes))
        if key not in self._known:
            try:
                function = MovedCuts(self._model, self._sequence, planned.function.given, shapes)
                self._known[key] = self._segmented(function)
            except PlanMismatchError as error:
                if fits:
                    logging.warning(
                        "results may differ in their last bits from the plain step's, since in this plan %s", error
                    )
                else:
                    self._runs_plain(f"with inputs of shape {', '.join(map(str, shapes))}, {error.difference}")
                self._known[key] = planned if fits else None
        return self._known[key]

    def __call__(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shared: Any = None) -> Any:
        """Return what the model's own ``call`` returns (see ``program.TrainingCall``)."""
        del shared
        if tf.distribute.has_strategy() and tf.executing_eagerly():
            raise UnsupportedModelError(
                "a plan by operations cannot run in eager steps under a tf.distribute strategy. Call strategy.run "
                "in a tf.function, or plan again with granularity='layer'."
            )
        inputs, _, tensors, others = CallArguments.of(model, args, kwargs)
        unknown = [name for name, value in others.items() if not is_constant(value)]
        unknown += [name for name in tensors if name not in self._function.given.tensors]
        missing = [name for name in self._function.given.tensors if name not in tensors]
        difference = ""
        if unknown or missing:
            difference = f"with {unknown[0]}=" if unknown else f"without {missing[0]}="
        elif keras_models.inner_functional(model) is None:
            difference = self._function.given.difference(inputs, tensors)
        if difference:
            self._runs_plain(f"it was called {difference}, which the plan is not made for")
            return plain_call(model, args, kwargs)
        training = keras_calls.training_of_call()
        arguments = others if training is None else {"training": training, **others}
        planned = self._ready(arguments)
        if planned is None:
            return plain_call(model, args, kwargs)
        flat = planned.function.flat_inputs(model, inputs, tensors)
        is_eager = tf.executing_eagerly()
        if is_eager and could_possibly_record():
            self._differs("in eager steps", "a graph, as fit and tf.function make it")
        traced = self._ready_for(planned, flat, free_batch=is_eager)
        if traced is None:
            return plain_call(model, args, kwargs)
        return traced.function.finish(model, (traced.eagerly if is_eager else traced.in_graph)(*flat))


def _shape_for(tensor: Any, spec: tf.TensorSpec, free_batch: bool) -> tf.TensorShape:
    """Return the shape to trace with for a tensor: what is known of it or, with ``free_batch``, all but the batch.

    A model that was traced for one batch size alone, as ``spec`` says then, cannot be traced for a free one.
    """
    if tensor.shape.rank is None:
        return tf.TensorShape([None] * len(spec.shape))
    if not free_batch or spec.shape[:1] != [None]:
        return tensor.shape
    return tf.TensorShape([None, *tensor.shape[1:]])


def _fits(spec: tf.TensorSpec, shape: tf.TensorShape) -> bool:
    """Whether all sizes that are known in a spec are those of a shape."""
    sizes = zip(spec.shape, shape, strict=False)
    return len(spec.shape) == len(shape) and all(size in (None, given) for size, given in sizes)


def _spelled(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items()) or "no training="
