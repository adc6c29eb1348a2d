"""The order of a tape: segments of two branches take turns, and what is summed inside of one stays in it."""

from __future__ import annotations

import re

from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.ir.text import parse
from tf_memsaver.judge.prepared import Prepared
from tf_memsaver.judge.schedule import scheduled

TWO_BRANCHES = """
    graph "two branches" batch=1 device=IDEAL
    unit 0 "left0" kind="K" signature="s"
    unit 1 "left1" kind="K" signature="s"
    unit 2 "right0" kind="K" signature="s"
    unit 3 "right1" kind="K" signature="s"
    value 0 "x" input 1
    value 1 "left0" activation 1
    value 2 "left1" activation 1
    value 3 "right0" activation 1
    value 4 "right1" activation 1
    value 5 "loss" gradient 1
    value 6 "d_left1" gradient 1
    value 7 "d_right1" gradient 1
    value 8 "more of d_left1" gradient 1
    value 9 "sum" gradient 1
    value 10 "d_left0" gradient 1
    value 11 "d_right0" gradient 1
    op 0 "left0" F forward unit=0 reads=0 writes=1
    op 1 "left1" F forward unit=1 reads=1 writes=2
    op 2 "right0" F forward unit=2 reads=0 writes=3
    op 3 "right1" F forward unit=3 reads=3 writes=4
    op 4 "loss" L backward reads=2,4 writes=5
    op 5 "d_right1" B backward unit=3 reads=3,5 writes=7
    op 6 "d_right0" B backward unit=2 reads=0,7 writes=11
    op 7 "d_left1" B backward unit=1 reads=1,5 writes=6
    op 8 "more" B backward unit=1 reads=1,5 writes=8
    op 9 "AddN" AddN backward reads=6,8 writes=9
    op 10 "d_left0" B backward unit=0 reads=0,9 writes=10
    outputs 10 11
"""


def _backward(*modes: SegmentMode) -> list[str]:
    """Return the backward ops and replays in their order, with a segment for each unit."""
    graph = parse(TWO_BRANCHES)
    segments = [Segment(start=unit, stop=unit + 1, mode=mode) for unit, mode in enumerate(modes)]
    steps = scheduled(Prepared(graph), segments, taped=True).steps[4:]
    return [f"{'again ' if step.replay else ''}{graph.ops[step.op].name}" for step in steps if step.op >= 0]


def test_branches_take_turns() -> None:
    store, again = SegmentMode.STORE, SegmentMode.RECOMPUTE
    # As captured, one branch comes behind the other. A sum runs as soon as it can.
    assert _backward(again, again, again, again) == [
        "loss", "d_right1", "d_left1", "more", "AddN", "d_right0", "d_left0",
    ]  # fmt: skip
    assert _backward(store, store, store, store) == [
        "loss", "d_right1", "d_left1", "more", "AddN", "d_right0", "d_left0",
    ]  # fmt: skip


def test_code_takes_its_turn() -> None:
    # Its gradients are a tape's as well, but are of no unit; those of two networks are not one behind the other for it.
    store = [Segment(start=unit, stop=unit + 1, mode=SegmentMode.STORE) for unit in range(4)]
    graph = parse(TWO_BRANCHES.replace("backward unit=1", "backward"))
    steps = scheduled(Prepared(graph), store, taped=True).steps[4:]
    assert [graph.ops[step.op].name for step in steps] == [
        "loss", "d_right1", "d_left1", "more", "AddN", "d_right0", "d_left0",
    ]  # fmt: skip


def test_a_sum_of_what_a_segment_reads_itself_and_sends_out_is_made_in_it() -> None:
    graph = parse(TWO_BRANCHES.replace("unit=1 reads=1,5 writes=8", "unit=3 reads=4,5 writes=8"))
    whole = [Segment(start=0, stop=2, mode=SegmentMode.RECOMPUTE), Segment(start=2, stop=4, mode=SegmentMode.STORE)]
    steps = scheduled(Prepared(graph), whole, taped=True).steps
    places = {graph.ops[step.op].name: place for place, step in enumerate(steps) if step.op >= 0 and not step.replay}
    assert places["more"] < places["d_left1"] == places["AddN"] - 1 == places["d_left0"] - 2


def test_a_sum_inside_of_a_segment_is_no_reason_to_replay_twice() -> None:
    graph = parse(TWO_BRANCHES.replace("reads=1,5 writes=8", "reads=2,5 writes=8"))
    whole = [Segment(start=0, stop=2, mode=SegmentMode.RECOMPUTE), Segment(start=2, stop=4, mode=SegmentMode.STORE)]
    steps = scheduled(Prepared(graph), whole, taped=True).steps
    assert [step.op for step in steps if step.replay and step.op >= 0] == [0, 1]
    places = {graph.ops[step.op].name: place for place, step in enumerate(steps) if step.op >= 0 and not step.replay}
    assert places["d_left1"] + 1 == places["more"] == places["AddN"] - 1 == places["d_left0"] - 2


def test_branches_whose_backward_ops_took_turns_are_replayed_once_each() -> None:
    """So it is where one network is called several times: counted in the captured order, each turn was a replay."""
    in_turns = TWO_BRANCHES
    for name, place in (("d_left1", 5), ("d_right1", 6), ("more", 7), ("d_right0", 8)):
        line = next(line for line in TWO_BRANCHES.splitlines() if f'"{name}" B' in line)
        in_turns = in_turns.replace(f"{line}\n", "")
        at = in_turns.index('    op 9 "AddN"')
        in_turns = f"{in_turns[:at]}{re.sub('op [0-9]+', f'op {place}', line)}\n{in_turns[at:]}"
    graph = parse(in_turns)
    again = SegmentMode.RECOMPUTE
    both = [Segment(start=0, stop=2, mode=again), Segment(start=2, stop=4, mode=again)]
    for taped in (False, True):
        steps = scheduled(Prepared(graph), both, taped=taped).steps
        assert sorted(step.op for step in steps if step.replay and step.op >= 0) == [0, 2]
    # What replays nothing stays as it was captured.
    stored = [Segment(start=0, stop=4, mode=SegmentMode.STORE)]
    assert [step.op for step in scheduled(Prepared(graph), stored).steps] == [op.index for op in graph.ops]


TWO_LOSSES = """
    graph "two losses" batch=1 device=IDEAL
    unit 0 "trunk" kind="K" signature="s"
    unit 1 "aux" kind="K" signature="s"
    unit 2 "main" kind="K" signature="s"
    value 0 "x" input 1
    value 1 "trunk" activation 1
    value 2 "aux" activation 1
    value 3 "main" activation 1
    value 4 "of aux" gradient 1
    value 5 "of main" gradient 1
    value 6 "d_aux" gradient 1
    value 7 "d_main" gradient 1
    value 8 "d_main kernel" gradient 1
    value 9 "sum" gradient 1
    value 10 "mask" gradient 1
    value 11 "d_trunk" gradient 1
    op 0 "trunk" F forward unit=0 reads=0 writes=1
    op 1 "aux" F forward unit=1 reads=1 writes=2
    op 2 "main" F forward unit=2 reads=1 writes=3
    op 3 "of aux" L backward reads=2 writes=4
    op 4 "of main" L backward reads=3 writes=5
    op 5 "d_main/filter" B backward unit=2 reads=1,5 writes=8
    op 6 "d_main/input" B backward unit=2 reads=5 writes=7
    op 7 "d_aux" B backward unit=1 reads=4 writes=6
    op 8 "AddN" AddN backward reads=6,7 writes=9
    op 9 "mask" M backward unit=0 reads=1 writes=10
    op 10 "d_trunk" B backward unit=0 reads=9,10 writes=11
    outputs 8 11
"""


def test_the_gradients_of_two_losses_begin_together() -> None:
    graph = parse(TWO_LOSSES)
    store = [Segment(start=unit, stop=unit + 1, mode=SegmentMode.STORE) for unit in range(3)]
    steps = scheduled(Prepared(graph), store, taped=True).steps[3:]
    # The kernel's gradient of the one does not wait until the other is done. A mask is made where it is read.
    assert [graph.ops[step.op].name for step in steps] == [
        "of aux", "of main", "d_aux", "d_main/filter", "d_main/input", "AddN", "mask", "d_trunk",
    ]  # fmt: skip


BRANCHES_OF_A_SEGMENT = """
    graph "branches of a segment" batch=1 device=IDEAL
    unit 0 "left" kind="K" signature="s"
    unit 1 "right" kind="K" signature="s"
    unit 2 "head" kind="K" signature="s"
    value 0 "x" input 1
    value 1 "left" activation 1
    value 2 "right" activation 1
    value 3 "head" activation 1
    value 4 "d_head" gradient 1
    value 5 "d_right/a" gradient 1
    value 6 "d_right/b" gradient 1
    value 7 "d_left/a" gradient 1
    value 8 "d_left/b" gradient 1
    value 9 "sum" gradient 1
    op 0 "left" F forward unit=0 reads=0 writes=1
    op 1 "right" F forward unit=1 reads=0 writes=2
    op 2 "head" F forward unit=2 reads=1,2 writes=3
    op 3 "d_head" B backward unit=2 reads=3 writes=4
    op 4 "d_right/a/B" B backward unit=1 reads=2,4 writes=5
    op 5 "d_right/b/B" B backward unit=1 reads=2,5 writes=6
    op 6 "d_left/a/B" B backward unit=0 reads=1,4 writes=7
    op 7 "d_left/b/B" B backward unit=0 reads=1,7 writes=8
    op 8 "AddN" AddN backward reads=6,8 writes=9
    outputs 9
"""


def test_branches_of_a_segment_go_back_operation_by_operation() -> None:
    # A replay has a tape of its own: both branches begin with the gradient that arrives.
    graph = parse(BRANCHES_OF_A_SEGMENT)
    segments = [Segment(start=0, stop=2, mode=SegmentMode.RECOMPUTE), Segment(start=2, stop=3, mode=SegmentMode.STORE)]
    steps = scheduled(Prepared(graph), segments, taped=True).steps[3:]
    assert [graph.ops[step.op].name for step in steps if step.op >= 0 and not step.replay] == [
        "d_head", "d_right/a/B", "d_left/a/B", "d_right/b/B", "d_left/b/B", "AddN",
    ]  # fmt: skip
