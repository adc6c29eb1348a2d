"""Measured times of operations in place of predicted ones."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tf_memsaver.capture import op_times
from tf_memsaver.capture.model_step import capture_graph
from tf_memsaver.cost import workspace
from tf_memsaver.cost.rules import MATRIX_OPS
from tf_memsaver.ir.graph import Graph
from tf_memsaver.parity import grappler
from tools.shared.models import small as models


def times_of(graph: Graph) -> dict[str, float]:
    return {op.name: op.seconds for op in graph.ops}


def test_every_product_that_is_known_anywhere_has_its_flops() -> None:
    tables = [each for each in vars(grappler).values() if isinstance(each, (dict, frozenset))]
    types = {kind for table in (*tables, workspace.RULES) for kind in table if isinstance(kind, str)}
    products = {kind for kind in types if re.search("Conv|MatMul|Einsum", kind)}
    assert len(products) > 10
    assert products <= MATRIX_OPS


def test_only_times_differ() -> None:
    model = models.residual_net()
    plain, measured = (capture_graph(model, batch_size=4, profile=profile) for profile in (False, True))
    times = times_of(plain)
    assert plain == dataclasses.replace(
        measured, ops=tuple(dataclasses.replace(op, seconds=times[op.name]) for op in measured.ops)
    )
    assert all((op.seconds > 0) == (times[op.name] > 0) for op in measured.ops)
    assert times_of(measured) != times


def test_equal_operations_take_the_same_time_and_others_the_scaled_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter(range(10**6))

    def shortest(run: Callable[[], Any]) -> float:
        run()
        return 1.0 + next(runs)

    monkeypatch.setattr(op_times, "_shortest", shortest)
    x = inputs = keras.Input((16, 8))
    for _ in range(2):
        x = layers.Dense(8, activation="tanh")(layers.Dropout(0.5)(x))
    x = layers.GRU(32)(x)
    model = keras.Model(inputs, layers.Dense(2)(x))
    plain, measured = (times_of(capture_graph(model, batch_size=16, profile=profile)) for profile in (False, True))
    tanh = [seconds for name, seconds in measured.items() if name.endswith("/Tanh") and "dense" in name]
    # The first call of the clock was for what starting an operation takes; so whole numbers are left, and the launch.
    assert len(tanh) == 2 and tanh[0] == tanh[1] and tanh[0] % 1 == pytest.approx(1e-5)
    loops = [name for name in measured if name.endswith("while")]
    known = [name for name in measured if measured[name] % 1 == pytest.approx(1e-5)]
    assert loops and len(known) > len(measured) / 2
    scale = sum(measured[name] for name in known) / sum(plain[name] for name in known)
    assert all(measured[name] == pytest.approx(plain[name] * scale) for name in loops)


@pytest.mark.parametrize("granularity", ["layer", "op"])
def test_a_plan_by_measured_times(granularity: str) -> None:
    plan = tf_memsaver.search_plan(models.residual_net(), batch_size=4, granularity=granularity, profile=True)
    assert plan.request.profile and plan.recomputed and plan.peak_bytes < plan.plain_peak_bytes
    assert tf_memsaver.Plan.from_json(plan.to_json()) == plan


def test_functions_are_profiled_too() -> None:
    kernels = [tf.Variable(tf.random.normal((64, 64))) for _ in range(4)]

    def chain(x: Any) -> Any:
        for kernel in kernels:
            x = tf.tanh(x @ kernel)
        return x

    spec = tf.TensorSpec((None, 64))
    smaller = tf_memsaver.optimize_function(chain, spec, batch_size=256, max_overhead=1.0, profile=True)
    assert smaller.memsaver_plan.request.profile and smaller.memsaver_plan.recomputed
