"""Checkmate's own cost model (Jain et al., MLSys 2020, arXiv:1910.02653) as a ``Graph`` of ours.

Read from ``dfgraph_from_keras`` and ``op_hook`` of its repository, in the form behind the paper's figures:

* A node for each layer but the input, one for the loss, and one, *Grad<j>*, for the gradient of each layer's output.
* Grad<j> reads the Grad of each layer i that reads j, the output of i, and the output of j. It does not read the other
  inputs of i, nor weights. Grad of the last layer reads the loss and its layer's output.
* A node's output takes its elements × 4 bytes × batch; Grad<j> as much as the output of j; the loss 4 bytes an example.
  The input batch and weight gradients take nothing: fixed memory is twice the parameters, those not trained included.
* A layer costs its multiplications (``forward_cost``), and its Grad twice that. The loss costs nothing.
* No buffer is taken over, no kernel needs scratch, and a replay reads its inputs where they lie.

Three things differ here. A Grad stands as soon as the *first* reader of its layer can be run backward, the unit that it
belongs to: so every segment's backward pass is one piece. On chains that is Checkmate's order; where branches meet,
Grads of different layers change places. What such a Grad reads of a later reader's output would make one segment's
backward pass read what another has made, which captured steps never do and our planners do not know: a *Hold*, which
costs nothing and takes the output's place when its own unit has run backward, hands it on. And our simulator counts a
copy of what enters a replay, as TensorFlow makes it; ``checkmate_judge`` judges a plan's order of execution as
Checkmate would, without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tf_memsaver.ir.graph import Graph, MemoryKind, Op, Phase, Unit, Value
from tf_memsaver.ir.topology import find_cuts

ELEMENT_BYTES = 4
HOLD = "Hold"
"""The type of the ops that hand an output on to the Grad of an earlier unit."""

FIXED_COPIES = 2
"""Fixed memory as a multiple of the parameters': themselves and their gradients."""

FREE = frozenset(
    """
    AveragePooling2D Concatenate Cropping2D Dropout Flatten GlobalAveragePooling2D MaxPooling2D Reshape ZeroPadding2D
    """.split()
)
"""Kinds of layers that cost nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A layer: the indices of the layers that it reads (none for the input), bytes and cost for one example."""

    name: str
    kind: str
    inputs: tuple[int, ...]
    nbytes: int
    cost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The layers of a model in its order, and the bytes of its parameters."""

    name: str
    nodes: tuple[Node, ...]
    parameter_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """What the budget holds beside activations and gradients, whatever the batch."""
        return FIXED_COPIES * self.parameter_bytes

    @property
    def forward_cost(self) -> int:
        """Cost of one forward pass of one example."""
        return sum(node.cost for node in self.nodes)

    @property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each layer, the layers that read it, in order."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for index, node in enumerate(self.nodes):
            for source in dict.fromkeys(node.inputs):
                found[source].append(index)
        return tuple(map(tuple, found))


def network_of(model: Any) -> Network:
    """Return the layers of a Functional or Sequential Keras model.

    Raises:
      ValueError: a layer is of a kind that Checkmate has no cost for, or is called more than once.
    """
    layers = [layer for layer in model.layers if type(layer).__name__ != "InputLayer"]
    place = {layer.name: index for index, layer in enumerate(layers)}
    nodes = []
    for layer in layers:
        if len(layer._inbound_nodes) != 1:
            raise ValueError(f"layer '{layer.name}' is called more than once; Checkmate has one node a layer")
        sources = layer.input if isinstance(layer.input, list) else [layer.input]
        names = [tensor._keras_history.operation.name for tensor in sources]
        nodes.append(
            Node(
                name=layer.name,
                kind=type(layer).__name__,
                inputs=tuple(place[name] for name in names if name in place),
                nbytes=ELEMENT_BYTES * _elements(layer.output),
                cost=forward_cost(layer, [_elements(source) for source in sources], _elements(layer.output)),
            )
        )
    return Network(name=model.name, nodes=tuple(nodes), parameter_bytes=ELEMENT_BYTES * model.count_params())


def forward_cost(layer: Any, inputs: Sequence[int], outputs: int) -> int:
    """Return Checkmate's cost of a layer for one example that reads and makes so many elements.

    Multiplications of convolutions and products; 4 an element for BatchNorm; one for activations and for what an Add
    reads; none for pooling and for what only moves elements. A transposed convolution costs its input channels an
    element, without its kernel: so it stands in Checkmate's ``conv_transpose_hook``, and so it is taken.

    Raises:
      ValueError: there is no cost for layers of this kind.
    """
    kind = type(layer).__name__
    if kind == "Conv2D":
        height, width, channels, _ = layer.kernel.shape
        return height * width * channels * outputs
    if kind == "DepthwiseConv2D":
        return math.prod(layer.kernel.shape[:2]) * outputs
    if kind == "Conv2DTranspose":
        return layer.kernel.shape[3] * outputs
    if kind == "Dense":
        return layer.kernel.shape[0] * outputs
    if kind == "UpSampling2D" and layer.interpolation == "nearest":
        return outputs
    per_input = {"BatchNormalization": 4, "Activation": 1, "ReLU": 1, "Add": 1}
    if kind in per_input:
        return per_input[kind] * sum(inputs)
    if kind in FREE:
        return 0
    raise ValueError(f"Checkmate has no cost for layer '{layer.name}' of type {kind}")


def _elements(tensor: Any) -> int:
    return math.prod(tensor.shape[1:])


# The graph ------------------------------------------------------------------------------------------------------------


def step_graph(network: Network, batch_size: int) -> Graph:
    """Return a training step under the cost model. Value j is the output of layer j, and a cost unit is a second."""
    nodes, count = network.nodes, len(network.nodes)
    readers = network.readers
    values: list[Value] = []
    ops: list[Op] = []

    def value(name: str, nbytes: int, kind: MemoryKind = MemoryKind.GRADIENT) -> int:
        values.append(Value(index=len(values), name=name, nbytes=nbytes, kind=kind))
        return len(values) - 1

    def op(
        kind: str, phase: Phase, unit: int | None, inputs: Sequence[int], output: int, cost: int, **more: Any
    ) -> None:
        name, seconds = values[output].name, float(cost * batch_size)
        common = {"name": name, "type": kind, "phase": phase, "unit": unit, "seconds": seconds, **more}
        ops.append(Op(index=len(ops), inputs=tuple(dict.fromkeys(inputs)), outputs=(output,), **common))

    for node in nodes:
        value(node.name, node.nbytes * batch_size, MemoryKind.ACTIVATION)
    loss = value("loss", ELEMENT_BYTES * batch_size, MemoryKind.ACTIVATION)
    fixed = value("parameters and their gradients", network.fixed_bytes, MemoryKind.PARAMETER)
    for j, node in enumerate(nodes):
        op(node.kind, Phase.FORWARD, j, node.inputs or (fixed,), j, node.cost)
    op("Loss", Phase.FORWARD, None, [j for j in range(count) if not readers[j]], loss, 0)
    grads: dict[int, int] = {}
    held: dict[int, int] = {}
    handed_on = {i for reading in readers for i in reading[1:]}
    for unit in range(count, -1, -1):
        for j in reversed([j for j in range(count) if min(readers[j], default=count) == unit]):
            read = [v for i in readers[j] for v in (grads[i], held.get(i, i))]
            grads[j] = value(f"Grad<{nodes[j].name}>", nodes[j].nbytes * batch_size)
            owner = unit if readers[j] else None
            op("Grad", Phase.BACKWARD, owner, [*(read or [loss]), j], grads[j], 2 * nodes[j].cost)
        if unit in handed_on:
            held[unit] = value(f"Hold<{nodes[unit].name}>", nodes[unit].nbytes * batch_size)
            op(HOLD, Phase.BACKWARD, unit, [unit], held[unit], 0, overwrites=(unit,))
    units = tuple(
        Unit(index=j, label=node.name, kind=node.kind, signature=f"{node.kind}({node.nbytes})")
        for j, node in enumerate(nodes)
    )
    return Graph(
        name=network.name,
        batch_size=batch_size,
        values=tuple(values),
        ops=tuple(ops),
        units=units,
        cuts=find_cuts(ops, values, range(len(values)), units),
        outputs=(),
        device="IDEAL",
    )
