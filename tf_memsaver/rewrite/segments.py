"""Run a model's calls in the segments of a plan.

A segment's mode decides how it runs: ``RUNNERS`` has an entry for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf
from absl import logging

from tf_memsaver.compat import keras_calls, keras_variables
from tf_memsaver.compat.graphs import is_compiled_by_xla
from tf_memsaver.errors import PlanMismatchError
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.plan.plan import Plan
from tf_memsaver.program.calls import CallSequence
from tf_memsaver.program.program import Segmenter
from tf_memsaver.rewrite.blocks import Block, blocks_of
from tf_memsaver.rewrite.entering import mask_of
from tf_memsaver.rewrite.run import Run, Runner, UnlistedVariablesError
from tf_memsaver.runtime.order import get_ready, hold_in_order, in_turn
from tf_memsaver.runtime.recompute import recompute
from tf_memsaver.runtime.replayable import Shared


class SegmentedForward:
    """The forward pass of a model in segments: flat inputs in, flat outputs out."""

    def __init__(
        self,
        sequence: CallSequence,
        segments: Sequence[Segment],
        ordered: int | None = None,
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare the segments; ``ordered`` as in ``Shared``. ``begins`` is called whenever they begin to run.

        Raises:
          PlanMismatchError: a recompute segment holds a layer call that makes an output of the model.
        """
        get_ready()
        self._sequence, self._ordered, self._begins = sequence, ordered, begins
        self._run = _one_by_one([_runner(block) for block in blocks_of(sequence, segments)])

    def __call__(self, inputs: Sequence[Any], training: bool | None, shared: Shared | None = None) -> list[Any]:
        """Return the flat outputs for flat, standardized inputs; ``shared`` if these are part of a larger model.

        Names are those of the scope that it is called in.
        """
        self._begins()
        slots: list[Any] = [None] * self._sequence.slot_count
        hold_in_order(self._ordered)
        for slot, tensor in zip(self._sequence.inputs, inputs, strict=True):
            slots[slot] = in_turn(_of_graph(tensor))
            mask = mask_of(tensor)
            if mask is not None:
                keras_calls.set_keras_mask(slots[slot], mask)
        self._run(
            slots, training, replace(shared, names=shared.parity.names()) if shared else Shared(ordered=self._ordered)
        )
        return [slots[slot] for slot in self._sequence.outputs]


def in_segments(plan: Plan) -> Segmenter:
    """Return what programs are handed to be run by a plan."""
    ordered = ordered_by(plan)
    return Segmenter(
        prepare=functools.partial(SegmentedForward, ordered=ordered, begins=_Judged(plan)),
        begin=functools.partial(Shared, ordered=ordered),
    )


class _Judged:
    """Warns once where XLA compiles a step whose plan was judged by the simulator."""

    def __init__(self, plan: Plan) -> None:
        self._is_silent = plan.request.executor == "xla" or not plan.recomputed_units

    def __call__(self) -> None:
        if not self._is_silent and is_compiled_by_xla(tf.compat.v1.get_default_graph()):
            self._is_silent = True
            logging.warning(
                "tf_memsaver: XLA compiles this step, but its plan was made for TensorFlow's own executor. "
                "Training works, but the predicted figures do not apply. Optimize the model after "
                "model.compile(..., jit_compile=True), or with executor='xla'."
            )


def ordered_by(plan: Plan) -> int | None:
    """Return the batch size of a plan whose step is held in order, or None; what replays nothing is the plain step."""
    return plan.batch_size if plan.request.order and plan.recomputed_units else None


def _of_graph(tensor: Any) -> Any:
    """Return the tensor by which the graph that is being traced, if any, reads what may be an eager tensor.

    Gradients of variables go to their handles, which stay as they are.
    """
    if (
        tf.executing_eagerly()
        or not tf.is_tensor(tensor)
        or tf.is_symbolic_tensor(tensor)
        or tensor.dtype == tf.resource
    ):
        return tensor
    return tf.compat.v1.get_default_graph().capture(tensor)


def _runner(block: Block) -> Runner:
    children = [_runner(child) for child in block.children]
    inside = _one_by_one(children) if children else functools.partial(_run_calls, block)
    return RUNNERS[block.segment.mode](block, inside)


def _one_by_one(runners: Sequence[Runner]) -> Runner:
    def run(slots: list[Any], training: bool | None, shared: Shared) -> None:
        for runner in runners:
            runner(slots, training, shared)

    return run


def _run_calls(block: Block, slots: list[Any], training: bool | None, shared: Shared) -> None:
    """Run the calls one by one; trained as they stand, or inside an enclosing segment's replay."""
    scope = keras_variables.recording_scope()
    for call, released in block.calls:
        if scope is not None:
            scope.operation = call.operation
        for slot, tensor in zip(call.outputs, call.run(slots, training, shared.names), strict=True):
            slots[slot] = tensor
        for slot in released:
            slots[slot] = None


def _stored(_: Block, inside: Runner) -> Runner:
    """Return what runs a segment as it stands: its activations stay until the backward pass has read them."""
    return inside


class _Recomputed:
    """Runs a segment without keeping its activations; the backward pass replays it."""

    def __init__(self, block: Block, inside: Runner) -> None:
        """Prepare a segment; ``inside`` runs what it consists of.

        Raises:
          PlanMismatchError: the segment makes an output of the model.
        """
        if block.result_makers:
            raise PlanMismatchError(
                f"it replays '{block.result_makers[0]}', which makes an output of this model and must stay in a store "
                f"segment"
            )
        self._block, self._inside = block, inside
        # It grows when a run meets variables that its layers do not list.
        self._variables = list(block.variables)

    def __call__(self, slots: list[Any], training: bool | None, shared: Shared) -> None:
        run, outputs = self._first_run(slots, training, shared)
        for slot in self._block.released:
            slots[slot] = None
        run.publish(outputs, slots)

    def _first_run(self, slots: Sequence[Any], training: bool | None, shared: Shared) -> tuple[Run, list[tf.Tensor]]:
        while True:
            run = Run(self._block, self._inside, slots, training, self._variables, shared)
            try:
                return run, recompute(run, run.inputs, run.weights, shared)
            except UnlistedVariablesError as found:
                self._variables.extend(found.variables)


RUNNERS: Mapping[SegmentMode, Callable[[Block, Runner], Runner]] = {
    SegmentMode.STORE: _stored,
    SegmentMode.RECOMPUTE: _Recomputed,
}
"""By mode, what makes the runner of a segment of what it reads and makes, and of the runner of what is inside."""
