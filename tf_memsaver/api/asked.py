"""What verbs have in common: what their options ask of a planner, and what is said of a plan."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tf_memsaver.check.watch import device_name
from tf_memsaver.compat import datasets
from tf_memsaver.compat.counting import check_counted, is_counted
from tf_memsaver.compat.devices import bytes_left, has_gpu
from tf_memsaver.compat.keras_training import fit_compiles, own_optimizer, replicas_of
from tf_memsaver.compat.keras_variables import bytes_of
from tf_memsaver.cost.device import LEAST_COUNTED_STEP
from tf_memsaver.display.notices import tell
from tf_memsaver.errors import InvalidRequestError
from tf_memsaver.ir.graph import Graph, MemoryKind
from tf_memsaver.options.table import Hints, options_of
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.problem import check_names
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import check_strategy
from tf_memsaver.program.kept_objects import slots_of
from tf_memsaver.program.kinds import labels_known, program_of
from tf_memsaver.program.signature import is_planned_as_a_step
from tf_memsaver.units import AUTO, format_bytes

_MUCH_BESIDE = 0.1
"""The share of a budget from which on it is told that others take as much beside it."""


def part_of(options: Mapping[str, Any], group: Any) -> dict[str, Any]:
    """Return those of a verb's options that are of a group."""
    return {name: options[name] for name in options_of(group) if name in options}


def check_before_tracing(model: Any, options: Mapping[str, Any]) -> None:
    """Check what can be told without a trace, which takes seconds: the strategy, and the names of layers in hints.

    Raises:
      InvalidRequestError: there is no such strategy.
      HintError: a pattern matches no layer.
    """
    if "strategy" in options:
        check_strategy(options["strategy"])
    hints = {name: options[name] for name in options_of(Hints)}
    if any(hints.values()) and isinstance(model, keras.Model) and options.get("step") is None:
        # Chunks of time have names that only the trace tells.
        labels = labels_known(model, options["granularity"]) if options.get("time_chunks") is None else None
        if labels is not None:
            check_names(labels, hints)


def tell_of(subject: str, plan: Plan) -> None:
    """Say what a plan does for a model or function, and warn where that is little."""
    tell(f"tf_memsaver: {subject}: {plan}")
    if plan.advice:
        logging.warning("tf_memsaver: %s: %s", subject, plan.advice)


def tell_of_plain_calls(model: Any, plan: Plan) -> None:
    """Say which calls of networks keep their activations where a model trains by a step of its own, and why.

    Where the plan saves little, that is a warning.
    """
    if not is_planned_as_a_step(model):
        return
    program = program_of(model, plan.request.granularity, None, plan.request.time_chunks)
    if program.runs_step and program.stays_plain:
        say = logging.warning if plan.advice else tell
        say(f"tf_memsaver: {program.stays_plain}")


def warn_of_unknown_length(model: Any, plan: Plan, data: Any) -> None:
    """Say where a dataset of unknown length makes plain weights decay once more in each epoch of ``fit``.

    ``fit`` finds its end by a step without a batch (``EpochIterator``, Keras 3.12 to 3.15). A decay needs no gradient,
    so it runs in such a step; in an optimized model it waits for the gradient (``runtime.updates``).
    """
    optimizer = own_optimizer(model)
    decay = getattr(getattr(optimizer, "inner_optimizer", optimizer), "weight_decay", None)
    if not decay or model.run_eagerly or fit_compiles(model) or not (plan.request.order and plan.recomputed_units):
        return
    if isinstance(data, tf.data.Dataset) and data.cardinality() == tf.data.UNKNOWN_CARDINALITY:
        logging.warning(
            "the length of the data is not known, so fit finds its end by a step without a batch. In that step, the "
            "weights of the plain model decay once more (weight_decay=%s), and those of the optimized one do not: "
            "results differ slightly. To get the same results, give the number of batches: "
            "data.apply(tf.data.experimental.assert_cardinality(...)), or fit(..., steps_per_epoch=...).",
            decay,
        )


def request_of(options: Mapping[str, Any], model: Any = None, **fixed: Any) -> Request:
    """Return what the options of a verb ask of a planner; ``budget="auto"`` is what the device has left for a step.

    What a model's variables and optimizer take already is a part of a step, as are the tensors of its data on a CPU.

    Raises:
      InvalidRequestError: nothing tells how much memory there is, or a limit has no meaning.
    """
    asked = {**options, **fixed}
    if asked.get("budget") == AUTO:
        there = _bytes_taken(model) + (0 if has_gpu() else _bytes_of_data(asked.get("data")))
        asked["budget"] = int(_OF_WHAT_IS_LEFT * _bytes_left()) + there
    request = Request.of(asked)
    check_strategy(request.strategy)
    return request


_OF_WHAT_IS_LEFT = 0.9
"""Buffers are not all that a process needs, and others work beside it."""


def _bytes_left() -> int:
    left = bytes_left()
    if left is None:
        raise InvalidRequestError(
            "budget='auto': the memory that this system has left cannot be read. Give bytes, such as budget='6GiB'."
        )
    if left <= 0:
        raise InvalidRequestError(
            "budget='auto': this device has no memory left. End what else runs there, or give bytes, such as "
            "budget='6GiB'."
        )
    return left


def bytes_of_others(model: Any, data_bytes: int = 0) -> int:
    """Return what this process holds on the device that no step of a model takes: other models, and data on a CPU.

    ``data_bytes`` of the data count for the step all the same, also where they are not there yet: the result is less by
    these, and may be negative.

    Of a loop nobody knows what is its own: 0. What a CPU's allocator does not count of a model is taken for counted.

    Raises:
      MeasurementError: nothing counts the device's memory.
    """
    device = device_name()
    check_counted(device)
    if not isinstance(model, keras.Model):
        return 0
    return max(0, _bytes_held(device) - _bytes_taken(model)) - data_bytes


def warn_of_other_batches(model: Any, data: Any, batch_size: int | None) -> None:
    """Say where a dataset has batches of another size than the one that was asked for.

    Replicas share a batch, and a loop's step is given what its caller makes of one: of these nothing is said.
    """
    if batch_size is None or not isinstance(data, tf.data.Dataset):
        return
    if not isinstance(model, keras.Model) or replicas_of(model) > 1:
        return
    size = next((shape[0] for shape in datasets.flat_shapes(data) if shape.rank), None)
    if size not in (None, batch_size):
        logging.warning(
            "data has batches of %d, and batch_size=%d was asked for: the plan is for batches of %d. fit takes those "
            "of the data. Leave batch_size out to plan for them.",
            size,
            batch_size,
            batch_size,
        )


def warn_of_others(model: Any, plan: Plan, graph: Graph) -> None:
    """Say what else this process holds on the device, if that is much beside the budget of a step.

    Nobody knows what a loop holds of its own: all that lives between its steps counts as if it were there.
    """
    budget = plan.request.budget_bytes
    if budget is None or not is_counted(device_name()):
        return
    if isinstance(model, keras.Model):
        others = bytes_of_others(model, graph.bytes_of(MemoryKind.DATA))
    else:
        others = _bytes_held(device_name()) - graph.resident_bytes
    if others >= max(_MUCH_BESIDE * budget, LEAST_COUNTED_STEP):
        logging.warning(
            "this process holds %s on the device beside what the step takes, such as other models, layers that the "
            "model does not use, or other data. The budget does not cover these. budget='auto' plans with what is "
            "left.",
            format_bytes(others),
        )


def _bytes_held(device: str) -> int:
    """Return the bytes that this process holds on a device.

    Garbage is collected first: slots of steps that were run before may lie in it, and leave while the next steps run.
    """
    gc.collect()
    return int(tf.config.experimental.get_memory_info(device)["current"])


def _bytes_of_data(data: Any) -> int:
    return sum(datasets.tensors_in(data)) if isinstance(data, tf.data.Dataset) else 0


def _bytes_taken(model: Any) -> int:
    if not isinstance(model, keras.Model):
        return 0
    different = {id(variable): variable for variable in (*model.variables, *slots_of(model))}
    return sum(map(bytes_of, different.values()))
