"""Timelines worked out by hand, in bytes. A layer of a chain makes 8; its weight and weight gradient have 1."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import covers, graphs
from tf_memsaver.cost.device import POOL_SHARE
from tf_memsaver.ir.graph import Graph, MemoryKind, Op, Phase, Unit, Value
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.judge.simulate import Simulator, Timeline
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tools.shared.nets import Net, chain

STORE, RECOMPUTE = SegmentMode.STORE, SegmentMode.RECOMPUTE


def segment(start: int, stop: int, mode: SegmentMode, *children: Segment) -> Segment:
    return Segment(start=start, stop=stop, mode=mode, children=children)


def run(graph: Graph, *segments: Segment) -> Timeline:
    return Simulator(graph).run(segments)


def live(timeline: Timeline) -> list[int]:
    return [instant.live_bytes for instant in timeline.instants]


def test_plain_chain():
    graph = chain([8, 8, 8])
    timeline = run(graph, segment(0, 3, STORE))
    # Resident: input 4 and weights 3. Forward adds 8 a layer, then the loss 1; its gradient takes the place of the
    # last output. Each layer's weight gradient stays; its input and its output's gradient go.
    assert live(timeline) == [15, 23, 31, 32, 32, 33, 33, 26, 26, 19]
    assert timeline.resident_bytes == 7
    assert timeline.peak_bytes == 33
    assert timeline.instants[timeline.peak_at].op == 5
    assert timeline.replay_seconds == 0
    # Forward 8 s a layer and loss 1; backward 16 s for each 8 bytes, 2 for each weight gradient.
    assert timeline.step_seconds == 3 * 8 + 1 + 16 + 3 * 2 + 2 * 16


def in_sequence(first: Graph, second: Graph) -> Graph:
    """Two steps as one with two tapes, the second behind the first."""
    values, ops, units = len(first.values), len(first.ops), len(first.units)

    def moved(indices: Sequence[int]) -> tuple[int, ...]:
        return tuple(index + values for index in indices)

    def moved_value(value: Value) -> Value:
        alias_of = None if value.alias_of is None else value.alias_of + values
        return dataclasses.replace(value, index=value.index + values, alias_of=alias_of)

    return dataclasses.replace(
        first,
        values=(*first.values, *map(moved_value, second.values)),
        ops=(
            *first.ops,
            *(
                dataclasses.replace(
                    op,
                    index=op.index + ops,
                    unit=None if op.unit is None else op.unit + units,
                    inputs=moved(op.inputs),
                    outputs=moved(op.outputs),
                    overwrites=moved(op.overwrites),
                    after=tuple(index + ops for index in op.after),
                )
                for op in second.ops
            ),
        ),
        units=(*first.units, *(dataclasses.replace(unit, index=unit.index + units) for unit in second.units)),
        outputs=(*first.outputs, *moved(second.outputs)),
    )


def test_a_step_of_two_tapes_needs_what_the_larger_of_them_needs():
    one, other = chain([8, 8, 8]), chain([8, 8, 8, 8])
    graph = in_sequence(one, other)
    # Weights, inputs and the outputs of both are there in addition: of the first step a loss and three gradients.
    for segments in (
        (segment(0, 3, STORE), segment(0, 4, STORE)),
        (segment(0, 2, RECOMPUTE), segment(2, 3, STORE), segment(0, 4, STORE)),
    ):
        of_first = [each for each in segments if each.stop <= 3]
        shifted = [
            dataclasses.replace(each, start=each.start + 3, stop=each.stop + 3) for each in segments[len(of_first) :]
        ]
        alone = [run(one, *of_first), run(other, *segments[len(of_first) :])]
        both = run(graph, *of_first, *shifted)
        assert live(both) == [
            *(each + alone[1].resident_bytes for each in live(alone[0])),
            *(each + alone[0].resident_bytes + 4 for each in live(alone[1])),
        ]
    plain = segment(0, 7, STORE)
    assert run(graph, plain).peak_bytes < run(graph.in_one_pass, plain).peak_bytes
    assert one.in_one_pass is one


def test_recompute_segment():
    timeline = run(chain([8, 8, 8]), segment(0, 2, RECOMPUTE), segment(2, 3, STORE))
    # The first output goes as soon as the second layer has read it, and is replayed (25) behind the third layer's
    # backward. The second layer is not replayed, since nothing in the segment's backward reads its output.
    assert live(timeline) == [15, 23, 23, 24, 24, 25, 25, 25, 26, 26, 19]
    assert [i.op for i in timeline.instants if i.replay] == [0]
    assert timeline.replay_seconds == 8
    assert timeline.peak_bytes == 26


def test_nested_children():
    outer = segment(0, 4, RECOMPUTE, segment(0, 2, RECOMPUTE), segment(2, 4, STORE))
    timeline = run(chain([8, 8, 8, 8]), outer)
    # The outer replay runs layers 0 to 2 for the backward of 3 and 2, and does not keep layer 0's output; the inner one
    # runs layer 0 again.
    assert [i.op for i in timeline.instants if i.replay] == [0, 1, 2, 0]
    forward = [16, 24, 24, 24, 17, 17]
    assert live(timeline) == [*forward, 25, 33, 33, 34, 34, 27, 27, 27, 28, 28, 21]
    assert timeline.replay_seconds == 4 * 8


def test_skip_over_a_recompute_segment():
    net = Net()
    first = net.dense(net.input(4), 8)
    last = net.dense(net.dense(first, 8), 8)
    graph = net.graph(net.add(last, first))
    timeline = run(graph, segment(0, 1, STORE), segment(1, 3, RECOMPUTE), segment(3, 4, STORE))
    # ``first`` is read in forward by the second layer and by the sum, and kept for the replay, whose order gate takes
    # its buffer over. The sum takes over the third output; its gradient serves both its inputs.
    assert live(timeline) == [15, 23, 31, 23, 24, 24, 32, 33, 33, 34, 34, 26, 19]
    assert [i.op for i in timeline.instants if i.replay] == [1]


def test_a_replay_copies_what_an_earlier_segment_needs_too():
    net = Net()
    first = net.dense(net.input(4), 8)
    second = net.dense(first, 8)
    third = net.dense(second, 8)
    graph = net.graph(net.concat(third, net.scratch(first, 8, 8)))
    apart = [segment(0, 1, STORE), segment(1, 3, RECOMPUTE), segment(3, 4, RECOMPUTE), segment(4, 5, STORE)]
    timeline = run(graph, *apart)
    replays = [(i.op, i.live_bytes) for i in timeline.instants if i.replay]
    # Live at the replay of the scratch layer: 7 resident, the loss, the two gradients of 8 that the sum was cut into,
    # ``first`` (kept for the segment before), and first its copy and the temporary, then the temporary and the output.
    assert replays[:2] == [(3, 7 + 1 + 16 + 8 + 8 + 8), (4, 7 + 1 + 16 + 8 + 8 + 8)]
    assert [op for op, _ in replays] == [3, 4, 1]


def test_views_and_in_place_ops():
    net = Net()
    x = net.reshape(net.relu(net.dense(net.input(4), 8)))
    timeline = run(net.graph(net.dense(x, 8)), segment(0, 4, STORE))
    # The relu takes over, the view has no bytes; in backward the relu's gradient takes over the gradient before it.
    assert live(timeline) == [14, 14, 14, 22, 23, 23, 24, 32, 24, 24, 17]


def test_an_op_does_not_take_over_what_is_still_needed():
    net = Net()
    x = net.dense(net.input(4), 8)
    graph = net.graph(net.concat(net.relu(x), net.relu(x)))
    timeline = run(graph, segment(0, 4, STORE))
    # The first relu cannot take over ``x``, which the second one reads; the second one can.
    assert live(timeline)[:4] == [5 + 8, 5 + 16, 5 + 16, 5 + 32]


def test_workspace_counts_only_while_the_op_runs():
    net = Net()
    x = net.dense(net.dense(net.input(4), 8, workspace=100), 8)
    assert live(run(net.graph(x), segment(0, 2, STORE)))[:3] == [14 + 100, 22, 23]


def test_a_backward_view_of_a_replayed_value_reads_the_replayed_one():
    kinds = [MemoryKind.INPUT, *[MemoryKind.ACTIVATION] * 3, *[MemoryKind.GRADIENT] * 3]
    sizes = [4, 8, 8, 1, 8, 0, 8]
    values = [
        Value(index=i, name=f"v{i}", nbytes=size, kind=kind, alias_of=1 if i == 5 else None)
        for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True))
    ]
    rows = [
        (Phase.FORWARD, 0, (0,), (1,)),
        (Phase.FORWARD, 1, (1,), (2,)),
        (Phase.FORWARD, None, (2,), (3,)),
        (Phase.BACKWARD, None, (3,), (4,)),
        (Phase.BACKWARD, 1, (1,), (5,)),
        (Phase.BACKWARD, 1, (5, 4), (6,)),
    ]
    graph = Graph(
        name="view",
        batch_size=1,
        values=tuple(values),
        ops=tuple(
            Op(index=i, name=f"op{i}", type="Op", phase=phase, unit=unit, inputs=reads, outputs=writes)
            for i, (phase, unit, reads, writes) in enumerate(rows)
        ),
        units=tuple(Unit(index=i, label=f"u{i}", kind="Op", signature=f"u{i}") for i in range(2)),
        cuts=(),
        outputs=(3,),
    )
    timeline = run(graph, segment(0, 2, RECOMPUTE))
    # Forward 12, 20; value 1 goes, so that the loss finds 12 + 1, its gradient 13 + 8 - 8; then the replay of value 1.
    assert live(timeline) == [12, 20, 13, 13, 21, 21, 29]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_measure_agrees_with_the_timeline(data: st.DataObject):
    problem = Problem.build(data.draw(graphs(max_units=5)), Request())
    plans = list(covers(problem))
    segments = data.draw(st.sampled_from(plans))
    timeline, measured = problem.simulator.run(segments), problem.simulator.measure(segments)
    assert measured.peak_bytes == timeline.peak_bytes == max(live(timeline))
    assert measured.replay_seconds == timeline.replay_seconds
    assert measured.replay_seconds == pytest.approx(timeline.step_seconds - problem.graph.step_seconds)
    assert max(*measured.forward_peaks, *measured.backward_peaks, measured.other_peak) == measured.peak_bytes


@settings(deadline=None, max_examples=60)
@given(graphs())
def test_store_segments_one_by_one_are_the_plain_step(graph: Graph):
    each = [segment(unit, unit + 1, STORE) for unit in range(len(graph.units))]
    assert live(run(graph, *each)) == live(run(graph, segment(0, len(graph.units), STORE)))


def of_a_plan(sizes: list[int], scale: int = 2**20) -> tuple[int, int, int]:
    """Return the live, the usual and the most bytes of a step's own of a chain whose first layer is replayed."""
    graph = dataclasses.replace(chain(sizes, scale=scale), device="CPU")
    plan = (segment(0, 1, RECOMPUTE), segment(1, len(sizes), STORE))
    simulator = Simulator(graph)
    found = simulator.ordered_peak(plan), simulator.reported_peak(plan), simulator.highest_peak(plan)
    live, usual, most = (each - graph.resident_bytes for each in found)
    return live, usual, most


def test_equal_buffers_waste_nothing_and_a_share_is_added():
    live, usual, _ = of_a_plan([8] * 12)
    resident = 8 * 2**20  # The batch.
    assert usual == pytest.approx(live + POOL_SHARE * (live + resident), rel=0.01)


def test_buffers_that_do_not_fit_where_others_were_take_more():
    # In turn 9 and 16 MiB: what 16 left is handed out whole for 9.
    (live, usual, _), (fitting, all_of_them, _) = of_a_plan([16, 16, 9, 16, 9] * 3), of_a_plan([16] * 15)
    assert usual / live > 1.05 * all_of_them / fitting


def test_what_may_be_added_evens_out_over_many_buffers():
    few, many = of_a_plan([8, 8, 8]), of_a_plan([8] * 48)
    assert 0 < (many[2] - many[1]) / many[0] < (few[2] - few[1]) / few[0] / 3
    # Of some 48 equal buffers, a seventh of what one alone would add.
    assert (many[2] - many[1]) / many[0] == pytest.approx(1 / 48**0.5, rel=0.1)


def test_the_allocator_adds_nothing_to_buffers_that_are_not_from_its_pool():
    graph = dataclasses.replace(chain([8, 12, 5, 9], scale=2**10), device="CPU")
    simulator, plan = Simulator(graph), (segment(0, 3, RECOMPUTE), segment(3, 4, STORE))
    assert simulator.reported_peak(plan) == simulator.ordered_peak(plan)


BESIDE = [200] * 3 + [3000, 40_000, 200, 2000, 30_000] * 2
"""Sizes of layers in KiB, of which some are below what a CPU counts."""


@pytest.mark.parametrize(
    "segments", [(segment(0, len(BESIDE), STORE),), (segment(0, 4, RECOMPUTE), segment(4, len(BESIDE), STORE))]
)
def test_a_cpu_counts_no_small_buffers_unless_there_is_little_else(segments: tuple[Segment, ...]):
    large = [size if size >= 256 else 0 for size in BESIDE]

    def reported(sizes: list[int], device: str, scale: int = 2**10) -> int:
        return Simulator(dataclasses.replace(chain(sizes, scale=scale), device=device)).reported_peak(segments)

    assert reported(BESIDE, "CPU") == reported(large, "CPU") < reported(BESIDE, "CPU_BFC")
    # The same step in miniature, all below 16 MiB, counts as it is.
    assert reported(BESIDE, "CPU", scale=4) > reported(large, "CPU", scale=4)


@pytest.mark.parametrize(
    "segments", [(segment(0, len(BESIDE), STORE),), (segment(0, 4, RECOMPUTE), segment(4, len(BESIDE), STORE))]
)
def test_a_cpu_counts_a_list_by_the_size_of_its_elements(segments: tuple[Segment, ...]):
    graph = dataclasses.replace(chain(BESIDE, scale=2**10), device="CPU")

    def reported(least: int, most_of_a_part: int | None) -> int:
        """Return what is reported where activations of at least so many bytes are lists, or 0 bytes if None."""

        def changed(value: Value) -> Value:
            if value.kind is not MemoryKind.ACTIVATION or value.nbytes < least:
                return value
            if most_of_a_part is None:
                return dataclasses.replace(value, nbytes=0)
            return dataclasses.replace(value, parts=-(-value.nbytes // most_of_a_part))

        return Simulator(dataclasses.replace(graph, values=tuple(map(changed, graph.values)))).reported_peak(segments)

    assert reported(10 << 20, 255 << 10) == reported(10 << 20, None) < reported(10 << 20, 512 << 10)
    # A list gets chunks for its elements, which fit better than one for all of it.
    assert reported(10 << 20, 512 << 10) < Simulator(graph).reported_peak(segments)


def test_what_a_loop_takes_besides_counts_where_several_threads_run_what_is_ready():
    def peaks(device: str, racing: int) -> tuple[int, int, int]:
        graph = dataclasses.replace(chain([8, 12, 5, 9], scale=2**20), device=device)
        graph = dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, racing_bytes=racing) for op in graph.ops))
        simulator = Simulator(graph)
        plain, plan = (segment(0, 4, STORE),), (segment(0, 3, RECOMPUTE), segment(3, 4, STORE))
        return simulator.reported_peak(plain), simulator.highest_peak(plain), simulator.highest_peak(plan)

    more = 64 << 20
    (usual, most, planned), before = peaks("CPU", more), peaks("CPU", 0)
    assert usual >= before[0] + more // 2 and most >= before[1] + more
    # A plan's step runs in order, and one thread launches a GPU's kernels.
    assert planned == before[2]
    assert peaks("GPU", more) == peaks("GPU", 0)


@pytest.mark.parametrize("others", [True, False])
def test_the_plain_step_has_a_copy_of_what_a_constant_scales_and_a_plan_has_none(others: bool):
    def peaks(scaled: bool) -> tuple[int, int]:
        graph = chain([8, 6, 9, 20])
        ops, kept = list(graph.ops), 4
        first, second = (op for op in ops if op.phase is Phase.BACKWARD and set(op.inputs) & {kept, 5})
        ops[first.index] = dataclasses.replace(first, scaled=(kept,) if scaled else ())
        ops[second.index] = dataclasses.replace(second, inputs=(*second.inputs, kept) if others else second.inputs)
        simulator = Simulator(dataclasses.replace(graph, ops=tuple(ops)))
        plans = (segment(0, 4, STORE),), (segment(0, 3, RECOMPUTE), segment(3, 4, STORE))
        return simulator.reported_peak(plans[0]), simulator.reported_peak(plans[1])

    (plain, planned), (more, same) = peaks(False), peaks(True)
    assert planned == same
    # Where nobody else reads the activation, the copy takes its buffer.
    assert more - plain == (6 if others else 0)


def test_what_is_not_counted_is_the_small_buffers_of_the_plain_step():
    graph = dataclasses.replace(chain(BESIDE, scale=2**10), device="CPU")
    small = dataclasses.replace(chain([size if size < 256 else 0 for size in BESIDE], scale=2**10), device="IDEAL")
    simulator = Simulator(graph)
    assert 0 < simulator.uncounted_bytes <= Simulator(small).reported_peak((segment(0, len(BESIDE), STORE),))
    assert Simulator(dataclasses.replace(graph, device="GPU")).uncounted_bytes == 0


def test_what_is_reported_of_a_plan_without_replays_is_the_plain_step_s():
    graph = dataclasses.replace(chain([8, 12, 5, 9], scale=2**20), device="CPU")
    simulator = Simulator(graph)
    whole, halves = (segment(0, 4, STORE),), (segment(0, 2, STORE), segment(2, 4, STORE))
    assert simulator.reported_peak(halves) == simulator.reported_peak(whole) == simulator.played_peak(whole)


def test_on_a_chain_the_order_of_the_tape_is_that_of_capture():
    graph = chain([8, 3, 5, 9])
    simulator = Simulator(graph)
    for plan in covers(Problem.build(graph, Request())):
        assert simulator.ordered_peak(plan) == simulator.measure(plan).peak_bytes
