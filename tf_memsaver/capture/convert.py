"""From a traced step to an ir.Graph: values with sizes and views, ops with phases, units and costs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf
from absl import logging

from tf_memsaver.capture.cuts import joined_positions
from tf_memsaver.capture.data_shapes import DataShapes, uncounted
from tf_memsaver.capture.early_updates import updates_early
from tf_memsaver.capture.op_times import with_measured_seconds
from tf_memsaver.capture.optimised import EqualValues, JoinedSums
from tf_memsaver.capture.pinning import pinned_units
from tf_memsaver.capture.step import MODEL_SCOPE, StepSource, TracedStep
from tf_memsaver.compat.counting import counts_all
from tf_memsaver.compat.devices import has_gpu, warn_of_unseen_gpu
from tf_memsaver.compat.messages import first_line
from tf_memsaver.compat.released import gradients_end_with_graphs, release
from tf_memsaver.cost import rules
from tf_memsaver.cost.device import CPU, CPU_BFC, GPU, Device
from tf_memsaver.cost.workspace import places_bytes
from tf_memsaver.ir.graph import Graph, MemoryKind, Op, Phase, Unit, Value, roots_of
from tf_memsaver.ir.topology import find_cuts
from tf_memsaver.parity.buffers import viewed_input
from tf_memsaver.parity.control import filter_gradients_first
from tf_memsaver.parity.grappler import READS_OUTPUT
from tf_memsaver.parity.products import made_early
from tf_memsaver.program.calls import CallSequence
from tf_memsaver.program.unstacking import bytes_of_slices
from tf_memsaver.tfgraph.emission import sizes_worked_out
from tf_memsaver.tfgraph.operations import (
    Costs,
    costs_of,
    kernels_here,
    parts_of,
    spec_of,
    tensor_bytes,
    tensors_read,
    waiting_terms,
)

TINY_BYTES = 1024
"""Ops that read and write nothing larger are left out: scalars and shapes; together they stay far below a page each."""


def traced_graph(
    source: StepSource, batch_size: int, shapes: DataShapes | None = None, *, profile: bool = False
) -> Graph:
    """Trace the step of a source and return its Graph on the device at hand; see ``build_graph``.

    ``shapes`` knows those that the data alone tells.
    """
    shapes = shapes or DataShapes()
    warn_of_unseen_gpu()
    try:
        try:
            traced, step = _traced(source, shapes, sizes_worked_out())
        except ValueError as error:
            # A size that was worked out wrong is worse than one that is not known.
            shapes.found.clear()
            traced, step = _traced(source, shapes, contextlib.nullcontext())
            logging.warning(
                "'%s': sizes in its loops and branches are not known (%s), so what they keep for the backward pass may "
                "not be counted. Check with tf_memsaver.measure.",
                source.name,
                first_line(error),
            )
        try:
            device = current_device()
            graph = build_graph(source, step, batch_size, device, fixed_batch=shapes.fixed_batch, profile=profile)
            _warn_of_uncounted(source, step)
        finally:
            release(traced)
    finally:
        source.close()
        shapes.forget_data()
    return dataclasses.replace(graph, data_shapes=tuple(shapes.found))


def _traced(source: StepSource, shapes: DataShapes, sizes: AbstractContextManager[None]) -> tuple[Any, TracedStep]:
    """Return the graph of a step, and the step, with ``sizes`` worked out in it or not."""
    graph = shapes.graph("memsaver_step")
    try:
        with gradients_end_with_graphs(), sizes:
            return graph, source.trace(graph)
    except BaseException:
        release(graph)
        raise


def _warn_of_uncounted(source: StepSource, step: TracedStep) -> None:
    """Warn where the bytes of activations are not known."""
    unit = uncounted(step)
    if unit is not None:
        logging.warning(
            "'%s': sizes in '%s' are not known before the step runs, so what has them, and all that is computed from "
            "it, is not counted. Predictions and budgets are not reliable: check with tf_memsaver.measure. Give data= "
            "with real batches, or make the sizes known (texts: apply TextVectorization in the dataset, with ds.map).",
            source.name,
            source.sequence.labels[unit],
        )


def current_device() -> Device:
    """Return the cost model of the device that training uses here: a GPU when TensorFlow sees one."""
    if has_gpu():
        return GPU
    return CPU_BFC if counts_all() else CPU


def build_graph(
    source: StepSource,
    step: TracedStep,
    batch_size: int,
    device: Device,
    *,
    fixed_batch: bool = False,
    profile: bool = False,
) -> Graph:
    """Return the Graph of a traced step, with a candidate cut at every position where results stay bit-identical.

    ``fixed_batch`` tells that training traces the step for this batch size, and not for a free one. With ``profile``
    the seconds of operations are measured, one by one, else predicted by the roofline of ``device``.
    """
    builder = _Builder(source, step, device, fixed_batch=fixed_batch)
    units = builder.units(source.sequence)
    ops = builder.ops(profile)
    joined = joined_positions(step, backward_is_a_call=source.sequence.forward_first is not None)
    cuts = tuple(
        cut for cut in find_cuts(ops, builder.values, roots_of(builder.values), units) if cut.position not in joined
    )
    return Graph(
        name=source.name,
        batch_size=batch_size,
        values=tuple(builder.values),
        ops=ops,
        units=units,
        cuts=cuts,
        outputs=builder.output_values(),
        joined=tuple(sorted(joined)),
        device=device.kind,
        opened=source.sequence.opened,
        note=source.sequence.note,
    )


class _Builder:
    def __init__(self, source: StepSource, step: TracedStep, device: Device, *, fixed_batch: bool) -> None:
        self._joined_sums, self._equal = JoinedSums(step, fixed_batch=fixed_batch), EqualValues()
        self._step, self._device, self._kernels = step, device, kernels_here()
        self.values: list[Value] = []
        self._value_of: dict[int, int] = {}
        self._behind: dict[int, list[int]] = {}
        """What an operation that is left out has read: who reads its result depends on these values.

        It is a sum that another one is joined with, or tiny, as what makes a scale of a normalisation's variance.
        """
        self._places: dict[int, int] = {}
        """For what a pooling makes, the value that has the places of its maxima."""
        self._operations = step.graph.get_operations()
        self._weight_gradients = {id(t) for t in step.weight_gradients}
        owned, needed = zip(self._operations, step.owners, strict=True), step.reachable
        backward = [each for each, (phase, _) in owned if phase is Phase.BACKWARD and id(each) in needed]

        def name_of(operation: Any) -> str:
            return str(operation.name.replace(f"{MODEL_SCOPE}/", f"{source.name}/", 1))

        # Factors of other products are multiplied early by what is known of their sizes: these are so always.
        self._scaled = {
            id(product): product.inputs[place]
            for product, place, _ in made_early(backward, name_of)
            if product.inputs[place].op.type in READS_OUTPUT
        }
        """What graph optimisation multiplies early, by the product that reads it."""
        self._residents = source.residents()
        self._add_residents()

    # -- values ---------------------------------------------------------------------------------------------------

    def _add(self, name: str, nbytes: int, kind: MemoryKind, alias_of: int | None = None, parts: int = 1) -> int:
        index, size = len(self.values), self._device.rounded(nbytes)
        self.values.append(Value(index=index, name=name, nbytes=size, kind=kind, alias_of=alias_of, parts=parts))
        return index

    def _add_residents(self) -> None:
        handles: dict[int, int] = {}
        for path, variable, kind in self._residents:
            if id(variable.handle) not in handles:
                nbytes = variable.shape.num_elements() * variable.dtype.size
                handles[id(variable.handle)] = self._add(path, nbytes, kind)
        for external, internal in self._step.graph.captures:
            if id(external) in handles:
                self._value_of[id(internal)] = handles[id(external)]
            elif internal.dtype != tf.resource:
                self._value_of[id(internal)] = self._add(internal.name, tensor_bytes(internal), MemoryKind.PARAMETER)
        for tensor in self._step.inputs:
            self._value_of[id(tensor)] = self._add(tensor.name, tensor_bytes(tensor), MemoryKind.INPUT)

    def output_values(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self._value_of[id(t)] for t in self._step.outputs if id(t) in self._value_of))

    # -- units ----------------------------------------------------------------------------------------------------

    def units(self, sequence: CallSequence) -> tuple[Unit, ...]:
        variables = [variable for _, variable, _ in self._residents]
        reasons = pinned_units(sequence, self._step, variables, self._joined_sums)
        return tuple(
            Unit(
                index=index,
                label=call.label,
                kind=call.kind,
                signature=call.signature,
                pinned=reasons.get(index, ""),
            )
            for index, call in enumerate(sequence.calls)
        )

    # -- ops ------------------------------------------------------------------------------------------------------

    def ops(self, profile: bool) -> tuple[Op, ...]:
        wanted, passes = self._step.reachable, self._step.passes
        ordered: list[Op] = []
        sources: list[Any] = []
        listed: dict[int, int] = {}
        for place in self._execution_order():
            operation, (phase, unit) = self._operations[place], self._step.owners[place]
            if id(operation) in wanted:
                made = self._convert(operation, phase, unit, len(ordered))
                if made is not None:
                    if passes and made.phase is Phase.BACKWARD:
                        made = dataclasses.replace(made, tape=passes[place])
                    listed[id(operation)] = len(ordered)
                    ordered.append(made)
                    sources.append(operation)
        if profile:
            pairs = list(zip(sources, ordered, strict=True))
            ordered = with_measured_seconds(pairs, self._device.seconds_per_op)
        return updates_early(self._with_waits(ordered, listed), len(self.values))

    def _execution_order(self) -> list[int]:
        """Return the places of the operations: in each pass those of the forward pass, then the others."""
        owners, passes = self._step.owners, self._step.passes or [0] * len(self._operations)
        place_of = {id(operation): place for place, operation in enumerate(self._operations)}
        places = [place_of[id(operation)] for operation in filter_gradients_first(self._operations)]
        return sorted(places, key=lambda place: (passes[place], owners[place][0] is not Phase.FORWARD))

    def _with_waits(self, ordered: list[Op], listed: dict[int, int]) -> list[Op]:
        """Give every op the ops that it waits for, seen through operations that are not listed."""
        makers = {v: op.index for op in ordered for v in op.outputs if self.values[v].alias_of is None}
        seen_through: dict[int, set[int]] = {}
        waits: dict[int, set[int]] = {}
        assigned: dict[int, set[int]] = {}
        for operation in self._operations:
            before: set[int] = set()
            if operation.type == "ReadVariableOp":
                # As tf.function has it: what is read after an update waits for that.
                before |= assigned.get(id(operation.inputs[0]), set())
            for source in (*(tensor.op for tensor in operation.inputs), *operation.control_inputs):
                if id(source) in listed:
                    before.add(listed[id(source)])
                else:
                    before |= seen_through.get(id(source), set())
            if id(operation) in listed:
                waits[listed[id(operation)]] = before
            else:
                seen_through[id(operation)] = before
            if operation.type.startswith("Assign"):
                done = {listed[id(operation)]} if id(operation) in listed else before
                assigned[id(operation.inputs[0])] = done
        return [
            dataclasses.replace(op, after=tuple(sorted(waits[op.index] - {makers.get(value) for value in op.inputs})))
            for op in ordered
        ]

    def _convert(self, operation: Any, phase: Phase, unit: int | None, index: int) -> Op | None:
        op_type = operation.type
        if op_type == "ReadVariableOp" and id(operation.inputs[0]) in self._value_of:
            self._value_of[id(operation.outputs[0])] = self._value_of[id(operation.inputs[0])]
            return None
        if op_type in ("Placeholder", "Const", "NoOp"):
            return None
        if op_type in rules.MULTI_VIEWS and phase is not Phase.FORWARD:
            # Keras hands all gradients through one, which graph optimisation takes out. What an update waits for still
            # has it: without an order, threads come to the updates last (ResNet50's plain step: 448 MiB played so, 382
            # played without, 442 to 455 measured).
            for place, tensor in enumerate(operation.outputs):
                value = self._value_of.get(id(viewed_input(operation, place)))
                if value is not None:
                    self._value_of[id(tensor)] = value
            # One operation that all updates wait for, instead of as many waits for each of them as there are gradients.
            return self._joint(operation, index) if phase is Phase.UPDATE else None
        if op_type in rules.METADATA_READERS:
            return None
        outputs = [t for t in operation.outputs if tensor_bytes(t) > TINY_BYTES]
        inputs = self._values_of(tensors_read(operation, self._step.reachable))
        original = self._equal.original(operation) if phase is Phase.FORWARD else None
        if original is not None:
            pairs = zip(operation.outputs, original.outputs, strict=True)
            known = [(id(t), self._value_of[id(first)]) for t, first in pairs if id(first) in self._value_of]
            self._value_of.update(known)
            return None
        if self._joined_sums.has(operation, phase):
            self._behind[id(operation.outputs[0])] = inputs
            return None
        if not outputs and not any(
            self.values[i].nbytes or self.values[self._root(i)].nbytes > TINY_BYTES for i in inputs
        ):
            self._behind.update((id(tensor), list(dict.fromkeys(inputs))) for tensor in operation.outputs)
            return None
        return self._make(operation, phase, unit, index, inputs)

    @staticmethod
    def _joint(operation: Any, index: int) -> Op:
        """Return an op that only waits, for all that makes the gradients."""
        return Op(
            index=index,
            name=operation.name,
            type=operation.type,
            phase=Phase.BACKWARD,
            unit=None,
            inputs=(),
            outputs=(),
        )

    def _values_of(self, tensors: Iterable[Any]) -> list[int]:
        found: list[int] = []
        for tensor in tensors:
            value = self._value_of.get(id(tensor))
            found += self._behind.get(id(tensor), []) if value is None else [value]
        return found

    def _values_of_places(self, pooled: Any) -> list[int]:
        """Return the value that has the places of the maxima that a tensor holds."""
        value = self._value_of.get(id(pooled))
        root = None if value is None else self._root(value)
        return [self._places[root]] if root in self._places else []

    def _root(self, value: int) -> int:
        """Return the value that one is a view of, or itself."""
        while (viewed := self.values[value].alias_of) is not None:
            value = viewed
        return value

    def _make(self, operation: Any, phase: Phase, unit: int | None, index: int, inputs: list[int]) -> Op:
        spec = spec_of(operation, self._kernels)
        kind = MemoryKind.ACTIVATION if phase is Phase.FORWARD else MemoryKind.GRADIENT
        outputs = []
        for place, tensor in enumerate(operation.outputs):
            nbytes = tensor_bytes(tensor)
            source = viewed_input(operation, place)
            viewed = None if source is None else self._value_of.get(id(source))
            own_kind = MemoryKind.WEIGHT_GRADIENT if id(tensor) in self._weight_gradients else kind
            if viewed is None:
                value = self._add(tensor.name, nbytes, own_kind, parts=parts_of(tensor))
            else:
                value = self._add(tensor.name, 0, own_kind, viewed)
            self._value_of[id(tensor)] = value
            outputs.append(value)
        if places := places_bytes(spec):
            if operation.type in rules.POOLS:
                inputs = [*inputs, *self._values_of_places(operation.inputs[1])]
            else:
                self._places[outputs[0]] = self._add(f"{operation.name}/places", places, kind)
                outputs.append(self._places[outputs[0]])
        moved, costs = 0, Costs()
        overwrites: tuple[int, ...] = ()
        if any(self.values[value].alias_of is None for value in outputs) or not outputs:
            moved = rules.bytes_moved(spec)
            costs = costs_of(operation, spec, self._step.graph)
            overwrites = tuple(
                value
                for place in rules.overwritable_inputs(spec)
                for value in self._values_of([operation.inputs[place]])
            )
        waiting, term_bytes = waiting_terms(operation)
        scaled = self._scaled.get(id(operation))
        return Op(
            index=index,
            name=operation.name,
            type=operation.type,
            phase=phase,
            unit=unit,
            inputs=tuple(dict.fromkeys(inputs)),
            outputs=tuple(outputs),
            flops=costs.flops,
            bytes_moved=moved,
            seconds=costs.slowness
            * self._device.seconds(
                moved, costs.matrix_flops, costs.scalar_operations, reduces=operation.type in rules.REDUCTIONS
            ),
            workspace_bytes=costs.workspace_bytes,
            racing_bytes=waiting * term_bytes if term_bytes >= self._device.pooled_from else 0,
            replaced_bytes=bytes_of_slices(operation),
            overwrites=overwrites,
            scaled=() if scaled is None else tuple(self._values_of([scaled])),
        )
