"""TensorFlow's executor, as far as it decides which tensors of a plain step are live at once.

Plans are held to their order, and are walked. The plain step is not: the order of its schedule is one of many.
``ExecutorState`` (tensorflow/core/common_runtime/executor.cc, 2.21) runs an op as soon as all it waits for is done: of
the ops that one op makes ready, a thread runs the cheap ones itself, in order, and the last of the expensive ones, and
puts the other expensive ones on its own queue, from which idle threads steal the oldest. So while one thread runs a
convolution, others run ahead wherever the graph lets them, and the peak depends on how long each op takes. ``run``
plays one step by given times.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from tf_memsaver.ir.graph import Graph, MemoryKind, Phase
from tf_memsaver.judge.allocator import AllocatorLedger
from tf_memsaver.judge.rows import ScheduledOp
from tf_memsaver.judge.walk import taken_over

_ARGUMENT = ScheduledOp(op=-1, replay=False, touches=(), allocates=(), overwrites=(), workspace=0)


class Dependencies:
    """What each step of a schedule waits for, and what waits for it.

    Behind the steps stand ``arguments`` that take no memory and wait for nothing (see ``_shared_weights``).
    """

    def __init__(self, steps: Sequence[ScheduledOp], graph: Graph, outlive: Iterable[int]) -> None:
        """Read them off, by data and by the ops' ``after``; the steps replay nothing, and some buffers outlive them."""
        waits = _waits_by_data(steps)
        _add_waits_by_order(waits, steps, graph)
        weights = _shared_weights(steps, graph)
        for number, readers in enumerate(weights, len(steps)):
            for place in readers:
                waits[place].add(number)
        waits += [set() for _ in weights]
        self.reads = Counter(itertools.chain(outlive, *(step.touches for step in steps)))
        """How many steps touch each buffer; for those that outlive the steps, one more."""
        self.waits = [len(before) for before in waits]
        """How many steps each step waits for."""
        self.arguments = len(weights)
        """How many made-up steps follow the real ones."""
        first_use = [*range(len(steps)), *(readers[0] for readers in weights)]
        self.ready = sorted((p for p, before in enumerate(waits) if not before), key=lambda p: (first_use[p], -p))
        """The steps that wait for nothing, in order."""
        self.waiting: list[list[int]] = [[] for _ in waits]
        """The steps that wait for each step, the last one first."""
        for place in range(len(waits) - 1, -1, -1):
            for before in waits[place]:
                self.waiting[before].append(place)


def _waits_by_data(steps: Sequence[ScheduledOp]) -> list[set[int]]:
    """Return, for each step, those that make what it touches."""
    maker = {buffer: place for place, step in enumerate(steps) for buffer in step.allocates}
    return [{maker[b] for b in step.touches if maker.get(b, place) != place} for place, step in enumerate(steps)]


def _add_waits_by_order(waits: list[set[int]], steps: Sequence[ScheduledOp], graph: Graph) -> None:
    """Add what the ops' ``after`` says."""
    placed = {step.op: place for place, step in enumerate(steps)}
    for place, step in enumerate(steps):
        waits[place] |= {placed[op] for op in graph.ops[step.op].after if placed[op] < place}


def _shared_weights(steps: Sequence[ScheduledOp], graph: Graph) -> list[list[int]]:
    """Return, for each weight that several steps of the forward pass read, these steps.

    A weight is an argument of the step (``_Arg``). Arguments run one after another among the first ops, and each makes
    all that read it ready: so several calls of one network advance together, layer by layer, whatever data they share.
    """
    readers: dict[int, list[int]] = {}
    for place, step in enumerate(steps):
        op = graph.ops[step.op]
        if op.phase is Phase.FORWARD:
            for root in {graph.roots[value] for value in op.inputs}:
                if graph.values[root].kind is MemoryKind.PARAMETER:
                    readers.setdefault(root, []).append(place)
    return [places for places in readers.values() if len(places) > 1]


class _Threads:
    """The threads of one step that is played: what each runs, and what waits in its queues."""

    def __init__(
        self,
        steps: Sequence[ScheduledOp],
        nbytes: Sequence[int],
        dependencies: Dependencies,
        seconds: Sequence[float],
        ledger: AllocatorLedger,
        threads: int,
    ) -> None:
        self._steps = [*steps, *[_ARGUMENT] * dependencies.arguments]
        self._seconds = [*seconds, *[0.0] * dependencies.arguments]
        self._nbytes = nbytes
        self._waits, self._reads = list(dependencies.waits), dict(dependencies.reads)
        self._waiting = dependencies.waiting
        self._ledger = ledger
        self._alive: set[int] = set()
        self._own: list[deque[int]] = [deque() for _ in range(threads)]
        """What each thread runs next itself."""
        self._queues: list[deque[int]] = [deque() for _ in range(threads)]
        """What each thread has for others to steal."""
        self._running: list[tuple[int, int | None] | None] = [None] * threads
        """The step that each thread runs, with its scratch."""
        self._ends: list[tuple[float, int, int]] = []
        """When running steps end: time, a number that makes ties stable, thread."""
        self._count = 0
        self._queues[0].extend(dependencies.ready)

    def run(self, expensive: Sequence[bool]) -> None:
        """Run all steps."""
        self._start_next(0, 0.0)
        while self._ends:
            now, _, thread = heapq.heappop(self._ends)
            place = self._finish(thread)
            self._distribute(place, thread, expensive)
            self._start_next(thread, now)
            for other, running in enumerate(self._running):
                if running is None:
                    self._start_next(other, now)

    def _start_next(self, thread: int, now: float) -> None:
        """Start a step of the thread's own, or the oldest that another one has to give."""
        queue = self._own[thread] or self._queues[thread]
        if queue:
            self._start(thread, queue.popleft(), now)
            return
        for other in self._queues:
            if other:
                self._start(thread, other.pop(), now)
                return

    def _start(self, thread: int, place: int, now: float) -> None:
        step, alive = self._steps[place], self._alive
        dying = [b for b in step.overwrites if self._reads[b] == 1 and b in alive]
        taken = taken_over(step.allocates, dying, self._nbytes) if dying else {}
        for buffer in step.allocates:
            if buffer in taken:
                alive.discard(taken[buffer])
                self._ledger.take_over(buffer, taken[buffer])
            else:
                self._ledger.allocate(buffer)
            alive.add(buffer)
        for buffer in step.copies:
            if self._reads[buffer] > 1:
                self._ledger.allocate(buffer)
                alive.add(buffer)
        self._running[thread] = place, self._ledger.take_scratch(step.workspace)
        self._count += 1
        heapq.heappush(self._ends, (now + self._seconds[place], self._count, thread))

    def _finish(self, thread: int) -> int:
        """End the step that a thread runs, with the buffers that it reads last; return its place."""
        done = self._running[thread]
        assert done is not None
        self._running[thread] = None
        place, scratch = done
        self._ledger.give_scratch(scratch)
        reads, alive = self._reads, self._alive
        for buffer in self._steps[place].touches:
            reads[buffer] -= 1
            if not reads[buffer] and buffer in alive:
                alive.discard(buffer)
                self._ledger.free(buffer)
        return place

    def _distribute(self, place: int, thread: int, expensive: Sequence[bool]) -> None:
        """Queue what a step made ready: cheap ones and the last expensive one for the thread, the others for all."""
        waits, own, queue = self._waits, self._own[thread], self._queues[thread]
        last: int | None = None
        for follower in self._waiting[place]:
            waits[follower] -= 1
            if waits[follower]:
                continue
            if not expensive[follower]:
                own.append(follower)
                continue
            if last is not None:
                queue.appendleft(last)
            last = follower
        if last is not None:
            (queue.appendleft if own else own.append)(last)


def run(
    steps: Sequence[ScheduledOp],
    nbytes: Sequence[int],
    dependencies: Dependencies,
    seconds: Sequence[float],
    expensive: Sequence[bool],
    ledger: AllocatorLedger,
    threads: int,
) -> None:
    """Play one step; ``ledger`` books every buffer when its op starts, and its end when the last reader is done."""
    _Threads(steps, nbytes, dependencies, seconds, ledger, threads).run(expensive)
