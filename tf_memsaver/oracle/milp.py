"""An oracle: the least time that any schedule must replay within a budget, by mixed-integer programming.

Checkmate's formulation (Jain et al., "Checkmate: Breaking the memory wall with optimal tensor rematerialization",
MLSys 2020, arXiv:1910.02653, section 4) over single operations, solved by HiGHS. The forward pass runs first, in order;
the backward ops run in their given order, each once, and before each of them any forward ops may run again. Their
partition into stages that advance the frontier by one op is theirs, too. Here a stage ends with a backward op that
reads values of the forward pass, and begins after the one before.

* R[t,u] ∈ {0,1}: forward op u runs again in stage t.
* S[t,v] ∈ {0,1}: value v is live when stage t begins; S[1,v]: it is kept from the forward pass. They would be 0 or 1 by
  themselves where all R are, but as integers they let HiGHS cut by the rows of bytes, and bounds are far better.
* R[t,u] ≤ S[t,v] + R[t,maker of v] for all v that u reads; 1 ≤ the same for what the backward op of stage t reads.
* S[t+1,v] ≤ S[t,v] + R[t,maker of v].
* U[t] ≤ budget, the bytes live while the backward op of stage t runs: G[t], which no schedule changes (gradients,
  temporaries, workspace), what the op reads, and what else is live when the next stage begins. Z[t,v] ≤ 1 − S[t+1,v]:
  an output takes over the buffer of v. The same for the other backward ops of a stage, and for the forward pass.
* U[t,u] ≤ budget, the bytes live while u runs again in stage t: what it reads and makes, what else the next stage
  begins with, or the stage's op reads, and was made before u. As in Checkmate, replays of one stage run in graph order.

In place of Checkmate's FREE[t,u,v], which says when within a stage a value dies, values that are neither carried on nor
read by the stage's op count only for the ops next to them. That makes the program small, and a *relaxation* of what the
simulator counts, as do free copies (a segment's replay reads copies of what enters it), free views, and outputs of the
step that need not be live at its end. So ``bound_seconds`` holds for every schedule of this order, those of segments of
one or of several levels among them, and ``seconds`` is the least there is where it is proven and the schedule's
``peak_bytes``, counted by the simulator's own walk, are within the budget, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tf_memsaver.errors import MissingExtraError
from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import Segment
from tf_memsaver.oracle.stages import Stages

TIME_LIMIT = 120.0
"""Seconds that HiGHS gets, if nothing else is said."""

CLOSE = 1e-6
"""Share by which time and bound may differ where a solution counts as proven."""

INFINITE = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """What was found out about the schedules within a budget.

    No schedule replays less than ``bound_seconds``; infinite where none is within the budget. ``seconds`` are those of
    the best one found (infinite: none was), and ``proven`` says that the two are the same. ``peak_bytes`` is what it
    needs in all, replays included: where that is within the budget, it can really run.
    """

    seconds: float
    bound_seconds: float
    proven: bool
    peak_bytes: int


def least_replay(graph: Graph, budget: int, time_limit: float = TIME_LIMIT, start: Sequence[Segment] = ()) -> Oracle:
    """Return the least replay seconds of schedules of ``graph`` whose peak is within ``budget`` bytes.

    For graphs of up to a few hundred ops; after ``time_limit`` seconds, the best that is known. Units that cannot be
    replayed are not. ``start`` is a plan within the budget to begin with, so that none worse is returned.

    Raises:
      MissingExtraError: HiGHS is not installed.
    """
    highs = _highspy()
    program = _Program(Stages(graph), budget)
    solver = highs.Highs()
    for option, value in (
        ("output_flag", False),
        ("time_limit", float(time_limit)),
        ("mip_rel_gap", CLOSE),
        ("threads", 1),
        ("random_seed", 0),
    ):
        solver.setOptionValue(option, value)
    solver.passModel(program.model(highs))
    if start:
        program.start_with(solver, start)
    solver.run()
    return program.read(highs, solver)


def is_available() -> bool:
    """Return whether HiGHS is installed."""
    try:
        _highspy()
    except MissingExtraError:
        return False
    return True


def _highspy() -> Any:
    try:
        return importlib.import_module("highspy")
    except ImportError as error:
        raise MissingExtraError("highspy", "milp") from error


class _Program:
    """The columns R, S and Z, and the rows over them, of a step's stages. Bytes are counted in budgets."""

    def __init__(self, stages: Stages, budget: int) -> None:
        self._stages, self._budget = stages, budget
        self._costs: list[float] = []
        self._rows: list[tuple[list[int], list[float], float]] = []
        self._unit = max((stages.graph.ops[op].seconds for op in stages.outputs), default=0.0) or 1.0
        self.kept: dict[tuple[int, int], int] = {}
        self.again: dict[tuple[int, int], int] = {}
        useful, ops = stages.useful, stages.graph.ops
        for value, maker in enumerate(stages.makers):
            for place in range(useful[value] + 1):
                self.kept[place, value] = self._column(0.0)
                if stages.replayable[value] and (place, maker) not in self.again:
                    self.again[place, maker] = self._column(ops[maker].seconds)
        self._integers = len(self._costs)
        for place in range(len(stages.stages)):
            self._availability(place)
        self._bytes_in_backward()
        self._bytes_of_replays()
        self._bytes_in_forward()

    def _column(self, cost: float) -> int:
        self._costs.append(cost)
        return len(self._costs) - 1

    def _row(self, terms: Sequence[tuple[int, float]], most: float) -> None:
        """Add Σ factor · column ≤ most."""
        self._rows.append(([column for column, _ in terms], [factor for _, factor in terms], most))

    def _at_hand(self, place: int, value: int, factor: float) -> list[tuple[int, float]]:
        """Return the terms of S + R: whether a value is live, or made again, in a stage."""
        again = self.again.get((place, self._stages.makers[value]))
        terms = [(self.kept[place, value], factor)]
        return terms if again is None else [*terms, (again, factor)]

    def _availability(self, place: int) -> None:
        """Add what ops need that run again in a stage, what its backward op reads, and what the next stage keeps."""
        stages = self._stages
        for value in stages.stages[place].reads:
            self._row(self._at_hand(place, value, -1.0), -1.0)
        for value in range(len(stages.roots)):
            if (place + 1, value) in self.kept:
                self._row([(self.kept[place + 1, value], 1.0), *self._at_hand(place, value, -1.0)], 0.0)
        for op in stages.outputs:
            if (place, op) in self.again:
                for value in stages.reads(op):
                    self._row([(self.again[place, op], 1.0), *self._at_hand(place, value, -1.0)], 0.0)

    def _live_when(self, place: int, left_out: Collection[int], until: int) -> list[tuple[int, float]]:
        """Return the terms of the bytes that are live when a stage begins, of the values before ``until``."""
        nbytes = self._stages.nbytes
        kept = ((value, self.kept.get((place, value))) for value in range(until) if value not in left_out)
        return [(column, nbytes[value] / self._budget) for value, column in kept if column is not None]

    def _live_between(self, place: int) -> list[tuple[int, float]]:
        """Return the terms of the bytes that are surely live from a stage's begin to its op.

        What may only serve replays can die before that: of such a value, what is carried on and not made again counts.
        """
        stages, terms = self._stages, []
        for value, size in enumerate(stages.nbytes):
            now, after = self.kept.get((place, value)), self.kept.get((place + 1, value))
            again = self.again.get((place, stages.makers[value]))
            serves = any((place, op) in self.again for op in stages.readers[value])
            if value in stages.stages[place].reads or not serves:
                terms.extend([] if now is None else [(now, size / self._budget)])
            elif after is not None:
                terms.append((after, size / self._budget))
                terms.extend([] if again is None else [(again, -size / self._budget)])
        return terms

    def _bytes_in_backward(self) -> None:
        """Add U[t] ≤ budget for each stage, and for the ops since the stage before."""
        nbytes, budget = self._stages.nbytes, self._budget
        for place, stage in enumerate(self._stages.stages):
            if stage.between:
                self._row(self._live_between(place), 1.0 - stage.between / budget)
            terms = self._live_when(place + 1, stage.reads, len(nbytes))
            for size in dict.fromkeys(stage.fresh):
                heirs = []
                for value in stage.overwrites:
                    if nbytes[value] == size:
                        taken = self._column(0.0)
                        heirs.append((taken, 1.0))
                        terms.append((taken, -size / budget))
                        after = self.kept.get((place + 1, value))
                        self._row([(taken, 1.0), *([] if after is None else [(after, 1.0)])], 1.0)
                if len(heirs) > stage.fresh.count(size):
                    self._row(heirs, float(stage.fresh.count(size)))
            read = sum(nbytes[value] for value in stage.reads)
            self._row(terms, 1.0 - (stage.live + read) / budget)

    def _bytes_of_replays(self) -> None:
        """Add what is live at least while an op runs again, where replays of one stage run in graph order.

        What it reads and makes; what the backward op reads, or the next stage begins with, and was made before it.
        """
        stages, nbytes, budget = self._stages, self._stages.nbytes, self._budget
        for (place, op), column in self.again.items():
            stage, step = stages.stages[place], stages.prepared.static[op]
            first = stages.outputs[op][0]
            own = {*stages.reads(op), *stages.outputs[op], *(value for value in stage.reads if value < first)}
            held = sum(nbytes[value] for value in own) + step.workspace - stages.taken_over(op)
            terms = self._live_when(place + 1, own, first)
            self._row([(column, held / budget), *terms], 1.0 - stage.least / budget)

    def _bytes_in_forward(self) -> None:
        """Add that what is kept for the backward pass leaves room for the forward pass."""
        nbytes, budget = self._stages.nbytes, self._budget
        for live, dead in self._stages.forward():
            kept = [(self.kept[0, value], nbytes[value] / budget) for value in dead if (0, value) in self.kept]
            self._row(kept, 1.0 - live / budget)

    # To HiGHS and back --------------------------------------------------------------------------------------------

    def model(self, highs: Any) -> Any:
        """Return the program as HiGHS takes it. Time is counted in the longest op's."""
        columns = [column for row, _, _ in self._rows for column in row]
        program = highs.HighsLp()
        program.num_col_, program.num_row_ = len(self._costs), len(self._rows)
        program.col_cost_ = np.array(self._costs) / self._unit
        program.col_lower_, program.col_upper_ = np.zeros(len(self._costs)), np.ones(len(self._costs))
        program.row_lower_ = np.full(len(self._rows), -highs.kHighsInf)
        program.row_upper_ = np.array([most for _, _, most in self._rows])
        program.a_matrix_.format_ = highs.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.cumsum([0, *(len(row) for row, _, _ in self._rows)])
        program.a_matrix_.index_ = np.array(columns, dtype=np.int32)
        program.a_matrix_.value_ = np.array([factor for _, factors, _ in self._rows for factor in factors])
        kinds = highs.HighsVarType
        rest = len(self._costs) - self._integers
        program.integrality_ = [kinds.kInteger] * self._integers + [kinds.kContinuous] * rest
        return program

    def start_with(self, solver: Any, segments: Sequence[Segment]) -> None:
        """Tell HiGHS of a plan: which ops run again in which stage; the rest follows."""
        again = self._stages.runs_again(segments)
        columns = np.array(list(self.again.values()), dtype=np.int32)
        values = np.array([float(key in again) for key in self.again])
        solver.setSolution(len(columns), columns, values)

    def read(self, highs: Any, solver: Any) -> Oracle:
        """Return what HiGHS found."""
        hopeless = any(not columns and most < 0 for columns, _, most in self._rows)
        if hopeless or solver.getModelStatus() == highs.HighsModelStatus.kInfeasible:
            return Oracle(seconds=INFINITE, bound_seconds=INFINITE, proven=True, peak_bytes=0)
        if not self._costs:
            none: list[list[int]] = [[] for _ in self._stages.stages]
            return Oracle(seconds=0.0, bound_seconds=0.0, proven=True, peak_bytes=self._stages.peak_bytes(none))
        info = solver.getInfo()
        # Without integers there is no such bound, and nothing to replay.
        bound = max(info.mip_dual_bound, 0.0) * self._unit if self._integers else 0.0
        if info.primal_solution_status != highs.SolutionStatus.kSolutionStatusFeasible:
            return Oracle(seconds=INFINITE, bound_seconds=bound, proven=False, peak_bytes=0)
        found = np.array(solver.getSolution().col_value)
        runs_again = self._without_waste({key for key, column in self.again.items() if found[column] > 0.5})
        ops = self._stages.graph.ops
        seconds = sum(ops[op].seconds for again in runs_again for op in again)
        return Oracle(
            seconds=seconds,
            bound_seconds=min(bound, seconds),
            proven=seconds <= bound + CLOSE * max(seconds, self._unit),
            peak_bytes=self._stages.peak_bytes(runs_again),
        )

    def _without_waste(self, again: set[tuple[int, int]]) -> list[list[int]]:
        """Return, for each stage, the ops that run again and are needed, in order."""
        stages = self._stages
        runs_again: list[list[int]] = [[] for _ in stages.stages]
        needed: set[int] = set()
        for place in range(len(stages.stages) - 1, -1, -1):
            needed.update(stages.stages[place].reads)
            for op, outputs in reversed(stages.outputs.items()):
                if (place, op) in again and not needed.isdisjoint(outputs):
                    runs_again[place].append(op)
                    needed.difference_update(outputs)
                    needed.update(stages.reads(op))
            runs_again[place].reverse()
        return runs_again
