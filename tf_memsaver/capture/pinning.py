"""Which units must stay in store segments, and why."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from tf_memsaver.capture.step import TracedStep
from tf_memsaver.ir.graph import Phase
from tf_memsaver.program.calls import CallSequence
from tf_memsaver.tfgraph.operations import FUNCTION_CALLS, hidden_state


def pinned_units(sequence: CallSequence, step: TracedStep, variables: Iterable[tf.Variable]) -> dict[int, str]:
    """Return, by unit, the reason why the runtime cannot replay it; ``variables`` are those that are known."""
    reasons: dict[int, str] = {}
    model_outputs = set(sequence.outputs)
    composite: set[int] = set()
    for unit, call in enumerate(sequence.calls):
        if call.pinned:
            reasons[unit] = call.pinned
        if model_outputs.intersection(call.outputs):
            reasons[unit] = "makes an output of the model, whose logits the loss reads"
        made = [
            slot for slot, t in zip(call.outputs, step.boundary[unit], strict=False) if not isinstance(t, tf.Tensor)
        ]
        composite.update(made)
        if made or composite.intersection(call.inputs):
            reasons[unit] = "makes or reads a ragged or sparse tensor"
    for unit, path in step.sparse_units.items():
        reasons[unit] = f"keeps the sparse gradient of {path}"
    for unit in step.drawing_units:
        reasons[unit] = "draws from Python's or NumPy's random numbers when it is traced; a replay would draw others"
    for unit, name in step.unknown_reads.items():
        reasons[unit] = f"reads '{name}', a trainable tf.Variable that Keras does not know"
    handles = {id(variable.handle) for variable in variables}
    unknown = {
        id(inner) for outer, inner in step.graph.captures if outer.dtype == tf.resource and id(outer) not in handles
    }
    for operation, (phase, owner) in zip(step.graph.get_operations(), step.owners, strict=True):
        if phase is Phase.FORWARD and owner is not None:
            if operation.type in FUNCTION_CALLS and any(t.dtype == tf.resource for t in operation.inputs):
                reasons[owner] = "calls a tf.function that reads variables, which a replay cannot give it"
            if operation.type.startswith("Assign") and any(id(t) in unknown for t in operation.inputs):
                reasons[owner] = "assigns a tf.Variable that Keras does not know: a replay would assign it again"
            blocker = hidden_state(operation, step.graph)
            if blocker:
                reasons[owner] = f"runs {blocker}, whose hidden state cannot be replayed"
    return reasons
