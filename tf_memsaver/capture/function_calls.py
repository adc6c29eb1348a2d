"""A traced TensorFlow function as one flat list of calls, each a few of its operations.

Calls of other functions are inlined. What needs no argument (reads of variables, and what is made of them) is hoisted
in front of all calls, assignments are moved behind them where nothing reads the variable in between, and the rest is
grouped so that each call makes one large tensor: segments of a plan are made of such groups.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops import resource_variable_ops

from tf_memsaver import keras_compat
from tf_memsaver.capture.calls import ADDITIONS, CallSequence, Reader
from tf_memsaver.capture.operations import (
    CUSTOM_GRADIENT,
    FUNCTION_CALLS,
    called_function,
    custom_gradient_bodies,
    has_custom_gradient,
    implements,
    library_function,
)
from tf_memsaver.cost import rules
from tf_memsaver.emission import Template
from tf_memsaver.errors import InvalidRequestError, UnsupportedModelError

LARGE_ELEMENTS = 4096
"""A tensor of a known shape with as many elements ends a group; so does one whose shape depends on the arguments."""

LARGEST_REPEATED_CONSTANT = 16384
"""Bytes. Smaller constants are made anew where they are read, so that shapes stay known inside segments."""

_STATEFUL_CALLS = frozenset({"Case", "If", "StatefulPartitionedCall", "While"})
"""Operations whose gradients may have state."""

_ASSIGNMENTS = frozenset({"AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp"})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Constant:
    """A small Const, which is made anew in each group that reads it."""

    operation: Template
    label: str

    def run(self, called: str) -> tf.Tensor:
        """Emit it."""
        # Behind the gate of a replay it would be no constant to the graph optimizer, which folds constants into others.
        with tf.control_dependencies(None):
            return self.operation.emit([], _without(called, self.label))[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gathering:
    """A NoOp that waits for others, so that one control input stands for theirs.

    Graph optimisation takes out a control input that another path implies, but not one of these: without them more
    additions would meet, and be reordered.
    """

    label: str
    after: tuple[int | Gathering, ...]

    def run(self, slots: dict[int, Any], called: str) -> Any | None:
        """Emit it, or return it if another call has; None if nothing that it waits for is there."""
        label = _without(called, self.label)
        graph = tf.compat.v1.get_default_graph()
        with contextlib.suppress(KeyError):
            return graph.get_operation_by_name(f"{tf.get_current_name_scope()}/{label}".lstrip("/"))
        before = _present(self.after, slots, called)
        with tf.control_dependencies(before):
            return tf.no_op(name=label) if before else None


def _present(after: Sequence[int | Gathering], slots: dict[int, Any], called: str) -> list[Any]:
    if after and keras_compat.recording_scope() is not None:
        # A segment lacks who else waits, without whom a NoOp goes away and takes what it implied along.
        after = _slots_of(after)
    found = (slots.get(each) if isinstance(each, int) else each.run(slots, called) for each in after)
    return [each for each in found if each is not None]


def _slots_of(after: Iterable[int | Gathering]) -> list[int]:
    """Return all that is waited for, in the end."""
    return [slot for each in after for slot in ([each] if isinstance(each, int) else _slots_of(each.after))]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CustomGradient:
    """The gradient of an operation that has its own, as calls.

    Its function may look at any tensor of the graph that it was defined in: ``captured`` are their slots, which are
    those of the forward pass. ``upstream`` are slots of its arguments, ``results`` of its results (None where it has
    none). ``function`` names the call that it consists of, as in a loaded SavedModel, or is empty.
    """

    calls: tuple[OpCall, ...]
    function: str
    captured: tuple[int, ...]
    upstream: tuple[int, ...]
    results: tuple[int | None, ...]

    def bound(self, slots: Any) -> Callable[..., list[Any]]:
        """Return the gradient function, as TensorFlow registers them, for the tensors that are in ``slots`` now."""
        seen = {slot: slots[slot] for slot in self.captured}

        def gradient(operation: Any, *upstream: Any) -> list[Any]:
            local = {**seen, **dict(zip(self.upstream, upstream, strict=True))}
            for call in self.calls:
                # Saving asks without an operation, and puts what it gets into a function to be called again.
                call.run(local, called="" if operation is not None else self.function)
            return [None if slot is None else local[slot] for slot in self.results]

        return gradient


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpCall:
    """One operation of the function.

    ``constants`` holds, by place of the input, a Const to make anew; ``variables`` are those whose handles are inputs;
    ``after`` says what must run before: slots, and operations that gather several; ``passes_lists`` says whether lists
    of tensors go in or out, ``apart`` whether this is an addition to a sum that must wait for others; ``of_tape`` is
    that of ``Template.emit``.
    """

    operation: Template
    label: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: tuple[Constant | None, ...]
    variables: tuple[tf.Variable, ...]
    after: tuple[int | Gathering, ...] = ()
    gradient: CustomGradient | None = None
    passes_lists: bool = False
    apart: bool = False
    of_tape: bool = False

    def run(self, slots: dict[int, Any], called: str = "") -> None:
        """Emit the operation on the tensors in ``slots`` and put what it makes there.

        ``called`` is a call that its name leaves out. The names of the source matter: graph optimisation sorts by them.
        """
        label = _without(called, self.label)
        for variable in self.variables:
            resource_variable_ops.variable_accessed(variable)
        if self.operation.type == "ReadVariableOp" and self.variables:
            with tf.name_scope(f"{tf.get_current_name_scope()}/{label.rpartition('/')[0]}/".lstrip("/")):
                slots[self.outputs[0]] = self.variables[0].value()
            return
        for slot, constant in zip(self.inputs, self.constants, strict=True):
            if constant is not None and slot not in slots:
                slots[slot] = constant.run(called)
        tensors = [slots[slot] for slot in self.inputs]
        gradient = None if self.gradient is None else self.gradient.bound(slots)
        before = _present(self.after, slots, called)
        with tf.control_dependencies(before) if before else contextlib.nullcontext():
            made = self.operation.emit(tensors, label, gradient, self.of_tape)
        slots.update(zip(self.outputs, made, strict=True))

    @property
    def reads(self) -> list[int]:
        """The slots that a run needs: the inputs but for constants, and what a custom gradient looks at."""
        read = [slot for slot, constant in zip(self.inputs, self.constants, strict=True) if constant is None]
        return [*read, *(() if self.gradient is None else self.gradient.captured)]

    @property
    def pinned(self) -> str:
        """Why the operation runs once only: it has side effects, or reads what others change."""
        if self.operation.is_stateful:
            return f"runs {self.operation.type}, which must run once"
        if self.passes_lists:
            return "makes or reads a list of tensors, whose gradient does not pass the boundary of a segment"
        if self.apart:
            return "adds to a sum that waits for other operations, so that the sums are not made one in the plain step"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupCall:
    """Consecutive operations as one call (see ``calls.Call``)."""

    members: tuple[OpCall, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    signature: str

    @property
    def operation(self) -> Any:
        """The last operation."""
        return self.members[-1].operation

    @property
    def label(self) -> str:
        """The name of the last operation."""
        return self.members[-1].label

    @property
    def kind(self) -> str:
        """The type of the last operation."""
        return self.members[-1].operation.type

    @property
    def pinned(self) -> str:
        """The reason of the first member that has one."""
        return next(filter(None, (member.pinned for member in self.members)), "")

    def readers(self, slot: int) -> list[Reader]:
        """Return the operations that read a slot, once for each read."""
        return [
            Reader(member.label, member.outputs[0] if member.operation.type in ADDITIONS else None)
            for member in self.members
            for read in member.inputs
            if read == slot and member.operation.type not in rules.METADATA_READERS
        ]

    def run(self, slots: Sequence[Any], training: bool) -> list[Any]:
        """Emit all operations; ``training`` is settled in the traced function."""
        del training
        local = {slot: slots[slot] for slot in self.inputs}
        for member in self.members:
            member.run(local)
        return [local[slot] for slot in self.outputs]


def _without(called: str, label: str) -> str:
    return label.removeprefix(f"{called}/") if called else label


class FunctionCalls:
    """The calls of a concrete function, and what is around them: arguments, variables, hoisted operations.

    ``sequence.inputs`` are the slots of the arguments, then of the captured tensors, then of what is hoisted;
    ``signature`` are the arguments and keyword arguments that the function was traced with, ``argument_specs`` the
    specs of its flat tensor arguments. The function itself, whose graph is large, is not kept.
    """

    def __init__(self, concrete: Any, scope: str | None = None) -> None:
        """List the calls of a ``tf.types.experimental.ConcreteFunction``.

        With ``scope`` they are to run in the graph of their gradients, inside the name scope that was traced as this
        one, and not in a function of their own.
        """
        self.name = str(concrete.name)
        self.signature = concrete.structured_input_signature
        self._type = concrete.function_type
        self._results = tf.nest.map_structure(_spec, concrete.structured_outputs)
        self.variables: tuple[tf.Variable, ...] = tuple(concrete.graph.variables)
        self._captures = list(concrete.captured_inputs)
        count = len(concrete.graph.inputs)
        self.argument_count = count - len(self._captures)
        arguments = concrete.graph.inputs[: self.argument_count]
        self.argument_specs = [tf.TensorSpec(t.shape, t.dtype, t.op.name) for t in arguments]
        handles = {id(v.handle): v for v in self.variables if hasattr(v, "handle")}
        self._variable_of = {
            slot: handles[id(tensor)]
            for slot, tensor in zip(range(self.argument_count, count), self._captures, strict=True)
            if id(tensor) in handles
        }
        leaves = tf.nest.flatten(self._results, expand_composites=True)
        flat = _Inliner(concrete.graph, self._variable_of, scope, sum(leaf is not None for leaf in leaves))
        calls = _needed(flat.calls, flat.outputs)
        self._prologue, rest = self._hoisted(calls, count)
        made = [slot for call in self._prologue for slot in call.outputs]
        read = {slot for call in rest for slot in (*call.inputs, *_slots_of(call.after))} | set(flat.outputs)
        made = [slot for slot in made if slot in read]
        self.sequence = CallSequence(
            calls=_grouped(_assignments_last(rest), flat.outputs, frozenset(made)),
            inputs=(*range(count), *made),
            outputs=tuple(flat.outputs),
            slot_count=flat.slot_count,
            resident=frozenset(range(self.argument_count, count)) | frozenset(made),
            weights=self._trained(made),
            forward_first=None if scope is not None else self._sorts_first(concrete, rest),
        )

    def flat_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the tensors of a call, as ``enter`` takes them; Python values may be left out.

        Raises:
          TypeError: the arguments do not fit the function's signature.
          InvalidRequestError: a Python value, such as ``training``, is not the one that the function was traced with.
        """
        kind = self._type
        traced = kind.bind(*self.signature[0], **self.signature[1]).arguments
        bound = kind.bind_partial(*args, **kwargs)
        for name, expected in traced.items():
            if name not in bound.arguments and len(_python_values(expected)) == len(tf.nest.flatten(expected)):
                bound.arguments[name] = expected
            given = bound.arguments.get(name)
            if _python_values(given) != _python_values(expected):
                raise InvalidRequestError(
                    f"'{self.name}' was traced with {name}={expected!r}, and is called with {name}={given!r}. "
                    f"Optimize the function for that value too."
                )
        bound = kind.bind(*bound.args, **bound.kwargs)
        return list(kind.unpack_inputs(bound))

    def accepts(self, flat: Sequence[Any]) -> bool:
        """Whether tensors fit the shapes and dtypes that the function was traced with."""
        specs = self.argument_specs
        return len(flat) == len(specs) and all(
            tensor.dtype == spec.dtype and tensor.shape.is_compatible_with(spec.shape)
            for tensor, spec in zip(flat, specs, strict=True)
        )

    def enter(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the tensors for ``sequence.inputs``: run what is hoisted."""
        slots = dict(enumerate([*arguments, *self._captures]))
        for call in self._prologue:
            call.run(slots)
        return [slots[slot] for slot in self.sequence.inputs]

    def leave(self, flat: Sequence[Any]) -> Any:
        """Return the function's result for the tensors of ``sequence.outputs``."""
        left = iter(flat)
        # The graph's outputs leave out None.
        leaves = tf.nest.flatten(self._results, expand_composites=True)
        whole = [None if leaf is None else next(left) for leaf in leaves]
        return tf.nest.pack_sequence_as(self._results, whole, expand_composites=True)

    def _trained(self, made: Iterable[int]) -> frozenset[int]:
        """Return those of the hoisted slots that a gradient with respect to a trained variable passes."""
        trained: set[int] = set()
        for call in self._prologue:
            if any(v.trainable for v in call.variables) or not trained.isdisjoint(call.inputs):
                floats = (dtype.is_floating for dtype in call.operation.dtypes)
                trained.update(slot for slot, is_float in zip(call.outputs, floats, strict=True) if is_float)
        return frozenset(trained.intersection(made))

    def _sorts_first(self, concrete: Any, calls: Sequence[OpCall]) -> bool:
        """Whether a call of the function has a name that sorts before that of the call of its gradient function.

        A function without state is called by a PartitionedCall, one with state by a StatefulPartitionedCall.
        """
        if all(call.operation.type not in _STATEFUL_CALLS for call in calls):
            return False
        graph = tf.__internal__.FuncGraph("gradient")
        with graph.as_default():
            arguments = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in self.argument_specs]
            with tf.GradientTape() as tape:
                # By flat tensors, which no public call takes.
                results = concrete._call_flat(arguments, self._captures)
            flat = tf.nest.flatten(results, expand_composites=True)
            floats = [tensor for tensor in flat if tensor is not None and tensor.dtype.is_floating]
            tape.gradient(floats, [variable for variable in self.variables if variable.trainable])
        names = [f"{each.name}/" for each in graph.get_operations() if each.type in FUNCTION_CALLS]
        return bool(names) and names[0] < names[-1]

    def _hoisted(self, calls: Sequence[OpCall], count: int) -> tuple[list[OpCall], list[OpCall]]:
        """Part the calls into those that need no argument and can run first, and the others."""
        early = set(range(self.argument_count, count))
        written: set[int] = set()
        hoisted, rest = [], []
        for call in calls:
            resources = [slot for slot in call.inputs if slot in self._variable_of]
            is_read = call.operation.type == "ReadVariableOp" and not written.intersection(resources)
            if (is_read or not call.operation.is_stateful) and early.issuperset(call.reads):
                early.update(call.outputs)
                hoisted.append(call)
                continue
            if call.operation.type != "ReadVariableOp":
                written.update(resources)
            rest.append(call)
        return hoisted, rest


def _python_values(argument: Any) -> list[Any]:
    """Return the leaves of an argument that are no tensors, ragged and sparse ones among them, and no specs of such."""
    specs_or_arrays = (tf.TypeSpec, np.ndarray, np.generic)
    leaves = tf.nest.flatten(argument)
    return [leaf for leaf in leaves if not (tf.is_tensor(leaf) or isinstance(leaf, specs_or_arrays))]


def _spec(result: Any) -> Any:
    return result if result is None or isinstance(result, tf.TypeSpec) else tf.type_spec_from_value(result)


class _Inliner:
    """Numbers the tensors of a function and of those that it calls, and lists their operations in order."""

    def __init__(self, graph: Any, variable_of: Mapping[int, tf.Variable], scope: str | None, outputs: int) -> None:
        """Take in a graph of so many outputs; where its gradient was taken, it has got more behind them."""
        self.calls: list[OpCall] = []
        self._scope = scope
        self._variable_of = variable_of
        self.slot_count = 0
        self._constant_of: dict[int, Constant] = {}
        self._sums: dict[int, bool] = {}
        slots = {id(tensor): self._new() for tensor in graph.inputs}
        self._walk(graph, "", slots)
        self.outputs = [slots[id(tensor)] for tensor in graph.outputs[:outputs]]
        for slot in self.outputs:
            if slot in self._constant_of:
                self._add(self._constant_of.pop(slot).operation, "", [], [slot])

    def _new(self) -> int:
        self.slot_count += 1
        return self.slot_count - 1

    def _label(self, prefix: str, operation: Any) -> str:
        return _without(self._scope or "", f"{prefix}{operation.name}")

    def _walk(self, graph: Any, prefix: str, slots: dict[int, int]) -> tuple[int | Gathering, ...]:
        """List the operations of a graph; return what who waits for its end waits for."""
        gathered: dict[int, Gathering] = {}
        for operation in _in_order(graph):
            outputs = operation.outputs
            if operation.type == "NoOp" or (outputs and id(outputs[0]) in slots):
                continue
            inputs = [slots[id(tensor)] for tensor in operation.inputs]
            body = _inlined_body(operation, graph)
            if body is not None:
                inner = {id(tensor): slot for tensor, slot in zip(body.inputs, inputs, strict=True)}
                scope = f"{prefix}{operation.name}/"
                after = self._walk(body, scope, inner)
                label = _without(self._scope or "", f"{scope}output_control_node")
                gathered[id(operation)] = Gathering(label=label, after=after)
                called = called_function(operation)
                count = len(outputs) if called is None else len(called.cached_definition.signature.output_arg)
                pairs = zip(outputs[:count], body.outputs[:count], strict=True)
                slots.update({id(tensor): inner[id(made)] for tensor, made in pairs})
                continue
            template = Template(operation)
            made = [self._new() for _ in template.dtypes]
            slots.update({id(tensor): slot for tensor, slot in zip(outputs, made, strict=False)})
            if operation.type == "Const" and _constant_bytes(operation) <= LARGEST_REPEATED_CONSTANT:
                self._constant_of[made[0]] = Constant(operation=template, label=self._label(prefix, operation))
            else:
                after = self._awaited(operation.control_inputs, prefix, slots, gathered)
                gradient = self._custom_gradient(operation, slots)
                self._add(template, prefix, inputs, made, after, gradient)
        return self._awaited(getattr(graph, "control_outputs", ()), prefix, slots, gathered)

    def _awaited(
        self, operations: Iterable[Any], prefix: str, slots: dict[int, int], gathered: dict[int, Gathering]
    ) -> tuple[int | Gathering, ...]:
        """Return what stands for operations to wait for; ``gathered`` are the NoOps and calls of their graph so far."""
        found: list[int | Gathering] = []
        for each in operations:
            if each.type == "NoOp" and id(each) not in gathered:
                after = self._awaited(each.control_inputs, prefix, slots, gathered)
                gathered[id(each)] = Gathering(label=self._label(prefix, each), after=after)
            if id(each) in gathered:
                found.append(gathered[id(each)])
            elif each.outputs and id(each.outputs[0]) in slots:
                slot = slots[id(each.outputs[0])]
                found.extend([slot] if slot not in self._constant_of else [])
        return tuple(found)

    def _add(
        self,
        operation: Template,
        prefix: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        after: tuple[int | Gathering, ...] = (),
        gradient: CustomGradient | None = None,
    ) -> None:
        # Of a sum, whether something between it and here waits for more than its data.
        waits = [self._sums[slot] or bool(after) for slot in inputs if slot in self._sums]
        if operation.type in ADDITIONS or (operation.type == "Identity" and waits):
            self._sums[outputs[0]] = operation.type == "Identity" and any(waits)
        self.calls.append(
            OpCall(
                operation=operation,
                label=self._label(prefix, operation),
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                constants=tuple(self._constant_of.get(slot) for slot in inputs),
                variables=tuple(self._variable_of[slot] for slot in inputs if slot in self._variable_of),
                after=after,
                gradient=gradient,
                passes_lists=tf.variant in (*operation.read_dtypes, *operation.dtypes),
                apart=operation.type in ADDITIONS and any(waits),
                of_tape=self._scope is not None,
            )
        )

    def _custom_gradient(self, operation: Any, slots: Mapping[int, int]) -> CustomGradient | None:
        """Return the gradient that an operation brings along, listed as calls like the function itself."""
        if not has_custom_gradient(operation):
            return None
        with operation.graph.as_default():
            graph = tf.__internal__.FuncGraph("gradient")
            with graph.as_default():
                upstream = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in operation.outputs]
                found = ops.get_gradient_function(operation)(operation, *upstream)
                results = [None if t is None else tf.convert_to_tensor(t) for t in found]
        missing = [external.name for external, _ in graph.captures if id(external) not in slots]
        if missing:
            raise UnsupportedModelError(
                f"the custom gradient of '{operation.name}' reads {missing[0]}, which lies outside the function. "
                f"Pass it to the function with the custom gradient as an argument."
            )
        inner = {id(internal): slots[id(external)] for external, internal in graph.captures}
        captured = tuple(slot for slot in dict.fromkeys(inner.values()) if slot not in self._constant_of)
        inner.update({id(tensor): self._new() for tensor in upstream})
        outer_calls, self.calls = self.calls, []
        self._walk(graph, "", inner)
        calls, self.calls = self.calls, outer_calls
        own = [each for each in graph.get_operations() if each.type not in ("Const", "Identity", "Placeholder")]
        return CustomGradient(
            calls=tuple(calls),
            function=own[0].name if len(own) == 1 and own[0].type in FUNCTION_CALLS else "",
            captured=captured,
            upstream=tuple(inner[id(tensor)] for tensor in upstream),
            results=tuple(None if tensor is None else inner[id(tensor)] for tensor in results),
        )


def _in_order(graph: Any) -> list[Any]:
    """Return a graph's operations, each behind those that it reads from, else in the order in which they were made.

    A loop whose gradient was taken reads from operations that were made after it.
    """
    done: set[int] = set()
    ordered: list[Any] = []
    for operation in graph.get_operations():
        waiting = [operation]
        while waiting:
            top = waiting[-1]
            before = [t.op for t in top.inputs if t.op.graph is graph and id(t.op) not in done]
            if before and id(top) not in done:
                waiting.extend(before)
                continue
            waiting.pop()
            if id(top) not in done:
                done.add(id(top))
                ordered.append(top)
    return ordered


def _inlined_body(operation: Any, graph: Any) -> Any | None:
    """Return the graph of the function that an operation calls, if nothing is lost by inlining it."""
    attributes = operation.node_def.attr
    if operation.type not in FUNCTION_CALLS or CUSTOM_GRADIENT in attributes or "_XlaMustCompile" in attributes:
        return None
    function = called_function(operation) or library_function(graph, operation.get_attr("f").name)
    return None if implements(function) else getattr(function, "graph", None)


def _constant_bytes(operation: Any) -> int:
    tensor = operation.outputs[0]
    return (tensor.shape.num_elements() or 0) * max(1, tensor.dtype.size or 1)


def _needed(calls: Sequence[OpCall], outputs: Iterable[int]) -> list[OpCall]:
    """Return the calls that an output or a side effect depends on."""
    wanted, needed = set(outputs), []
    for call in reversed(calls):
        effect = call.operation.is_stateful and call.operation.type != "ReadVariableOp"
        if effect or not wanted.isdisjoint(call.outputs):
            wanted.update(call.reads)
            needed.append(call)
    needed.reverse()
    return needed


def _assignments_last(calls: Sequence[OpCall]) -> list[OpCall]:
    """Move each assignment behind all other calls, if none of them uses its variable after it."""
    kept: list[OpCall] = []
    last: list[OpCall] = []
    used: set[int] = set()
    for call in reversed(calls):
        if call.operation.type in _ASSIGNMENTS and call.inputs[0] not in used:
            last.append(call)
        else:
            kept.append(call)
            used.update(call.inputs)
    return [*reversed(kept), *reversed(last)]


def _grouped(calls: Sequence[OpCall], outputs: Iterable[int], early: frozenset[int]) -> tuple[GroupCall, ...]:
    """Group consecutive calls: up to the next that makes a large tensor; a pinned one stands alone.

    A function that has a gradient of its own stays in one group, with the gradient, and so does what makes and reads a
    list of tensors: gradients of lists pass no boundary. ``early`` are the slots that are filled before all calls.
    """
    ends = [place for place, call in enumerate(calls) if call.gradient is not None]
    bodies = custom_gradient_bodies([call.inputs for call in calls], [call.outputs for call in calls], ends)
    inside = {place for body, end in zip(bodies, ends, strict=True) for place in range(min(body, default=end), end)}
    inside.update(_between_lists(calls))
    groups: list[list[OpCall]] = []
    open_group = False
    for place, call in enumerate(calls):
        if place - 1 not in inside and (call.pinned or not open_group):
            groups.append([])
        groups[-1].append(call)
        open_group = place in inside or not (call.pinned or _makes_large(call))
    last_read: dict[int, int] = dict.fromkeys(outputs, len(groups))
    for number, group in reversed(list(enumerate(groups))):
        for call in group:
            for slot in call.reads:
                last_read.setdefault(slot, number)
    made_by = _Signatures()
    found = []
    for number, group in enumerate(groups):
        made = [slot for call in group for slot in call.outputs]
        read = dict.fromkeys(slot for call in group for slot in call.reads if slot not in set(made))
        read |= dict.fromkeys(slot for call in group for slot in _slots_of(call.after) if slot in early)
        found.append(
            GroupCall(
                members=tuple(group),
                inputs=tuple(read),
                outputs=tuple(slot for slot in made if last_read.get(slot, -1) > number),
                signature=made_by.of(group),
            )
        )
    return tuple(found)


def _between_lists(calls: Sequence[OpCall]) -> set[int]:
    """Return the places of calls from one that makes a list of tensors up to the last that reads it, without that."""
    last_reader = {slot: place for place, call in enumerate(calls) for slot in call.reads}
    between: set[int] = set()
    for place, call in enumerate(calls):
        for slot, dtype in zip(call.outputs, call.operation.dtypes, strict=True):
            if dtype == tf.variant:
                between.update(range(place, last_reader.get(slot, place)))
    return between


def _makes_large(call: OpCall) -> bool:
    if call.operation.type in rules.VIEWS or call.operation.type in rules.MULTI_VIEWS:
        return False
    made = zip(call.operation.shapes, call.operation.dtypes, strict=True)
    sizes = [shape.num_elements() for shape, dtype in made if dtype.is_floating]
    return any(size is None or size >= LARGE_ELEMENTS for size in sizes)


class _Signatures:
    """Describes operations without names: type, attributes, and where the inputs come from."""

    def __init__(self) -> None:
        self._producer: dict[int, str] = {}
        self._count = 0

    def of(self, group: Sequence[OpCall]) -> str:
        """Return the signature of the next group."""
        texts = []
        for call in group:
            attributes = sorted(
                (key, str(value))
                for key, value in call.operation.attributes.items()
                if not key.startswith("_") and not value.HasField("func") and key not in ("value", "shared_name")
            )
            digest = hashlib.sha256(repr(attributes).encode()).hexdigest()[:8]
            reads = " ".join(self._producer.get(slot, f"in{slot}") for slot in call.reads)
            texts.append(f"{call.operation.type}[{digest}]({reads})")
            for place, slot in enumerate(call.outputs):
                self._producer[slot] = f"{self._count}.{place}"
            self._count += 1
        return "; ".join(texts)
