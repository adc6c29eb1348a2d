"""What operations cost, by type."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from tf_memsaver.cost.device import CPU, GPU, Device
from tf_memsaver.cost.rules import (
    Kernels,
    OpSpec,
    bytes_moved,
    flops,
    overwritable_inputs,
    scalar_operations,
    slowness,
)
from tf_memsaver.cost.workspace import workspace_bytes

Shape = tuple[int, ...]
HERE = Kernels()


def spec(kind: str, inputs: list[Shape], output: Shape, kernels: Kernels = HERE, **attributes: Any) -> OpSpec:
    """An operation on float32 tensors."""

    def nbytes(shape: Shape) -> int:
        return 4 * int(math.prod(shape))

    return OpSpec(
        type=kind,
        input_shapes=tuple(inputs),
        input_bytes=tuple(map(nbytes, inputs)),
        output_shapes=(output,),
        output_bytes=(nbytes(output),),
        attributes=attributes,
        kernels=kernels,
    )


@pytest.mark.parametrize(
    ("operation", "count"),
    [
        (spec("Relu", [(4, 8)], (4, 8)), 32),
        (spec("MatMul", [(4, 8), (8, 16)], (4, 16)), 2 * 4 * 8 * 16),
        (spec("MatMul", [(8, 4), (8, 16)], (4, 16), transpose_a=True), 2 * 4 * 8 * 16),
        (spec("Einsum", [(2, 3, 4), (4, 5)], (2, 3, 5), equation="abc,cd->abd"), 2 * 2 * 3 * 4 * 5),
        (spec("Conv2D", [(1, 8, 8, 3), (3, 3, 3, 16)], (1, 8, 8, 16)), 2 * 8 * 8 * 16 * 27),
        (spec("DepthwiseConv2dNative", [(1, 8, 8, 3), (3, 3, 3, 1)], (1, 8, 8, 3)), 2 * 8 * 8 * 3 * 9),
    ],
    ids=lambda each: each.type if isinstance(each, OpSpec) else "",
)
def test_flops(operation: OpSpec, count: int):
    assert flops(operation) == count


def test_views_and_readers_of_shapes_move_nothing():
    assert bytes_moved(spec("Relu", [(4,)], (4,))) == 32
    assert bytes_moved(spec("Reshape", [(4,)], (2, 2))) == bytes_moved(spec("Shape", [(4,)], (1,))) == 0


def test_a_normalization_reads_a_batch_three_times_in_training():
    image, each = (8, 4, 4, 16), (16,)
    shapes: list[Shape] = [image, each, each, each, each]
    used = spec("FusedBatchNormV3", shapes, image, is_training=False)
    trained = dataclasses.replace(used, attributes={"is_training": True})
    assert bytes_moved(trained) - bytes_moved(used) == 2 * used.input_bytes[0]


def test_a_result_takes_over_an_input_of_its_size():
    assert overwritable_inputs(spec("AddV2", [(4,), (1,)], (4,))) == (0,)
    assert overwritable_inputs(spec("MatMul", [(4, 4), (4, 4)], (4, 4))) == ()


@pytest.mark.parametrize("kind", ["Softmax", "SparseSoftmax"])
def test_the_gradient_of_a_loss_takes_over_the_logits(kind: str):
    # Not the labels, though they may be of the same size.
    loss = spec(f"{kind}CrossEntropyWithLogits", [(4, 9), (4, 9)], (4,))
    loss = dataclasses.replace(loss, output_shapes=((4,), (4, 9)), output_bytes=(16, 144))
    assert overwritable_inputs(loss) == (0,)


def test_the_filter_gradient_of_a_grouped_convolution_takes_dense_scratch_where_xla_compiles_it():
    shapes: list[Shape] = [(1, 8, 8, 6), (4,), (1, 8, 8, 6)]
    assert workspace_bytes(spec("Conv2DBackpropFilter", shapes, (3, 3, 2, 6))) == 0
    grouped = spec("Conv2DBackpropFilter", shapes, (3, 3, 2, 6), kernels=Kernels(compiled=True))
    assert workspace_bytes(grouped) == 2 * 3 * grouped.output_bytes[0]


@pytest.mark.parametrize(
    ("kind", "dtype", "count"),
    [
        ("StatelessRandomUniformV2", "float32", 27 * 32),
        ("StatelessRandomUniformV2", "int32", 27 * 32),
        ("Erfc", "float32", 8 * 32),
        ("Erfc", "bfloat16", 48 * 32),
        ("Mul", "float32", 0),
        ("Mul", "float16", 2 * 32),
        ("MatMul", "bfloat16", 0),
    ],
)
def test_what_kernels_do_one_number_at_a_time(kind: str, dtype: str, count: int):
    operation = spec(kind, [(4, 8), (4, 8)], (4, 8), T=dtype)
    assert scalar_operations(operation) == count
    assert scalar_operations(dataclasses.replace(operation, kernels=Kernels(compiled=True))) == 0


def test_random_numbers_take_a_cpu_longer_than_their_bytes():
    draw = spec("StatelessRandomUniformV2", [(2,)], (1024, 1024), T="float32")

    def seconds(device: Device) -> tuple[float, float]:
        moved = bytes_moved(draw)
        return device.seconds(moved, scalar_operations=scalar_operations(draw)), device.seconds(moved)

    drawn, moved = seconds(CPU)
    assert 10 * moved < drawn < 100 * moved
    drawn, moved = seconds(GPU)
    assert drawn == moved


def test_a_power_that_is_a_square_or_a_cube_is_computed_by_vectors():
    def power(exponent: float | None) -> int:
        return scalar_operations(spec("Pow", [(4, 8), ()], (4, 8), T="float32", exponent=exponent))

    assert power(2.0) == power(3.0) == power(0.5) == 0
    assert power(None) == power(2.5) == 46 * 32


BY_EIGEN = Kernels(by_eigen=frozenset({"float32"}))


@pytest.mark.parametrize(
    ("operation", "is_slower"),
    [
        (spec("BatchMatMulV2", [(64, 32, 32), (64, 32, 32)], (64, 32, 32), BY_EIGEN, T="float32"), True),
        (spec("BatchMatMulV2", [(64, 16, 32), (64, 32, 16)], (64, 16, 16), BY_EIGEN, T="float32"), False),
        (spec("BatchMatMulV2", [(64, 32, 32), (64, 32, 32)], (64, 32, 32), BY_EIGEN, T="float64"), False),
        (spec("BatchMatMulV2", [(64, 32, 32), (64, 32, 32)], (64, 32, 32), T="float32"), False),
        (spec("MatMul", [(64, 32), (32, 32)], (64, 32), BY_EIGEN, T="float32"), False),
        (spec("Transpose", [(4, 8, 8), (3,)], (4, 8, 8), BY_EIGEN, T="float32", perm=(0, 2, 1)), True),
        (spec("Transpose", [(4, 8, 8), (3,)], (8, 4, 8), BY_EIGEN, T="float32", perm=(1, 0, 2)), False),
    ],
    ids=lambda each: each.type if isinstance(each, OpSpec) else "",
)
def test_what_takes_longer_by_eigen_than_by_onednn(operation: OpSpec, is_slower: bool):
    assert (slowness(operation) > 1) is is_slower
    assert slowness(dataclasses.replace(operation, kernels=dataclasses.replace(BY_EIGEN, compiled=True))) == 1
