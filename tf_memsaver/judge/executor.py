"""TensorFlow's executor, as far as it decides which tensors are live at once.

The order of a schedule is one of many. ``ExecutorState`` (tensorflow/core/common_runtime/executor.cc, 2.21) runs an op
as soon as all it waits for is done: of the ops that one op makes ready, a thread runs the cheap ones itself, in order,
and the last of the expensive ones, and puts the other expensive ones on its own queue, from which idle threads steal
the oldest. So while one thread runs a convolution, others run ahead wherever the graph lets them, and the peak depends
on how long each op takes. ``run`` plays one step by given times.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from tf_memsaver.ir.graph import Graph
from tf_memsaver.judge.allocator import AllocatorLedger
from tf_memsaver.judge.schedule import Schedule


class Dependencies:
    """What each step of a schedule waits for, and what waits for it."""

    def __init__(self, schedule: Schedule, graph: Graph, forward_count: int) -> None:
        """Read the dependencies off: by data, by the ops' ``after``, and the gates of replays (see ``runtime``)."""
        steps = schedule.steps
        maker = {buffer: place for place, step in enumerate(steps) for buffer in step.news}
        waits = [{maker[b] for b in step.touches if maker.get(b, place) != place} for place, step in enumerate(steps)]
        plain = {step.op: place for place, step in enumerate(steps) if step.op >= 0 and not step.replay}
        replayed = {step.op: place for place, step in enumerate(steps) if step.op >= 0 and step.replay}
        for place, step in enumerate(steps):
            for op in graph.ops[step.op].after if step.op >= 0 else ():
                in_backward = place >= forward_count
                before = replayed.get(op, -1) if in_backward and op in replayed else plain.get(op, -1)
                if step.replay and op not in replayed:
                    continue
                if 0 <= before < place:
                    waits[place].add(before)
        readers: dict[int, list[int]] = {}
        for place, step in enumerate(steps):
            for buffer in step.touches:
                readers.setdefault(buffer, []).append(place)
        self.reads = {buffer: len(places) for buffer, places in readers.items()}
        for start, stop in schedule.replays:
            arrived = {w for place in range(start, stop) for w in waits[place] if forward_count <= w < start}
            leaving = {
                place: [r for buffer in steps[place].news for r in readers[buffer] if r >= stop]
                for place in range(start, stop)
            }
            made = {place for place, late in leaving.items() if late}
            for place in range(start, stop):
                if steps[place].replay:
                    waits[place] |= arrived
                for late in leaving[place]:
                    waits[late] |= made
        self.waits = [len(w) for w in waits]
        self.waiting: list[list[int]] = [[] for _ in steps]
        for place in range(len(waits) - 1, -1, -1):
            for w in waits[place]:
                self.waiting[w].append(place)


def run(
    schedule: Schedule,
    dependencies: Dependencies,
    seconds: Sequence[float],
    expensive: Sequence[bool],
    outlive: frozenset[int],
    ledger: AllocatorLedger,
    threads: int,
) -> None:
    """Play one step; ``ledger`` books every buffer when its op starts, and its end when the last reader is done."""
    steps, nbytes = schedule.steps, schedule.nbytes
    waits, reads = list(dependencies.waits), dict(dependencies.reads)
    alive: set[int] = set()
    own: list[deque[int]] = [deque() for _ in range(threads)]
    queues: list[deque[int]] = [deque() for _ in range(threads)]
    running: list[tuple[int, int | None] | None] = [None] * threads
    ends: list[tuple[float, int, int]] = []
    queues[0].extend(place for place, count in enumerate(waits) if not count)
    count = 0

    def start(thread: int, place: int, now: float) -> None:
        nonlocal count
        step = steps[place]
        dying = [b for b in step.overwrites if reads[b] == 1 and b in alive and b not in outlive]
        for buffer in step.news:
            heir = next((b for b in dying if nbytes[b] == nbytes[buffer]), None)
            if heir is None:
                ledger.allocate(buffer)
            else:
                dying.remove(heir)
                alive.discard(heir)
                ledger.take_over(buffer, heir)
            alive.add(buffer)
        running[thread] = (place, ledger.take_scratch(step.workspace))
        count += 1
        heapq.heappush(ends, (now + seconds[place], count, thread))

    def start_next(thread: int, now: float) -> None:
        queue = own[thread] or queues[thread]
        if queue:
            start(thread, queue.popleft(), now)
            return
        for other in queues:
            if other:
                start(thread, other.pop(), now)
                return

    start_next(0, 0.0)
    while ends:
        now, _, thread = heapq.heappop(ends)
        done = running[thread]
        assert done is not None
        running[thread] = None
        place, scratch = done
        ledger.give_scratch(scratch)
        for buffer in steps[place].touches:
            reads[buffer] -= 1
            if not reads[buffer] and buffer in alive and buffer not in outlive:
                alive.discard(buffer)
                ledger.free(buffer)
        last: int | None = None
        for follower in dependencies.waiting[place]:
            waits[follower] -= 1
            if waits[follower]:
                continue
            if not expensive[follower]:
                own[thread].append(follower)
                continue
            if last is not None:
                queues[thread].appendleft(last)
            last = follower
        if last is not None:
            (queues[thread].appendleft if own[thread] else own[thread].append)(last)
        for each in (thread, *(t for t in range(threads) if t != thread)):
            if running[each] is None:
                start_next(each, now)
