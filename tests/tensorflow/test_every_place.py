"""Segments that end at every place inside a block train alike, though a plan would end few of them there.

Sums of three terms and more may begin with another term on a busy machine, in the plain step, too: what differs is
tried again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

from tests.tensorflow.plans import optimized_in_segments
from tf_memsaver.capture.model_step import capture_graph
from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import Segment, SegmentMode
from tools.shared.models.formulas import CLASSES, formula_model, formula_names
from tools.shared.records import Record, differing
from tools.shared.training import fit

BATCH_SIZE, TRIES = 4, 3

DIFFERENT = ("hard_silu", "snake", "three_factors")
"""Last bits differ at some places: a constant, or a factor, is multiplied with another one."""


def trained(model: Any) -> Record:
    """Return what ``fit`` leaves; the last batch is smaller, so that no graph knows its size."""
    numbers = np.random.default_rng(0)
    x = numbers.standard_normal((3 * BATCH_SIZE + 2, *model.input_shape[1:])).astype(np.float32)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss, jit_compile=False)
    return fit(model, x, numbers.integers(0, CLASSES, len(x)), batch_size=BATCH_SIZE)


def segments_at(graph: Graph, place: int) -> Iterator[list[Segment]]:
    """Yield segments of which one that is replayed ends at a place, and of which one begins there."""
    count = len(graph.units)
    pinned = [unit.index for unit in graph.units if unit.pinned]
    start = max((each + 1 for each in pinned if each < place), default=0)
    stop = min((each for each in pinned if each >= place), default=count)
    for first, last in ((start, place), (place, stop)):
        if first < last and {first, last}.isdisjoint(graph.joined):
            ends = ((0, first), (first, last), (last, count))
            modes = (SegmentMode.STORE, SegmentMode.RECOMPUTE, SegmentMode.STORE)
            yield [Segment(start=a, stop=b, mode=mode) for (a, b), mode in zip(ends, modes, strict=True) if a < b]


@pytest.mark.filterwarnings("ignore:Gradients do not exist")  # Not all formulas read both layers.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.xfail(reason="last bits differ", raises=AssertionError, strict=True)]
            * (name in DIFFERENT),
        )
        for name in formula_names()
    ],
)
def test_a_segment_may_end_at_every_place_of_a_block(name: str) -> None:
    def made() -> Any:
        keras.backend.clear_session()  # Names count: graph optimisation sorts by them.
        keras.utils.set_random_seed(0)
        return formula_model(name)

    plain, graph = trained(made()), capture_graph(made(), batch_size=BATCH_SIZE, granularity="op")
    differ = []
    for place in sorted(set(range(1, len(graph.units))) - set(graph.joined)):
        for segments in segments_at(graph, place):
            tried = (optimized_in_segments(made(), segments, BATCH_SIZE, "op") for _ in range(TRIES))
            if all(differing(plain, trained(model)) for model in tried):
                differ.append(graph.units[place - 1].label)
    assert not differ
