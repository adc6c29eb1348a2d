"""Searches that may keep few labels find plans that are nearly as quick."""

from __future__ import annotations

import pytest

from tf_memsaver.ir.graph import Graph
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tf_memsaver.search import labels
from tf_memsaver.search.one_level import OneLevel
from tools.shared.nets import Net


def densenet(layers: int, growth: int) -> Graph:
    """Three dense blocks, each with a quarter of the pixels of the one before."""
    net = Net()
    x = net.dense(net.input(64), 64)
    for pixels in (16, 4, 1):
        for _ in range(layers):
            squeezed = net.dense(net.relu(net.norm(x)), 4 * growth * pixels)
            x = net.concat(x, net.dense(net.relu(net.norm(squeezed)), growth * pixels))
        x = net.dense(net.relu(net.norm(x)), max(1, net.bytes_of(x) // 8))
    return net.graph(x)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_few_labels_of_many_patterns_are_nearly_as_good(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least bytes of equal ranges of time were kept: nine tenths of the memory took three times as long."""

    def seconds() -> float:
        problem = Problem.build(densenet(layers=7, growth=3), Request())
        plans = problem.once(OneLevel)
        least, most = plans.smallest.peak_bytes, problem.plain.peak_bytes
        found = plans.quickest(int(least + share * (most - least)))
        assert found is not None
        return found.replay_seconds

    many = seconds()
    monkeypatch.setattr(labels, "MOST_EXTENSIONS", 0)
    assert seconds() <= 1.1 * many
