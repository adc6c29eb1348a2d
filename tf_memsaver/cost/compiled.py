"""A captured step as XLA compiles it, roughly: what the plans that its compiler is asked about are searched on.

Read from the buffer assignments of compiled steps (TensorFlow 2.21, CPU, XLA's order for memory) of a U-Net, VGG16,
MobileNetV2, BERT and ViT:

* a chain of elementwise operations is computed inside of what reads it (``xla/service/instruction_fusion.cc``), once
  for every reader: it takes memory only in front of a convolution, a product or a pooling, and a backward pass keeps
  what the chain begins with in its place. What is dear to compute, as an exponential, is not computed twice;
* an update takes no memory beside its variable;
* kernels have no scratch memory of TensorFlow's, and poolings hand nothing on to their gradients. XLA's own scratch
  memory on CPUs is that of two expanded operations: the gradient of a max-pooling (``select_and_scatter_expander.cc``:
  four 32-bit indices for every element that is read, and of every maximum), and the filter gradient of a depthwise
  convolution (``convolution_group_converter.cc``: of all pairs of channels, twice).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from tf_memsaver.cost.device import CPU, CPU_BFC, IDEAL
from tf_memsaver.cost.rules import ELEMENTWISE, FILTER_GRADIENTS, MULTI_VIEWS, POOLS, REDUCTIONS, VIEWS
from tf_memsaver.cost.workspace import RULES
from tf_memsaver.ir.graph import Graph, Op, Phase

_DEAR = frozenset(
    """Atan2 Cos Div Erf Erfc Exp Expm1 Log Log1p LogSoftmax Pow RealDiv Rsqrt Sigmoid Sin Softmax Softplus Sqrt Tan
    Tanh Xdivy Xlogy""".split()
)
"""Elementwise operations whose results are kept (``InstructionFusion::IsExpensive``)."""

_MOVES = frozenset("AddN BroadcastTo ClipByValue Pad Select SelectV2 Slice StridedSlice Tile Transpose".split())

_FUSED = (ELEMENTWISE | _MOVES | VIEWS | MULTI_VIEWS) - _DEAR
"""Operations that are computed inside of what reads them,"""

_FUSE_WITH = _FUSED | _DEAR | REDUCTIONS
"""and those that they are computed inside of."""

_COPYING = frozenset({*FILTER_GRADIENTS, *FILTER_GRADIENTS.values()})
"""Operations whose operands are copied into another layout first; the copy is computed with what it is a copy of."""

_NUMBER_BYTES = 4


def as_compiled(graph: Graph) -> Graph:
    """Return a step as XLA compiles it: the same units and operations, with what is live then, and no allocator."""
    fused = _Fused(graph)
    values = tuple(
        dataclasses.replace(value, nbytes=0) if value.index in fused.free else value for value in graph.values
    )
    ops = tuple(dataclasses.replace(fused.op(op), after=()) for op in graph.ops)
    return dataclasses.replace(graph, values=values, ops=ops, device=IDEAL.kind)


def most_scratch(graph: Graph) -> tuple[str, int]:
    """Return the name of the operation that XLA expands into most scratch memory, and its bytes; no plan changes them.

    The name is empty where there is none.
    """
    found = ((_expanded_bytes(graph, op), op.name) for op in graph.ops)
    nbytes, name = max(found, default=(0, ""), key=lambda each: each[0])
    return (name, nbytes) if nbytes else ("", 0)


class _Fused:
    """Which buffers of a step need none when it is compiled, and what is kept in their place."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._roots = graph, graph.roots
        self._readers: dict[int, dict[int, Op]] = {}
        for op in graph.ops:
            if op.type not in VIEWS:
                for value in op.inputs:
                    self._readers.setdefault(self._roots[value], {})[op.index] = op
        self._made_in: dict[int, Phase] = {}
        self._sources: dict[int, Mapping[int, None]] = {}
        """For each buffer that is computed inside of its readers, the buffers that it is computed of."""
        self.free: set[int] = set()
        """Those that are nowhere in memory while they wait for a reader."""
        outputs = {self._roots[value] for value in graph.outputs}
        for op in graph.ops:
            for value in op.outputs:
                if self._roots[value] == value and value not in outputs:
                    self._take(op, value)

    def _take(self, op: Op, made: int) -> None:
        self._made_in[made] = op.phase
        if op.phase is Phase.UPDATE or (op.type in POOLS.values() and made != op.outputs[0]):
            self.free.add(made)
        unfused = [each for each in self._readers.get(made, {}).values() if each.type not in _FUSE_WITH]
        if op.type not in _FUSED or self._is_kept(op, made, unfused):
            return
        self._sources[made] = dict.fromkeys(self._begins_with(op))
        if not any(each.phase is op.phase for each in unfused):
            self.free.add(made)

    def _is_kept(self, op: Op, made: int, unfused: Sequence[Op]) -> bool:
        """Whether a fused operation's result is kept for later readers, rather than computed again for each.

        It is if it has several operands of its size and more than one reader (``ComputeGloballyUnfusible``), or if
        another pass reads it as it stands.
        """
        if any(each.phase is not op.phase and each.type not in _COPYING for each in unfused):
            return True
        nbytes = self._graph.values[made].nbytes
        large = {root for root in map(self._roots.__getitem__, op.inputs) if self._graph.values[root].nbytes >= nbytes}
        return len(large) > 1 and (bool(unfused) or len(self._readers.get(made, ())) > 1)

    def _begins_with(self, op: Op) -> Iterator[int]:
        for value in op.inputs:
            root = self._roots[value]
            yield from self._sources.get(root, (root,))

    def op(self, op: Op) -> Op:
        """Return an operation that reads what is there in memory, with XLA's scratch memory."""
        inputs: dict[int, None] = {}
        scratch = _scratch_bytes(self._graph, op)
        for value in op.inputs:
            root = self._roots[value]
            if root in self._sources and (root in self.free or self._made_in[root] is not op.phase):
                inputs |= self._sources[root]
                if op.type not in _FUSE_WITH:
                    scratch += self._graph.values[root].nbytes
            else:
                inputs[value] = None
        return dataclasses.replace(
            op,
            inputs=tuple(inputs),
            workspace_bytes=scratch,
            overwrites=tuple(value for value in op.overwrites if value in inputs),
        )


def _scratch_bytes(graph: Graph, op: Op) -> int:
    """Return what an operation takes while it runs; that of a called function, as of a loop, stays as it was."""
    expanded = _expanded_bytes(graph, op)
    return expanded or (0 if op.type in RULES else op.workspace_bytes)


def _expanded_bytes(graph: Graph, op: Op) -> int:
    """Return the scratch memory of an operation that XLA expands into others, in front of those that read it."""
    if graph.device not in (CPU.kind, CPU_BFC.kind):
        return 0
    if op.type not in ("MaxPoolGrad", "DepthwiseConv2dNativeBackpropFilter"):
        return 0
    nbytes = [graph.values[graph.roots[value]].nbytes for value in op.inputs]
    if op.type == "MaxPoolGrad":
        image, pooled = nbytes[:2]
        return 4 * image + 5 * pooled
    # Of the filter's shape the FLOPs tell the rows times the columns; the rest are channels.
    made = graph.values[op.outputs[0]].nbytes
    window = op.flops * _NUMBER_BYTES // max(1, 2 * nbytes[-1])
    return 2 * made * made // max(1, _NUMBER_BYTES * window)
