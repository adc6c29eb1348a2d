"""What ``estimate`` and ``plan`` show: the answer first, on one screen of 80 columns."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence

import pytest
from rich.console import Console, RenderableType

from tf_memsaver.display import overview, tables
from tf_memsaver.display.folding import block_of, folded
from tf_memsaver.display.parts import BAR_WIDTH, NOW, PLANNED, Name, Rows, bar, bar_of_two
from tf_memsaver.display.scales import plan_in_words
from tf_memsaver.ir.graph import Graph
from tf_memsaver.judge.estimate import Estimate, UnitEstimate
from tf_memsaver.options.table import Granularity
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.largest import LargestBatch
from tf_memsaver.planners.solve import solve
from tools.shared.nets import chain

MIB = 2**20


def lines_of(parts: Sequence[RenderableType], width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    for part in parts:
        console.print(part, highlight=False)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def renamed(graph: Graph, names: Sequence[str]) -> Graph:
    units = tuple(dataclasses.replace(unit, label=name) for unit, name in zip(graph.units, names, strict=True))
    return dataclasses.replace(graph, units=units)


@pytest.fixture(scope="module")
def deep() -> tuple[Estimate, Plan]:
    """A chain of fifty blocks of two layers with long names, and a plan for it."""
    long = "a_layer_whose_name_is_longer_than_a_line_of_a_terminal_can_ever_be"
    names = [f"stage_{place // 2}_{long}_{place}" for place in range(100)]
    graph = renamed(chain([(1 + place % 7) * MIB for place in range(100)]), names)
    return Estimate.from_graph(graph), solve(graph, Request(strategy="min_peak"))


@pytest.mark.parametrize("view", [overview.estimate_view, overview.plan_view])
def test_a_view_fits_one_screen_and_begins_with_the_answer(view, deep: tuple[Estimate, Plan]) -> None:
    estimate, plan = deep
    lines = lines_of(view(estimate, plan))
    assert len(lines) <= 23 and max(map(len, lines)) <= 80
    assert [line.split("  ")[0] for line in lines[1:4]] == ["peak now", "peak planned", "step time"]
    assert f"{plan.peak_bytes / plan.plain_peak_bytes:.0%} of now" in lines[2]
    assert f"{plan.step_overhead:+.1%}" in lines[3] and f"{len(plan.recomputed)} of 100 layers" in lines[3]
    assert estimate.peak_at[:10] in lines[1]


@pytest.mark.parametrize(("kind", "device"), [("CPU", "CPU"), ("CPU_BFC", "CPU"), ("GPU", "GPU")])
def test_the_title_says_for_which_device(kind: str, device: str) -> None:
    graph = dataclasses.replace(chain([MIB] * 4), device=kind, batch_size=1024, name="a_model_" * 9)
    plan, estimate = solve(graph, Request(strategy="plain")), Estimate.from_graph(graph)
    compiled = dataclasses.replace(plan, request=dataclasses.replace(plan.request, executor="xla"))
    assert estimate.to_json()["device"] == device
    for each, judged in ((plan, "predicted"), (compiled, "as XLA compiles it")):
        title = lines_of(overview.plan_view(estimate, each))[0]
        assert title.endswith(f", batch size 1024: one training step on {device}, {judged}") and len(title) <= 80


def test_ten_blocks_are_shown_and_the_others_are_counted(deep: tuple[Estimate, Plan]) -> None:
    lines = lines_of(overview.estimate_view(*deep))
    assert sum(line.startswith("stage_") for line in lines) == 10
    assert "and 80 more" in lines[-1] and "--all" in lines[-1]


def test_a_plan_that_saves_nothing_says_why() -> None:
    graph = chain([MIB] * 4)
    plan = dataclasses.replace(solve(graph, Request(strategy="plain")), advice="why, and what to try")
    text = "\n".join(lines_of(overview.plan_view(Estimate.from_graph(graph), plan)))
    assert "no plan saves much here" in text and "why, and what to try" in text and "nothing is recomputed" in text


def test_names_lose_their_middle_and_figures_nothing() -> None:
    table = Rows("title")
    table.add_name("layer")
    table.add_figures("bytes")
    table.add_row("begin_" + "x" * 100 + "_end", "1023.99 MiB")
    _, _, row = lines_of([table], width=40)
    name, figure = row.split("  ")
    assert figure == "1023.99 MiB" and name.startswith("begin_") and name.endswith("_end") and "…" in name
    assert lines_of([Name("short")]) == ["short"]


@pytest.mark.parametrize(
    "table",
    [
        lambda estimate, plan: tables.layers_table(estimate),
        lambda estimate, plan: tables.totals_table(estimate),
        lambda estimate, plan: tables.segments_table(plan),
        lambda estimate, plan: tables.before_after_table(plan),
        lambda estimate, plan: tables.curve_table([plan, plan]),
    ],
)
def test_every_table_has_one_line_a_row_in_80_columns(table, deep: tuple[Estimate, Plan]) -> None:
    shown = table(*deep)
    lines = lines_of([shown])
    assert max(map(len, lines)) <= 80
    # A title, a heading, the rows, and a caption where there is one.
    assert len(lines) - shown.row_count in (2, 3)


def test_bars_are_as_long_as_their_share() -> None:
    assert len(bar(1, 1, NOW).plain) == BAR_WIDTH == len(bar(5, 1, NOW).plain)
    assert len(bar(1, 2, NOW).plain) == BAR_WIDTH // 2
    assert bar(0, 1, NOW).plain == "" == bar(1, 0, NOW).plain
    assert len(bar(1, 10**9, NOW).plain) == 1  # What is not nothing is seen.
    two = bar_of_two(3, 1, 8, (PLANNED, NOW))
    assert two.plain == "█" * 8 + "░" * 2 and [str(span.style) for span in two.spans] == [PLANNED, NOW]


@pytest.mark.parametrize(
    ("label", "block"),
    [
        ("block_1_expand_BN", "block_1"),
        ("conv2_block1_1_conv", "conv2_block1"),
        ("block2d_expand_conv", "block2d"),
        ("block2_sepconv1_act", "block2"),
        ("Conv_1", "Conv_1"),
        ("Conv_1_bn", "Conv_1"),
        ("conv2d_3", "conv2d_3"),
        ("conv2d_3/convolution", "conv2d_3"),
        ("max_pooling2d_1", "max_pooling2d_1"),
        ("dense/MatMul", "dense"),
        ("encoder/layer_3/mlp#2", "encoder/layer_3"),
        ("encoder/conv2d_3/kernel", "encoder"),
        ("stage1.unit2.conv", "stage1.unit2"),
        ("lstm_1_2", "lstm_1_2"),
        ("transformer_block_0/attention/dense_1", "transformer_block_0"),
        ("predictions", "predictions"),
    ],
)
def test_the_block_of_a_name(label: str, block: str) -> None:
    assert block_of(label) == block


def test_folding_keeps_every_layer_once_and_the_order() -> None:
    names = ["stem", "block_1_a", "block_1_b", "block_2_a", "head", "block_1_c"]
    assert folded(names) == [("stem", [0]), ("block_1", [1, 2, 5]), ("block_2_a", [3]), ("head", [4])]
    # One block of all would tell nothing.
    assert folded(["net/a", "net/b", "net/c"]) == [("net/a", [0]), ("net/b", [1]), ("net/c", [2])]


def test_a_layer_that_is_called_twice_is_shown() -> None:
    unit = UnitEstimate(label="dense", kind="Dense", output_bytes=1, kept_bytes=1, parameter_bytes=0, flops=0)
    estimate = dataclasses.replace(
        Estimate.from_graph(chain([8] * 4)), units=(unit, dataclasses.replace(unit, label="dense#2"))
    )
    plan = solve(chain([8] * 4), Request(strategy="plain"))
    assert any("dense" in line for line in lines_of(overview.estimate_view(estimate, plan)))


def test_what_xlas_compiler_told_stands_beside_what_is_simulated() -> None:
    estimate, plan = Estimate.from_graph(chain([8] * 4)), solve(chain([8] * 4), Request(strategy="plain"))
    compiled = dataclasses.replace(estimate, compiled_peak_bytes=1 << 20)
    [line] = [line for line in lines_of(overview.estimate_view(compiled, plan)) if "with XLA" in line]
    assert "1.00 MiB" in line
    assert not any("XLA" in line for line in lines_of(overview.estimate_view(estimate, plan)))


@pytest.mark.parametrize(
    ("asked", "opened", "noun"),
    [
        ("layer", (), "layers"),
        ("auto", (), "layers"),
        ("auto", ("block",), "layers and groups of operations"),
        ("op", (), "groups of operations"),
    ],
)
def test_units_are_called_what_they_are(asked: Granularity, opened: tuple[str, ...], noun: str) -> None:
    graph = dataclasses.replace(chain([MIB] * 9), opened=opened)
    plan = solve(graph, Request(strategy="min_peak", granularity=asked))
    said = f"{len(plan.recomputed)} of 9 {noun}"
    batch = LargestBatch(batch_size=2, plan=plan, plain_batch_size=1, rates=())
    assert all(said in text for text in (str(plan), repr(plan), repr(batch), plan_in_words(plan)))
    assert f"{plan.units_in_words(len(plan.kept))}, and 0 that must be" in repr(plan)
    # A line of 80 columns has no room for the longer nouns.
    shown = said if noun == "layers" else f"{len(plan.recomputed)} of 9 units"
    assert f"{shown} recomputed" in lines_of(overview.plan_view(Estimate.from_graph(graph), plan))[3]
