"""A model of the same class, over the same layers and variables, whose training call runs a plan's segments.

The result is an instance of a dynamic subclass of the model's own class, set up by ``Functional.__init__`` (as a
``Sequential`` or, with a ``call`` of its own, a ``Model`` over the same layers) with the other attributes carried over.
So ``summary``, ``get_layer``, weight files, a custom ``train_step``, ``compile`` and callbacks work as before, and the
original is untouched.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import keras
import tensorflow as tf
from absl import logging

from tf_memsaver.compat import keras_calls, keras_copies, keras_models, keras_training, tapes
from tf_memsaver.errors import PlanMismatchError, UnsupportedModelError
from tf_memsaver.ir.segments import Segment
from tf_memsaver.options import refused
from tf_memsaver.plan.plan import Plan
from tf_memsaver.program.layer_calls import list_layer_calls, runs_as_python
from tf_memsaver.program.model_function import ModelFunction, settings_of
from tf_memsaver.program.moved_cuts import MovedCuts
from tf_memsaver.program.signature import (
    check_model,
    inputs_to_json,
    note_inputs_of_json,
    share_signature,
    usual_arguments,
)
from tf_memsaver.rewrite.certificate import certify
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
    _memsaver: tuple[Plan, _Forward]

    @property
    def memsaver_plan(self) -> Plan:
        """The plan that the model trains by."""
        return self._memsaver[0]

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
        return keras_copies.unpickled_by_keras(super().__reduce__())  # type: ignore[arg-type]

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
        """Return the optimized model that ``get_config`` described.

        Raises:
          PlanMismatchError: this version of Keras builds other layers from the same config.
          CertificationError: the plan would change the results: the file was changed by hand, or the code of a layer.
        """
        plain = keras.saving.deserialize_keras_object(config["model"], custom_objects=custom_objects)
        note_inputs_of_json(plain, config.get("inputs"))
        return make_optimized(plain, Plan.from_json(config["plan"]))


class _Forward(Protocol):
    """The training call of an optimized model."""

    def __call__(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what the model's own ``call`` returns for these arguments."""
        ...


class _LayerForward:
    """Runs layer calls in segments."""

    def __init__(self, model: Any, plan: Plan) -> None:
        sequence = list_layer_calls(model)
        plan.check_matches(sequence.signatures, [call.label for call in sequence.calls])
        self._forward = SegmentedForward(sequence, plan.segments)

    def __call__(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = _arguments(model, args, kwargs)
        functional = keras_models.inner_functional(model)
        flat = keras_models.standardize_inputs(functional, given["inputs"])
        if given["mask"] is not None:
            for tensor, its_mask in zip(flat, keras.tree.flatten(given["mask"]), strict=False):
                if its_mask is not None:
                    keras_calls.set_keras_mask(tensor, its_mask)
        return keras_models.pack_outputs(functional, self._forward(flat, training=given["training"]))


class _Traced(NamedTuple):
    """A traced call of a model, what runs it in a graph, and what runs it eagerly (in a graph of its own)."""

    function: ModelFunction
    in_graph: Any
    eagerly: Any

    @classmethod
    def of(cls, function: ModelFunction, segments: Sequence[Segment]) -> _Traced:
        forward = SegmentedForward(function.calls.sequence, segments)

        def run(*flat: Any) -> list[Any]:
            return forward(function.calls.enter(flat), training=function.arguments.get("training"))

        def run_in_scope(*flat: Any) -> list[Any]:
            with tf.name_scope(function.scope):
                return run(*flat)

        return cls(function, run, tf.function(run_in_scope, autograph=False))


class _OpForward:
    """Runs the operations of the model's traced call in segments.

    It is traced anew when layers were frozen or unfrozen, for other arguments beside the inputs, and for a graph in
    which the shapes of the inputs are known.
    """

    def __init__(self, model: Any, plan: Plan) -> None:
        self._model, self._plan = model, plan
        self._planned: dict[Any, _Traced | None] = {}
        self._known: dict[Any, _Traced] = {}
        self._said: set[str] = set()
        function = ModelFunction(model)
        self._check(function)
        self._sequence = function.calls.sequence
        self._planned[self._key(function.arguments)] = _Traced.of(function, plan.segments)

    def _key(self, arguments: Mapping[str, Any]) -> Any:
        return settings_of(self._model), tuple(sorted(arguments.items()))

    def _check(self, function: ModelFunction) -> None:
        sequence = function.calls.sequence
        self._plan.check_matches(sequence.signatures, [call.label for call in sequence.calls])

    def _ready(self, arguments: Mapping[str, Any]) -> _Traced | None:
        """Return the call for these arguments, with a free batch dimension; None if the plan does not fit it."""
        key = self._key(arguments)
        if key not in self._planned:
            function = ModelFunction(self._model, arguments)
            try:
                self._check(function)
            except PlanMismatchError:
                if arguments == usual_arguments(self._model):
                    raise
                self._planned[key] = self._moved(arguments)
            else:
                self._planned[key] = _Traced.of(function, self._plan.segments)
        return self._planned[key]

    def _moved(self, arguments: Mapping[str, Any]) -> _Traced | None:
        """Return the call for arguments with which it runs other operations, cut where the planned one is."""
        function = MovedCuts(self._model, self._sequence, arguments)
        try:
            moved = _Traced.of(function, function.segments(self._plan.segments))
        except PlanMismatchError as error:
            self._runs_plain(f"called with {_spelled(arguments)}, {error.difference}")
            return None
        logging.warning(
            "model '%s' is trained with %s, and its plan was made for %s: results may differ in their last bits from "
            "the plain step's. A plan of layers (granularity='layer') has the same bits either way.",
            self._model.name,
            _spelled(arguments),
            _spelled(usual_arguments(self._model)),
        )
        return moved

    def _runs_plain(self, reason: str) -> None:
        """Say, once for each reason, that a call trains without the plan."""
        if reason not in self._said:
            self._said.add(reason)
            name = self._model.name
            logging.warning("model '%s' trains without its plan here and saves no memory: %s", name, reason)

    def _ready_for(self, planned: _Traced, shapes: Sequence[tf.TensorShape]) -> _Traced:
        """Return the call for inputs of these shapes."""
        if not all(shape.is_fully_defined() for shape in shapes):
            return planned
        key = self._key(planned.function.arguments), tuple(map(tuple, shapes))
        if key not in self._known:
            function = MovedCuts(self._model, self._sequence, planned.function.arguments, shapes)
            try:
                self._known[key] = _Traced.of(function, function.segments(self._plan.segments))
            except PlanMismatchError as error:
                logging.warning("results may differ in their last bits from the plain step's: in this plan %s", error)
                self._known[key] = planned
        return self._known[key]

    def __call__(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if tf.distribute.has_strategy():
            raise UnsupportedModelError(
                "a plan of operations holds the variables of one device and cannot run under a tf.distribute strategy. "
                "Make the plan with granularity='layer'."
            )
        inputs, *others = _arguments(model, args, kwargs).items()
        training = keras_calls.training_of_call()
        arguments: dict[str, Any] = {} if training is None else {"training": training}
        for name, value in others:
            # Keras gives a model of several inputs a list of their masks, though none has one.
            if name == "training" or all(leaf is None for leaf in keras.tree.flatten(value)):
                continue
            if not isinstance(value, (bool, int, float, str)):
                self._runs_plain(f"it was called with {name}=, which a plan of operations does not know")
                return _plain_call(model, args, kwargs)
            arguments[name] = value
        planned = self._ready(arguments)
        if planned is None:
            return _plain_call(model, args, kwargs)
        flat = planned.function.flat_inputs(model, inputs[1])
        if tf.executing_eagerly():
            return planned.function.finish(model, planned.eagerly(*flat))
        traced = self._ready_for(planned, [tensor.shape for tensor in flat])
        return traced.function.finish(model, traced.in_graph(*flat))


class _SublayerForward:
    """Runs the model's own call, with some of its sublayers in segments."""

    def __init__(self, model: Any, plan: Plan) -> None:
        self._segments = SublayerSegments(model, plan)

    def __call__(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._segments.run(lambda: _plain_call(model, args, kwargs))


def _forward_of(model: Any, plan: Plan) -> _Forward:
    if plan.request.granularity == "op":
        return _OpForward(model, plan)
    return _SublayerForward(model, plan) if runs_as_python(model) else _LayerForward(model, plan)


def make_optimized(model: Any, plan: Plan) -> Any:
    """Return ``model`` (which stays as it is) as an instance that trains by ``plan``.

    Raises:
      InvalidRequestError: ``plan`` is no Plan.
      PlanMismatchError: the plan was made for another model.
      CertificationError: the plan would change the results (see ``certificate``).
      UnsupportedModelError: the model's inputs are not known (see ``capture.signature``).
    """
    if not isinstance(plan, Plan):
        raise refused("plan", "a Plan (Plan.load reads one from a file)", plan)
    optimized = make_uncertified(model, plan)
    certify(model, plan, lambda: _same_model(model, keras_models.own_class(model)))
    return optimized


def make_uncertified(model: Any, plan: Plan) -> Any:
    """Return the same for a plan that is taken on trust."""
    check_model(model)
    forward = _forward_of(model, plan)
    base = keras_models.own_class(model)
    optimized = _same_model(model, _optimized_class(base))
    # A tuple: Keras tracks no attribute of it, and saving does not walk into it.
    object.__setattr__(optimized, "_memsaver", (plan, forward))
    return _compiled_like(model, optimized)


def strip(model: Any) -> Any:
    """Return the plain model, over the same layers and variables, of an optimized one; a plain model as it is."""
    if not is_optimized(model):
        return model
    return _compiled_like(model, _same_model(model, keras_models.own_class(model)))


def another(model: Any) -> Any:
    """Return the same model, plain or optimized, as another object over the same layers, variables and optimizer."""
    made = _same_model(model, type(model))
    if is_optimized(model):
        object.__setattr__(made, "_memsaver", model._memsaver)
    return _compiled_like(model, made)


def is_optimized(model: Any) -> bool:
    """Whether the model was made by ``make_optimized``."""
    return isinstance(model, OptimizedModel)


def _plain_call(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an optimized model as its own class does."""
    return model.memsaver_base.call(model, *args, **kwargs)


def _arguments(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model's own ``call`` by name, those left out included, in their order."""
    signature = inspect.signature(model.memsaver_base.call)
    bound = signature.bind(model, *args, **kwargs)
    bound.apply_defaults()
    named = dict(list(bound.arguments.items())[1:])
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(parameter.name))
    return named


def _spelled(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items()) or "no training="


def _may_be_differentiated(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a gradient may be taken of what a running call returns: in training, or where a tape may record it."""
    if any(isinstance(leaf, keras.KerasTensor) for leaf in keras.tree.flatten((args, kwargs))):
        return False
    return bool(keras_calls.training_of_call()) or tapes.could_possibly_record()


def _call_of(base: Any) -> Any:
    """Return the ``call`` of an optimized model, which Keras cannot tell from that of ``base``.

    It runs the plan's segments where a gradient may be taken, with the very arguments that it was given, and else what
    ``base`` runs.
    """

    @functools.wraps(base.call, updated=())
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _may_be_differentiated(args, kwargs):
            return self._memsaver[1](self, args, kwargs)
        return _plain_call(self, args, kwargs)

    # For readers of signatures that do not look behind a wrapper.
    call.__signature__ = inspect.signature(base.call)  # type: ignore[attr-defined]
    return call


_CLASSES: dict[type, type] = {}


def _optimized_class(base: Any) -> type:
    """Return the dynamic subclass of ``base``: one for each class, so that types of equal models are equal."""
    if base not in _CLASSES:
        attributes = {
            # Keras writes it into files, and imports what it finds there if it is Keras: it must not look for the base.
            "__module__": "tf_memsaver",
            "__qualname__": base.__qualname__,
            "__new__": _new,
            "call": _call_of(base),
            "memsaver_base": base,
        }
        made = type(base.__name__, (OptimizedModel, base), attributes)
        keras_copies.serialize_class_as(made, OptimizedModel)
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
        keras_copies.share_sequential(model, made)
    elif isinstance(model, keras_models.Functional):
        keras_models.Functional.__init__(made, model.input, model.output, name=model.name)
    else:
        keras.Model.__init__(made, name=model.name)
    keras_copies.share_attributes(model, made)
    if isinstance(model, keras_models.Functional):
        keras_copies.share_order(model, made)
    elif not isinstance(model, keras.Sequential):
        keras_copies.share_layers(model, made)
    share_signature(model, made)
    return made


def _compiled_like(model: Any, made: Any) -> Any:
    """Compile ``made`` as ``model`` is, with the same optimizer object: they train the same variables."""
    if getattr(model, "compiled", False):
        arguments = keras_training.compile_arguments(model)
        if arguments is None:
            raise UnsupportedModelError(
                f"model '{model.name}' was compiled in a way that cannot be read back. "
                f"Optimize it before compile(), and compile the optimized model."
            )
        keras.Model.compile(made, **arguments)
    return made
