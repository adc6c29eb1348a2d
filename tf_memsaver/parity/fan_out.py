"""Readers that keep TensorFlow's graph optimizer from fusing segments otherwise than the plain step.

The optimizer ("remapper") fuses a chain of ops, such as a matrix product, its bias and a GELU, where the values in
between have no other reader; the fused kernel rounds otherwise. In the plain step backward ops are such readers. A
first run has no backward pass, and a replay lacks the ops that nobody needs: in both, values would be fused that are
not fused in the plain step. A *witness* reads one element of such a value and so stands in for the missing reader.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tf_memsaver.cost.rules import METADATA_READERS
from tf_memsaver.parity.gates import Gates
from tf_memsaver.program.calls import ADDITIONS
from tf_memsaver.tfgraph.emission import ends_segment
from tf_memsaver.tfgraph.operations import SUMS, custom_gradient_bodies, has_custom_gradient, sums_of_many, viewed_input

_READS_OUTPUT = frozenset(
    """Cumprod Elu Exp Expm1 Inv LogSoftmax Max Min Prod Reciprocal Relu Relu6 Rsqrt Selu Sigmoid Softmax Sqrt
    Tanh""".split()
)
"""Ops whose gradient reads what they return."""

_READS_INPUT = frozenset(
    """Abs Acos Acosh Asin Asinh Atan Atanh BesselI0e BesselI1e Cos Cosh Cumprod Digamma Erf Erfc Erfinv L2Loss
    LeakyRelu Lgamma Log Log1p Max Min Ndtri Pow Prod Sin Sinh Softplus Softsign Square Tan""".split()
)
"""Ops whose gradient reads what they are given."""

_READS_OTHERS = frozenset(
    """Atan2 BatchMatMul BatchMatMulV2 BatchMatMulV3 Conv2D Conv2DBackpropInput Conv3D Conv3DBackpropInputV2
    DepthwiseConv2dNative Div DivNoNan Einsum FusedBatchNormV3 MatMul Maximum Minimum Mul MulNoNan Pow RealDiv Select
    SelectV2 SquaredDifference""".split()
)
"""Ops whose gradient for one input reads the others."""


_WAITED_FOR_BY_SIZES = frozenset({"Conv2D", "Conv3D"})
"""Ops whose gradient reads the sizes of their input by an op (``ShapeN``): a constant later, which waits for it."""

_SCOPE = "memsaver_witness"
"""Name scope of what is added here."""

_FUSED_WITH_PADS = frozenset("AvgPool BatchMatMulV2 Conv2D Conv3D DepthwiseConv2dNative Einsum MatMul MaxPool".split())
"""Readers that are fused with nothing in front of them but a padding."""


def first_run_witness(
    operations: Sequence[Any], sources: Iterable[Any], results: Sequence[Any], gradient_scope: str, gates: Gates
) -> tuple[tf.Tensor | None, tuple[tf.Tensor, ...]]:
    """Add a reader to every value that the plain step's backward ops read and that has one reader here.

    The square that the gradient of a cube computes is added, too: graph optimisation takes it for the forward pass as
    well, and folds constants by its name.

    Args:
      operations: what a first run added to its graph, in order.
      sources: the tensors that gradients are taken for.
      results: the tensors that gradients come from.
      gradient_scope: where names sort, relative to those of the operations, as in the plain step's backward pass.
      gates: what reads single elements.

    Returns:
      What was read, as one float32 vector, or None if nothing was. What is run must depend on it by data: where a
      control dependency is all, the graph optimizer takes the readers out. And those of the results whose values the
      plain step's backward ops read (``held_through_sums_behind``).
    """
    # Those of segments inside are for their gradients, which nobody takes here.
    operations = [operation for operation in operations if _SCOPE not in operation.name]
    readers = _readers_among(operations)

    of_passed: dict[int, list[Any]] = {}
    for operation in operations:
        if not _passes_on(operation):
            for tensor in operation.inputs:
                of_passed.setdefault(id(_before_passed_on(tensor)), []).append(operation)

    def may_be_fused(tensor: Any) -> bool:
        source = _before_passed_on(tensor)
        only = of_passed.get(id(source), [])
        return len(only) == 1 and (only[0].type not in _FUSED_WITH_PADS or source.op.type in ("Pad", "PadV2"))

    needed = list(_read_by_gradients(operations, sources, results))
    read = [tensor for tensor in needed if may_be_fused(tensor)]
    buffers = {id(_buffer(tensor)) for tensor in needed}
    held = _held_through_sums(operations, readers, buffers, gates)
    witness = _witness([*read, *_squares_of_cubes(operations, gradient_scope), *held], gates)
    return witness, tuple(tensor for tensor in results if id(_buffer(tensor)) in buffers)


def _held_through_sums(
    operations: Sequence[Any], readers: Mapping[int, Sequence[Any]], needed: Collection[int], gates: Gates
) -> Iterator[tf.Tensor]:
    """Read the terms of sums whose buffers (ids) the plain step needs longer, behind the sum: see ``sums_of_many``."""
    for last, terms in sums_of_many(operations, readers):
        held = [tensor for tensor in terms if id(_buffer(tensor)) in needed]
        if held:
            yield _read_behind(last, held, gates)


def _readers_among(operations: Iterable[Any]) -> dict[int, list[Any]]:
    """Return, by tensor (id), those of the operations that read it."""
    readers: dict[int, list[Any]] = {}
    for operation in operations:
        for tensor in operation.inputs:
            readers.setdefault(id(tensor), []).append(operation)
    return readers


def _read_behind(last: Any, terms: Sequence[Any], gates: Gates) -> tf.Tensor:
    with tf.name_scope(_SCOPE):
        # Behind it by data: an operation that another one waits for is not joined with others.
        return gates.first_elements(terms, behind=gates.gate([gates.first_elements([last.outputs[0]])]))


def held_through_sums_behind(tensors: Iterable[Any], gates: Gates) -> tuple[tf.Tensor, ...]:
    """Read what is a term of a sum behind its segment once more, behind the sum: see ``sums_of_many``.

    Args:
      tensors: results of a first run that the plain step needs longer.
      gates: what reads single elements.

    Returns:
      What was read, as ``first_run_witness``.
    """
    held: list[tf.Tensor] = []
    for tensor in tensors:
        # A backward pass in a graph of its own gets the terms as they stand.
        if tensor.graph is not tf.compat.v1.get_default_graph():
            continue
        sums = {id(last): last for last in _sums_of(tensor) if len(_terms_of(last)) > 2}
        held.extend(_read_behind(last, [tensor], gates) for last in sums.values())
    return tuple(held)


def keep_convolutions(operations: Sequence[Any], inputs: Iterable[Any], gates: Gates) -> tuple[tf.Tensor, ...]:
    """Read convolutions once more behind a LeakyRelu, where somebody waits for the LeakyRelu in the plain step.

    The remapper (``FindContractionWithActivation``, TensorFlow 2.21) joins a convolution with a LeakyRelu that nobody
    waits for, whatever else reads the convolution. It fails then, and nothing is fused in the whole graph. In the plain
    step the sizes for the gradient of a convolution behind the LeakyRelu wait for it, once graph optimisation knows
    them.

    Args:
      operations: those of a first run, with all that reads its results.
      inputs: what the segment reads; its sizes are read behind a gate.
      gates: what reads single elements.

    Returns:
      What was read, as ``first_run_witness``.
    """
    read = []
    for operation in (*operations, *(_before_passed_on(tensor).op for tensor in inputs)):
        if operation.type != "LeakyRelu" or not operation.outputs[0].shape.is_fully_defined():
            continue
        source = _before_passed_on(operation.inputs[0])
        convolved = _before_passed_on(source.op.inputs[0]) if source.op.type == "BiasAdd" else source
        if convolved.op.type != "Conv2D":
            continue
        if operation.graph is not tf.compat.v1.get_default_graph():
            continue
        if any(reader.type in _WAITED_FOR_BY_SIZES for reader in _readers_of(operation.outputs[0])):
            with tf.control_dependencies([operation]), tf.name_scope(_SCOPE):
                read.append(gates.first_elements([source]))
    return tuple(read)


def _sums_of(tensor: Any) -> Iterator[Any]:
    """Yield the last additions of the sums that a tensor is a term of."""
    for reader in _readers_of(tensor):
        if reader.type in SUMS:
            further = _readers_of(reader.outputs[0])
            inside = len(further) == 1 and further[0].type in SUMS
            yield from _sums_of(reader.outputs[0]) if inside else (reader,)


def _terms_of(addition: Any) -> list[Any]:
    terms = []
    for tensor in addition.inputs:
        source = _before_passed_on(tensor)
        inside = source.op.type in SUMS and len(_readers_of(source)) == 1
        terms.extend(_terms_of(source.op) if inside else [source])
    return terms


def _readers_of(tensor: Any) -> list[Any]:
    """Return what reads a tensor, be it passed on, but for its shape and what is added here."""
    found = []
    for reader in tensor.consumers():
        if reader.type in METADATA_READERS or _SCOPE in reader.name:
            continue
        if reader.type == "EnsureShape" or _passes_on(reader):
            for place, passed in enumerate(reader.inputs):
                if passed is tensor:
                    found.extend(_readers_of(reader.outputs[place]))
        else:
            found.append(reader)
    return found


def _passes_on(operation: Any) -> bool:
    """Whether graph optimisation takes an operation out, and what it reads goes to those who read the operation.

    The end of a segment inside names what enters the segment, too, but nobody reads that there.
    """
    return operation.type == "Identity" or ends_segment(operation)


def _before_passed_on(tensor: Any) -> Any:
    while _passes_on(tensor.op):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _buffer(tensor: Any) -> Any:
    """Return the tensor that first had the buffer of this one; segments inside pass on what they read and make."""
    while (source := viewed_input(tensor.op, tensor.value_index)) is not None:
        tensor = source
    return tensor


def _squares_of_cubes(operations: Sequence[Any], gradient_scope: str) -> Iterator[tf.Tensor]:
    for operation in operations:
        if operation.type == "Pow" and tf.get_static_value(operation.inputs[1]) == 3:
            with tf.name_scope(f"{gradient_scope}/{operation.name}_grad/"):
                yield tf.raw_ops.Pow(x=operation.inputs[0], y=tf.constant(2, operation.inputs[1].dtype), name="Pow")


def replay_witness(
    replayed: Sequence[Any],
    added: Sequence[Any],
    outputs: Sequence[Any],
    arrived: Collection[int],
    gradients: Iterable[Any],
    gates: Gates,
) -> tf.Tensor | None:
    """Add a reader to every replayed value that loses one: an op that is not needed, or one behind the segment.

    Args:
      replayed: what a replay added to its graph, in order.
      added: the same with the backward ops behind it.
      outputs: what the replay returned.
      arrived: the places of those that a gradient arrived for: others have no reader behind the segment.
      gradients: what the backward ops are there for.
      gates: what reads single elements.

    Returns:
      As ``first_run_witness``.
    """
    own, needed = {id(operation) for operation in added}, set()
    stack = [tensor.op for tensor in gradients]
    while stack:
        operation = stack.pop()
        if id(operation) in own and id(operation) not in needed:
            needed.add(id(operation))
            # Graph optimisation knows the sizes of the others.
            sizes = operation.type in METADATA_READERS
            stack.extend(tensor.op for tensor in operation.inputs if not (sizes and tensor.shape.is_fully_defined()))
    here = {id(operation) for operation in replayed}
    unneeded = [operation for operation in replayed if id(operation) not in needed]
    lost = [tensor for operation in unneeded for tensor in operation.inputs]
    left = [outputs[place] for place in arrived]
    lost += [tensor for tensor in left if sum(id(reader) in needed for reader in tensor.consumers()) == 1]
    read = [tensor for tensor in lost if id(tensor.op) in needed and id(tensor.op) in here]
    return _witness([*read, *_held_for_others(replayed, needed, outputs, gates)], gates)


class _Outside(NamedTuple):
    """Stands for what reads a tensor outside of the operations that are looked at."""

    type: str = ""


def _held_for_others(
    replayed: Sequence[Any], needed: Collection[int], outputs: Iterable[Any], gates: Gates
) -> Iterator[tf.Tensor]:
    """Read terms of sums behind the sum, where what reads them later in the plain step is not here (``sums_of_many``).

    That is what stands behind the segment, and operations (not those whose ids are ``needed``) that nobody needs here.
    """
    own = [operation for operation in replayed if _SCOPE not in operation.name]
    place = {id(operation): number for number, operation in enumerate(own)}
    readers = _readers_among(own)
    outputs = list(outputs)
    for tensor in outputs:
        readers.setdefault(id(tensor), []).append(_Outside())
    left = {id(_buffer(tensor)) for tensor in outputs}
    for last, terms in sums_of_many(own, readers):
        if id(last) not in needed:
            continue
        later = [reader for reader in own[place[id(last)] + 1 :] if id(reader) not in needed]
        left_here = left.union(id(_buffer(tensor)) for reader in later for tensor in reader.inputs)
        held = [tensor for tensor in terms if id(_buffer(tensor)) in left_here]
        if held:
            yield _read_behind(last, held, gates)


def _witness(tensors: Iterable[Any], gates: Gates) -> tf.Tensor | None:
    unique = {id(tensor): tensor for tensor in tensors if tensor.dtype.is_floating}
    if not unique:
        return None
    with tf.name_scope(_SCOPE):
        return gates.first_elements(list(unique.values()))


def _read_by_gradients(operations: Sequence[Any], sources: Iterable[Any], results: Iterable[Any]) -> Iterator[Any]:
    """Yield the values made by ``operations`` that their gradient functions read."""
    made = {id(tensor) for operation in operations for tensor in operation.outputs if operation.type != "Const"}
    reached = _reached_by_gradients(operations, results)
    own_gradient = _inside_custom_gradients(operations)
    differentiable = {id(tensor) for tensor in sources}
    for operation in operations:
        leading = [id(tensor) in differentiable for tensor in operation.inputs]
        if not any(leading) or operation.type == "StopGradient":
            continue
        differentiable.update(id(tensor) for tensor in operation.outputs if tensor.dtype.is_floating)
        if id(operation) in own_gradient or id(operation) not in reached:
            continue
        for place, tensor in enumerate(operation.inputs):
            others = any(leading[:place]) or any(leading[place + 1 :])
            if id(tensor) in made and (
                (operation.type in _READS_OTHERS and others)
                or (operation.type in _READS_INPUT and leading[place])
                or (operation.type in ADDITIONS and tensor.op.type == "BiasAdd" and not _are_known_equal(operation))
            ):
                yield tensor
        if operation.type in _READS_OUTPUT or (operation.type == "Pow" and leading[1]):
            yield from operation.outputs


def _are_known_equal(addition: Any) -> bool:
    """Whether the shapes of both terms are known and the same; the gradient reads them when the step runs, otherwise.

    So a product with its bias is not fused with the addition in the plain step. Additions of additions are made one.
    """
    left, right = (tensor.shape for tensor in addition.inputs)
    return bool(left.is_fully_defined()) and left.as_list() == right.as_list()


def _reached_by_gradients(operations: Sequence[Any], results: Iterable[Any]) -> set[int]:
    """Return the ids of the operations that a gradient of ``results`` arrives at."""
    wanted, reached = {id(tensor) for tensor in results}, set()
    for operation in reversed(operations):
        if operation.type != "StopGradient" and any(id(tensor) in wanted for tensor in operation.outputs):
            reached.add(id(operation))
            wanted.update(id(tensor) for tensor in operation.inputs)
    return reached


def _inside_custom_gradients(operations: Sequence[Any]) -> set[int]:
    """Return the ids of the operations in functions with a gradient of their own, which are not differentiated.

    Segments inside have one too, but not in the plain step.
    """
    reads = [[id(tensor) for tensor in operation.inputs] for operation in operations]
    makes = [[id(tensor) for tensor in operation.outputs] for operation in operations]
    ends = [place for place, each in enumerate(operations) if has_custom_gradient(each) and not ends_segment(each)]
    return {id(operations[place]) for body in custom_gradient_bodies(reads, makes, ends) for place in body}
