"""A model of the same class, over the same layers and variables, whose training call runs a plan's segments.

The result is an instance of a dynamic subclass of the model's own class, set up by ``Functional.__init__`` (as a
``Sequential`` or, with a ``call`` of its own, a ``Model`` over the same layers) with the other attributes carried over.
So ``summary``, ``get_layer``, weight files, a custom ``train_step``, ``compile`` and callbacks work as before, and the
original is untouched.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from absl import logging

from tf_memsaver.compat import keras_calls, keras_copies, keras_models, keras_training
from tf_memsaver.compat.seeds import seeds_in_force
from tf_memsaver.errors import PlanMismatchError, UnsupportedModelError
from tf_memsaver.options import refused
from tf_memsaver.plan.layers import recomputed_runs
from tf_memsaver.plan.plan import Plan
from tf_memsaver.program.kinds import program_of
from tf_memsaver.program.model_call import may_be_differentiated, plain_call
from tf_memsaver.program.model_check import check_model
from tf_memsaver.program.model_function import values_in
from tf_memsaver.program.signature import (
    inputs_to_json,
    is_planned_as_a_step,
    note_batch_of_json,
    note_inputs_of_json,
    share_signature,
    trained_on_to_json,
)
from tf_memsaver.program.step_program import CallsInTurn
from tf_memsaver.rewrite.certificate import certify
from tf_memsaver.rewrite.segments import in_segments

_TO_LOAD = (
    "to load this file, import keras, then tf_memsaver. To save a model that Keras loads without tf_memsaver: "
    "tf_memsaver.strip(model).save(...)"
)

_MOST_RUNS = 12
"""Segments that ``summary`` lists."""


@dataclass(slots=True, kw_only=True)
class PlanInPlace:
    """A plan, what runs by it, and the model as it was when the plan was put in place.

    Attributes:
      plan: the plan.
      run: runs by it in the place of the class's ``call`` or ``train_step``.
      trained: the variables that are trained, by their paths.
      layers: the model's layers, of which a Sequential model may get others; none once that was said.
      compiled: tells when the model was compiled whose call was traced (``keras_training.last_compiled``).
      settings: what else decides what its call traces.
    """

    plan: Plan
    run: Callable[..., Any]
    trained: tuple[str, ...]
    layers: tuple[weakref.ref[Any], ...]
    compiled: weakref.ref[Any] | None
    settings: Any


@keras.saving.register_keras_serializable(package="tf_memsaver", name="OptimizedModel")
class OptimizedModel:
    """What an optimized model has beside its own class; never instantiated alone.

    Its serialized form is the plain model and the plan, whatever the plain model's class.
    """

    memsaver_base: Any
    _memsaver: PlanInPlace

    @property
    def memsaver_plan(self) -> Plan:
        """The plan by which the model trains (a ``Plan``)."""
        return self._memsaver.plan

    def summary(
        self, line_length: int | None = None, positions: Any = None, print_fn: Any = None, **options: Any
    ) -> None:
        """Print Keras's ``summary``, and below it what the plan recomputes."""
        super().summary(line_length, positions, print_fn, **options)  # type: ignore[misc]
        plan = self.memsaver_plan
        runs = recomputed_runs(plan.layers, plan.units_in_words)
        more = [f"and {len(runs) - _MOST_RUNS} more: see memsaver_plan.layers"] if runs[_MOST_RUNS:] else []
        lines = [f" Recomputed in the backward pass, by tf_memsaver: {plan.recomputed_in_words}"]
        lines += [f"   {run}" for run in (*runs[:_MOST_RUNS], *more)]
        (print_fn or keras_models.print_below_summary)("\n".join(lines))

    def make_train_function(self, force: bool = False) -> Any:
        """Make what ``fit`` runs, as Keras does; say so if the plan is for a model of which more or less is trained.

        What it traces is traced anew where that may have changed (see ``_renew``).
        """
        _renew(self)
        in_place = self._memsaver
        if _has_its_layers(self) and _trained(self) != in_place.trained:
            in_place.trained = _trained(self)
            logging.warning(
                "layers of model '%s' were frozen or unfrozen since it was planned. It trains by that plan, but its "
                "peak is not what was predicted, and may exceed a budget; after a BatchNormalization was frozen, last "
                "bits may differ from the plain model's. Optimize it again after compile(): "
                "model = tf_memsaver.optimize(model, ...).",
                self.name,  # type: ignore[attr-defined]
            )
        return super().make_train_function(force)  # type: ignore[misc]

    def get_config(self) -> dict[str, Any]:
        """Return the plain model's serialized form and the plan."""
        logging.log_first_n(logging.INFO, "saving an optimized model: %s", 1, _TO_LOAD)
        plain, own_plan = keras.saving.serialize_keras_object(strip(self)), _own_plan(self)
        keras_copies.keep_precision(plain, self)
        if not is_planned_as_a_step(self):
            plain.pop("compile_config", None)  # Else it is compiled before its step is traced, to apply the plan.
        # The first entry is for people: Keras puts what it cannot load into its message, from the start.
        return {
            "to_load": _TO_LOAD,
            "model": plain,
            "plan": None if own_plan is None else own_plan.to_json(),
            "inputs": inputs_to_json(self),
            "trained_on": trained_on_to_json(self),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return keras_copies.unpickled_by_keras(super().__reduce__())  # type: ignore[arg-type]

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Any:
        """Return the optimized model that ``get_config`` described.

        One whose ``train_step`` cannot be traced since no file has what it was compiled with (a ``compile`` of its own)
        comes back plain, and a warning says so; so does one of which Keras makes other layers than were saved.

        Raises:
          CertificationError: the plan would change the results: the file was changed by hand, or the code of a layer.
        """
        plain = keras.saving.deserialize_keras_object(config["model"], custom_objects=custom_objects)
        note_inputs_of_json(plain, config.get("inputs"))
        note_batch_of_json(plain, config.get("trained_on"))
        if config["plan"] is None:
            logging.warning(
                "model '%s' trained by the plan of a loop that calls it with several arguments. A file does not keep "
                "such a plan, so the model is loaded as a plain one. Optimize it again, with step=.",
                plain.name,
            )
            return plain
        plan = Plan.from_json(config["plan"])
        try:
            return make_optimized(plain, plan)
        except PlanMismatchError as error:
            logging.warning(
                "model '%s': Keras makes other layers from the file than were saved, so it is loaded as a plain model. "
                "Optimize it again. (%s)",
                plain.name,
                error,
            )
            return plain
        except UnsupportedModelError:
            # Keras calls it compiled even so.
            if getattr(plain, "optimizer", None) is not None or not is_planned_as_a_step(plain):
                raise
            logging.warning(
                "model '%s' was compiled in a way that a file does not keep, so its train_step cannot be traced, "
                "and it is loaded as a plain model. Compile it, then apply its plan: tf_memsaver.apply_plan(model, "
                "plan, data=...).",
                plain.name,
            )
            return plain


# No methods of the class, whose names might be those of methods that a user's class has.


def _own_plan(model: Any) -> Plan | None:
    """Return the plan for a call of this model alone, if there is one; a loop's step may be for other models, too."""
    in_place = model._memsaver
    run = in_place.run
    return run.plan if isinstance(run, CallsInTurn) else in_place.plan


def _renew(model: Any) -> None:
    """Trace calls anew where what layers read in Python was seen to change, or it was compiled, or seeds were set.

    Plans by layers run the layers' code, whatever it reads. Flags of what is trained are left out: plans of operations
    know their calls by these.
    """
    in_place = model._memsaver
    if in_place.plan.is_by_layers or not hasattr(in_place.run, "renew"):
        return
    compiled, settings = keras_training.last_compiled(model), _settings(model)
    if (compiled, settings) != (in_place.compiled, in_place.settings):
        in_place.compiled, in_place.settings = compiled, settings
        has_graph = keras_models.inner_functional(model) is not None
        in_place.run.renew(None if has_graph else _same_model(model, keras_models.own_class(model)))


def _has_its_layers(model: Any) -> bool:
    """Return whether the plan is for the layers that a model has; if not, say so once."""
    in_place = model._memsaver
    has = not isinstance(model, keras.Sequential) or [each() for each in in_place.layers] == model.layers
    if not has and in_place.layers:
        in_place.layers = ()
        logging.warning(
            "layers of model '%s' were added or removed since it was planned, so it trains without its plan and "
            "saves no memory. Optimize it again: model = tf_memsaver.optimize(model, ...).",
            model.name,
        )
    return has


def make_optimized(model: Any, plan: Plan) -> Any:
    """Return ``model`` (which stays as it is) as an instance that trains by ``plan``; of a loop, its networks.

    A network of a loop in which nothing can be replayed comes back as it is.

    Raises:
      InvalidRequestError: ``plan`` is no Plan.
      PlanMismatchError: the plan was made for another model.
      CertificationError: the plan would change the results (see ``certificate``).
      UnsupportedModelError: the model's inputs are not known (see ``program.signature``).
    """
    if not isinstance(plan, Plan):
        raise refused("plan", "a Plan (Plan.load reads one from a file)", plan)
    optimized = make_uncertified(model, plan)
    certify(model, plan, lambda: _same_model(model, keras_models.own_class(model)))
    return optimized


def make_uncertified(model: Any, plan: Plan) -> Any:
    """Return the same for a plan that is taken on trust."""
    check_model(model, needs_call=False)
    program = program_of(model, plan.request.granularity, plan.opened, plan.request.time_chunks)
    return program.optimized(model, plan, in_segments(plan), functools.partial(_with_plan, plan))


def _with_plan(plan: Plan, model: Any, method: str, run: Callable[..., Any]) -> Any:
    optimized = _same_model(model, _optimized_class(keras_models.own_class(model), method))
    _compiled_like(model, optimized)
    in_place = PlanInPlace(
        plan=plan,
        run=run,
        trained=_trained(model),
        layers=tuple(map(weakref.ref, model.layers)),
        compiled=keras_training.last_compiled(optimized),
        settings=_settings(optimized),
    )
    _put_in_place(optimized, in_place)
    return optimized


def _put_in_place(optimized: Any, in_place: PlanInPlace) -> None:
    """Give an optimized model its plan, where Keras neither tracks nor saves it."""
    object.__setattr__(optimized, "_memsaver", in_place)


def _settings(model: Any) -> Any:
    return values_in(model), seeds_in_force()


def _trained(model: Any) -> tuple[str, ...]:
    return tuple(variable.path for variable in model.trainable_variables)


def strip(model: Any) -> Any:
    """Return the plain model for an optimized one, with the same layers, variables and weights.

    The optimized model does not change. A plain model is returned as it is. A compiled model's plain form is compiled,
    too, with the same optimizer object.
    """
    if not is_optimized(model):
        return model
    return _compiled_like(model, _same_model(model, keras_models.own_class(model)))


def another(model: Any) -> Any:
    """Return the same model, plain or optimized, as another object over the same layers, variables and optimizer."""
    made = _compiled_like(model, _same_model(model, type(model)))
    if is_optimized(model):
        _put_in_place(made, dataclasses.replace(model._memsaver, compiled=keras_training.last_compiled(made)))
    return made


def is_optimized(model: Any) -> bool:
    """Whether the model was made by ``make_optimized``."""
    return isinstance(model, OptimizedModel)


def _may_be_differentiated(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a gradient may be taken of what a running call returns: in training, or where a tape may record it."""
    if any(isinstance(leaf, keras.KerasTensor) for leaf in keras.tree.flatten((args, kwargs))):
        return False
    return may_be_differentiated(keras_calls.training_of_call())


def _call_of(base: Any) -> Any:
    """Return the ``call`` of an optimized model, which Keras cannot tell from that of ``base``.

    It runs the plan's segments where a gradient may be taken, with the very arguments that it was given, and else what
    ``base`` runs.
    """

    @functools.wraps(base.call, updated=())
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        planned = _may_be_differentiated(args, kwargs) and _has_its_layers(self)
        if planned:
            _renew(self)
        run = self._memsaver.run if planned else plain_call
        return run(self, args, kwargs)

    # For readers of signatures that do not look behind a wrapper.
    call.__signature__ = inspect.signature(base.call)  # type: ignore[attr-defined]
    return call


def _train_step_of(base: Any) -> Any:
    """Return the ``train_step`` of an optimized model: that of ``base``, in whose calls of networks segments run."""

    @functools.wraps(base.train_step, updated=())
    def train_step(self: Any, data: Any) -> Any:
        return self._memsaver.run(self, data)

    return train_step


_METHODS = {"call": _call_of, "train_step": _train_step_of}
"""Makes the method of an optimized model in whose place a plan is run."""

_CLASSES: dict[tuple[type, str], type] = {}


def _optimized_class(base: Any, method: str) -> type:
    """Return the dynamic subclass of ``base``: one for each method, so that types of equal models are equal."""
    if (base, method) not in _CLASSES:
        attributes = {
            # Keras writes it into files, and imports what it finds there if it is Keras: it must not look for the base.
            "__module__": "tf_memsaver",
            "__qualname__": base.__qualname__,
            "__new__": _new,
            "memsaver_base": base,
            method: _METHODS[method](base),
        }
        made = type(base.__name__, (OptimizedModel, base), attributes)
        keras_copies.serialize_class_as(made, OptimizedModel)
        _CLASSES[base, method] = made
    return _CLASSES[base, method]


def _new(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what the constructor makes: a plain model, as for ``keras.models.clone_model``; it knows of no plan."""
    warnings.warn(
        f"this copy of an optimized {cls.__name__} is a plain model and trains without the plan. "
        f"Give it one: tf_memsaver.apply_plan(copy, model.memsaver_plan).",
        stacklevel=2,
    )
    return cls.memsaver_base(*args, **kwargs)


def _same_model(model: Any, cls: Any) -> Any:
    """Return a new instance of ``cls`` over the graph, layers and variables of ``model``."""
    # An optimized class makes plain models.
    made = getattr(cls, "memsaver_base", cls).__new__(cls)
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
                f"model '{model.name}' was compiled in a way that cannot be copied. Optimize it before compile(), "
                "and compile the optimized model."
            )
        with keras_training.compile_scope(model):
            keras.Model.compile(made, **arguments)
        keras_training.share_run_options(model, made)
    return made
