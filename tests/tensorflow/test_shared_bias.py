"""A tensor that its maker reads, too, and two layers of one segment: its gradient is one sum of three terms."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import tf_memsaver
from tf_memsaver.ir.segments import Segment, SegmentMode


@keras.saving.register_keras_serializable("test_shared_bias")
class Biased(layers.Layer):
    """A residual block whose bias the first of them makes for all, as T5's does."""

    def __init__(self, makes: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.makes = makes
        self.product = layers.Dense(16)
        self.bias = layers.Dense(16) if makes else None

    def call(self, x: Any, bias: Any = None) -> Any:
        if self.bias is not None:
            bias = self.bias(x)
        x = x + keras.ops.softmax(self.product(x) + bias)
        return (x, bias) if self.makes else x


def biased() -> Any:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((16,))
    x = layers.Dense(16, activation="tanh")(inputs)
    x, bias = Biased(makes=True)(x)
    for _ in range(2):
        x = Biased()(x, bias=bias)
    model = keras.Model(inputs, layers.Dense(4)(x))
    model.compile("sgd", "mse", jit_compile=False)
    return model


def trained(plan: Any) -> list[bytes]:
    generator = np.random.default_rng(0)
    x, y = (generator.standard_normal((90, size)).astype("float32") for size in (16, 4))
    model = biased() if plan is None else tf_memsaver.apply_plan(biased(), plan)
    # The last batch is smaller, so that the batch dimension is free.
    model.fit(x, y, batch_size=40, epochs=2, shuffle=False, verbose=0)
    return [np.asarray(each).tobytes() for each in model.variables]


@pytest.mark.parametrize("first", ["store", "recompute"])
def test_results_are_those_of_the_plain_model(first: str) -> None:
    plan = tf_memsaver.search_plan(biased(), batch_size=40, strategy="plain", granularity="layer")
    ends = ((0, 1, "store"), (1, 2, first), (2, 4, "recompute"), (4, 5, "store"))
    assert len(plan.labels) == 5
    segments = tuple(Segment(start=start, stop=stop, mode=SegmentMode(mode)) for start, stop, mode in ends)
    # On a busy machine the plain step has several results: a sum begins with a term whose memory is free.
    assert trained(dataclasses.replace(plan, segments=segments)) in [trained(None) for _ in range(5)]
