"""Which units must stay in store segments, and why."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tf_memsaver.capture.optimised import JoinedSums
from tf_memsaver.capture.step import TracedStep
from tf_memsaver.cost.rules import RANDOM
from tf_memsaver.ir.graph import Phase
from tf_memsaver.parity.extra_readers import may_round_otherwise
from tf_memsaver.parity.level import Rule, level_here
from tf_memsaver.program.calls import CallSequence
from tf_memsaver.tfgraph.operations import (
    ASSIGNMENTS,
    FUNCTION_CALLS,
    called_functions,
    hidden_state,
    inside_branches,
)

_READERS = ("ReadVariableOp", *FUNCTION_CALLS)

_OWN_GRADIENT = (
    "has a gradient of its own (tf.custom_gradient, tf.recompute_grad) that reads variables, which a replay cannot "
    "give it; if that is tf.recompute_grad, take it out"
)


def pinned_units(
    sequence: CallSequence, step: TracedStep, variables: Iterable[tf.Variable], sums: JoinedSums
) -> dict[int, str]:
    """Return, by unit, the reason why the runtime cannot replay it; ``variables`` are those that are known.

    Of several reasons the last is told.
    """
    found = _by_calls(sequence, step), _by_trace(step), _by_operations(step, variables), _by_sums(step, sums)
    return dict(itertools.chain.from_iterable(found))


def _by_calls(sequence: CallSequence, step: TracedStep) -> Iterator[tuple[int, str]]:
    """Yield the units that are pinned for what a call says of itself, and what it reads and makes."""
    model_outputs = set(sequence.outputs)
    composite: set[int] = set()
    for unit, call in enumerate(sequence.calls):
        if call.pinned:
            yield unit, call.pinned
        if model_outputs.intersection(call.outputs):
            yield unit, "makes an output of the model, whose logits the loss reads"
        tensors = zip(call.outputs, step.boundary[unit], strict=False)
        made = {slot for slot, tensor in tensors if not isinstance(tensor, tf.Tensor)}
        composite |= made
        if made or composite.intersection(call.inputs):
            yield unit, "makes or reads a ragged or sparse tensor"


def _by_trace(step: TracedStep) -> Iterator[tuple[int, str]]:
    """Yield the units that are pinned for what happened while they were traced."""
    for unit, path in step.sparse_units.items():
        yield unit, f"has a sparse gradient of {path}, to which others are added"
    for unit in step.drawing_units:
        yield unit, "draws from Python's or NumPy's random numbers when it is traced; a replay would draw others"
    for unit, name in step.unknown_reads.items():
        yield unit, f"reads '{name}', a trainable tf.Variable that Keras does not know"


def _by_operations(step: TracedStep, variables: Iterable[tf.Variable]) -> Iterator[tuple[int, str]]:
    """Yield the units that are pinned for an operation of their forward pass, or of their gradient."""
    known = {id(variable.handle) for variable in variables}
    resources = [(outer, inner) for outer, inner in step.graph.captures if outer.dtype == tf.resource]
    unknown = {id(inner) for outer, inner in resources if id(outer) not in known}
    for operation, (phase, owner) in zip(step.graph.get_operations(), step.owners, strict=True):
        if owner is None or operation.device in step.elsewhere:
            continue
        if phase is Phase.BACKWARD and operation.type in _READERS and _takes_state(operation):
            yield owner, _OWN_GRADIENT
        if phase is not Phase.FORWARD:
            continue
        if operation.type in FUNCTION_CALLS and _takes_state(operation):
            yield owner, "calls a tf.function that reads variables, which a replay cannot give it"
        if operation.type in ASSIGNMENTS and any(id(tensor) in unknown for tensor in operation.inputs):
            yield owner, "assigns a tf.Variable that Keras does not know: a replay would assign it again"
        if any(
            each.type in RANDOM for each in inside_branches(operation.type, called_functions(operation, step.graph))
        ):
            yield owner, "draws random numbers in a branch (tf.cond), from a seed that a replay cannot give it"
        if may_round_otherwise(operation.type, called_functions(operation, step.graph)):
            yield owner, "runs a branch (tf.cond) or a loop that may round otherwise when it is recomputed"
        blocker = hidden_state(operation, step.graph)
        if blocker:
            yield owner, f"runs {blocker}, whose hidden state cannot be replayed"


def _by_sums(step: TracedStep, sums: JoinedSums) -> Iterator[tuple[int, str]]:
    """Yield the units with sums that graph optimisation would not join in a first run as it does in a plain step."""
    if Rule.STORED_SUMS not in level_here().rules:
        return
    for operation, (phase, owner) in zip(step.graph.get_operations(), step.owners, strict=True):
        if owner is None or phase is not Phase.FORWARD or id(operation) not in step.reachable:
            continue
        if sums.depend_on_gradients(operation):
            yield owner, "adds tensors of which only gradients tell that they have one shape (as after UpSampling2D)"
        if sums.depend_on_equals(operation):
            yield owner, "adds tensors that are added elsewhere, too: TensorFlow does that once, in another order"


def _takes_state(operation: Any) -> bool:
    return any(tensor.dtype == tf.resource for tensor in operation.inputs)
