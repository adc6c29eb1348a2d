"""What kernels allocate while they run: the rules beside the allocator's peak of the operation alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tensorflow as tf

from tf_memsaver.compat.onednn import takes_onednn
from tf_memsaver.cost.workspace import places_bytes, workspace_bytes
from tf_memsaver.tfgraph.operations import kernels_here, spec_of
from tools.shared import memory
from tools.shared.processes import in_own_process


def image(*shape: int) -> Any:
    return tf.random.stateless_normal(shape, (1, 2))


def filter_gradient(x: Any, gradient: Any) -> Any:
    return tf.raw_ops.Conv2DBackpropFilter(
        input=x, filter_sizes=[3, 3, x.shape[-1], gradient.shape[-1]], out_backprop=gradient, strides=[1] * 4,
        padding="SAME",
    )  # fmt: skip


def input_gradient(kernel: Any, gradient: Any) -> Any:
    sizes = [*gradient.shape[:-1], kernel.shape[2]]
    return tf.raw_ops.Conv2DBackpropInput(
        input_sizes=sizes, filter=kernel, out_backprop=gradient, strides=[1] * 4, padding="SAME"
    )


def volume_filter_gradient(side: int) -> Any:
    return lambda x, gradient: tf.raw_ops.Conv3DBackpropFilterV2(
        input=x, filter_sizes=[*[side] * 3, x.shape[-1], gradient.shape[-1]], out_backprop=gradient, strides=[1] * 5,
        padding="SAME",
    )  # fmt: skip


def volume_input_gradient(kernel: Any, gradient: Any) -> Any:
    sizes = [*gradient.shape[:-1], kernel.shape[3]]
    return tf.raw_ops.Conv3DBackpropInputV2(
        input_sizes=sizes, filter=kernel, out_backprop=gradient, strides=[1] * 5, padding="SAME"
    )


def pool_gradient(x: Any) -> Any:
    pooled = x[:, ::2, ::2]
    return tf.raw_ops.MaxPoolGrad(
        orig_input=x, orig_output=pooled, grad=pooled, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="VALID"
    )


def einsum(equation: str) -> Any:
    return lambda *factors: tf.einsum(equation, *factors)


def half(*shape: int, dtype: Any = tf.bfloat16) -> Any:
    return tf.cast(image(*shape), dtype)


def float16(*shape: int) -> Any:
    return half(*shape, dtype=tf.float16)


def double(*shape: int) -> Any:
    """For these kinds of numbers the kernels are Eigen's on all processors."""
    return half(*shape, dtype=tf.float64)


def equation_sums_much(spec: Any) -> bool:
    """Whether an einsum reads more than four times what it makes."""
    return spec.type == "Einsum" and min(spec.input_bytes) > 4 * spec.output_bytes[0]


@pytest.mark.parametrize(
    ("kind", "run", "inputs"),
    [
        ("Conv2DBackpropFilter", filter_gradient, [image(8, 64, 64, 32), image(8, 64, 64, 64)]),
        ("Conv2DBackpropFilter", filter_gradient, [image(32, 16, 16, 64), image(32, 16, 16, 64)]),
        ("Conv2DBackpropInput", input_gradient, [image(3, 3, 64, 64), image(8, 64, 64, 64)]),
        ("Conv2DBackpropInput", input_gradient, [image(3, 3, 8, 8), image(64, 16, 16, 8)]),
        ("Conv2DBackpropFilter", filter_gradient, [float16(32, 32, 32, 24), float16(32, 32, 32, 24)]),
        ("Conv2DBackpropInput", input_gradient, [float16(3, 3, 24, 24), float16(32, 32, 32, 24)]),
        ("Conv3DBackpropFilterV2", volume_filter_gradient(1), [image(4, 24, 24, 24, 2), image(4, 24, 24, 24, 8)]),
        ("Conv3DBackpropFilterV2", volume_filter_gradient(3), [image(4, 24, 24, 24, 8), image(4, 24, 24, 24, 8)]),
        ("Conv3DBackpropFilterV2", volume_filter_gradient(3), [image(64, 8, 8, 8, 64), image(64, 8, 8, 8, 64)]),
        ("Conv3DBackpropInputV2", volume_input_gradient, [image(3, 3, 3, 16, 16), image(1, 24, 24, 24, 16)]),
        ("Conv3DBackpropInputV2", volume_input_gradient, [image(3, 3, 3, 64, 64), image(64, 8, 8, 8, 64)]),
        ("Conv3DBackpropFilterV2", volume_filter_gradient(3), [double(4, 24, 24, 24, 8), double(4, 24, 24, 24, 8)]),
        ("Conv3DBackpropInputV2", volume_input_gradient, [double(3, 3, 3, 16, 16), double(1, 24, 24, 24, 16)]),
        ("Conv3DBackpropInputV2", volume_input_gradient, [double(3, 3, 3, 32, 32), double(32, 8, 8, 8, 32)]),
        ("MaxPoolGrad", pool_gradient, [image(16, 64, 64, 64)]),
        ("MatMul", tf.matmul, [half(2048, 1024), half(1024, 2048)]),
        ("BatchMatMulV2", tf.matmul, [half(32, 256, 128), half(32, 128, 256)]),
        ("Einsum", einsum("aecd,abcd->acbe"), [image(16, 200, 8, 64), image(16, 200, 8, 64)]),
        ("Einsum", einsum("acbe,aecd->abcd"), [image(16, 8, 200, 200), image(16, 200, 8, 64)]),
        ("Einsum", einsum("abc,cde->abde"), [image(16, 200, 512), image(512, 8, 64)]),
        ("Einsum", einsum("abcd,cde->abe"), [image(16, 200, 8, 64), image(8, 64, 512)]),
        ("Einsum", einsum("abc,abde->cde"), [image(16, 200, 512), image(16, 200, 8, 64)]),
        ("Einsum", einsum("bij,bkj->bki"), [image(16, 512, 64), image(16, 400, 64)]),
    ],
)  # fmt: skip
def test_rules_say_what_kernels_allocate(kind: str, run: Any, inputs: list[Any]) -> None:
    graph = tf.function(run).get_concrete_function(*inputs).graph
    (operation,) = (each for each in graph.get_operations() if each.type == kind)
    spec = spec_of(operation, kernels_here())
    predicted, result = workspace_bytes(spec), spec.output_bytes[0]

    @tf.function
    def step(*given: Any) -> Any:
        return run(*given)

    read = sum(spec.input_bytes[:2]) if kind == "MaxPoolGrad" else 0  # The slice is made here, too.
    least = min(memory.peak_over_live(lambda: step(*inputs)) for _ in range(3))
    slack = 1 << 20
    assert result + predicted <= least + slack
    # Eigen may add up the two halves of a long sum, each in a buffer (TensorContractionThreadPool.h: ShardByInnerDim).
    halves = result if equation_sums_much(spec) else 0
    # A buffer may lie in a chunk that is larger by less than its size.
    assert least < 2 * (result + predicted + halves) + read + slack


def pooled_with_gradient(pool: str, gradient: str, given: Any, seed: Any) -> Any:
    window = [1, *[2] * (given.shape.rank - 2), 1]
    pooled = getattr(tf.nn, pool)(given, window, window, "VALID")
    return pooled, getattr(tf.raw_ops, gradient)(
        orig_input=given, orig_output=tf.identity(pooled), grad=seed, ksize=window, strides=window, padding="VALID"
    )


def least_of_a_pooling(pool: str, gradient: str, inputs: tuple[int, ...], result: tuple[int, ...]) -> int:
    """What the gradient of a pooling takes, the least of three runs."""
    x, seed = image(*inputs), tf.ones(result)
    step = tf.function(lambda given, seed: pooled_with_gradient(pool, gradient, given, seed)[1])
    return min(memory.peak_over_live(lambda: step(x, seed)) for _ in range(3))


@pytest.mark.parametrize(
    ("pool", "gradient", "inputs"),
    [("max_pool2d", "MaxPoolGrad", (16, 64, 64, 64)), ("max_pool3d", "MaxPool3DGrad", (4, 16, 32, 32, 64))],
)
def test_the_gradient_of_a_pooling_takes_what_that_hands_on(pool: str, gradient: str, inputs: tuple[int, ...]) -> None:
    """With oneDNN a pooling hands a byte for each maximum on to its gradient, which needs no scratch memory then."""
    result = (inputs[0], *(size // 2 for size in inputs[1:-1]), inputs[-1])
    given, seed = tf.TensorSpec(inputs), tf.TensorSpec(result)
    traced = tf.function(pooled_with_gradient).get_concrete_function(pool, gradient, given, seed)
    of_type = {each.type: spec_of(each, kernels_here()) for each in traced.graph.get_operations()}
    made, taken = of_type[gradient.removesuffix("Grad")], of_type[gradient]
    assert places_bytes(made) == places_bytes(taken) == (math.prod(result) if takes_onednn() else 0)
    predicted = made.output_bytes[0] + places_bytes(made) + taken.output_bytes[0] + workspace_bytes(taken)
    if takes_onednn():
        assert workspace_bytes(taken) == 0
        # In a process of its own: tests before it leave free chunks, and a buffer may lie in one that is much larger.
        # There is no room for the copies of the other kernel.
        least = in_own_process(least_of_a_pooling, pool, gradient, inputs, result)
        assert predicted - (1 << 20) < least < predicted + 2 * made.output_bytes[0]
