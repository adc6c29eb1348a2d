"""Hints: what they name, and when they are refused."""

from __future__ import annotations

import dataclasses

import pytest

from tf_memsaver.errors import HintError
from tf_memsaver.ir.graph import Graph
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tools.shared.nets import Net, chain


def pinned_graph() -> Graph:
    net = Net()
    x = net.dense(net.input(4), 8)
    x = net.relu(net.dense(x, 8, pinned="runs RandomUniform, whose hidden state cannot be replayed"))
    return net.graph(net.dense(x, 8))


@pytest.mark.parametrize("hint", ["keep", "recompute", "candidates"])
def test_a_pattern_that_matches_nothing_is_an_error_that_shows_names(hint: str):
    with pytest.raises(HintError, match=rf"{hint}='conv\*' matches no layer.*dense_0"):
        Problem.build(chain([8] * 3), Request(**{hint: ("conv*",)}))


def test_keep_and_recompute_of_one_layer_contradict_each_other():
    with pytest.raises(HintError, match="'dense_1'"):
        Problem.build(chain([8] * 3), Request(keep=("dense_1",), recompute=("dense_*",)))


def test_a_layer_that_cannot_be_replayed_cannot_be_forced():
    with pytest.raises(HintError, match="RandomUniform"):
        Problem.build(pinned_graph(), Request(recompute=("dense_1",)))


def test_patterns_name_units():
    problem = Problem.build(pinned_graph(), Request(keep=("relu_*",), recompute=("dense_0", "dense_3")))
    assert problem.pinned == (False, True, True, False)
    assert problem.forced == (True, False, False, True)


def test_candidates_leave_their_cuts_and_the_borders_of_other_hints():
    problem = Problem.build(chain([8] * 6), Request(candidates=("dense_1",), keep=("dense_4",)))
    assert [cut.position for cut in problem.cuts] == [2, 4, 5]


def test_articulation_points_are_the_cuts_that_one_value_crosses():
    net = Net()
    x = net.dense(net.input(4), 8)
    y = net.dense(net.dense(x, 8), 8)
    problem = Problem.build(net.graph(net.dense(net.add(x, y), 8)), Request())
    assert [cut.position for cut in problem.cuts] == [1, 2, 3, 4]
    assert [cut.position for cut in problem.articulation_points] == [1, 4]


def test_a_layer_that_was_taken_apart_is_recomputed_but_for_what_cannot_be_replayed():
    graph = pinned_graph()
    labels = [f"block/{unit.label}" if 0 < unit.index < 3 else unit.label for unit in graph.units]
    units = tuple(dataclasses.replace(unit, label=label) for unit, label in zip(graph.units, labels, strict=True))
    opened = dataclasses.replace(graph, units=units, opened=("block",))
    problem = Problem.build(opened, Request(recompute=("block",)))
    assert problem.pinned == (False, True, False, False)
    assert problem.forced == (False, False, True, False)
    assert Problem.build(opened, Request(keep=("block",))).pinned == (False, True, True, False)
    # A pattern that names the layer names its parts, too.
    assert Problem.build(opened, Request(recompute=("block*",))).forced == problem.forced
    with pytest.raises(HintError, match="RandomUniform"):
        Problem.build(opened, Request(recompute=("dense_1",)))
    with pytest.raises(HintError, match="also named in keep"):
        Problem.build(opened, Request(recompute=("block",), keep=("block",)))
    fixed = dataclasses.replace(units[2], pinned="draws random numbers")
    with pytest.raises(HintError, match="nothing in that layer"):
        Problem.build(dataclasses.replace(opened, units=(*units[:2], fixed, *units[3:])), Request(recompute=("block",)))
