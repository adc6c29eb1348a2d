"""Operations of a traced function as calls: single ones, with what belongs to them, and groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tf_memsaver.compat import keras_variables
from tf_memsaver.compat.replicas import of_all_replicas, of_this_replica
from tf_memsaver.compat.tapes import variable_accessed
from tf_memsaver.cost import rules
from tf_memsaver.parity.grappler import ADDITIONS, function_scope, tape_scope
from tf_memsaver.parity.names import Names
from tf_memsaver.program.calls import Reader
from tf_memsaver.tfgraph.emission import Template
from tf_memsaver.tfgraph.operations import ASSIGNMENTS, has_gradients

Naming = Callable[[str], str]
"""Returns the name to give to what has a label."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Constant:
    """A small Const, which is made anew in each group that reads it."""

    operation: Template
    label: str

    def run(self, named: Naming) -> tf.Tensor:
        """Emit it."""
        # After the gate of a replay it would be no constant to the graph optimizer, which folds constants into others.
        with tf.control_dependencies(None):
            return self.operation.emit([], named(self.label))[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gathering:
    """A NoOp that waits for others, so that one control input stands for theirs.

    Graph optimisation takes out a control input that another path implies, but not one of these: without them more
    additions would meet, and be reordered.
    """

    label: str
    after: tuple[int | Gathering, ...]

    def run(self, slots: dict[int, Any], named: Naming) -> Any | None:
        """Emit it, or return it if another call has; None if nothing that it waits for is there."""
        label = named(self.label)
        graph = tf.compat.v1.get_default_graph()
        with contextlib.suppress(KeyError):
            return graph.get_operation_by_name(f"{tf.get_current_name_scope()}/{label}".lstrip("/"))
        before = _present(self.after, slots, named)
        with tf.control_dependencies(before):
            return tf.no_op(name=label) if before else None


def _present(after: Sequence[int | Gathering], slots: dict[int, Any], named: Naming) -> list[Any]:
    if after and keras_variables.recording_scope() is not None:
        # A segment lacks who else waits, without whom a NoOp goes away and takes what it implied along.
        after = slots_of(after)
    found = (slots.get(each) if isinstance(each, int) else each.run(slots, named) for each in after)
    return [each for each in found if each is not None]


def slots_of(after: Iterable[int | Gathering]) -> list[int]:
    """Return all that is waited for, in the end."""
    return [slot for each in after for slot in ([each] if isinstance(each, int) else slots_of(each.after))]


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

    def _without_function(self, label: str) -> str:
        return without(self.function, label)

    def _without_number(self, label: str) -> str:
        """Return what the operations of a label were called before they were numbered among themselves."""
        name, _, number = label.rpartition("_")
        return name if number.isdecimal() and any(call.label == name for call in self.calls) else label

    def bound(self, slots: Any, of_tape: bool) -> Callable[..., list[Any]]:
        """Return the gradient function, as TensorFlow registers them, for the tensors that are in ``slots`` now.

        Where it is ``of_tape``, its operations are numbered on, as the plain step's are.
        """
        seen = {slot: slots[slot] for slot in self.captured}
        named = self._without_number if of_tape else str

        def gradient(operation: Any, *upstream: Any) -> list[Any]:
            local = {**seen, **dict(zip(self.upstream, upstream, strict=True))}
            for call in self.calls:
                # Saving asks without an operation, and puts what it gets into a function to be called again.
                call.run(local, named if operation is not None else self._without_function)
            return [None if slot is None else local[slot] for slot in self.results]

        return gradient


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpCall:
    """One operation of the function.

    ``constants`` holds, by place of the input, a Const to make anew; ``variables`` are those whose handles are
    inputs; ``after`` says what must run before: slots, and operations that gather several; ``passes_lists`` says
    whether lists of tensors go in or out, ``waits_for_others`` whether this is an addition to a sum that must wait
    for others; ``of_tape`` whether a tape names the backward operations, in the graph of the forward pass, or a
    gradient function in one of its own. A tape goes by the operation, if that was recorded in a name scope of its
    own (``own_scope``), or else by the scope that it lies in.
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
    waits_for_others: bool = False
    of_tape: bool = False
    own_scope: bool = True

    def run(self, slots: dict[int, Any], named: Naming = str) -> None:
        """Emit the operation on the tensors in ``slots`` and put what it makes there.

        ``named`` makes the name of its label. The names of the source matter: graph optimisation sorts by them.
        """
        label = named(self.label)
        variables = [of_this_replica(variable) for variable in self.variables]
        for variable in variables:
            variable_accessed(variable)
        if self.operation.type == "ReadVariableOp" and variables:
            with tf.name_scope(f"{tf.get_current_name_scope()}/{label.rpartition('/')[0]}/".lstrip("/")):
                slots[self.outputs[0]] = variables[0].value()
            return
        for slot, constant in zip(self.inputs, self.constants, strict=True):
            if constant is not None and slot not in slots:
                slots[slot] = constant.run(named)
        tensors = [slots[slot] for slot in self.inputs]
        gradient = None if self.gradient is None else self.gradient.bound(slots, self.of_tape)
        before = _present(self.after, slots, named)
        with tf.control_dependencies(before) if before else contextlib.nullcontext():
            whole = of_all_replicas(variables[0]) if self.operation.type in ASSIGNMENTS and variables else None
            if whole is not None:
                # It knows whether each replica sets its own copy, or all set theirs to what they agree on.
                getattr(whole, ASSIGNMENTS[self.operation.type])(tensors[1], name=label, read_value=False)
                return
            made = self.operation.emit(tensors, label, gradient, self.of_tape, self._backward_scope(label))
        slots.update(zip(self.outputs, made, strict=True))

    def _backward_scope(self, label: str) -> Callable[[str], str]:
        """Return what names the scope of the backward operations, by the name that the operation has got."""
        if not self.of_tape:
            return lambda _: function_scope(label)
        if self.gradient is not None:
            # A tape opens no scope for the gradient function of a tf.custom_gradient.
            return lambda _: ""
        if self.own_scope:
            return tape_scope
        return lambda name: tape_scope(name.rpartition("/")[0])

    @property
    def reads(self) -> list[int]:
        """The slots that a run needs: the inputs but for constants, and what a custom gradient looks at."""
        read = [slot for slot, constant in zip(self.inputs, self.constants, strict=True) if constant is None]
        return [*read, *(() if self.gradient is None else self.gradient.captured)]

    @property
    def differentiable(self) -> list[int]:
        """The slots among its outputs that may have a gradient: those of floating or complex numbers."""
        made = zip(self.outputs, self.operation.dtypes, strict=True)
        return [slot for slot, dtype in made if has_gradients(dtype)]

    @property
    def looks_rows_up(self) -> bool:
        """Whether it takes entries of its first input along the first dimension, so that its gradient is sparse."""
        axis = self.constants[2] if self.operation.type == "GatherV2" else None
        return axis is not None and not tf.make_ndarray(axis.operation.attributes["value"].tensor).any()

    @property
    def pinned(self) -> str:
        """Why the operation runs once only: it has side effects, or reads what others change."""
        if self.operation.names_functions and self.operation.is_stateful and self.operation.only_reads:
            return f"runs {self.operation.type} with weights inside, which plans by operations keep"
        if self.operation.is_stateful:
            return f"runs {self.operation.type}, which must run once"
        if self.passes_lists:
            return "makes or reads a list of tensors, whose gradient does not pass the boundary of a segment"
        if self.waits_for_others:
            return "adds to a sum that waits for other operations, so that the sums are not made one in the plain step"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupCall:
    """Consecutive operations as one call (see ``calls.Call``)."""

    members: tuple[OpCall, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    signature: str
    name: str = ""

    @property
    def operation(self) -> Any:
        """The last operation."""
        return self.members[-1].operation

    @property
    def label(self) -> str:
        """The name that it was given, or that of the last operation."""
        return self.name or self.end

    @property
    def end(self) -> str:
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
            Reader(
                member.label, member.operation.type, member.outputs[0] if member.operation.type in ADDITIONS else None
            )
            for member in self.members
            for read in member.inputs
            if read == slot and member.operation.type not in rules.METADATA_READERS
        ]

    def run(self, slots: Sequence[Any], training: bool | None, names: Names) -> list[Any]:
        """Emit all operations; ``training`` is settled in the traced function."""
        del training
        local = {slot: slots[slot] for slot in self.inputs}
        for member in self.members:
            member.run(local, names.of_operation)
        return [local[slot] for slot in self.outputs]


def without(called: str, label: str) -> str:
    """Return a label without the name of a call in front of it."""
    return label.removeprefix(f"{called}/") if called else label
