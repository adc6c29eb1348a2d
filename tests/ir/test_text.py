"""Graphs as text: the round trip, the form itself, and lines that are refused."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import graphs
from tf_memsaver.ir.graph import Graph, MemoryKind, Value
from tf_memsaver.ir.text import dump, parse
from tools.shared.nets import Net

GOLDEN = """\
graph "net" batch=2 device=IDEAL joined=1
unit 0 "dense_0" kind="dense" signature="dense(0)" pinned="hidden state"
unit 1 "reshape_1" kind="reshape" signature="reshape(1)"
value 0 "v0" input 4
value 1 "v1" parameter 1
value 2 "v2" activation 8
value 3 "v3" activation 0 view_of=2
value 4 "v4" activation 1
value 5 "v5" gradient 8
value 6 "v6" gradient 0 view_of=5
value 7 "v7" weight_gradient 1
op 0 "op0" MatMul forward unit=0 reads=0,1 writes=2 workspace_bytes=3 seconds=8.0
op 1 "op1" Reshape forward unit=1 reads=2 writes=3
op 2 "op2" Loss forward reads=3 writes=4 seconds=1.0
op 3 "op3" LossGrad backward reads=4 writes=5 seconds=16.0
op 4 "op4" Reshape backward unit=1 reads=5 writes=6
op 5 "op5" WeightGrad backward unit=0 reads=0,6 writes=7 workspace_bytes=3 seconds=2.0
cut 1 "dense_0" live=2
outputs 4 7
"""


def test_the_form():
    net = Net()
    graph = net.graph(net.reshape(net.dense(net.input(4), 8, workspace=3, pinned="hidden state")))
    graph = dataclasses.replace(graph, joined=(1,))
    assert dump(graph) == GOLDEN
    assert parse(GOLDEN) == graph


def test_what_was_chosen_is_part_of_the_form():
    chosen = {"opened": ("call()", "block/attend"), "note": 'by layers alone, "here"', "data_shapes": ((2, 87), (5,))}
    graph = dataclasses.replace(parse(GOLDEN), **chosen)
    lines = dump(graph).splitlines()
    assert lines[:3] == [
        'graph "net" batch=2 device=IDEAL joined=1 note="by layers alone, \\"here\\"" data_shapes=2x87,5',
        'opened "call()"',
        'opened "block/attend"',
    ]
    assert parse(dump(graph)) == graph


def test_lists_of_tensors_loops_that_race_and_copies_come_back():
    graph = parse(GOLDEN)
    values = tuple(dataclasses.replace(each, parts=1 + each.index) for each in graph.values)
    ops = tuple(dataclasses.replace(each, racing_bytes=each.index, scaled=each.inputs[:1]) for each in graph.ops)
    graph = dataclasses.replace(graph, values=values, ops=ops)
    assert parse(dump(graph)) == graph != parse(GOLDEN)


def test_comments_and_empty_lines_are_skipped():
    lines = [f"{line}  # a comment" for line in GOLDEN.splitlines()]
    assert parse("\n\n# a graph\n" + "\n".join(lines)) == parse(GOLDEN)


@settings(deadline=None)
@given(graphs())
def test_round_trip(graph: Graph):
    assert parse(dump(graph)) == graph
    assert dump(parse(dump(graph))) == dump(graph)


@given(st.text(), st.floats(allow_nan=False, allow_infinity=False))
def test_round_trip_of_any_name(name: str, seconds: float):
    value = Value(index=0, name=name, nbytes=3, kind=MemoryKind.INPUT)
    graph = Graph(name=name, batch_size=1, values=(value,), ops=(), units=(), cuts=(), outputs=())
    assert parse(dump(graph)) == graph


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("unit 1 ", "unit 7 ", "line 3: .*stands at place 1"),
        ("value 4 ", "value 5 ", "line 8: .*stands at place 4"),
        ("activation 8", "activations 8", "line 6: .*activations"),
        ("activation 8", "activation eight", "line 6: .*eight"),
        ("workspace_bytes=3 seconds=8.0", "workspace=3", "line 12: .*workspace"),
        ("seconds=16.0", "seconds=16.0 seconds=1.0", "line 15: .*twice"),
        ("outputs 4 7", "output 4 7", "line 19: .*'output'"),
        ('"reshape_1"', '"reshape_1', "line 3: cannot read"),
        ('"reshape_1"', "reshape_1", "line 3"),
        ('graph "net" batch=2 device=IDEAL joined=1', "", "no line that starts with 'graph'"),
    ],
)
def test_lines_that_are_refused(old: str, new: str, reason: str):
    assert old in GOLDEN
    with pytest.raises(ValueError, match=reason):
        parse(GOLDEN.replace(old, new, 1))
