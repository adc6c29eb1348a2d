"""From a traced step to an ir.Graph: sizes, views, costs, phases, and what cannot be replayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf
from absl import logging

from tf_memsaver.capture.layer_calls import CallSequence
from tf_memsaver.capture.step import TracedStep
from tf_memsaver.cost import rules
from tf_memsaver.cost.device import Device
from tf_memsaver.ir.graph import Graph, MemoryKind, Op, Phase, Unit, Value
from tf_memsaver.ir.topology import find_cuts

TINY_BYTES = 1024
"""Ops that read and write nothing larger are left out: scalars and shapes; together they stay far below a page each."""

_NO_REPLAY_STATE = frozenset(
    {
        "AssignAddVariableOp",
        "AssignSubVariableOp",
        "AssignVariableOp",
        "Assert",
        "ReadVariableOp",
        "ResourceGather",
        "ResourceGatherNd",
        "StatelessIf",
        "StatelessWhile",
        "VarHandleOp",
    }
)
"""Stateful by definition, yet the runtime replays them exactly: variables are read once and assigned once."""

_SUMS = frozenset({"Add", "AddN", "AddV2"})
_ADDED_AND_ACTIVATED = _SUMS | {"BiasAdd", "Elu", "LeakyRelu", "Relu", "Relu6", "Sigmoid", "Tanh"}
_FUSED_WITH = {
    "Add": _SUMS,
    "AddV2": _SUMS,
    "BiasAdd": _ADDED_AND_ACTIVATED,
    "Conv2D": _ADDED_AND_ACTIVATED,
    "DepthwiseConv2dNative": _ADDED_AND_ACTIVATED,
    "MatMul": _ADDED_AND_ACTIVATED,
}
"""What TensorFlow's arithmetic optimizer and remapper (core/grappler, 2.21) may make one op with its only reader."""

_LOOPS = frozenset({"StatelessWhile", "While"})
_FUNCTION_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_CALLS = _FUNCTION_CALLS | frozenset(
    {"If", "PartitionedCall", "StatefulPartitionedCall", "StatelessIf", "StatelessWhile", "While"}
)


def build_graph(model: Any, sequence: CallSequence, step: TracedStep, batch_size: int, device: Device) -> Graph:
    """Return the Graph of a traced step, with a candidate cut at every position where results stay bit-identical."""
    builder = _Builder(model, step, device)
    units = builder.units(sequence)
    ops = builder.ops()
    roots = builder.roots()
    splitting = builder.splitting_positions(len(units)) | builder.fusing_positions()
    cuts = tuple(cut for cut in find_cuts(ops, builder.values, roots, units) if cut.position not in splitting)
    return Graph(
        name=model.name,
        batch_size=batch_size,
        values=tuple(builder.values),
        ops=ops,
        units=units,
        cuts=cuts,
        outputs=builder.output_values(),
        joined=tuple(sorted(splitting)),
        device=device.kind,
    )


class _Builder:
    def __init__(self, model: Any, step: TracedStep, device: Device) -> None:
        self._step, self._device = step, device
        self.values: list[Value] = []
        self._value_of: dict[int, int] = {}
        self._variable_value: dict[int, int] = {}
        self._maker: dict[int, int] = {}
        self._behind: dict[int, frozenset[int]] = {}
        self._operations = step.graph.get_operations()
        self._weight_gradients = {id(t) for t in step.weight_gradients}
        self._add_residents(model)

    # -- values ---------------------------------------------------------------------------------------------------

    def _add(self, name: str, nbytes: int, kind: MemoryKind, alias_of: int | None = None) -> int:
        index = len(self.values)
        self.values.append(
            Value(index=index, name=name, nbytes=self._device.rounded(nbytes), kind=kind, alias_of=alias_of)
        )
        return index

    def _add_residents(self, model: Any) -> None:
        optimizer = self._step.optimizer
        for variables, kind in (
            (model.variables, MemoryKind.PARAMETER),
            ([] if optimizer is None else optimizer.variables, MemoryKind.OPTIMIZER),
        ):
            for variable in variables:
                if id(variable.value) not in self._variable_value:
                    nbytes = variable.value.shape.num_elements() * variable.value.dtype.size
                    self._variable_value[id(variable.value)] = self._add(variable.path, nbytes, kind)
        handles = {id(v.value.handle): index for v, index in self._variables_with_index(model)}
        for external, internal in self._step.graph.captures:
            if id(external) in handles:
                self._value_of[id(internal)] = handles[id(external)]
            elif internal.dtype != tf.resource:
                self._value_of[id(internal)] = self._add(internal.name, tensor_bytes(internal), MemoryKind.PARAMETER)
        for tensor in self._step.inputs:
            self._value_of[id(tensor)] = self._add(tensor.name, tensor_bytes(tensor), MemoryKind.INPUT)

    def _variables_with_index(self, model: Any) -> Iterable[tuple[Any, int]]:
        optimizer = self._step.optimizer
        for variable in [*model.variables, *([] if optimizer is None else optimizer.variables)]:
            yield variable, self._variable_value[id(variable.value)]

    def roots(self) -> list[int]:
        roots: list[int] = []
        for value in self.values:
            roots.append(value.index if value.alias_of is None else roots[value.alias_of])
        return roots

    def output_values(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self._value_of[id(t)] for t in self._step.outputs if id(t) in self._value_of))

    # -- cuts ----------------------------------------------------------------------------------------------------

    def splitting_positions(self, unit_count: int) -> set[int]:
        """Return the positions at which a cut would change the order of a floating-point sum.

        The gradient of a tensor with several readers is one sum over all of them. With readers on both sides of a cut,
        each side sums its own first: for two terms that is the same number, for three or more it is not.
        """
        readers = self._reads_by_unit()
        splitting: set[int] = set()
        for tensor in (t for made in self._step.boundary for t in made if isinstance(t, tf.Tensor)):
            units = {unit_count if unit is None else unit for unit in self._step.gradient_units.get(id(tensor), ())}
            terms = sum(max(1, readers.get((id(tensor), unit), 0)) for unit in units)
            if terms > 2 and len(units) > 1:
                splitting.update(range(min(units) + 1, max(units) + 1))
        return splitting

    def fusing_positions(self) -> set[int]:
        """Return the positions between two ops that graph optimisation makes one, with other roundings.

        It reorders chains of additions (a residual sum behind a BatchNorm), and fuses a convolution or product with
        what is added to it and the activation behind, wherever nothing else reads what lies between.
        """
        wanted = self._reachable()
        unit_of: dict[int, int] = {}
        readers: dict[int, list[Any]] = {}
        for operation, (phase, unit) in zip(self._operations, self._step.owners, strict=True):
            if id(operation) not in wanted:
                continue
            if phase is Phase.FORWARD and unit is not None:
                unit_of[id(operation)] = unit
            if operation.type not in rules.METADATA_READERS:
                for tensor in operation.inputs:
                    readers.setdefault(id(tensor), []).append(operation)
        fusing: set[int] = set()
        for operation in self._operations:
            consumers = _FUSED_WITH.get(operation.type)
            only = readers.get(id(operation.outputs[0]), []) if consumers and id(operation) in unit_of else []
            if consumers and len(only) == 1 and only[0].type in consumers and id(only[0]) in unit_of:
                fusing.update(range(unit_of[id(operation)] + 1, unit_of[id(only[0])] + 1))
        return fusing

    def _reads_by_unit(self) -> dict[tuple[int, int], int]:
        counts: dict[tuple[int, int], int] = {}
        for operation, (phase, unit) in zip(self._operations, self._step.owners, strict=True):
            if phase is Phase.FORWARD and unit is not None and operation.type not in rules.METADATA_READERS:
                for tensor in operation.inputs:
                    counts[id(tensor), unit] = counts.get((id(tensor), unit), 0) + 1
        return counts

    # -- units ----------------------------------------------------------------------------------------------------

    def units(self, sequence: CallSequence) -> tuple[Unit, ...]:
        reasons = self._pinned(sequence)
        return tuple(
            Unit(
                index=index,
                label=call.label,
                kind=type(call.operation).__name__,
                signature=call.signature,
                pinned=reasons.get(index, ""),
            )
            for index, call in enumerate(sequence.calls)
        )

    def _pinned(self, sequence: CallSequence) -> dict[int, str]:
        reasons: dict[int, str] = {}
        model_outputs = set(sequence.outputs)
        composite: set[int] = set()
        for unit, call in enumerate(sequence.calls):
            if model_outputs.intersection(call.outputs):
                reasons[unit] = "makes an output of the model, whose logits the loss reads"
            made = [
                slot
                for slot, t in zip(call.outputs, self._step.boundary[unit], strict=False)
                if not isinstance(t, tf.Tensor)
            ]
            composite.update(made)
            if made or composite.intersection(call.inputs):
                reasons[unit] = "makes or reads a ragged or sparse tensor"
        for unit, path in self._step.sparse_units.items():
            reasons[unit] = f"keeps the sparse gradient of {path}"
        for operation, (phase, owner) in zip(self._operations, self._step.owners, strict=True):
            if phase is Phase.FORWARD and owner is not None:
                if operation.type in _FUNCTION_CALLS and any(t.dtype == tf.resource for t in operation.inputs):
                    reasons[owner] = "calls a tf.function that reads variables, which a replay cannot give it"
                blocker = _hidden_state(operation, self._step.graph)
                if blocker:
                    reasons[owner] = f"runs {blocker}, whose hidden state cannot be replayed"
        return reasons

    # -- ops ------------------------------------------------------------------------------------------------------

    def ops(self) -> tuple[Op, ...]:
        wanted = self._reachable()
        ordered: list[Op] = []
        for phases in ((Phase.FORWARD,), (Phase.BACKWARD, Phase.UPDATE)):
            for operation, (phase, unit) in zip(self._operations, self._step.owners, strict=True):
                if phase in phases and id(operation) in wanted:
                    made = self._convert(operation, phase, unit, len(ordered))
                    if made is not None:
                        ordered.append(made)
        return _updates_early(ordered, len(self.values))

    def _reachable(self) -> set[int]:
        """Operations that something outside the step depends on: its outputs and every assignment."""
        stack = [t.op for t in self._step.outputs]
        stack += [op for op in self._operations if op.type.startswith("Assign") or op.type.startswith("Resource")]
        wanted: set[int] = set()
        while stack:
            operation = stack.pop()
            if id(operation) in wanted:
                continue
            wanted.add(id(operation))
            stack.extend(t.op for t in operation.inputs)
            stack.extend(operation.control_inputs)
        return wanted

    def _convert(self, operation: Any, phase: Phase, unit: int | None, index: int) -> Op | None:
        op_type = operation.type
        if op_type == "ReadVariableOp" and id(operation.inputs[0]) in self._value_of:
            self._value_of[id(operation.outputs[0])] = self._value_of[id(operation.inputs[0])]
            return None
        if op_type in ("Placeholder", "Const", "NoOp"):
            return None
        if op_type in rules.METADATA_READERS:
            return None
        outputs = [t for t in operation.outputs if tensor_bytes(t) > TINY_BYTES]
        inputs = [self._value_of[id(t)] for t in operation.inputs if id(t) in self._value_of]
        after = frozenset().union(*(self._behind.get(id(t), frozenset()) for t in operation.inputs))
        if not outputs and not any(self.values[i].nbytes for i in inputs):
            self._leave_out(operation, after)
            return None
        return self._make(operation, phase, unit, index, inputs, after)

    def _leave_out(self, operation: Any, after: frozenset[int]) -> None:
        """Note which ops of the graph an op that is left out waits for, so that its readers wait for them."""
        made = {
            self._maker[self._value_of[id(t)]] for t in operation.inputs if self._value_of.get(id(t)) in self._maker
        }
        for tensor in operation.outputs:
            self._behind[id(tensor)] = after | made

    def _make(
        self, operation: Any, phase: Phase, unit: int | None, index: int, inputs: list[int], after: frozenset[int]
    ) -> Op:
        op_type = operation.type
        spec = _spec(operation)
        kind = MemoryKind.ACTIVATION if phase is Phase.FORWARD else MemoryKind.GRADIENT
        outputs = []
        for place, tensor in enumerate(operation.outputs):
            nbytes = tensor_bytes(tensor)
            viewed = None
            if op_type in rules.VIEWS or op_type in rules.MULTI_VIEWS:
                source = operation.inputs[place if op_type in rules.MULTI_VIEWS else 0]
                viewed = self._value_of.get(id(source))
            own_kind = MemoryKind.WEIGHT_GRADIENT if id(tensor) in self._weight_gradients else kind
            value = self._add(tensor.name, 0 if viewed is not None else nbytes, own_kind, viewed)
            self._value_of[id(tensor)] = value
            self._maker[value] = index
            outputs.append(value)
        moved = rules.bytes_moved(spec)
        flops, matrix_flops, workspace = self._inner_costs(operation, spec)
        by_place = [self._value_of.get(id(t)) for t in operation.inputs]
        overwrites = tuple(v for v in (by_place[p] for p in rules.overwritable_inputs(spec)) if v is not None)
        return Op(
            index=index,
            name=operation.name,
            type=op_type,
            phase=phase,
            unit=unit,
            inputs=tuple(dict.fromkeys(inputs)),
            outputs=tuple(outputs),
            flops=flops,
            bytes_moved=moved,
            seconds=self._device.seconds(matrix_flops, moved),
            workspace_bytes=workspace,
            overwrites=overwrites,
            after=tuple(sorted(after)),
        )

    def _inner_costs(self, operation: Any, spec: rules.OpSpec) -> tuple[int, int, int]:
        """Return FLOPs, those of them in matrix products, and workspace; of a called function, all its ops together."""
        bodies = list(_called_functions(operation, self._step.graph))
        if not bodies:
            flops = rules.flops(spec)
            return flops, flops if spec.type in rules.MATRIX_OPS else 0, rules.workspace_bytes(spec)
        compiled = spec.compiled or "_XlaMustCompile" in operation.node_def.attr
        times = trip_count(operation) or 1
        flops = matrix_flops = workspace = 0
        for body in bodies:
            for inner in body.get_operations():
                more, more_matrix, scratch = self._inner_costs(inner, _spec(inner, compiled))
                flops, matrix_flops = flops + times * more, matrix_flops + times * more_matrix
                workspace = max(workspace, scratch)
        return flops, matrix_flops, workspace


def _updates_early(ops: list[Op], value_count: int) -> tuple[Op, ...]:
    """Move every update op to just behind the last op that it reads from: the executor runs it when it is ready."""
    ready = [-1] * value_count
    keys: list[tuple[int, int]] = []
    for place, op in enumerate(ops):
        key = place
        if op.phase is Phase.UPDATE:
            key = max((ready[value] for value in op.inputs), default=-1)
            key = key if key >= 0 else place
        for value in op.outputs:
            ready[value] = key
        keys.append((key, place))
    order = sorted(range(len(ops)), key=keys.__getitem__)
    moved = {place: index for index, place in enumerate(order)}
    return tuple(
        dataclasses.replace(ops[place], index=index, after=tuple(sorted(moved[p] for p in ops[place].after)))
        for index, place in enumerate(order)
    )


def tensor_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor of the traced graph; 0 for resources and strings, whose storage is elsewhere.

    A tensor whose shape depends on the data counts 0: such tensors are indices and masks of preprocessing, not
    activations. The tensor lists that a loop keeps for its gradient are counted where the loop makes them.
    """
    if tensor.dtype == tf.variant:
        return _loop_list_bytes(tensor)
    if tensor.dtype in (tf.resource, tf.string) or not tensor.dtype.size:
        return 0
    count = tensor.shape.num_elements()
    return 0 if count is None else count * tensor.dtype.size


def _loop_list_bytes(tensor: Any) -> int:
    """Return the bytes of a list that a while loop fills, one element a step: outputs and values for the gradient."""
    if tensor.op.type not in _LOOPS:
        return 0
    body = _function_graph(tensor.op.graph, tensor.op.get_attr("body").name)
    writer = None if body is None else body.outputs[tensor.value_index].op
    place = None if writer is None else {"TensorListPushBack": 1, "TensorListSetItem": 2}.get(writer.type)
    if writer is None or place is None:
        return 0
    trips = trip_count(tensor.op)
    if trips is None:
        logging.warning("loop '%s' runs an unknown number of steps: what it keeps is not counted", tensor.op.name)
        return 0
    return trips * tensor_bytes(writer.inputs[place])


def trip_count(operation: Any) -> int | None:
    """Return how many steps a while loop runs at most, from its limit or the lists that it reads; None if unknown."""
    if operation.type not in _LOOPS:
        return None
    sizes = []
    for tensor in operation.inputs:
        if tensor.op.type == "TensorListFromTensor":
            sizes.append(tensor.op.inputs[0].shape[0])
        elif tensor.op.type == "TensorListReserve":
            sizes.append(_static_count(tensor.op.inputs[1]))
    limit = _static_count(operation.inputs[1]) if len(operation.inputs) > 1 else None
    known = [limit, *sizes] if limit is not None and limit >= 0 else sizes
    counts = [int(size) for size in known if size is not None and size >= 0]
    return max(counts) if counts else None


def _static_count(tensor: Any) -> int | None:
    """Return a scalar integer that is known when tracing, else None."""
    if not tensor.dtype.is_integer or tensor.shape.rank != 0:
        return None
    value = tf.get_static_value(tensor)
    return None if value is None else int(value)


def _spec(operation: Any, compiled: bool = False) -> rules.OpSpec:
    def shape(tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.shape) if tensor.shape.is_fully_defined() else ()

    names = ("transpose_a", "adj_x", "equation", "strides", "padding", "explicit_paddings", "data_format")
    known = operation.node_def.attr
    attributes = {name: operation.get_attr(name) for name in names if name in known}
    if isinstance(attributes.get("equation"), bytes):
        attributes["equation"] = attributes["equation"].decode()
    return rules.OpSpec(
        type=operation.type,
        input_shapes=tuple(shape(t) for t in operation.inputs),
        input_bytes=tuple(tensor_bytes(t) for t in operation.inputs),
        output_shapes=tuple(shape(t) for t in operation.outputs),
        output_bytes=tuple(tensor_bytes(t) for t in operation.outputs),
        attributes=attributes,
        compiled=compiled,
    )


def _called_functions(operation: Any, graph: Any) -> Iterator[Any]:
    """Yield the graphs of the functions that an operation calls (branches, loop bodies, calls)."""
    if operation.type not in _CALLS:
        return
    for attribute in operation.node_def.attr.values():
        names = [attribute.func.name] if attribute.HasField("func") else [f.name for f in attribute.list.func]
        for name in filter(None, names):
            body = _function_graph(graph, name)
            if body is not None:
                yield body


def _function_graph(graph: Any, name: str) -> Any | None:
    """Return the graph of a function by name, looked up from the graph that calls it outwards."""
    while graph is not None:
        function = graph._get_function(name)
        if function is not None:
            return getattr(function, "graph", None)
        graph = getattr(graph, "outer_graph", None)
    return None


def _hidden_state(operation: Any, graph: Any) -> str:
    """Return the type of the first op, in the operation or in a function that it calls, that cannot be replayed."""
    if operation.type in _CALLS:
        for body in _called_functions(operation, graph):
            for inner in body.get_operations():
                found = _hidden_state(inner, body)
                if found:
                    return found
        return ""
    if not operation.op_def.is_stateful or operation.type in _NO_REPLAY_STATE:
        return ""
    return operation.type if operation.type != "Placeholder" else ""
