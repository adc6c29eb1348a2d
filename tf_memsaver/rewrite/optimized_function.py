"""A traced function that computes the same, by the segments of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_memsaver.plan.plan import Plan
from tf_memsaver.program.function_calls import FunctionCalls
from tf_memsaver.rewrite.segments import SegmentedForward, ordered_by


class SegmentedFunction:
    """A function whose operations run in the segments of a plan; it takes flat tensors."""

    def __init__(self, calls: FunctionCalls, plan: Plan) -> None:
        """Prepare the segments.

        Raises:
          PlanMismatchError: the plan was made for another function.
        """
        sequence = calls.sequence
        plan.check_matches(sequence.signatures, [call.label for call in sequence.calls])
        self.calls, self._forward = calls, SegmentedForward(sequence, plan.segments, ordered_by(plan))

    def __call__(self, flat: Sequence[Any]) -> Any:
        """Return the function's result for what ``calls.flat_arguments`` returned."""
        return self.calls.finish(self._forward(self.calls.enter(flat), training=True))


def make_optimized_function(calls: FunctionCalls, plan: Plan) -> Any:
    """Return a ``tf.function`` that is called as the traced one is and runs its operations in the plan's segments.

    Its attribute ``memsaver_plan`` is the plan.

    Raises:
      PlanMismatchError: the plan was made for another function.
    """
    segmented = SegmentedFunction(calls, plan)

    def optimized(*args: Any, **kwargs: Any) -> Any:
        return segmented(calls.flat_arguments(args, kwargs))

    function = tf.function(optimized, autograph=False)
    args, kwargs = calls.signature
    function.get_concrete_function(*args, **kwargs)
    function.memsaver_plan = plan
    return function
