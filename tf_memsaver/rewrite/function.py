"""A traced function that computes the same, by the segments of a plan."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_memsaver.capture.function_calls import FunctionCalls
from tf_memsaver.plan.types import Plan
from tf_memsaver.rewrite.segments import SegmentedForward


def make_optimized_function(calls: FunctionCalls, plan: Plan) -> Any:
    """Return a ``tf.function`` that is called as ``calls.concrete`` is and runs its operations in the plan's segments.

    Its attribute ``memsaver_plan`` is the plan.

    Raises:
      PlanMismatchError: the plan was made for another function.
    """
    sequence = calls.sequence
    plan.check_matches(sequence.signatures, [call.label for call in sequence.calls])
    forward = SegmentedForward(sequence, plan.segments)

    def optimized(*args: Any, **kwargs: Any) -> Any:
        flat = calls.enter(calls.flat_arguments(args, kwargs))
        return calls.leave(forward(flat, training=True))

    function = tf.function(optimized, autograph=False)
    args, kwargs = calls.concrete.structured_input_signature
    function.get_concrete_function(*args, **kwargs)
    function.memsaver_plan = plan
    return function
