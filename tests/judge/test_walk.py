"""What is live in each step, by arrays and step by step; and schedules of a scheduler that has written others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.strategies import covers, graphs
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.judge import schedule
from tf_memsaver.judge.rows import ScheduledOp
from tf_memsaver.judge.schedule import Scheduler, scheduled
from tf_memsaver.judge.walk import Lives, walk
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request


def walk_step_by_step(
    steps: Sequence[ScheduledOp], nbytes: Sequence[int], outlive: Iterable[int], resident_bytes: int
) -> list[int]:
    last = {buffer: place for place, step in enumerate(steps) for buffer in step.touches}
    last.update(dict.fromkeys(outlive, len(steps)))
    alive, live = set[int](), list[int]()
    for place, step in enumerate(steps):
        dying = [buffer for buffer in step.overwrites if buffer in alive and last[buffer] == place]
        for buffer in step.allocates:
            same = [old for old in dying if nbytes[old] == nbytes[buffer]]
            alive.add(buffer)
            if same:
                dying.remove(same[0])
                alive.remove(same[0])
        live.append(resident_bytes + sum(nbytes[buffer] for buffer in alive) + step.workspace)
        alive -= {buffer for buffer in step.touches if last[buffer] == place}
    return live


@st.composite
def steps_of_buffers(draw: st.DrawFn) -> tuple[list[ScheduledOp], list[int], list[int]]:
    """Steps that make up to two buffers each of those before them, their sizes, and some that outlive the steps."""
    nbytes: list[int] = []
    steps: list[ScheduledOp] = []
    for index in range(draw(st.integers(0, 12))):
        read = draw(st.lists(st.sampled_from(range(len(nbytes))), unique=True, max_size=3)) if nbytes else []
        overwrites = draw(st.lists(st.sampled_from(read), unique=True)) if read else []
        made = range(len(nbytes), len(nbytes) + draw(st.integers(0, 2)))
        nbytes += [draw(st.sampled_from([4, 8, 12])) for _ in made]
        workspace = draw(st.sampled_from([0, 100]))
        steps.append(ScheduledOp(index, False, (*read, *made), tuple(made), tuple(overwrites), workspace))
    return steps, nbytes, [buffer for buffer in range(len(nbytes)) if draw(st.booleans())]


@given(steps_of_buffers())
def test_the_walk_is_that_of_a_loop(given_steps: tuple[list[ScheduledOp], list[int], list[int]]) -> None:
    steps, nbytes, outlive = given_steps
    assert walk(steps, nbytes, outlive, 1000)[0] == walk_step_by_step(steps, nbytes, outlive, 1000)


@pytest.mark.parametrize("most_steps", [0, schedule.MOST_STEPS])
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(data=st.data())
def test_a_scheduler_writes_what_it_would_write_for_one_plan_alone(
    data: st.DataObject, most_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it forgets everything it has written before each segment."""
    monkeypatch.setattr(schedule, "MOST_STEPS", most_steps)
    problem = Problem.build(data.draw(graphs(max_units=5)), Request())
    prepared, plans = problem.simulator.prepared, list(covers(problem))
    scheduler, units = Scheduler(prepared), len(problem.graph.units)
    for _ in range(3):
        segments = data.draw(st.sampled_from(plans))
        if data.draw(st.booleans()):
            segments = [Segment(start=0, stop=units, mode=SegmentMode.RECOMPUTE, children=tuple(segments))]
        for taped in (False, True):
            one, other = scheduler.schedule(segments, taped=taped), scheduled(prepared, segments, taped=taped)
            sizes = one.sizes.tolist()
            assert one.steps == other.steps and sizes == other.sizes.tolist() and one.runs == other.runs
            expected = walk_step_by_step(one.steps, sizes, prepared.outlive, 0)
            assert walk(one.steps, sizes, prepared.outlive, 0)[0] == expected
            live = Lives(one.rows, one.sizes, prepared.outlive).sums(one.sizes) + one.rows.workspace
            assert live.tolist() == expected
