"""Reports to test with, without TensorFlow."""

from __future__ import annotations

import dataclasses
from typing import Any

from tf_memsaver.display.report import Report
from tf_memsaver.ir.graph import Graph
from tf_memsaver.judge.simulate import Simulator
from tf_memsaver.plan.request import Request
from tf_memsaver.planners.solve import Plans
from tools.shared.nets import Net

HOSTILE = '</script><img src="https://example.org/x.png" onerror="alert(1)">'
"""A layer's name that would break a page out of its script, or have it load something."""


def step(name: str = "net") -> Graph:
    """Return a step of sixteen layers, one of which cannot be recomputed."""
    net = Net(scale=1 << 20)
    x = net.input(4)
    for place in range(16):
        x = net.dense(x, 6 + place % 3, pinned="draws from hidden state" if place == 5 else "")
    return dataclasses.replace(net.graph(x), name=name)


def report_of(graph: Graph, **asked: Any) -> Report:
    """Return the report of the plan that is asked for."""
    plans = Plans(graph, versions={"tf_memsaver": "1.2.3"})
    request = Request(**{"strategy": "min_peak", **asked})
    return Report.of(Simulator(graph), plans.plan(request), plans.curve(request, 8), "tf-memsaver report net")
