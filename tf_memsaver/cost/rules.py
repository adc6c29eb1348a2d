"""Cost rules by operation type: what the captured graph knows of an op goes in, what it costs comes out.

A rule is added by naming the op type in one of the tables below. FLOPs count a multiply-add as two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Whose kernels run an op, as far as costs depend on it.

    ``compiled``: the op runs inside a function that XLA compiles. ``threads`` are those of a CPU's kernels.
    ``by_eigen`` are the types that a CPU leaves to Eigen, since oneDNN's kernels are not taken for them: Eigen computes
    gradients of convolutions from unfolded images, and products of 16-bit numbers in float32. ``cache_bytes`` are those
    of a CPU's last cache.
    """

    compiled: bool = False
    on_cpu: bool = True
    threads: int = 2
    by_eigen: frozenset[str] = frozenset()
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec:
    """What a cost rule sees: shapes and bytes of the tensors read and written, attributes, and whose kernel runs."""

    type: str
    input_shapes: tuple[Shape, ...]
    input_bytes: tuple[int, ...]
    output_shapes: tuple[Shape, ...]
    output_bytes: tuple[int, ...]
    attributes: Mapping[str, Any]
    kernels: Kernels = Kernels()

    @property
    def is_by_eigen(self) -> bool:
        """Whether Eigen's kernel runs it, since oneDNN's are not taken for its type, and XLA does not compile it."""
        return not self.kernels.compiled and self.attributes.get("T") in self.kernels.by_eigen


VIEWS = frozenset(
    {
        "CheckNumerics",
        "DebugGradientIdentity",
        "EnsureShape",
        "ExpandDims",
        "Identity",
        "PlaceholderWithDefault",
        "PreventGradient",
        "Reshape",
        "Squeeze",
        "StopGradient",
    }
)
"""Ops whose output shares the buffer of their first input."""

MULTI_VIEWS = frozenset({"IdentityN"})
"""Ops whose every output shares the buffer of the input at the same place."""

FILTER_GRADIENTS = {
    "Conv2DBackpropFilter": "Conv2DBackpropInput",
    "Conv3DBackpropFilterV2": "Conv3DBackpropInputV2",
    "DepthwiseConv2dNativeBackpropFilter": "DepthwiseConv2dNativeBackpropInput",
}
"""The gradients of kernels of convolutions; the gradient of its input, which the same function makes, comes before."""

POOLS = {"MaxPoolGrad": "MaxPool", "MaxPool3DGrad": "MaxPool3D"}
"""Gradients of max-poolings, and those; oneDNN's kernels hand on in which place of each window its maximum was."""

REDUCTIONS = frozenset({"ArgMax", "ArgMin", "BiasAddGrad", "Max", "Mean", "Min", "Prod", "Sum"})
"""Ops that read much and write little, at a lower rate."""

_NORMALIZATIONS = frozenset({"FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"})
"""In training they read a batch for its mean, for its variance and to normalise it (``fused_batch_norm_op.cc``)."""

SUMS = frozenset({"Add", "AddN", "AddV2"})
"""Ops that add tensors up."""

METADATA_READERS = frozenset({"BroadcastGradientArgs", "OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike"})
"""Ops that read only the shape of their inputs; graph optimisation folds them where shapes are known."""

_UNARY = frozenset(
    """Abs Cast Ceil Cos Elu Erf Erfc Exp Expm1 Floor Inv IsFinite IsNan LeakyRelu Log Log1p LogicalNot Neg Relu Relu6
    Reciprocal Rint Round Rsqrt Selu Sigmoid Sign Sin Softplus Softsign Sqrt Square Tan Tanh""".split()
)
_BINARY = frozenset(
    """Add AddV2 Atan2 BiasAdd Div DivNoNan EluGrad Equal FloorDiv FloorMod Greater GreaterEqual InvGrad LeakyReluGrad
    Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mul MulNoNan NotEqual Pow RealDiv ReciprocalGrad Relu6Grad
    ReluGrad RsqrtGrad SeluGrad SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad SquaredDifference Sub TanhGrad
    Xdivy Xlogy""".split()
)
_UNIFORM = frozenset(
    """RandomUniform RandomUniformInt StatefulUniform StatefulUniformInt StatelessRandomUniform
    StatelessRandomUniformFullInt StatelessRandomUniformFullIntV2 StatelessRandomUniformInt StatelessRandomUniformIntV2
    StatelessRandomUniformV2""".split()
)
_NORMAL = frozenset(
    "RandomStandardNormal StatefulStandardNormalV2 StatelessRandomNormal StatelessRandomNormalV2".split()
)
_TRUNCATED = frozenset(
    "StatefulTruncatedNormal StatelessTruncatedNormal StatelessTruncatedNormalV2 TruncatedNormal".split()
)
RANDOM = _UNIFORM | _NORMAL | _TRUNCATED
"""Operations that draw as many numbers as a shape says."""

SCALAR_OPERATIONS: dict[str, tuple[int, int, int]] = {
    **dict.fromkeys(sorted(_UNIFORM), (27, 36, 28)),
    **dict.fromkeys(sorted(_NORMAL), (74, 76, 70)),
    **dict.fromkeys(sorted(_TRUNCATED), (122, 122, 122)),
    "Cumprod": (42, 50, 46),
    "Cumsum": (42, 50, 46),
    "Elu": (4, 11, 29),
    "EluGrad": (2, 7, 27),
    "Erf": (2, 6, 3),
    "Erfc": (8, 48, 46),
    "Exp": (3, 7, 4),
    "Expm1": (18, 16, 16),
    "LeakyRelu": (1, 3, 32),
    "LeakyReluGrad": (2, 4, 26),
    "Log": (5, 8, 22),
    "Log1p": (6, 10, 11),
    "LogSoftmax": (8, 18, 10),
    "Pow": (46, 48, 48),
    "SelectV2": (5, 4, 23),
    "Selu": (4, 17, 30),
    "SeluGrad": (2, 8, 26),
    "Sigmoid": (4, 13, 8),
    "Softmax": (4, 4, 4),
    "Softplus": (17, 28, 49),
    "SoftplusGrad": (4, 17, 6),
}
"""Operations that a CPU's kernel does one number at a time, for each that it makes: a float32, a bfloat16, a float16.

They are its nanoseconds on two cores, times the six that these do in one (docs/figures.md): such kernels have no
vectors for the type, or make many steps of each number. Random ones take ten rounds (core/lib/random/philox_random.h).
"""

_OTHER_ELEMENTWISE = (0, 3, 2)
"""The same for elementwise ops that are not named: numbers of 16 bits take as long as those of 32."""

_FLOATS = ("float32", "bfloat16", "float16")

_OTHER_OVERWRITING = frozenset({"AddN", "SelectV2", "Softmax", "LogSoftmax", "ClipByValue"})
ELEMENTWISE = _UNARY | _BINARY
"""Ops that compute each element from those at the same place."""

_OVERWRITING = ELEMENTWISE | _OTHER_OVERWRITING
_LOSSES = frozenset({"SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"})
"""Their second output, the gradient, takes over the logits (kernels/xent_op.cc, sparse_xent_op.cc, TensorFlow 2.21)."""


def overwritable_inputs(spec: OpSpec) -> tuple[int, ...]:
    """Return the places of the inputs whose buffer an output may take over (same bytes): the first one, as a rule."""
    if spec.type in _LOSSES:
        return (0,) if spec.input_bytes[0] == spec.output_bytes[1] else ()
    if spec.type not in _OVERWRITING or not spec.output_bytes:
        return ()
    return tuple(place for place, nbytes in enumerate(spec.input_bytes) if nbytes == spec.output_bytes[0])


def flops(spec: OpSpec) -> int:
    """Return the floating-point operations of one run of the op."""
    rule = _FLOPS.get(spec.type)
    if rule is None:
        return sum(math.prod(shape) for shape in spec.output_shapes)
    return rule(spec) if is_known(spec) else 0


_OTHERS_FOR_POWERS = (-1.0, -0.5, 0.5, 1.0, 2.0, 3.0)
"""Constant exponents that graph optimisation has other operations for, such as squares (``ConvertPowStage``)."""


def scalar_operations(spec: OpSpec) -> int:
    """Return the operations of one run of the op that its kernel does one number at a time; XLA has vectors for all."""
    per_number = SCALAR_OPERATIONS.get(spec.type, _OTHER_ELEMENTWISE if spec.type in ELEMENTWISE else None)
    if spec.type == "Pow" and spec.attributes.get("exponent") in _OTHERS_FOR_POWERS:
        per_number = _OTHER_ELEMENTWISE
    if per_number is None or spec.kernels.compiled:
        return 0
    dtype = spec.attributes.get("T")
    return per_number[_FLOATS.index(dtype) if dtype in _FLOATS else 0] * math.prod(spec.output_shapes[0])


BY_EIGEN: dict[str, float] = {
    "AvgPool": 2,
    "AvgPool3D": 3,
    "BatchMatMul": 2.4,
    "BatchMatMulV2": 2.4,
    "BatchMatMulV3": 2.4,
    "Conv2DBackpropInput": 1.5,
    "Conv3D": 1.5,
    "Conv3DBackpropFilterV2": 1.7,
    "Conv3DBackpropInputV2": 3,
    "DepthwiseConv2dNative": 2.3,
    "DepthwiseConv2dNativeBackpropInput": 2.5,
    "FusedBatchNormGradV3": 1.9,
    "FusedBatchNormV3": 1.4,
    "MaxPool3D": 3,
    "Softmax": 1.6,
    "Transpose": 2,
}
"""How many times as long Eigen's kernels take as oneDNN's, on the same two cores (docs/figures.md), from 1.4 on."""

_SMALL = 128 * 128
"""Matrices of a batch are shared out among threads where a product takes no more multiplications; otherwise all threads
multiply one after the other (``matmul_op_impl.h: LaunchBatchMatMul``)."""


def slowness(spec: OpSpec) -> float:
    """Return how many times as long a run of the op takes as its arithmetic and its bytes say."""
    if not spec.is_by_eigen or not is_known(spec) or _suits_eigen(spec):
        return 1.0
    return BY_EIGEN.get(spec.type, 1.0)


def _suits_eigen(spec: OpSpec) -> bool:
    """Whether these are small matrices, of which each thread multiplies its own, or rows that move as they are."""
    if spec.type == "Transpose":
        order = spec.attributes.get("perm")
        return order is None or order[-1] == len(order) - 1
    return spec.type.startswith("BatchMatMul") and _matmul(spec) <= 2 * _SMALL * math.prod(spec.output_shapes[0][:-2])


def is_known(spec: OpSpec) -> bool:
    """Whether the ranks that rules go by are known; in the body of a loop they may not be."""
    return all((*spec.input_shapes[:1], *spec.output_shapes[:1]))


def bytes_moved(spec: OpSpec) -> int:
    """Return the bytes read and written by one run of the op; views and metadata readers move none."""
    if spec.type in VIEWS or spec.type in MULTI_VIEWS or spec.type in METADATA_READERS:
        return 0
    moved = sum(spec.input_bytes) + sum(spec.output_bytes)
    if spec.attributes.get("is_training") and spec.type in _NORMALIZATIONS and not spec.kernels.compiled:
        moved += 2 * spec.input_bytes[0]
    return moved


def _conv_forward(spec: OpSpec) -> int:
    return 2 * math.prod(spec.output_shapes[0]) * math.prod(spec.input_shapes[1][:-1])


def _conv_input_gradient(spec: OpSpec) -> int:
    return 2 * math.prod(spec.input_shapes[2]) * math.prod(spec.input_shapes[1][:-1])


def _conv_filter_gradient(spec: OpSpec) -> int:
    per_output = math.prod(spec.output_shapes[0][:-1])
    if spec.kernels.compiled:
        per_output *= groups_of_filter_gradient(spec)
    return 2 * math.prod(spec.input_shapes[2]) * per_output


def groups_of_filter_gradient(spec: OpSpec) -> int:
    """Return the number of groups of a channels-last convolution, by the operation that is its filter's gradient."""
    return max(1, spec.input_shapes[0][-1] // max(1, spec.output_shapes[0][-2]))


def _depthwise_forward(spec: OpSpec) -> int:
    return 2 * math.prod(spec.output_shapes[0]) * math.prod(spec.input_shapes[1][:2])


def _depthwise_input_gradient(spec: OpSpec) -> int:
    return 2 * math.prod(spec.input_shapes[2]) * math.prod(spec.input_shapes[1][:2])


def _depthwise_filter_gradient(spec: OpSpec) -> int:
    return 2 * math.prod(spec.input_shapes[2]) * math.prod(spec.output_shapes[0][:2])


def _matmul(spec: OpSpec) -> int:
    left, transposed = spec.input_shapes[0], bool(spec.attributes.get("transpose_a") or spec.attributes.get("adj_x"))
    return 2 * math.prod(spec.output_shapes[0]) * left[-2 if transposed else -1]


def _einsum(spec: OpSpec) -> int:
    """Every distinct label of the equation is one loop; labels under ``...`` are taken from the output."""
    equation = str(spec.attributes["equation"])
    terms = equation.split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, spec.input_shapes, strict=False):
        if "..." in term:
            return 2 * math.prod(spec.output_shapes[0]) * max(shape[-1], 1)
        sizes.update(zip(term, shape, strict=False))
    return 2 * math.prod(sizes.values())


_FLOPS: dict[str, Callable[[OpSpec], int]] = {
    "Conv2D": _conv_forward,
    "Conv3D": _conv_forward,
    "Conv2DBackpropInput": _conv_input_gradient,
    "Conv3DBackpropInputV2": _conv_input_gradient,
    "Conv2DBackpropFilter": _conv_filter_gradient,
    "Conv3DBackpropFilterV2": _conv_filter_gradient,
    "DepthwiseConv2dNative": _depthwise_forward,
    "DepthwiseConv2dNativeBackpropInput": _depthwise_input_gradient,
    "DepthwiseConv2dNativeBackpropFilter": _depthwise_filter_gradient,
    "MatMul": _matmul,
    "BatchMatMul": _matmul,
    "BatchMatMulV2": _matmul,
    "BatchMatMulV3": _matmul,
    "Einsum": _einsum,
}
MATRIX_OPS = frozenset(_FLOPS)
"""Convolutions and matrix products: the ops that a roofline places under the arithmetic roof."""
