"""The training call of a Keras model once more, traced with the shapes of one batch or with other arguments.

Python code of layers asks operations for sizes that are not known when it is traced, and graph optimisation does more
where shapes are known. Where the plain step is traced with a batch of a known size, as in ``fit``, only a call traced
so gives its bits. A plan is made of the trace with a free batch dimension and the arguments of ``fit``, and its
segments are looked for here.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from tf_memsaver.errors import PlanMismatchError
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.program.calls import Call, CallSequence
from tf_memsaver.program.grouping import arranged, group_calls
from tf_memsaver.program.model_function import ModelFunction
from tf_memsaver.program.op_calls import GroupCall, OpCall
from tf_memsaver.program.signature import Given


class MovedCuts(ModelFunction):
    """A model's call for known shapes or other arguments, in calls that end where those of the planned trace do."""

    def __init__(
        self,
        model: Any,
        planned: CallSequence,
        given: Given,
        shapes: Sequence[tf.TensorShape] | None = None,
    ) -> None:
        """Trace ``model``, which is only read, for flat inputs of these shapes (or with a free batch dimension)."""
        self._planned = [call.end for call in planned.calls if isinstance(call, GroupCall)]
        self._shapes = shapes
        self._places = [0]
        super().__init__(model, given)

    def specs(self, model: Any) -> list[tf.TensorSpec]:
        """Return the specs of the flat inputs, with the shapes that are known."""
        free = super().specs(model)
        if self._shapes is None:
            return free
        return [tf.TensorSpec(shape, spec.dtype, spec.name) for shape, spec in zip(self._shapes, free, strict=True)]

    def group(
        self, calls: Sequence[OpCall], outputs: Sequence[int], resident: frozenset[int], slots: Mapping[int, int]
    ) -> tuple[Call, ...]:
        """Return operations as calls (a ``function_calls.Grouping``).

        An operation may not be there, or have the name of another one, where sizes are asked for: a call ends with the
        operation of the same name, as far as these are in the same order.
        """
        calls = arranged(calls)
        place_of = {call.label: place for place, call in enumerate(calls[:-1])}
        ends = longest_increasing([place_of.get(label, -1) for label in self._planned[:-1]])
        stops = [0, *(end + 1 for end in ends if end is not None), len(calls)]
        for end in ends:
            self._places.append(self._places[-1] + (end is not None))
        self._places.append(len(stops) - 1)
        return group_calls([calls[i:j] for i, j in itertools.pairwise(stops)], outputs, resident)

    def segments(self, planned: Sequence[Segment]) -> tuple[Segment, ...]:
        """Return a plan's segments over the calls of this trace.

        Raises:
          PlanMismatchError: one of them would replay what must run once.
        """
        found = self._moved(planned)
        for segment in found:
            inside = self.calls.sequence.calls[segment.start : segment.stop]
            pinned = next((call for call in inside if call.pinned), None)
            if segment.mode is SegmentMode.RECOMPUTE and pinned is not None:
                raise PlanMismatchError(f"it replays '{pinned.label}', which {pinned.pinned}")
        return found

    def _moved(self, segments: Sequence[Segment]) -> tuple[Segment, ...]:
        places = self._places
        moved = (
            replace(s, start=places[s.start], stop=places[s.stop], children=self._moved(s.children)) for s in segments
        )
        return tuple(segment for segment in moved if segment.start < segment.stop)


def longest_increasing(places: Sequence[int]) -> list[int | None]:
    """Return ``places`` with None for the negative ones and the fewest others, so that the rest increase."""
    # The smallest place that so many and one more increasing ones can end with.
    smallest: list[int] = []
    length_at = []
    for place in places:
        length = bisect.bisect_left(smallest, place)
        length_at.append(length if place >= 0 else -1)
        if place >= 0:
            smallest[length : length + 1] = [place]
    wanted = len(smallest) - 1
    found: list[int | None] = []
    for place, length in zip(reversed(places), reversed(length_at), strict=True):
        if length == wanted >= 0:
            found.append(place)
            wanted -= 1
        else:
            found.append(None)
    return found[::-1]
