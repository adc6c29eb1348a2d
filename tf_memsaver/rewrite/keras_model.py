"""A model of the same class, over the same layers and variables, whose training call runs a plan's segments.

The result is an instance of a dynamic subclass of the model's own class, set up by ``Functional.__init__`` (as a
``Sequential`` or, with a ``call`` of its own, a ``Model`` over the same layers) with the other attributes carried over.
So ``summary``, ``get_layer``, weight files, a custom ``train_step``, ``compile`` and callbacks work as before, and the
original is untouched.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf
from absl import logging

from tf_memsaver import keras_compat
from tf_memsaver.capture.known_shapes import KnownShapes
from tf_memsaver.capture.layer_calls import list_layer_calls, runs_as_python
from tf_memsaver.capture.model_function import ModelFunction, settings_of
from tf_memsaver.capture.signature import inputs_to_json, note_inputs_of_json, share_signature
from tf_memsaver.errors import PlanMismatchError, UnsupportedModelError
from tf_memsaver.plan.types import Plan, Segment
from tf_memsaver.rewrite.segments import SegmentedForward
from tf_memsaver.rewrite.sublayers import SublayerSegments

_TO_LOAD = (
    "import keras, then tf_memsaver, before this is loaded. "
    "To save a model that Keras loads alone: tf_memsaver.strip(model).save(...)"
)


@keras.saving.register_keras_serializable(package="tf_memsaver", name="OptimizedModel")
class OptimizedModel:
    """What an optimized model has beside its own class; never instantiated alone.

    Its serialized form is the plain model and the plan, whatever the plain model's class.
    """

    memsaver_base: Any
    memsaver_parameters: Collection[str]
    """Of the base's ``call``."""
    _memsaver: tuple[Plan, _Forward]

    @property
    def memsaver_plan(self) -> Plan:
        """The plan that the model trains by."""
        return self._memsaver[0]

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None, **kwargs: Any) -> Any:
        """Run the plan's segments when training, the plain path otherwise (and for symbolic inputs)."""
        symbolic = any(isinstance(x, keras.KerasTensor) for x in keras.tree.flatten(inputs))
        if not training or symbolic or kwargs:
            return _plain_call(self, inputs, training=training, mask=mask, **kwargs)
        return self._memsaver[1](self, inputs, mask)

    def get_config(self) -> dict[str, Any]:
        """Return the plain model's serialized form and the plan."""
        logging.log_first_n(logging.INFO, "saving an optimized model: %s", 1, _TO_LOAD)
        plain = keras.saving.serialize_keras_object(strip(self))
        plain.pop("compile_config", None)
        # The first entry is for people: Keras puts what it cannot load into its message, from the start.
        return {
            "to_load": _TO_LOAD,
            "model": plain,
            "plan": self.memsaver_plan.to_json(),
            "inputs": inputs_to_json(self),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return keras_compat.unpickled_by_keras(super().__reduce__())  # type: ignore[arg-type]

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
        """Return the optimized model that ``get_config`` described.

        Raises:
          PlanMismatchError: this version of Keras builds other layers from the same config.
        """
        plain = keras.saving.deserialize_keras_object(config["model"], custom_objects=custom_objects)
        note_inputs_of_json(plain, config.get("inputs"))
        return make_optimized(plain, Plan.from_json(config["plan"]))


class _Forward(Protocol):
    """The training call of an optimized model."""

    def __call__(self, model: Any, inputs: Any, mask: Any) -> Any:
        """Return the model's outputs for structured inputs."""
        ...


class _LayerForward:
    """Runs layer calls in segments."""

    def __init__(self, model: Any, plan: Plan) -> None:
        sequence = list_layer_calls(model)
        plan.check_matches(sequence.signatures, [call.label for call in sequence.calls])
        self._forward = SegmentedForward(sequence, plan.segments)

    def __call__(self, model: Any, inputs: Any, mask: Any) -> Any:
        functional = keras_compat.inner_functional(model)
        flat = keras_compat.standardize_inputs(functional, inputs)
        if mask is not None:
            for tensor, its_mask in zip(flat, keras.tree.flatten(mask), strict=True):
                if its_mask is not None:
                    keras_compat.set_keras_mask(tensor, its_mask)
        return keras_compat.pack_outputs(functional, self._forward(flat, training=True))


class _Traced(NamedTuple):
    """A traced call of a model, what runs it in a graph, and what runs it eagerly (in a graph of its own)."""

    function: ModelFunction
    in_graph: Any
    eagerly: Any

    @classmethod
    def of(cls, function: ModelFunction, segments: Sequence[Segment]) -> _Traced:
        forward = SegmentedForward(function.calls.sequence, segments)

        def run(*flat: Any) -> list[Any]:
            return forward(function.calls.enter(flat), training=True)

        def run_in_scope(*flat: Any) -> list[Any]:
            with tf.name_scope(function.scope):
                return run(*flat)

        return cls(function, run, tf.function(run_in_scope, autograph=False))


class _OpForward:
    """Runs the operations of the model's traced call in segments.

    It is traced anew when layers were frozen or unfrozen, and for a graph in which the shapes of the inputs are known.
    """

    def __init__(self, model: Any, plan: Plan) -> None:
        self._model, self._plan = model, plan
        self._planned: dict[Any, _Traced] = {}
        self._known: dict[Any, _Traced] = {}
        self._ready(settings_of(model))

    def _ready(self, settings: tuple[bool, ...]) -> _Traced:
        """Return the call as it was planned with, with a free batch dimension."""
        if settings not in self._planned:
            function = ModelFunction(self._model)
            sequence = function.calls.sequence
            self._plan.check_matches(sequence.signatures, [call.label for call in sequence.calls])
            self._planned[settings] = _Traced.of(function, self._plan.segments)
        return self._planned[settings]

    def _ready_for(self, settings: tuple[bool, ...], shapes: Sequence[tf.TensorShape]) -> _Traced:
        """Return the call for inputs of these shapes."""
        planned = self._planned[settings]
        if not all(shape.is_fully_defined() for shape in shapes):
            return planned
        key = settings, tuple(map(tuple, shapes))
        if key not in self._known:
            function = KnownShapes(self._model, planned.function.calls.sequence, shapes)
            try:
                self._known[key] = _Traced.of(function, function.segments(self._plan.segments))
            except PlanMismatchError as error:
                logging.warning("results may differ in their last bits from the plain step's: in this plan %s", error)
                self._known[key] = planned
        return self._known[key]

    def __call__(self, model: Any, inputs: Any, mask: Any) -> Any:
        if tf.distribute.has_strategy():
            raise UnsupportedModelError(
                "a plan of operations holds the variables of one device and cannot run under a tf.distribute strategy. "
                "Make the plan with granularity='layer'."
            )
        if mask is not None and "mask" in model.memsaver_parameters:
            return _plain_call(model, inputs, training=True, mask=mask)
        settings = settings_of(self._model)
        planned = self._ready(settings)
        flat = planned.function.flat_inputs(model, inputs)
        if tf.executing_eagerly():
            return planned.function.finish(model, planned.eagerly(*flat))
        traced = self._ready_for(settings, [tensor.shape for tensor in flat])
        return traced.function.finish(model, traced.in_graph(*flat))


class _SublayerForward:
    """Runs the model's own call, with some of its sublayers in segments."""

    def __init__(self, model: Any, plan: Plan) -> None:
        self._segments = SublayerSegments(model, plan)

    def __call__(self, model: Any, inputs: Any, mask: Any) -> Any:
        return self._segments.run(lambda: _plain_call(model, inputs, training=True, mask=mask))


def _forward_of(model: Any, plan: Plan) -> _Forward:
    if plan.request.granularity == "op":
        return _OpForward(model, plan)
    return _SublayerForward(model, plan) if runs_as_python(model) else _LayerForward(model, plan)


def make_optimized(model: Any, plan: Plan) -> Any:
    """Return ``model`` (which stays as it is) as an instance that trains by ``plan``.

    Raises:
      PlanMismatchError: the plan was made for another model.
      UnsupportedModelError: the model's inputs are not known (see ``capture.signature``).
    """
    forward = _forward_of(model, plan)
    base = keras_compat.own_class(model)
    optimized = _same_model(model, _optimized_class(base))
    # A tuple: Keras tracks no attribute of it, and saving does not walk into it.
    object.__setattr__(optimized, "_memsaver", (plan, forward))
    return _compiled_like(model, optimized)


def strip(model: Any) -> Any:
    """Return the plain model, over the same layers and variables, of an optimized one; a plain model as it is."""
    if not is_optimized(model):
        return model
    return _compiled_like(model, _same_model(model, keras_compat.own_class(model)))


def is_optimized(model: Any) -> bool:
    """Whether the model was made by ``make_optimized``."""
    return isinstance(model, OptimizedModel)


def _plain_call(model: Any, inputs: Any, training: bool | None, mask: Any, **kwargs: Any) -> Any:
    """Call an optimized model as its own class does."""
    offered = {"training": training, "mask": mask}
    kwargs.update((name, value) for name, value in offered.items() if name in model.memsaver_parameters)
    return model.memsaver_base.call(model, inputs, **kwargs)


_CLASSES: dict[type, type] = {}


def _optimized_class(base: Any) -> type:
    """Return the dynamic subclass of ``base``: one for each class, so that types of equal models are equal."""
    if base not in _CLASSES:
        attributes = {
            # Keras writes it into files, and imports what it finds there if it is Keras: it must not look for the base.
            "__module__": "tf_memsaver",
            "__qualname__": base.__qualname__,
            "__new__": _new,
            "memsaver_base": base,
            "memsaver_parameters": frozenset(inspect.signature(base.call).parameters),
        }
        made = type(base.__name__, (OptimizedModel, base), attributes)
        keras_compat.serialize_class_as(made, OptimizedModel)
        _CLASSES[base] = made
    return _CLASSES[base]


def _new(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what the constructor makes: a plain model, as for ``keras.models.clone_model``; it knows of no plan."""
    if not args and not kwargs:
        return cls.memsaver_base.__new__(cls)
    warnings.warn(
        f"this copy of an optimized {cls.__name__} is a plain model and trains without the plan. "
        f"Give it one: tf_memsaver.apply_plan(copy, model.memsaver_plan).",
        stacklevel=2,
    )
    return cls.memsaver_base(*args, **kwargs)


def _same_model(model: Any, cls: Any) -> Any:
    """Return a new instance of ``cls`` over the graph, layers and variables of ``model``."""
    made = cls.__new__(cls)
    if isinstance(model, keras.Sequential):
        keras.Sequential.__init__(made, name=model.name)
        keras_compat.share_sequential(model, made)
    elif isinstance(model, keras_compat.Functional):
        keras_compat.Functional.__init__(made, model.input, model.output, name=model.name)
    else:
        keras.Model.__init__(made, name=model.name)
    keras_compat.share_attributes(model, made)
    if isinstance(model, keras_compat.Functional):
        keras_compat.share_order(model, made)
    elif not isinstance(model, keras.Sequential):
        keras_compat.share_layers(model, made)
    share_signature(model, made)
    return made


def _compiled_like(model: Any, made: Any) -> Any:
    """Compile ``made`` as ``model`` is, with the same optimizer object: they train the same variables."""
    if getattr(model, "compiled", False):
        arguments = keras_compat.compile_arguments(model)
        if arguments is None:
            raise UnsupportedModelError(
                f"model '{model.name}' was compiled in a way that cannot be read back. "
                f"Optimize it before compile(), and compile the optimized model."
            )
        keras.Model.compile(made, **arguments)
    return made
