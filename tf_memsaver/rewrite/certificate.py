"""Whether a plan may be applied to a model: the check that a planner's proposal passes, against the model at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras

from tf_memsaver.capture.model_step import captured_units
from tf_memsaver.compat.keras_variables import is_trained
from tf_memsaver.compat.messages import first_line
from tf_memsaver.errors import CertificationError, MemsaverError
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tf_memsaver.program.signature import is_planned_as_a_step, signature_of


def certify(model: Any, plan: Plan, copy: Callable[[], Any]) -> None:
    """Check that a plan, wherever it comes from, trains a plain model as it is; ``copy`` makes an uncompiled copy.

    A model that this process has captured for the plan's batch size is not traced again. A model without trainable
    weights is not trained, so that nothing needs to be known of its gradients.

    Raises:
      CertificationError: it does not, or the model's training step cannot be traced to tell.
    """
    if not any(is_trained(variable) for variable in model.trainable_variables):
        return
    try:
        _certify(model, plan)
    except CertificationError as error:
        if not any(_is_certified(other, plan) for other in _with_one_loss(model, copy)):
            raise error


def _certify(model: Any, plan: Plan) -> None:
    try:
        graph = captured_units(
            model,
            batch_size=plan.batch_size,
            granularity=plan.request.granularity,
            time_chunks=plan.request.time_chunks,
            opened=plan.opened,
            data_shapes=plan.data_shapes,
        )
    except Exception as error:
        reason = str(error) if isinstance(error, MemsaverError) else first_line(error)
        raise CertificationError(
            plan.planner,
            f"a training step of model '{model.name}' with batch size {plan.batch_size} cannot be traced, so the "
            f"plan cannot be checked: {reason}",
        ) from error
    # Hints name layers, and an equal model may name its layers otherwise. What they asked for is not what is safe.
    Problem.build(graph, Request()).certify(plan.segments, plan.planner)


def _is_certified(model: Any, plan: Plan) -> bool:
    try:
        _certify(model, plan)
    except CertificationError:
        return False
    return True


def _with_one_loss(model: Any, copy: Callable[[], Any]) -> Iterator[Any]:
    """Yield the model with a loss of each of its outputs, where it has several and is not compiled.

    A loaded model is not compiled yet, and the plan may be for losses of some outputs alone: fewer terms of gradients,
    and so more places to cut. A plan that is right for a loss of one output is accepted.
    """
    if is_planned_as_a_step(model):
        return
    outputs = signature_of(model).outputs
    count = len(keras.tree.flatten(outputs))
    if getattr(model, "compiled", False) or count == 1:
        return
    for chosen in range(count):
        losses = keras.tree.pack_sequence_as(outputs, ["mse" if place == chosen else None for place in range(count)])
        other = copy()
        keras.Model.compile(other, "sgd", loss=losses)
        yield other
