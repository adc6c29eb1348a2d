"""What TensorFlow goes by when it names, fuses and reorders operations: the one place for such facts.

TensorFlow's graph optimizer, Grappler, rewrites every graph before it runs. What it fuses and how it orders operands
depends on types of operations, on who else reads a value, and on names. All below was read in TensorFlow 2.21, in the
files that stand beside each entry (below ``tensorflow/``); most are in ``core/grappler``, short ``grappler``.

**Operands are sorted by name** (``grappler/utils/canonicalizer.cc: CanonicalizeNode``): those of every commutative
operation, ``Add``, ``AddN`` and ``Mul`` among them. So a name decides in which order terms are added, and with it the
last bits. Names compare character by character, scopes included: ``-`` comes before ``/``, that before digits, those
before letters.
"""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

from tf_memsaver.cost.rules import FILTER_GRADIENTS
from tf_memsaver.tfgraph.operations import constant_exponent

# Sums ---------------------------------------------------------------------------------------------------------------

ADDITIONS = frozenset({"Add", "AddV2"})
"""Additions of two terms (``grappler/op_types.cc: IsAdd``). Their gradient passes straight through."""

SUMS = ADDITIONS | {"AddN"}
"""What is joined to sums of many terms (``grappler/optimizers/arithmetic_optimizer.cc: AddOpsRewriteStage``).

The kernel (``core/kernels/aggregate_ops.cc: AddNOp``) begins with the first term whose buffer nobody else holds.
"""

# Activations --------------------------------------------------------------------------------------------------------

_FUSED_ACTIVATIONS = frozenset({"Elu", "LeakyRelu", "Relu", "Relu6", "Sigmoid", "Tanh"})
"""What is fused with a contraction and its bias (``remapper.cc: FindContractionWithBiasAndActivation``)."""

_ACTIVATIONS = _FUSED_ACTIVATIONS | {"Selu", "Softplus", "Softsign"}
"""Activations that are one operation, and so is their gradient."""

ACTIVATION_PARTS = _ACTIVATIONS | {"Erf", "Erfc", "Exp", "Log1p", "Mul", "Neg", "Pow", "RealDiv"}
"""What activations begin with: what these read is not a term of a sum by way of them."""

# Fusion -------------------------------------------------------------------------------------------------------------

BIAS = "BiasAdd"
"""The addition of a bias, which is made one with the product in front of it."""

_ADDED_OR_ACTIVATED = SUMS | _FUSED_ACTIVATIONS | {BIAS}

FUSED_WITH_READER = {
    **dict.fromkeys(ADDITIONS, SUMS),
    **dict.fromkeys((BIAS, "Conv2D", "DepthwiseConv2dNative", "MatMul"), _ADDED_OR_ACTIVATED),
}
"""By type, what an operation may be made one with if it is the only one to read it.

``grappler/optimizers/remapper.cc: FindContractionWithBias…``, and for sums ``AddOpsRewriteStage``.
"""

FUSED_WHATEVER_READS_IT = {"LeakyRelu": "Conv2D"}
"""By activation, the contraction that it is made one with though others read that, too, if nobody waits for it.

``remapper.cc: FindContractionWithActivation``; where others read it, it fails, and nothing is fused in the graph.
"""

_KERNELS = frozenset(
    """AvgPool BatchMatMulV2 BatchMatMulV3 Conv2D Conv3D DepthwiseConv2dNative MatMul MaxPool""".split()
)
"""Contractions and pools, but for ``Einsum``, whose gradient is made of several operations."""

FUSED_WITH_PADS_ALONE = _KERNELS | {"Einsum"}
"""Readers that are fused with nothing in front of them but a padding (``remapper.cc: FindPadWith…``)."""

PADS = frozenset({"Pad", "PadV2"})

FUSED_WITH_PAD = frozenset({"Conv2D", "Conv3D"})
"""What is made one with a padding in front of it if both have equal control inputs (``remapper.cc: FindPadWith…``)."""

SIZES_READ_BY_GRADIENT = frozenset({"Conv2D", "Conv3D"})
"""Convolutions whose gradient reads the sizes of their input by an operation, ``ShapeN`` (``python/ops/nn_grad.py``).

Once the sizes are known, that is a constant, which waits for what made the input: a control dependency.
"""

# Identities that stay ------------------------------------------------------------------------------------------------

KEPT_IDENTITY = "DebugGradientIdentity"
"""An identity that graph optimisation leaves in place, and that changes no symbol of a size that is not known.

``grappler/op_types.cc`` lists it neither in ``IsIdentity`` nor in ``IsStopGradient``, ``core/ops/array_ops.cc`` leaves
the shape as it is, and the kernel is that of ``Identity`` (``core/kernels/identity_op.cc``).
"""

RANKS_WITH_LAYOUTS = (4, 5)
"""On GPUs, convolutions get their images channel by channel, and so does all that follows, as far as it is known not to
care (``generic_layout_optimizer_transposer.cc: IsDefaultLayoutAgnosticOp``): ``KEPT_IDENTITY`` is not known, and a mean
over another layout is rounded otherwise."""

# Constants and broadcasts -------------------------------------------------------------------------------------------

CONSTANTS_MOVE_THROUGH = (frozenset({"Mul", "RealDiv"}), ADDITIONS | {"Sub"})
"""Through a chain of one of these a constant goes to another operand (``constant_folding.cc: ConstantPushDown``)."""

REORDERED_BY_SIZE = "Mul"
"""Of products of several factors the small ones come first (``arithmetic_optimizer.cc: MinimizeBroadcasts``)."""

ELEMENT_BY_ELEMENT = ADDITIONS | frozenset("Cast Erf Erfc Exp Log1p Mul Neg Pow RealDiv SelectV2 Tanh".split())
"""What activations and dropouts that are several operations are made of; what comes out has the shape of an input.

Without differences: they are what a replay is gated with, and its end."""

_NEUTRAL = {"Mul": (1, (0, 1)), "RealDiv": (1, (1,)), "AddV2": (0, (0, 1)), "Sub": (0, (1,))}
"""Operations that do nothing if one of these operands is this scalar: they are taken out.

``grappler/optimizers/constant_folding.cc: SimplifyArithmeticOperations``. So is a power of one, as in the gradient of a
square (``arithmetic_optimizer.cc: ConvertPowStage``).
"""


TRANSPOSITION = "Transpose"
"""What keeps the order of all dimensions but those of size 1 makes no copy (``core/kernels/transpose_op.cc``).

It is taken out as well, if its permutation is known (``constant_folding.cc: RemoveShuffleOrTranspose``). In a graph
with a free batch dimension, ``tf.tensordot`` makes one in front of each product, and so does each ``Dense`` layer on
tensors of three dimensions and more.
"""


def unchanged_operand(operation: Any) -> Any | None:
    """Return the operand that an operation passes on as it is, or None: the other one is neutral, or moves nothing."""
    if operation.type == TRANSPOSITION:
        return operation.inputs[0] if _keeps_order(*operation.inputs) else None
    if operation.type == "Pow":
        base, exponent = operation.inputs
        return base if exponent.shape.rank == 0 and constant_exponent(exponent) == 1 else None
    neutral, places = _NEUTRAL.get(operation.type, (0, ()))
    for place in places:
        source = operation.inputs[1 - place]
        if is_scalar(operation.inputs[place], neutral) and source.dtype == operation.outputs[0].dtype:
            return source
    return None


def _keeps_order(given: Any, permutation: Any) -> bool:
    """Whether a permutation is known to move dimensions of size 1 alone; a gradient has the inverse of one."""
    inverted = permutation.op.type == "InvertPermutation"
    known = tf.get_static_value(permutation.op.inputs[0] if inverted else permutation)
    if known is None or given.shape.rank is None:
        return False
    moved = [place for place in (known.argsort() if inverted else known) if given.shape[int(place)] != 1]
    return moved == sorted(moved)


def is_scalar(tensor: Any, number: int) -> bool:
    """Whether a tensor is a scalar constant of this value."""
    if tensor.op.type != "Const" or tensor.shape.rank != 0:
        return False
    value = tf.get_static_value(tensor)
    return value is not None and bool(value == number)


# What gradient functions read (python/ops: array_grad.py, math_grad.py, nn_grad.py) ---------------------------------

READS_OUTPUT = frozenset(
    """Cumprod Elu Exp Expm1 Inv LogSoftmax Max Min Prod Reciprocal Relu Relu6 Rsqrt Selu Sigmoid Softmax Sqrt
    Tanh""".split()
)
"""Operations whose gradient reads what they return."""

READS_OUTPUT_FOR = {"Pow": 1}
"""Operations whose gradient for the input at this place reads what they return."""

READS_INPUT = frozenset(
    """Abs Acos Acosh Asin Asinh Atan Atanh BesselI0e BesselI1e Cos Cosh Cumprod Digamma Erf Erfc Erfinv L2Loss
    LeakyRelu Lgamma Log Log1p Max Min Ndtri Pow Prod Sin Sinh Softplus Softsign Square Tan""".split()
)
"""Operations whose gradient reads what they are given."""

READS_OTHER_INPUTS = frozenset(
    """Atan2 BatchMatMul BatchMatMulV2 BatchMatMulV3 Conv2D Conv2DBackpropInput Conv3D Conv3DBackpropInputV2
    DepthwiseConv2dNative Div DivNoNan Einsum FusedBatchNormV3 MatMul Maximum Minimum Mul MulNoNan Pow RealDiv Select
    SelectV2 SquaredDifference""".split()
)
"""Operations whose gradient for one input reads the others."""

READS_SIZES_OF_INPUT = "Squeeze"
"""What stands between a product and its bias, which are made one if nothing else reads the product, and whose gradient
reads the sizes of what it is given, unless they are known (``remapper.cc: FindContractionWithSqueezeAndBiasAdd``).
"""

SQUARED_BY_GRADIENT = ("Pow", 3)
"""The operation, and its exponent, whose gradient makes the square of what it reads: 3·x², by the same ``Pow``."""

KERNEL_GRADIENTS = _KERNELS | _ACTIVATIONS | {"FusedBatchNormV3", "IdentityN"}
"""Operations whose gradient is a kernel, or several side by side: nothing in it is reordered."""

PASSED_STRAIGHT = frozenset({BIAS, "Identity", "Reshape", KEPT_IDENTITY})
"""Operations that hand the gradient of their output to their first input as it is."""

OF_SIZES_OF_THEIR_OWN = frozenset({"BatchToSpaceND", "SpaceToBatchND"})
"""Operations whose result has another batch size than what they are given, and a symbol for it that nothing else has.

They are around a dilated convolution, so that its gradient has a symbol of its own (``core/ops/array_ops.cc``).
"""

MERGING_SHAPES = frozenset("AddN EluGrad LeakyReluGrad Relu6Grad ReluGrad SeluGrad SoftplusGrad SoftsignGrad".split())
"""Operations whose operands have one shape: each has the symbols of the others (``MergeBothInputsShapeFn``)."""

SHAPED_LIKE_FIRST = frozenset("InvGrad ReciprocalGrad RsqrtGrad SigmoidGrad SqrtGrad TanhGrad".split())
"""Operations of two operands whose result has the shape of the first, whatever the other has (``UnchangedShape``)."""

CROSSENTROPIES = frozenset({"SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"})
"""Operations that make the losses, and their gradient for the logits.

The batch of the losses has another symbol than that of the logits, which the gradient has. So what is made of both, as
where losses are weighted, has a symbol of its own (seen in the graphs of 23 losses, TensorFlow 2.21).
"""

# Control inputs: what may be told to wait -----------------------------------------------------------------------------

BIAS_GRADIENT, MERGED_WITH_BIAS_GRADIENT = "BiasAddGrad", "Conv2DBackpropFilter"
"""Two readers of one gradient that oneDNN makes one kernel, which rounds otherwise.

It does so only if both have the same control inputs (``core/common_runtime/mkl_layout_pass.cc: CheckForNodeMerge``,
after Grappler, which may take one away that data implies). The gradient is input 0 of the first, 2 of the second.
"""

HELD_IN_ORDER = frozenset(
    """AvgPool3DGrad AvgPoolGrad BatchMatMul BatchMatMulV2 BatchMatMulV3 BatchToSpaceND BiasAddGrad BroadcastTo Conv2D
    Conv3D Einsum EluGrad FusedBatchNormGradV3 LeakyReluGrad MatMul MaxPool3DGrad MaxPoolGrad Relu6Grad ReluGrad
    ResizeBicubicGrad ResizeBilinearGrad ResizeNearestNeighborGrad SeluGrad Slice SoftplusGrad SoftsignGrad
    SpaceToBatchND Sum Tile""".split()
).union(FILTER_GRADIENTS, FILTER_GRADIENTS.values())
"""Operations of backward passes that no pass fuses, reorders or joins with others by whether they wait for something.

Sums, products and other arithmetic are none of them: ``arithmetic_optimizer.cc`` leaves alone what waits or is waited
for. Neither are forward operations: the remapper fuses none that wait, and a ``Conv2D`` and a ``BiasAdd`` with equal
control inputs end the process (``mkl_layout_pass.cc: MergeConv2DWithBiasAdd`` counts the inputs, and these, too).
"""

TAKEN_OUT_IF_EQUAL = frozenset({"BroadcastTo", "Slice", "Sum", "Tile"})
"""Of these, operations whose result is what they are given (``constant_folding.cc: SimplifyReduction, SimplifySlice,
SimplifyTile``; ``MaterializeBroadcastGradientArgs`` tells which gradients of sums these are)."""

# Names --------------------------------------------------------------------------------------------------------------

TAPE_SCOPE, FUNCTION_SCOPE = "gradient_tape", "gradients"
"""Scopes of gradients: those that a tape takes (``python/eager/backprop.py``), and those of a function's graph."""

FIRST_RUN_GRADIENTS = {None: TAPE_SCOPE, False: f"0_{FUNCTION_SCOPE}", True: f"zz_{FUNCTION_SCOPE}"}
"""Scopes that sort, against the operations of a forward pass, as the plain step's backward pass.

By whether the forward pass is a function that sorts first, by name; None if both are in one graph.
"""

REPLAY_IN_FUNCTION = {False: "replayed", True: "forward"}
"""Scopes that sort, against ``gradients``, as a forward pass that is a function of its own.

By whether the forward pass sorts first.
"""

FIRST_RUN_MARK = "-unrecorded"
"""Ends the names of first runs: a hyphen sorts before all else in names, so that they sort as in the plain step."""


def tape_scope(recorded_in: str) -> str:
    """Return the scope of the gradient of an operation that a tape recorded in a scope (``backprop.py``)."""
    return f"{TAPE_SCOPE}/{recorded_in}".rstrip("/")


def function_scope(operation: str) -> str:
    """Return the scope of the gradient of an operation in a function (``python/ops/gradients_util.py``)."""
    return f"{FUNCTION_SCOPE}/{operation}_grad"


def gradient_name(operation: str) -> str:
    """Return a name that sorts as that of the gradient of an operation, whatever characters the operation's has."""
    return re.sub(r"[^\w./-]", "_", function_scope(operation), flags=re.ASCII)


def sum_name(in_function: bool) -> str:
    """Return how a gradient of several terms is called."""
    return f"{FUNCTION_SCOPE}/AddN" if in_function else "AddN"
