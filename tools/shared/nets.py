"""Small training steps that need no TensorFlow: a builder that writes forward and backward as capture would."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tf_memsaver.ir.graph import Graph, MemoryKind, Op, Phase, Unit, Value
from tf_memsaver.ir.topology import find_cuts

Backward = Callable[[int], None]
"""Emits the backward ops of a unit, given the gradient of its output."""


class Net:
    """Builds a Graph unit by unit; every method returns the index of the unit's output value.

    Bytes are whatever the test says, times ``scale``; a forward op takes one second for each byte that it writes,
    before scaling, and backward ops two.
    """

    def __init__(self, scale: int = 1) -> None:
        self.scale = scale
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.units: list[Unit] = []
        self._backward: list[tuple[int, Backward | None]] = []
        self._gradients: dict[int, list[int]] = {}
        self._needs_gradient: set[int] = set()
        self._weight_gradients: list[int] = []

    # -- the parts of every unit ----------------------------------------------------------------------------------

    def value(self, nbytes: int, kind: MemoryKind, alias_of: int | None = None) -> int:
        """Add a value; one that is a view of another has no bytes."""
        index = len(self.values)
        nbytes = 0 if alias_of is not None else nbytes * self.scale
        self.values.append(Value(index=index, name=f"v{index}", nbytes=nbytes, kind=kind, alias_of=alias_of))
        return index

    def bytes_of(self, value: int) -> int:
        """Return what a value takes before scaling; a view as much as what it shows."""
        alias = self.values[value].alias_of
        return self.values[value].nbytes // self.scale if alias is None else self.bytes_of(alias)

    def op(
        self,
        op_type: str,
        inputs: Sequence[int],
        nbytes: int,
        *,
        overwrites: Sequence[int] = (),
        workspace: int = 0,
        kind: MemoryKind | None = None,
        view: bool = False,
        outside: bool = False,
        unit: int | None = None,
    ) -> int:
        """Add an operation of the newest unit, or in the backward pass of the one that it goes back through."""
        backward = self._in_backward
        kind = kind or (MemoryKind.GRADIENT if backward else MemoryKind.ACTIVATION)
        output = self.value(nbytes, kind, inputs[0] if view else None)
        self.ops.append(
            Op(
                index=len(self.ops),
                name=f"op{len(self.ops)}",
                type=op_type,
                phase=Phase.BACKWARD if backward else Phase.FORWARD,
                unit=None if outside else (self._unit if backward else len(self.units) - 1),
                inputs=tuple(dict.fromkeys(inputs)),
                outputs=(output,),
                seconds=0.0 if view else float(nbytes * (2 if backward else 1)),
                workspace_bytes=workspace * self.scale,
                overwrites=tuple(v for v in overwrites if self.bytes_of(v) == nbytes and nbytes),
            )
        )
        return output

    _in_backward = False
    _unit = 0

    def _begin(self, kind: str, pinned: str = "") -> None:
        index = len(self.units)
        self.units.append(
            Unit(index=index, label=f"{kind}_{index}", kind=kind, signature=f"{kind}({index})", pinned=pinned)
        )

    def _end(self, output: int, inputs: Sequence[int], backward: Backward, trained: bool = False) -> int:
        needs = trained or any(value in self._needs_gradient for value in inputs)
        if needs:
            self._needs_gradient.add(output)
        self._backward.append((output, backward if needs else None))
        return output

    def _give(self, value: int, gradient: int) -> None:
        self._gradients.setdefault(value, []).append(gradient)

    def _wants(self, value: int) -> bool:
        return value in self._needs_gradient

    def _weight_gradient(self, inputs: Sequence[int], nbytes: int, workspace: int = 0) -> None:
        kind = MemoryKind.WEIGHT_GRADIENT
        self._weight_gradients.append(self.op("WeightGrad", inputs, nbytes, kind=kind, workspace=workspace))

    # -- units ----------------------------------------------------------------------------------------------------

    def input(self, nbytes: int) -> int:
        """Add an input of the step."""
        return self.value(nbytes, MemoryKind.INPUT)

    def dense(
        self, x: int, nbytes: int, weight: int = 1, *, trained: bool = True, workspace: int = 0, pinned: str = ""
    ) -> int:
        """A product with a weight: backward reads the input."""
        w = self.value(weight, MemoryKind.PARAMETER)
        self._begin("dense", pinned)
        y = self.op("MatMul", [x, w], nbytes, workspace=workspace)

        def backward(dy: int) -> None:
            if trained:
                self._weight_gradient([x, dy], weight, workspace)
            if self._wants(x):
                self._give(x, self.op("MatMulGrad", [dy, w], self.bytes_of(x)))

        return self._end(y, [x], backward, trained)

    def relu(self, x: int) -> int:
        """Takes over its input's buffer; backward reads the output, and may take that over too."""
        self._begin("relu")
        y = self.op("Relu", [x], self.bytes_of(x), overwrites=[x])

        def backward(dy: int) -> None:
            self._give(x, self.op("ReluGrad", [dy, y], self.bytes_of(x), overwrites=[dy, y]))

        return self._end(y, [x], backward)

    def norm(self, x: int) -> int:
        """Two ops, of which the first one's result is read in backward; backward has two temporaries."""
        w = self.value(1, MemoryKind.PARAMETER)
        self._begin("norm")
        size = self.bytes_of(x)
        centred = self.op("Sub", [x], size)
        y = self.op("Mul", [centred, w], size)

        def backward(dy: int) -> None:
            product = self.op("Mul", [dy, centred], size)
            self._weight_gradient([product], 1)
            if self._wants(x):
                tile = self.op("Tile", [dy], size)
                self._give(x, self.op("Mul", [tile, x], size, overwrites=[tile]))

        return self._end(y, [x], backward, True)

    def scratch(self, x: int, nbytes: int, temporary: int) -> int:
        """Forward makes a temporary that nothing keeps; backward reads the output."""
        self._begin("scratch")
        y = self.op("Reduce", [self.op("Expand", [x], temporary)], nbytes)
        return self._end(y, [x], lambda dy: self._give(x, self.op("ScratchGrad", [dy, y], self.bytes_of(x))))

    def dropout(self, x: int) -> int:
        """A mask of its own, which backward reads."""
        self._begin("dropout")
        size = self.bytes_of(x)
        mask = self.op("Random", [], size)
        y = self.op("Mul", [x, mask], size, overwrites=[x, mask])
        return self._end(y, [x], lambda dy: self._give(x, self.op("Mul", [dy, mask], size, overwrites=[dy, mask])))

    def reshape(self, x: int) -> int:
        """A view, and a view of the gradient."""
        self._begin("reshape")
        y = self.op("Reshape", [x], 0, view=True)
        return self._end(y, [x], lambda dy: self._give(x, self.op("Reshape", [dy], 0, view=True)))

    def add(self, left: int, right: int) -> int:
        """A sum of two values of one size; backward hands its gradient on as it is."""
        self._begin("add")
        y = self.op("AddV2", [left, right], self.bytes_of(left), overwrites=[left, right])

        def backward(dy: int) -> None:
            for value in (left, right):
                if self._wants(value):
                    self._give(value, dy)

        return self._end(y, [left, right], backward)

    def concat(self, left: int, right: int) -> int:
        """Both values side by side; backward cuts the gradient in two."""
        self._begin("concat")
        y = self.op("ConcatV2", [left, right], self.bytes_of(left) + self.bytes_of(right))

        def backward(dy: int) -> None:
            for value in (left, right):
                if self._wants(value):
                    self._give(value, self.op("Slice", [dy], self.bytes_of(value)))

        return self._end(y, [left, right], backward)

    # -- the step -------------------------------------------------------------------------------------------------

    def graph(self, *outputs: int, loss_reads: bool = False) -> Graph:
        """Add a loss over ``outputs`` and the backward pass, and return the graph."""
        loss = self.op("Loss", outputs, 1, outside=True)
        self._in_backward = True
        for output in dict.fromkeys(outputs):
            if self._wants(output):
                reads = [loss, output] if loss_reads else [loss]
                self._give(output, self.op("LossGrad", reads, self.bytes_of(output), outside=True))
        for unit in reversed(range(len(self.units))):
            self._unit = unit
            output, backward = self._backward[unit]
            gradients = self._gradients.get(output)
            if backward is not None and gradients:
                size = self.bytes_of(output)
                whole = gradients[0]
                if len(gradients) > 1:
                    whole = self.op("AddN", gradients, size, overwrites=gradients)
                backward(whole)
        roots: list[int] = []
        for value in self.values:
            roots.append(value.index if value.alias_of is None else roots[value.alias_of])
        return Graph(
            device="IDEAL",
            name="net",
            batch_size=2,
            values=tuple(self.values),
            ops=tuple(self.ops),
            units=tuple(self.units),
            cuts=find_cuts(self.ops, self.values, roots, self.units),
            outputs=(loss, *self._weight_gradients),
        )


def chain(sizes: Sequence[int], scale: int = 1) -> Graph:
    """A chain of dense layers with the given output bytes, over an input of 4."""
    net = Net(scale)
    x = net.input(4)
    for size in sizes:
        x = net.dense(x, size)
    return net.graph(x)
