"""Workspace: the scratch memory that an operation's kernel allocates while it runs, by type of operation.

Sources are TensorFlow 2.21's, in ``tensorflow/core/kernels``. Each rule was held against the allocator's peak of the
operation alone (``tests/tensorflow/test_workspace.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tf_memsaver.cost.rules import POOLS, OpSpec, groups_of_filter_gradient, is_known

_UNFOLDED_BYTES = 30 << 20
"""How much of the unfolded images Eigen's convolution gradients aim to have at once (``target_working_set_size``)."""

_WORTH_A_THREAD = 256 << 10
"""From so many bytes a thread on, the input gradient goes image by image (``min_thread_work_unit_size``)."""

_MOST_UNFOLDED = 25
"""Volumes are not unfolded if that takes over so many times what is read and made (``kMaxTempAllocationOverhead``)."""


def workspace_bytes(spec: OpSpec) -> int:
    """Return the scratch memory that the op's kernel allocates while it runs."""
    rule = RULES.get(spec.type)
    return rule(spec) if rule is not None and is_known(spec) else 0


def _filter_gradient(spec: OpSpec) -> int:
    """Return what the filter gradient of a convolution takes.

    XLA's CPU compiler computes that of a grouped convolution for all pairs of channels, in two buffers. Measured on
    TensorFlow 2.21: 220.5 MiB for a depthwise 7×7 convolution of 768 channels, 55.1 MiB for 384. Keras runs grouped
    convolutions on CPUs this way. Eigen's kernel (``conv_grad_filter_ops.cc``) unfolds some images at a time; how many
    does not depend on how many there are.
    """
    if spec.kernels.compiled:
        groups = groups_of_filter_gradient(spec)
        return 2 * groups * spec.output_bytes[0] if groups > 1 else 0
    if not spec.is_by_eigen:
        return 0
    image, work = _unfolded(spec, spec.output_shapes[0])
    return -(-_UNFOLDED_BYTES // work) * image


def _input_gradient(spec: OpSpec) -> int:
    """Return what the input gradient of a convolution takes in Eigen's kernel (``conv_grad_input_ops.cc``)."""
    if not spec.is_by_eigen or not spec.input_shapes[1]:
        return 0
    image, work = _unfolded(spec, spec.input_shapes[1])
    one_by_one = spec.output_shapes[0][0] == 1 or work // spec.kernels.threads >= _WORTH_A_THREAD
    return image if one_by_one else -(-_UNFOLDED_BYTES // work) * image


def _volume_gradient(spec: OpSpec) -> int:
    """Return what a gradient of a convolution of volumes takes in Eigen's kernel (``conv_grad_ops_3d.cc``).

    It unfolds as many volumes at a time as fill the processor's last cache, though there may be fewer; the input
    gradient of a single volume unfolds that one.
    """
    if not spec.is_by_eigen or spec.attributes["T"] not in ("float32", "float64"):
        return 0
    is_of_filter = spec.type == "Conv3DBackpropFilterV2"
    kernel = spec.output_shapes[0] if is_of_filter else spec.input_shapes[1]
    if not kernel:
        return 0
    volume, work = _unfolded(spec, kernel)
    one_by_one = not is_of_filter and spec.output_shapes[0][0] == 1
    nbytes = volume if one_by_one else -(-spec.kernels.cache_bytes // work) * volume
    others = spec.input_bytes[0] if is_of_filter else spec.input_bytes[1]
    return nbytes if nbytes // (others + spec.input_bytes[2] + spec.output_bytes[0]) <= _MOST_UNFOLDED else 0


def _unfolded(spec: OpSpec, kernel: tuple[int, ...]) -> tuple[int, int]:
    """Return the bytes of an unfolded image, and those of the product that it is a factor of, with all it reads."""
    rows = math.prod(spec.input_shapes[2][1:-1])
    columns, channels = math.prod(kernel[:-1]), kernel[-1]
    size = spec.output_bytes[0] // math.prod(spec.output_shapes[0])
    return size * rows * columns, size * (rows * columns + rows * channels + columns * channels)


def places_bytes(spec: OpSpec) -> int:
    """Return the bytes of the places of maxima, one for each, that oneDNN's pooling hands on to its gradient.

    (``mkl_layout_pass.cc``: ``MaxpoolGradRewrite`` takes its gradient where that reads what such a pooling made.)
    """
    if spec.kernels.compiled or not spec.kernels.on_cpu or spec.is_by_eigen or not is_known(spec):
        return 0
    if spec.type in POOLS.values():
        return math.prod(spec.output_shapes[0])
    pool = spec.attributes.get("pooled_by")
    return math.prod(spec.input_shapes[1]) if pool is not None and POOLS.get(spec.type) == pool else 0


def _pool_gradient(spec: OpSpec) -> int:
    """Return the copy of the pooled tensor and the 64-bit places of its largest that ``maxpooling_op.cc`` makes."""
    if spec.kernels.compiled or not spec.kernels.on_cpu or places_bytes(spec):
        return 0
    return spec.input_bytes[1] + 8 * math.prod(spec.input_shapes[1])


def _product(spec: OpSpec) -> int:
    """Return the float32 copies that Eigen's products of 16-bit numbers make of all three (``matmul_op_impl.h``)."""
    if not spec.is_by_eigen or spec.attributes["T"] not in ("bfloat16", "float16"):
        return 0
    return 2 * (sum(spec.input_bytes) + sum(spec.output_bytes))


def _einsum(spec: OpSpec) -> int:
    """Return the transposed copies that ``einsum_op_impl.h`` makes, of factors and of the product.

    A factor is to have its labels by kind (those of the batch, the free ones, those summed over), and by first mention
    within a kind; free and summed ones may also be the other way round. The product has its labels by kind and factor.
    """
    equation = str(spec.attributes["equation"])
    if spec.kernels.compiled or "." in equation or "->" not in equation:
        return 0
    terms, result = equation.split("->")
    factors = terms.split(",")
    if len(factors) != 2:
        return 0
    mentioned = list(dict.fromkeys("".join(factors)))

    def kind(label: str) -> int:
        shared = label in factors[0] and label in factors[1]
        if label in result:
            return 1 if shared else 2
        return 3 if shared else 4

    def place(label: str) -> tuple[int, int]:
        return kind(label), mentioned.index(label)

    def swapped(label: str) -> tuple[int, int]:
        return {2: 3, 3: 2}.get(kind(label), kind(label)), mentioned.index(label)

    found = 0
    made: dict[str, None] = dict.fromkeys(sorted((label for label in mentioned if kind(label) == 1), key=place))
    for factor, nbytes in zip(factors, spec.input_bytes, strict=False):
        labels = list(factor)
        if labels not in (sorted(labels, key=place), sorted(labels, key=swapped)):
            found += nbytes
        made |= dict.fromkeys(sorted((label for label in labels if kind(label) == 2), key=place))
    return found + (spec.output_bytes[0] if list(made) != list(result) else 0)


RULES: dict[str, Callable[[OpSpec], int]] = {
    "Conv2DBackpropFilter": _filter_gradient,
    "Conv2DBackpropInput": _input_gradient,
    "Conv3DBackpropFilterV2": _volume_gradient,
    "Conv3DBackpropInputV2": _volume_gradient,
    "MaxPoolGrad": _pool_gradient,
    "MatMul": _product,
    "BatchMatMul": _product,
    "BatchMatMulV2": _product,
    "BatchMatMulV3": _product,
    "Einsum": _einsum,
}
