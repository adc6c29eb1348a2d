"""Operations of a backward pass that may run side by side: where it needs less memory than at its peak.

One by one, operations leave threads idle: within 90% of its memory, a MobileNetV2 took 13% longer so and 7% in groups,
a BERT 10 and 5% (two cores). A group ends before what its operations make, all of it at once, would come near the peak
of the pass run one by one; the next operation then waits for all of the group, and the next group for that operation.
So no order of what is held takes more.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence
from typing import Any

from tf_memsaver.cost.rules import Kernels
from tf_memsaver.cost.workspace import workspace_bytes
from tf_memsaver.parity.buffers import buffer_of
from tf_memsaver.tfgraph.operations import spec_of, tensor_bytes

NEAR_PEAK = 0.9
"""The share of the peak that a group may come to: the allocator adds to what is handed out in another order."""

MOST = 64
"""Operations of a group: what waits for all of them has an edge from each."""

_RESIDENT = frozenset({"Const", "Placeholder", "ReadVariableOp", "VarHandleOp"})
"""Types of operations that make what lives beside a step."""


class Profile:
    """The bytes of a backward pass, operation by operation, as they run one after the other.

    ``made`` are those that each makes or works with. An optimizer may use up a gradient at once, or wait for all of
    them: so ``after`` each operation there are two numbers of bytes that are live, and there are two ``peaks``.
    """

    def __init__(self, operations: Sequence[Any], results: Iterable[Any], batch_size: int, kernels: Kernels) -> None:
        """Count.

        Args:
          operations: those of the pass, in the order in which they are to run.
          results: the gradients that it is for.
          batch_size: what dimensions that are not known count as.
          kernels: whose kernels run.
        """
        place = {id(each): number for number, each in enumerate(operations)}
        last: dict[int, tuple[Any, int]] = {}
        for number, each in enumerate(operations):
            for buffer in map(buffer_of, (*each.inputs, *each.outputs)):
                last[id(buffer)] = buffer, number
        self.made = [workspace_bytes(spec_of(each, kernels, free=batch_size)) for each in operations]
        kept = {id(buffer_of(each)) for each in results}
        change = [[0] * (len(operations) + 1) for _ in range(2)]
        for buffer, number in last.values():
            nbytes = 0 if buffer.op.type in _RESIDENT else tensor_bytes(buffer, batch_size)
            begin = place.get(id(buffer.op))
            if begin is not None:
                self.made[begin] += nbytes
            for is_kept, its in zip((False, True), change, strict=True):
                # What is there before the pass counts before its first operation.
                its[0 if begin is None else begin + 1] += nbytes
                if not (is_kept and id(buffer) in kept):
                    its[number + 1] -= nbytes
        before = [list(itertools.accumulate(each)) for each in change]
        self.after = list(zip(*(each[1:] for each in before), strict=True))
        self.peaks = tuple(
            max((live + made for live, made in zip(each, self.made, strict=False)), default=0) for each in before
        )

    def fit(self, begin: int, end: int) -> bool:
        """Whether operations may run side by side: from place ``begin``, above 0, to ``end``, which is not one."""
        made, live = sum(self.made[begin:end]), self.after[begin - 1]
        return all(each + made <= NEAR_PEAK * peak for each, peak in zip(live, self.peaks, strict=True))


class Groups:
    """The groups of the operations that are held in order on one device, added one after the other."""

    def __init__(self, operations: Sequence[Any], held: Container[str], profile: Profile) -> None:
        """Begin with the operations of the pass, as ``profile`` has them, and the names of those that are added."""
        self._profile = profile
        self._place = {each.name: number for number, each in enumerate(operations)}
        following, self._following = len(operations), [0] * len(operations)
        for number, each in reversed([*enumerate(operations)]):
            self._following[number] = following
            if each.name in held:
                following = number
        self._begin = 0
        self._before: tuple[str, ...] = ()
        self._group: list[str] = []

    def has_room(self, name: str) -> bool:
        """Whether an operation may run beside those of the last group, with what runs freely until the next one."""
        is_begun = bool(self._before) and len(self._group) < MOST
        return is_begun and self._profile.fit(self._begin, self._following[self._place[name]])

    def join(self, name: str) -> tuple[str, ...]:
        """Add an operation to the last group; return what it has to wait for."""
        self._group.append(name)
        return self._before

    def end(self, name: str, *, waits: bool) -> tuple[str, ...]:
        """Add an operation that comes after the last group; return what it has to wait for.

        One that cannot wait is run beside those before it, and what comes then waits for all of them.
        """
        before = self.open
        self._before, self._group = (name,) if waits else (*before, name), []
        self._begin = self._place[name] + 1
        return before

    @property
    def open(self) -> tuple[str, ...]:
        """What an operation has to wait for that comes after all that were added."""
        return (*self._group,) or self._before
