"""Layers in blocks, and what a plan does with each: no TensorFlow."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tf_memsaver.display.layers import Block, Fate, LayerRow, blocks, layer_rows
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import solve
from tools.shared.nets import Net


def row(label: str, segment: int = 0) -> LayerRow:
    return LayerRow(
        label=label,
        kind="Dense",
        fate=Fate.KEPT,
        why="",
        segment=segment,
        plain_bytes=0,
        planned_bytes=0,
    )


def shape(parts: Sequence[LayerRow | Block]) -> list[object]:
    """Return blocks as pairs of a name and their parts, and layers as their labels."""
    return [(part.name, shape(part.parts)) if isinstance(part, Block) else part.label for part in parts]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ("a b", ["a", "b"]),
        ("conv1_conv conv1_bn pool", [("conv1", ["conv1_conv", "conv1_bn"]), "pool"]),
        ("block_1_expand block_1_expand_BN block_2_pad block_2_add", None),
        ("stem encoder/a encoder/b head", ["stem", ("encoder", ["encoder/a", "encoder/b"]), "head"]),
        ("encoder/b0/q encoder/b0/k", [("encoder/b0", ["encoder/b0/q", "encoder/b0/k"])]),
        # Numbers that tell layers of one kind apart are no blocks, and a block of one layer is that layer.
        ("conv2d_1 conv2d_2 dense_3", ["conv2d_1", "conv2d_2", "dense_3"]),
        ("conv1_conv dense", ["conv1_conv", "dense"]),
        ("stage1.unit2.a stage1.unit2.b", [("stage1.unit2", ["stage1.unit2.a", "stage1.unit2.b"])]),
        ("conv2d_3/a conv2d_3/a#2", [("conv2d_3", ["conv2d_3/a", "conv2d_3/a#2"])]),
    ],
)
def test_blocks_by_name(labels: str, expected: list[object] | None) -> None:
    if expected is None:
        one, two = ["block_1_expand", "block_1_expand_BN"], ["block_2_pad", "block_2_add"]
        expected = [("block_1", one), ("block_2", two)]
    assert shape(blocks([row(label) for label in labels.split()])) == expected


def test_blocks_in_blocks() -> None:
    labels = "conv2_block1_1_conv conv2_block1_out conv2_block2_1_conv conv2_block2_out".split()
    one, two = ("conv2_block1", labels[:2]), ("conv2_block2", labels[2:])
    assert shape(blocks([row(label) for label in labels])) == [("conv2", [one, two])]


def test_many_layers_without_blocks_are_folded_by_segments() -> None:
    rows = [row(f"layer{place}", segment=place // 8) for place in range(20)]
    names = [part.name for part in blocks(rows) if isinstance(part, Block)]
    assert names == ["layer0 … layer7", "layer8 … layer15", "layer16 … layer19"]
    assert [inner for part in blocks(rows) if isinstance(part, Block) for inner in part.rows()] == rows


def test_what_becomes_of_each_layer_and_why() -> None:
    net = Net()
    x = net.dense(net.input(4), 8)
    x = net.dense(x, 8, pinned="draws from hidden state")
    for _ in range(3):
        x = net.dense(x, 8)
    graph = net.graph(x)
    request = Request(strategy="min_peak", keep=("dense_4",), recompute=("dense_2", "dense_3"))
    plan = solve(graph, request)
    rows = layer_rows(graph, plan, [5] * 5, [3] * 5)
    assert [each.label for each in rows] == [unit.label for unit in graph.units]
    assert [each.fate for each in rows[1:]] == [Fate.PINNED, Fate.RECOMPUTED, Fate.RECOMPUTED, Fate.PINNED]
    assert rows[1].why == "draws from hidden state"
    assert rows[4].why == "is named in keep="
    assert rows[2].why == "" and rows[2].segment == rows[3].segment != rows[4].segment
    assert {(each.plain_bytes, each.planned_bytes) for each in rows} == {(5, 3)}
