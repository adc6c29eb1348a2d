"""What a step holds at each moment is what the simulator counts there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import covers, graphs
from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.judge.contents import Contents, contents
from tf_memsaver.judge.estimate import Estimate
from tf_memsaver.judge.simulate import Simulator
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tools.shared.nets import Net, chain


def whole(graph: Graph, mode: SegmentMode) -> tuple[Segment, ...]:
    return (Segment(start=0, stop=len(graph.units), mode=mode),)


def counted(graph: Graph, found: Contents) -> list[int]:
    return [
        sum(tensor.nbytes for tensor in found.live_at(place)) + graph.ops[instant.op].workspace_bytes
        for place, instant in enumerate(found.timeline.instants)
    ]


@given(st.data())
def test_tensors_add_up_to_the_timeline(data: st.DataObject) -> None:
    problem = Problem.build(data.draw(graphs()), Request())
    segments = data.draw(st.sampled_from(list(covers(problem))))
    found = contents(problem.simulator, segments)
    assert found.timeline == problem.simulator.run(segments)
    assert counted(problem.graph, found) == [instant.live_bytes for instant in found.timeline.instants]


@given(graphs())
def test_what_the_plain_step_keeps_is_what_the_estimate_says(graph: Graph) -> None:
    found = contents(Simulator(graph), whole(graph, SegmentMode.STORE))
    kept = sum(tensor.nbytes for tensor in found.tensors if tensor.kept)
    assert kept == Estimate.from_graph(graph).activation_bytes
    assert not any(tensor.again for tensor in found.tensors)


def test_nested_segments_add_up() -> None:
    graph = chain([5, 7, 9, 11, 3])
    inner = tuple(Segment(start=k, stop=k + 1, mode=SegmentMode.RECOMPUTE) for k in range(4))
    segments = (
        Segment(start=0, stop=4, mode=SegmentMode.RECOMPUTE, children=inner),
        Segment(start=4, stop=5, mode=SegmentMode.STORE),
    )
    found = contents(Simulator(graph), segments)
    assert counted(graph, found) == [instant.live_bytes for instant in found.timeline.instants]


def test_a_replay_makes_its_tensors_again() -> None:
    net = Net()
    hidden = net.dense(net.input(4), 10)
    graph = net.graph(net.dense(hidden, 3))
    found = contents(Simulator(graph), whole(graph, SegmentMode.RECOMPUTE))
    lives = [(tensor.again, tensor.kept) for tensor in found.tensors if tensor.value == hidden]
    assert lives == [(False, False), (True, False)]
    first, again = (tensor for tensor in found.tensors if tensor.value == hidden)
    assert first.last < again.first and found.live_at(again.first)[0].nbytes == 10
