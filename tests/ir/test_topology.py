"""Cuts and articulation points against brute force over paths."""

from __future__ import annotations

from hypothesis import given, settings

from tests.strategies import graphs
from tf_memsaver.ir.graph import Graph, Phase
from tf_memsaver.ir.topology import articulation_points, last_forward_reads, unit_positions
from tools.shared.nets import Net


def crossing(graph: Graph, position: int) -> set[int]:
    """The buffers made by a unit before ``position`` that a later unit, or the loss, reads."""
    units = len(graph.units)

    def place(index: int) -> int:
        unit = graph.ops[index].unit
        return units if unit is None else unit

    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    made = {graph.roots[v] for op in forward if place(op.index) < position for v in op.outputs}
    read = {graph.roots[v] for op in forward if place(op.index) >= position for v in op.inputs}
    return {root for root in made & read if graph.values[root].nbytes}


@settings(deadline=None)
@given(graphs(max_units=9))
def test_cuts_are_the_positions_where_the_live_set_changes(graph: Graph):
    expected: dict[int, set[int]] = {}
    before: set[int] = set()
    for position in range(1, len(graph.units)):
        live = crossing(graph, position)
        if live and live != before:
            expected[position] = live
            before = live
    assert {cut.position: set(cut.live) for cut in graph.cuts} == expected


def reaches_the_loss_without(graph: Graph, removed: int) -> bool:
    """Whether the loss still depends on the step's input when one buffer is taken out of the forward pass."""
    reached = {value.index for value in graph.values if value.kind.value == "input"}
    for op in graph.ops:
        if op.phase is Phase.FORWARD and any(v in reached for v in op.inputs):
            reached.update(v for v in op.outputs if graph.roots[v] != removed)
    return graph.outputs[0] in reached


@settings(deadline=None)
@given(graphs(max_units=9))
def test_every_path_to_the_loss_passes_an_articulation_point(graph: Graph):
    inputs = {value.index for value in graph.values if value.kind.value == "input"}
    for cut in articulation_points(graph.cuts):
        # A later unit that reads the step's input itself goes around the cut; the input is resident, so none shows it.
        late = [op for op in graph.ops if op.phase is Phase.FORWARD and op.unit is not None and op.unit >= cut.position]
        if not any(inputs.intersection(op.inputs) for op in late):
            assert not reaches_the_loss_without(graph, cut.live[0])


@settings(deadline=None)
@given(graphs(max_units=9))
def test_buffers_that_are_no_articulation_point_can_be_gone_around_or_do_not_span_a_position(graph: Graph):
    alone = {cut.live[0] for cut in articulation_points(graph.cuts)}
    for position in range(1, len(graph.units)):
        live = crossing(graph, position)
        assert not (len(live) == 1 and live.isdisjoint(alone))


def test_positions_and_last_reads_of_a_skip():
    net = Net()
    first = net.dense(net.input(4), 8)
    view = net.reshape(first)
    graph = net.graph(net.concat(net.dense(view, 8), first))
    positions = unit_positions(graph.ops, len(graph.values), len(graph.units))
    last = last_forward_reads(graph.ops, graph.roots, len(graph.units))
    assert (positions[first], positions[view]) == (1, 2)
    # Through the view at 3, and itself at 4; the view owns no buffer.
    assert (last[first], last[view]) == (4, 0)
    assert positions[graph.outputs[0]] == 5
    assert [cut.live for cut in graph.cuts] == [(first,), (first, graph.ops[2].outputs[0])]
