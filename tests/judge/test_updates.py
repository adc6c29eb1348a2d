"""Updates end a step and take the same under all plans; those that wait for one gradient run together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.ir.text import parse
from tf_memsaver.judge.prepared import Prepared
from tf_memsaver.judge.schedule import scheduled
from tf_memsaver.judge.simulate import Simulator

STEP = """
    graph "two layers" batch=1 device=IDEAL
    unit 0 "first" kind="K" signature="s"
    unit 1 "second" kind="K" signature="s"
    value 0 "x" input 1
    value 1 "first" activation 8
    value 2 "second" activation 8
    value 3 "of second" gradient 8
    value 4 "of first" gradient 8
    value 5 "weight of second" parameter 2
    value 6 "weight of first" parameter 2
    value 7 "gradient of second's" gradient 2
    value 8 "gradient of first's" gradient 2
    value 9 "rate" gradient 1
    value 10 "decay of second" gradient {decay}
    value 11 "sum of second" gradient 2
    value 12 "sum of first" gradient 2
    op 0 "first" F forward unit=0 reads=0,6 writes=1
    op 1 "second" F forward unit=1 reads=1,5 writes=2
    op 2 "loss" L backward reads=2 writes=3
    op 3 "d_weight_second" B backward unit=1 reads=1,3 writes=7
    op 4 "d_second" B backward unit=1 reads=3,5 writes=4
    op 5 "d_weight_first" B backward unit=0 reads=0,4 writes=8
    op 6 "rate" U update writes=9
    op 7 "decay" U update reads=5 writes=10
    op 8 "sum_second" U update reads=7,9,10 writes=11
    op 9 "assign_second" AssignSubVariableOp update reads=5,11
    op 10 "sum_first" U update reads=8,9 writes=12
    op 11 "assign_first" AssignSubVariableOp update reads=6,12
"""


def step(decay: int = 2) -> Graph:
    """Two layers with their updates, the second one's with a decay."""
    return parse(STEP.format(decay=decay))


def plans() -> list[list[Segment]]:
    store, again = SegmentMode.STORE, SegmentMode.RECOMPUTE
    modes = [(store, store), (again, store), (store, again), (again, again)]
    return [[Segment(start=k, stop=k + 1, mode=mode) for k, mode in enumerate(each)] for each in modes]


def test_updates_that_wait_for_one_gradient_are_a_group() -> None:
    groups = Prepared(step()).update_groups
    assert groups[7] == groups[8] == groups[9] != groups[10] == groups[11]
    assert list(groups.values()).count(groups[6]) == 1  # Both read the rate.


def test_what_waits_for_several_gradients_is_alone() -> None:
    groups = Prepared(parse(STEP.format(decay=2).replace("reads=7,9,10", "reads=7,8,9,10"))).update_groups
    assert len({groups[8], groups[9], groups[10]}) == 3
    assert groups[7] == groups[8]


@pytest.mark.parametrize("segments", plans())
def test_a_group_runs_as_soon_as_its_gradient_is_there(segments: Sequence[Segment]) -> None:
    names = [step().ops[each.op].name for each in scheduled(Prepared(step()), segments, taped=True).steps]
    first = names.index("decay")
    assert names[first : first + 3] == ["decay", "sum_second", "assign_second"]
    assert first < names.index("d_weight_first")


@pytest.mark.parametrize("decay", [2, 100], ids=["a peak elsewhere", "a peak in the update"])
@pytest.mark.parametrize("segments", plans())
def test_the_peak_of_the_updates_is_counted_once_for_all_plans(segments: Sequence[Segment], decay: int) -> None:
    simulator = Simulator(step(decay))
    measured, timeline = simulator.measure(segments), simulator.run(segments)
    assert measured.peak_bytes == timeline.peak_bytes
    beside = max(*measured.forward_peaks, *measured.backward_peaks, measured.other_peak)
    assert (beside < measured.peak_bytes) == (decay == 100)
    assert [instant.op for instant in timeline.instants][-6:] == [6, 7, 8, 9, 10, 11]
