"""The memory of a training step, layer by layer: the simulated peak, and the usual rule of thumb beside it.

The rule of thumb counts activations twice (each has a gradient of its size) and weights three times (weight, gradient,
one momentum), all at 4 bytes, plus the input batch. Here, the element sizes and the number of optimizer slots come from
the captured step. The rule is still wrong in both directions: the backward pass does not need every output, it needs
some values inside layers, and gradients are not all live at once. The simulation counts all of this, so both are shown.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from tf_memsaver.cost.device import processor
from tf_memsaver.ir.graph import Graph, MemoryKind, Op, Phase
from tf_memsaver.ir.segments import stored
from tf_memsaver.judge.simulate import Simulator
from tf_memsaver.summary import Rows, Summarized
from tf_memsaver.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitEstimate:
    """One layer call of an ``Estimate``. A weight or buffer counts for the first call that uses it, so sums are right.

    ``output_bytes`` are the outputs that later calls or the loss read. ``kept_bytes`` are the values that the layer
    makes and the backward pass reads: they stay in memory after the forward pass of the plain step. ``parameter_bytes``
    are the weights and other state. ``flops`` are the floating-point operations of one forward run.
    """

    label: str
    kind: str
    output_bytes: int
    kept_bytes: int
    parameter_bytes: int
    flops: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Estimate(Summarized):
    """The result of ``estimate``: where the bytes of one plain training step go. All figures are predicted.

    ``device`` is the device that the figures are for: ``"CPU"`` or ``"GPU"``.

    ``peak_bytes`` is the simulated peak of the whole step in TensorFlow's own executor, as the allocator would report
    it. ``peak_at`` is the operation and the layer at which the most bytes are live. ``compiled_peak_bytes`` is the
    peak that XLA's compiler reports, if ``fit`` compiles the model with XLA, otherwise None.

    ``activation_bytes`` are all values that the forward pass leaves for the backward pass, including those outside
    layers (the loss). ``parameter_bytes`` are the weights and other state, ``trained_bytes`` those weights that the
    optimizer updates, ``gradient_bytes`` their gradients, which are smaller for an embedding, ``optimizer_bytes`` the
    optimizer's slots, and ``input_bytes`` the batch. ``data_bytes`` is what else the training data holds, on a CPU
    only: there it is in the same memory. ``optimizer_slots`` is the optimizer's memory as a multiple of the
    trained weights' (2.0 for Adam). Up to ``uncounted_bytes`` of all these are not in the peak: a CPU's allocator does
    not count tensors below 256 KiB. ``step_seconds`` is the predicted time.

    ``units`` has one entry for each layer; ``pandas.DataFrame(estimate.units)`` is a table of them.
    """

    model: str
    device: str
    batch_size: int
    units: tuple[UnitEstimate, ...]
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    input_bytes: int
    activation_bytes: int
    peak_bytes: int
    peak_at: str
    step_seconds: float
    compiled_peak_bytes: int | None = None
    uncounted_bytes: int = 0
    trained_bytes: int = 0
    data_bytes: int = 0

    @classmethod
    def from_graph(cls, graph: Graph) -> Estimate:
        """Return the estimate of a captured training step."""
        simulator = Simulator(graph)
        plain = stored(len(graph.units))
        timeline = simulator.run(plain)
        highest = max(timeline.instants, key=lambda instant: instant.live_bytes, default=None)
        kept = _kept_for_backward(graph)
        return cls(
            model=graph.name,
            device=processor(graph.device),
            batch_size=graph.batch_size,
            units=_units(graph, kept),
            parameter_bytes=graph.bytes_of(MemoryKind.PARAMETER),
            gradient_bytes=_buffer_bytes(graph, MemoryKind.WEIGHT_GRADIENT),
            optimizer_bytes=graph.bytes_of(MemoryKind.OPTIMIZER),
            input_bytes=graph.bytes_of(MemoryKind.INPUT),
            activation_bytes=sum(graph.values[buffer].nbytes for buffer in kept),
            peak_bytes=simulator.reported_peak(plain),
            peak_at="" if highest is None else _place(graph, graph.ops[highest.op]),
            step_seconds=graph.step_seconds,
            uncounted_bytes=simulator.uncounted_bytes,
            trained_bytes=_trained_bytes(graph),
            data_bytes=graph.bytes_of(MemoryKind.DATA),
        )

    @property
    def output_bytes(self) -> int:
        """The bytes of all layers' outputs, which the rule of thumb counts as activations."""
        return sum(unit.output_bytes for unit in self.units)

    @property
    def optimizer_slots(self) -> float:
        """The optimizer's memory as a multiple of the trained weights'."""
        return self.optimizer_bytes / self.trained_bytes if self.trained_bytes else 0.0

    @property
    def rule_of_thumb_bytes(self) -> int:
        """The rule of thumb: all outputs times two, weights, their gradients, optimizer slots, and the input batch."""
        weights = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return 2 * self.output_bytes + weights + self.input_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as plain JSON data."""
        data = dataclasses.asdict(self)
        data["output_bytes"] = self.output_bytes
        data["optimizer_slots"] = self.optimizer_slots
        data["rule_of_thumb_bytes"] = self.rule_of_thumb_bytes
        return data

    def summary(self) -> tuple[str, Rows]:
        """Return what ``repr`` shows."""
        largest = sorted(self.units, key=lambda unit: -unit.kept_bytes)[:3]
        rows = (
            *_compiled_rows(self.compiled_peak_bytes),
            ("peak", f"{format_bytes(self.peak_bytes)}, predicted; most at {self.peak_at or 'no operation'}"),
            ("activations", f"{format_bytes(self.activation_bytes)}, kept for the backward pass"),
            ("weights", f"{format_bytes(self.parameter_bytes)}, other state included"),
            ("gradients", f"{format_bytes(self.gradient_bytes)} of the weights"),
            ("optimizer", f"{format_bytes(self.optimizer_bytes)} ({self.optimizer_slots:.1f} × trained weights)"),
            ("batch", format_bytes(self.input_bytes)),
            *_data_rows(self.data_bytes),
            *_uncounted_rows(self.uncounted_bytes),
            ("rule of thumb", format_bytes(self.rule_of_thumb_bytes)),
            ("layers", f"{len(self.units)}; pandas.DataFrame(estimate.units) lists them"),
            ("most kept by", ", ".join(f"{unit.label} ({format_bytes(unit.kept_bytes)})" for unit in largest)),
        )
        return f"Estimate of '{self.model}' on {self.device}, batch size {self.batch_size}", rows

    def __str__(self) -> str:
        predicted = (
            f"{self.model} at batch size {self.batch_size}: predicted peak {format_bytes(self.peak_bytes)}, of which "
            f"{format_bytes(self.activation_bytes)} activations kept for the backward pass"
        )
        compiled = self.compiled_peak_bytes
        return predicted if compiled is None else f"{predicted}; peak {format_bytes(compiled)} {_AS_COMPILED}"


_AS_COMPILED = "as XLA compiles the step for fit"


def _compiled_rows(compiled_peak_bytes: int | None) -> Rows:
    if compiled_peak_bytes is None:
        return ()
    return (("peak by XLA", f"{format_bytes(compiled_peak_bytes)}, {_AS_COMPILED}; the rest is without XLA"),)


def _data_rows(data_bytes: int) -> Rows:
    return (("data", f"{format_bytes(data_bytes)} in memory beside the batch, on a CPU"),) if data_bytes else ()


def _uncounted_rows(uncounted_bytes: int) -> Rows:
    if not uncounted_bytes:
        return ()
    return (("not counted", f"{format_bytes(uncounted_bytes)} at most in tensors below 256 KiB, on a CPU"),)


def units_of(graph: Graph) -> tuple[UnitEstimate, ...]:
    """Return the units of an ``Estimate`` alone: no step is simulated for them."""
    return _units(graph, _kept_for_backward(graph))


def _kept_for_backward(graph: Graph) -> dict[int, None]:
    """Return the buffers that the forward pass makes and a later phase reads, in the order of those reads."""
    kept: dict[int, None] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD:
            continue
        for value in op.inputs:
            root = graph.roots[value]
            producer = graph.producers[root]
            if producer is not None and graph.ops[producer].phase is Phase.FORWARD:
                kept[root] = None
    return kept


def _units(graph: Graph, kept: dict[int, None]) -> tuple[UnitEstimate, ...]:
    """Attribute outputs, kept buffers, weights and work of the forward pass to the units."""
    count = len(graph.units)
    kept_bytes, parameter_bytes, flops = [0] * count, [0] * count, [0] * count
    outputs: list[dict[int, None]] = [{} for _ in range(count)]
    maker: list[int | None] = [None] * len(graph.values)
    seen: set[int] = set()
    for op in graph.ops:
        if op.phase is not Phase.FORWARD:
            continue
        for value in op.inputs:
            root = graph.roots[value]
            made_by = maker[value]
            if made_by is not None and made_by != op.unit:
                outputs[made_by][root] = None
            if op.unit is not None and graph.values[root].kind is MemoryKind.PARAMETER and root not in seen:
                seen.add(root)
                parameter_bytes[op.unit] += graph.values[root].nbytes
        for value in op.outputs:
            maker[value] = op.unit
        if op.unit is not None:
            flops[op.unit] += op.flops
    for buffer in kept:
        made_by = maker[buffer]
        if made_by is not None:
            kept_bytes[made_by] += graph.values[buffer].nbytes
    return tuple(
        UnitEstimate(
            label=unit.label,
            kind=unit.kind,
            output_bytes=sum(graph.values[buffer].nbytes for buffer in outputs[unit.index]),
            kept_bytes=kept_bytes[unit.index],
            parameter_bytes=parameter_bytes[unit.index],
            flops=flops[unit.index],
        )
        for unit in graph.units
    )


def _buffer_bytes(graph: Graph, kind: MemoryKind) -> int:
    """Return the bytes of the buffers of all values of a kind, views included."""
    buffers = {graph.roots[value.index] for value in graph.values if value.kind is kind}
    return sum(graph.values[buffer].nbytes for buffer in buffers)


def _trained_bytes(graph: Graph) -> int:
    """Return the bytes of the weights that the update reads or writes; of their gradients, if it was not traced."""
    read = {graph.roots[value] for op in graph.ops if op.phase is Phase.UPDATE for value in op.inputs}
    trained = sum(graph.values[root].nbytes for root in read if graph.values[root].kind is MemoryKind.PARAMETER)
    return trained or _buffer_bytes(graph, MemoryKind.WEIGHT_GRADIENT)


def _place(graph: Graph, op: Op) -> str:
    where = "outside all layers" if op.unit is None else graph.units[op.unit].label
    return f"{op.type}, {op.phase.value} of {where}"
