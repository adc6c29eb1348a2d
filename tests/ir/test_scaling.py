"""A step at other batch sizes than those that were captured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.scaling import Scaling
from tools.shared.nets import chain


def at(size: int, count: int = 5) -> Graph:
    """A chain whose tensors take 30 bytes, and 10 more for a sample."""
    graph = chain([30 + 10 * size] * count)
    ops = tuple(replace(op, flops=7 * size, seconds=0.5 + size, racing_bytes=3 * size) for op in graph.ops)
    return replace(graph, batch_size=size, ops=ops)


def test_the_line_through_two_steps_is_the_step_at_all_sizes() -> None:
    line = Scaling(at(4), at(8))
    for size in (1, 4, 6, 8, 1000):
        assert line.at(size) == at(size)


@pytest.mark.parametrize("other", [at(4), at(8, count=6), replace(at(8), device="GPU"), replace(at(8), joined=(2,))])
def test_steps_that_differ_in_more_than_numbers_have_no_line(other: Graph) -> None:
    with pytest.raises(ValueError, match="differ in more than numbers"):
        Scaling(at(4), other)
