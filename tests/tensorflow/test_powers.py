"""Powers with a constant exponent: graph optimisation has other operations for some, which take much less time."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tf_memsaver.cost.rules import scalar_operations
from tf_memsaver.parity.buffers import buffer_of
from tf_memsaver.tfgraph.operations import kernels_here, spec_of
from tools.shared.step_graphs import graphs_run


def powers_in(graph: Any) -> list[Any]:
    return [each for each in graph.get_operations() if each.type == "Pow"]


@pytest.mark.parametrize("exponent", [-1.0, -0.5, 0.5, 1.0, 2.0, 3.0, 2.5, 4.0])
def test_powers_that_are_told_as_cheap_run_as_other_operations(exponent: float) -> None:
    function = tf.function(lambda x: tf.pow(x, exponent))
    numbers = tf.random.uniform((64, 64))
    (power,) = powers_in(function.get_concrete_function(numbers).graph)
    is_cheap = scalar_operations(spec_of(power, kernels_here())) == 0
    run = {node.op for each in graphs_run(lambda: function(numbers)) for node in each.post_optimization_graph.node}
    assert is_cheap == ("Pow" not in run)


def powers_of_gradient(exponent: float) -> list[Any]:
    """Return a power and that which its gradient makes."""

    @tf.function
    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            power = tf.pow(x, exponent)
        return tape.gradient(power, x)

    return powers_in(gradient.get_concrete_function(tf.TensorSpec((4, 8))).graph)


def test_the_gradient_of_a_cube_has_the_square_of_what_it_reads() -> None:
    found = powers_of_gradient(3.0)
    assert [spec_of(each, kernels_here()).attributes["exponent"] for each in found] == [3.0, 2.0]


def test_what_is_no_number_of_all_elements_is_no_exponent() -> None:
    function = tf.function(lambda x, y: (tf.pow(x, y), tf.pow(x, [2.0, 3.0])))
    found = powers_in(function.get_concrete_function(tf.TensorSpec((4, 2)), tf.TensorSpec(())).graph)
    assert [spec_of(each, kernels_here()).attributes["exponent"] for each in found] == [None, None]


def test_a_power_of_one_makes_nothing_of_its_own() -> None:
    # The gradient of a square reads it: x ** (2 - 1).
    first, second = powers_of_gradient(2.0)
    assert buffer_of(second.outputs[0]) is first.inputs[0] and buffer_of(first.outputs[0]) is first.outputs[0]
    (larger,) = powers_in(tf.function(lambda x: tf.pow(x, [1.0, 1.0])).get_concrete_function(tf.TensorSpec(())).graph)
    assert buffer_of(larger.outputs[0]) is larger.outputs[0]
