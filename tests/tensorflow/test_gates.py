"""Gates: zero whatever they wait for, and made of one set of constants in each graph."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_memsaver.parity.gates import Gates, after

NUMBERS = [0.0, -0.0, 1.5, float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int32"])
def test_a_gate_is_zero_whatever_it_waits_for(dtype: str, compiled: bool) -> None:
    @tf.function(jit_compile=compiled)
    def gate(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        gates = Gates()
        return gates.gate([gates.first_elements([x, y, x[:0]]), gates.first_elements([y])])

    for number in NUMBERS if dtype.startswith(("float", "bf")) else [0, -3]:
        found = gate(tf.cast(tf.fill([2, 3], number), dtype), tf.constant([[1.0]]))
        assert found.shape == () and found.dtype == tf.float32
        assert found.numpy().tobytes() == np.float32(0.0).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "bool", "string"])
def test_what_waits_is_unchanged(dtype: str) -> None:
    given = tf.constant(["a"]) if dtype == "string" else tf.cast(tf.constant([0.0, -0.0, 3.0]), dtype)

    @tf.function
    def passed(x: tf.Tensor) -> tf.Tensor:
        gates = Gates()
        return after(gates.gate([gates.first_elements([tf.ones([2])])]), x)

    assert passed(given).numpy().tobytes() == given.numpy().tobytes()


def test_constants_are_made_once_in_each_graph() -> None:
    gates = Gates()
    found = []
    for _ in range(2):
        graph = tf.__internal__.FuncGraph("step")
        with graph.as_default():
            x = tf.compat.v1.placeholder(tf.float32, [None, 4])
            with tf.control_dependencies([x.op]):
                for _ in range(3):
                    gates.gate([gates.first_elements([x, x])])
            assert all(constant.graph is graph and not constant.op.control_inputs for constant in gates.constants())
            found.append([operation.type for operation in graph.get_operations()].count("Const"))
    assert found == [5, 5]
