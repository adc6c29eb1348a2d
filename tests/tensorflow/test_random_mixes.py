"""Random networks of usual blocks compute, optimized, what they compute without: step by step and in ``fit``.

``RANDOM_MIXES=40 pytest tests/tensorflow/test_random_mixes.py`` tries as many networks as that.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

import tf_memsaver
from tf_memsaver.parity.level import EXACT, Rule, at_level
from tools.shared.models.random_mixes import build_mix, compile_mix, mixed_data, random_mix
from tools.shared.records import differing
from tools.shared.step_graphs import Difference, differences, step_graph
from tools.shared.training import fit

_MANY = int(os.environ.get("RANDOM_MIXES", "0"))
_BATCH_SIZE = 4


def _optimized(blocks: Any, granularity: str, strategy: str) -> Any:
    options: dict[str, Any] = {"granularity": granularity, "strategy": strategy, "max_overhead": 100.0}
    return tf_memsaver.optimize(build_mix(blocks), batch_size=_BATCH_SIZE, **options)


def _trained(model: Any, optimizer: str) -> Any:
    compile_mix(model, optimizer)
    return fit(model, *mixed_data(4, _BATCH_SIZE), batch_size=_BATCH_SIZE, epochs=1)


def _step(model: Any, optimizer: str = "adam") -> Any:
    compile_mix(model, optimizer)
    x, y = mixed_data(1, _BATCH_SIZE)
    return step_graph(model, lambda: model.fit(x, y, batch_size=_BATCH_SIZE, verbose=0))


@pytest.mark.parametrize("seed", range(_MANY or 3))
def test_random_mixes_train_alike(seed: int) -> None:
    blocks, strategy, granularity, optimizer = random_mix(seed)
    plain = _trained(build_mix(blocks), optimizer)
    if differing(plain, _trained(build_mix(blocks), optimizer)):
        pytest.skip("the plain model differs from itself")
    wrong = differing(plain, _trained(_optimized(blocks, granularity, strategy), optimizer))
    assert not wrong, (len(wrong), random_mix(seed))


def _step_differences(blocks: Any, granularity: str, strategy: str) -> list[Difference]:
    return differences(_step(build_mix(blocks)), _step(_optimized(blocks, granularity, strategy)))


@pytest.mark.parametrize(
    ("blocks", "granularity"),
    [
        (["act_hard_silu", "feed_forward", "conv_norm_hard_silu"], "layer"),
        (["act_hard_silu", "feed_forward", "conv_norm_hard_silu"], "op"),
        # A step with four equal squares, one of them computed for a cube's gradient.
        (["dense_squareplus", "polynomial", "dense_squareplus", "mean_down_up"], "op"),
    ],
)
def test_steps_are_made_of_the_same_expressions(blocks: list[str], granularity: str) -> None:
    assert not _step_differences(blocks, granularity, "min_peak")


def test_a_difference_is_found_where_it_begins() -> None:
    with at_level(EXACT.without(Rule.ARRIVING_AFTER_FACTORS)):
        found = _step_differences(["act_hard_silu"], "layer", "recompute_all")
    assert any("activation" in each.plain for each in found)
