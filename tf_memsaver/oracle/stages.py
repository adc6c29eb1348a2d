"""The step as the program of ``milp`` sees it: stages of the backward pass, and values that may be made again."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tf_memsaver.ir.graph import Graph, Phase
from tf_memsaver.ir.segments import Segment
from tf_memsaver.judge.prepared import Prepared
from tf_memsaver.judge.rows import ScheduledOp
from tf_memsaver.judge.schedule import scheduled
from tf_memsaver.judge.walk import walk
from tf_memsaver.search.facts import BackwardOp, Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A backward op that reads values of the forward pass: which ones, and what else is live while it runs.

    ``fresh`` are the bytes of its outputs that take over no gradient, ``overwrites`` the values that they may take over
    instead; ``between`` is the most that else is live since the stage before, and ``least`` the least.
    """

    op: int
    reads: tuple[int, ...]
    live: int
    between: int
    least: int
    fresh: tuple[int, ...]
    overwrites: tuple[int, ...]


class Stages:
    """The step as the program sees it. Values are numbered in the order in which the forward pass makes them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph = graph.in_one_pass
        self.prepared = Prepared(graph)
        self.facts = Facts(self.prepared)
        static = self.prepared.static
        made = [(op, root) for op in graph.ops for root in static[op.index].allocates if root in self.facts.buffers]
        self.roots = [root for _, root in made]
        self.value_of = {root: value for value, root in enumerate(self.roots)}
        self.nbytes = [self.prepared.nbytes[root] for root in self.roots]
        self.makers = [op.index for op, _ in made]
        self.outputs: dict[int, list[int]] = {}
        """For each op that makes values, which ones."""
        for value, maker in enumerate(self.makers):
            self.outputs.setdefault(maker, []).append(value)
        self.readers: list[list[int]] = [[] for _ in made]
        """For each value, the ops that make others of it."""
        for op in self.outputs:
            for value in self.reads(op):
                self.readers[value].append(op)
        self.replayable = [op.unit is not None and not graph.units[op.unit].pinned for op, _ in made]
        self.stages = tuple(self._stages())

    def reads(self, op: int) -> tuple[int, ...]:
        """Return the values that an op reads."""
        touches = self.prepared.static[op].touches
        allocates = self.prepared.static[op].allocates
        return tuple(self.value_of[root] for root in touches if root in self.value_of and root not in allocates)

    def taken_over(self, op: int) -> int:
        """Return the bytes of outputs that may take the place of inputs, at most."""
        step, nbytes = self.prepared.static[op], self.prepared.nbytes
        free = [nbytes[root] for root in step.overwrites]
        return sum(nbytes[root] for root in step.allocates if nbytes[root] in free)

    def _stages(self) -> Sequence[Stage]:
        resident = self.facts.resident_bytes
        ops: list[BackwardOp] = [*self.facts.loss_ops, *itertools.chain(*self.facts.backward_ops.values())]
        stages, between, least = [], 0, sys.maxsize
        for made in sorted(ops, key=lambda op: op.place):
            if self.graph.ops[made.place].phase is Phase.FORWARD:
                continue
            before = made.live - self.graph.ops[made.place].workspace_bytes - sum(made.fresh)
            least = min(least, before + resident)
            reads = self.reads(made.place)
            if reads:
                overwrites = tuple(self.value_of[root] for root in made.overwrites)
                stages.append(
                    Stage(
                        op=made.place,
                        reads=reads,
                        live=made.live + resident,
                        between=between,
                        least=least,
                        fresh=made.fresh,
                        overwrites=overwrites,
                    )
                )
                between, least = 0, sys.maxsize
            else:
                between = max(between, made.live + resident)
        return stages

    @cached_property
    def useful(self) -> list[int]:
        """For each value, the last stage (0-based) in which it can be of use: for its op, or to replay others; -1."""
        useful = [-1] * len(self.roots)
        for place, stage in enumerate(self.stages):
            for value in stage.reads:
                useful[value] = place
        for value in range(len(self.roots) - 1, -1, -1):
            if self.replayable[value]:
                for read in self.reads(self.makers[value]):
                    useful[read] = max(useful[read], useful[value])
        return useful

    def forward(self) -> list[tuple[int, list[int]]]:
        """Return, for forward ops, what is live there with nothing kept, and the values that are dead by then."""
        ops = [op for op in self.graph.ops if op.phase is Phase.FORWARD]
        steps = [self.prepared.static[op.index] for op in ops]
        live, last = walk(steps, self.prepared.nbytes, (), self.facts.resident_bytes)
        instants: list[tuple[int, list[int]]] = []
        highest = -1
        # What is kept only grows: an op that needs less than a later one says nothing new.
        for place in range(len(ops) - 1, -1, -1):
            if live[place] > highest:
                highest = live[place]
                instants.append((highest, [v for v, root in enumerate(self.roots) if last[root] < place]))
        return instants

    def runs_again(self, segments: Sequence[Segment]) -> set[tuple[int, int]]:
        """Return, for a plan, the stages and the ops that run again in them."""
        steps = scheduled(self.prepared, segments).steps
        stage_of = {stage.op: place for place, stage in enumerate(self.stages)}
        again: set[tuple[int, int]] = set()
        place = len(self.stages)
        for step in reversed(steps):
            if step.replay:
                again.add((place, step.op))
            elif step.op in stage_of:
                place = stage_of[step.op]
        return again

    def peak_bytes(self, runs_again: Sequence[Sequence[int]]) -> int:
        """Return the peak, by the simulator's walk, of the schedule with these ops run again in each stage."""
        prepared, static = self.prepared, self.prepared.static
        steps, nbytes = list[ScheduledOp](), list(prepared.nbytes)
        now: dict[int, int] = {}

        def moved(step: ScheduledOp) -> ScheduledOp:
            return step._replace(
                touches=tuple(dict.fromkeys(now.get(root, root) for root in step.touches)),
                allocates=tuple(now.get(root, root) for root in step.allocates),
                overwrites=tuple(now.get(root, root) for root in step.overwrites),
            )

        stage_of = {stage.op: place for place, stage in enumerate(self.stages)}
        for op in self.graph.ops:
            place = stage_of.get(op.index, -1)
            if place >= 0:
                for again in runs_again[place]:
                    for root in static[again].allocates:
                        now[root] = len(nbytes)
                        nbytes.append(prepared.nbytes[root])
                    steps.append(moved(static[again]))
            steps.append(moved(static[op.index]))
        resident = self.facts.resident_bytes
        return max(walk(steps, nbytes, prepared.outlive, resident)[0], default=resident)
