"""The order in which a tape goes back, where a recompute segment is one operation of it.

A tape calls the gradient function of an operation when all gradients have arrived for what it made. Of several that are
ready, the first to get ready comes first (``GradientTape::ComputeGradient``, tensorflow/c/eager/tape.h, TensorFlow
2.21: what gets ready enters ``op_stack`` at the other end than where it is taken). The gradient function of a recompute
segment adds the replay and all its backward ops at once. So two branches take turns, segment by segment. The gradients
of several losses, of regularizers too, begin together.

Sums of gradients and updates run as soon as they can: the updates of a replayed segment's weights while it goes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from tf_memsaver.ir.graph import Op, Phase


class Turn:
    """Ops that a tape adds at once: of the segment ``number``, or of none (-1)."""

    __slots__ = ("number", "ops")

    def __init__(self, number: int, ops: list[Op]) -> None:
        self.number, self.ops = number, ops


def turns_of(
    ops: Sequence[Op],
    numbers: Sequence[int],
    replayed: Collection[int],
    is_gradient: Sequence[bool],
    update_groups: Mapping[int, int],
) -> list[Turn]:
    """Return the ops of a backward pass as a tape adds them.

    Args:
      ops: the backward ops, in an order in which they can run.
      numbers: for each op, the number of the segment that it belongs to, -1 for none.
      replayed: the numbers of the recompute segments.
      is_gradient: for the ops of a segment, which values are gradients: it begins with those that arrive.
      update_groups: the group of each update, by the index of its op. Those of a group run one after the other.
    """
    turns = _turns(ops, numbers, replayed, update_groups)
    return [turns[place] for place in _Tape(turns, is_gradient).placed]


def _turns(
    ops: Sequence[Op], numbers: Sequence[int], replayed: Collection[int], update_groups: Mapping[int, int]
) -> list[Turn]:
    turns: list[Turn] = []
    whole: dict[tuple[str, int], Turn] = {}

    def join(kind: str, its: int, number: int, op: Op) -> None:
        if (kind, its) not in whole:
            whole[kind, its] = Turn(number, [])
            turns.append(whole[kind, its])
        whole[kind, its].ops.append(op)

    last: tuple[int, str] | None = None
    for op, number in zip(ops, numbers, strict=True):
        key = None
        if number in replayed:
            join("segment", number, number, op)
        elif op.phase is Phase.UPDATE:
            join("updates", update_groups[op.index], -1, op)
        elif _is_sum(op):
            turns.append(Turn(number, [op]))
        else:
            # The gradient function of the operation ``a/b`` adds ``gradient_tape/a/b/…``.
            # For code without a scope, several add to the same scope.
            key = number, op.name.rpartition("/")[0]
            if key == last and key[1] not in ("", "gradient_tape"):
                turns[-1].ops.append(op)
            else:
                turns.append(Turn(number, [op]))
        last = key
    return turns


def _is_sum(op: Op) -> bool:
    """Whether a tape adds gradients up by an op: it is no gradient function's, and of no unit."""
    return op.unit is None and op.type == "AddN"


class _Tape:
    """Puts turns in order; ``placed`` has their places."""

    def __init__(self, turns: Sequence[Turn], is_gradient: Sequence[bool]) -> None:
        self._turns = turns
        self.placed: dict[int, None] = {}
        turn_of = {op.index: place for place, turn in enumerate(turns) for op in turn.ops}
        maker = {value: place for place, turn in enumerate(turns) for op in turn.ops for value in op.outputs}
        self._before: list[set[int]] = []
        self._followers: list[list[int]] = [[] for _ in turns]
        for place, turn in enumerate(turns):
            before = {maker[value] for op in turn.ops for value in op.inputs if value in maker}
            # In order, an update waits for what it reads.
            waiting = [op for op in turn.ops if op.phase is not Phase.UPDATE]
            before |= {turn_of[other] for op in waiting for other in op.after if other in turn_of}
            before.discard(place)
            self._before.append(before)
            for each in before:
                self._followers[each].append(place)
        if is_gradient:
            self._go_back_from(
                [
                    place
                    for place, turn in enumerate(turns)
                    if not self._before[place]
                    and any(is_gradient[value] and value not in maker for op in turn.ops for value in op.inputs)
                ]
            )
        for place in range(len(turns)):
            if place not in self.placed:
                self._go_back_from([place])

    def _go_back_from(self, starts: list[int]) -> None:
        """Place what gradients lead to that begin with some turns, and those of losses added to them."""
        reached = self._reached_from(starts)
        while others := self._losses_beside(reached):
            starts += others
            reached = self._reached_from(starts)
        missing = dict.fromkeys(reached, 0)
        for place in reached:
            for follower in self._followers[place]:
                if follower in missing:
                    missing[follower] += 1
        queue = deque(sorted(starts))
        while queue:
            place = queue.popleft()
            self._place(place)
            for follower in self._followers[place]:
                missing[follower] = missing.get(follower, 0) - 1
                if missing[follower] == 0:
                    first = self._turns[follower].ops[0]
                    is_taped = first.phase is not Phase.UPDATE and not _is_sum(first)
                    (queue.append if is_taped else queue.appendleft)(follower)

    def _reached_from(self, starts: Sequence[int]) -> dict[int, None]:
        """Return the turns that some turns lead to, these included, that have no place yet."""
        reached = dict.fromkeys(starts)
        pending = [*starts]
        while pending:
            for follower in self._followers[pending.pop()]:
                if follower not in reached and follower not in self.placed:
                    pending.append(follower)
                    reached[follower] = None
        return reached

    def _losses_beside(self, reached: Collection[int]) -> list[int]:
        """Return where the gradients of further losses begin that meet reached ones, in a sum or in a unit.

        Such a beginning is outside all units. What begins in one, like a mask of forward values, has its place there.
        """
        pending = [place for place in reached if self._is_of_unit(place) or _is_sum(self._turns[place].ops[0])]
        seen, found = set(reached), []
        while pending:
            place = pending.pop()
            before = [each for each in self._before[place] if each not in self.placed]
            if not before and place not in reached and not self._is_of_unit(place):
                found.append(place)
            new = [each for each in before if each not in seen]
            seen.update(new)
            pending += new
        return found

    def _is_of_unit(self, place: int) -> bool:
        first = self._turns[place].ops[0]
        return first.unit is not None and first.phase is not Phase.UPDATE

    def _place(self, place: int) -> None:
        """Place a turn after what it needs and no gradient leads to, such as a mask made of forward values."""
        pending, seen = [place], {place}
        while pending:
            needed = [each for each in self._before[pending[-1]] if each not in self.placed and each not in seen]
            if needed:
                seen.update(needed)
                pending += sorted(needed, reverse=True)
            else:
                self.placed[pending.pop()] = None
