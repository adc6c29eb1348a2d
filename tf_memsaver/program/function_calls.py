"""A traced TensorFlow function as one flat list of calls, each a few of its operations.

Calls of other functions are inlined. What needs no argument (reads of variables, what is made of them, and what sets
them for a later read) is hoisted in front of all calls, assignments are moved after them where nothing reads the
variable in between, and the rest is grouped so that each call makes one large tensor: segments of a plan are made of
such groups.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_memsaver.compat.graphs import FuncGraph, call_on_flat_tensors, flat_arguments
from tf_memsaver.compat.released import gradients_end_with_graphs, release
from tf_memsaver.compat.replicas import of_this_replica
from tf_memsaver.compat.tapes import stop_recording
from tf_memsaver.cost.rules import RANDOM
from tf_memsaver.errors import InvalidRequestError
from tf_memsaver.program.calls import Call, CallSequence
from tf_memsaver.program.grouping import arranged, grouped, needed
from tf_memsaver.program.inlining import Inliner
from tf_memsaver.program.op_calls import OpCall, slots_of
from tf_memsaver.program.program import Program
from tf_memsaver.program.unstacking import slices_as_one
from tf_memsaver.tfgraph.operations import ASSIGNMENTS, FUNCTION_CALLS, has_gradients

Grouping = Callable[[Sequence[OpCall], Sequence[int], frozenset[int], Mapping[int, int]], tuple[Call, ...]]
"""Makes calls of single operations; it gets the slots of the results, those that are live during the whole step, and
those of the tensors (ids) of the traced graph."""

_STATEFUL_CALLS = frozenset({"Case", "If", "StatefulPartitionedCall", "While"})
"""Operations whose gradients may have state."""


class FunctionCalls(Program):
    """The calls of a concrete function, and what is around them: arguments, variables, hoisted operations.

    ``sequence.inputs`` are the slots of the arguments, then of the captured tensors, then of what is hoisted;
    ``signature`` are the arguments and keyword arguments that the function was traced with, ``argument_specs`` the
    specs of its flat tensor arguments. The function itself, whose graph is large, is not kept.
    """

    def __init__(
        self,
        concrete: Any,
        scope: str | None = None,
        unscoped: Collection[str] = (),
        group: Grouping | None = None,
        frozen: Collection[tf.Variable] = (),
    ) -> None:
        """List the calls of a ``tf.types.experimental.ConcreteFunction``.

        With ``scope`` they are to run in the graph of their gradients, inside the name scope that was traced as this
        one, and not in a function of their own; ``unscoped`` are the names of those that were recorded without a name
        scope of their own (``parity.scopes``). ``group`` makes calls of operations, by what they make if left out.
        No gradient is taken for the variables in ``frozen``, although they are trainable.
        """
        self.name = _name_of(concrete)
        self.signature = concrete.structured_input_signature
        self._type = concrete.function_type
        self._results = tf.nest.map_structure(_spec, concrete.structured_outputs)
        self.variables: tuple[tf.Variable, ...] = tuple(concrete.graph.variables)
        self._frozen = frozenset(map(id, frozen))
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
        results = sum(leaf is not None for leaf in leaves)
        flat = Inliner(concrete.graph, self._variable_of, scope, unscoped, results)
        calls, slot_count = slices_as_one(needed(flat.calls, flat.outputs), flat.outputs, flat.slot_count)
        self._prologue, rest = self._hoisted(calls, count)
        made = [slot for call in self._prologue for slot in call.outputs]
        read = {slot for call in rest for slot in (*call.inputs, *slots_of(call.after))} | set(flat.outputs)
        made = [slot for slot in made if slot in read]
        resident = frozenset(range(self.argument_count, count)) | frozenset(made)
        found = (group or by_size)(rest, flat.outputs, resident, flat.slots)
        # What a group is opened into may have slots of its own, after those of the trace.
        last = max((slot for call in found for slot in call.outputs), default=-1)
        self.sequence = CallSequence(
            calls=found,
            inputs=(*range(count), *made),
            outputs=tuple(flat.outputs),
            slot_count=max(slot_count, last + 1),
            resident=resident,
            weights=self._trained(made),
            read_again=self._read_again(),
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
                    f"'{self.name}' was traced with {name}={expected!r}, but is called with {name}={given!r}. Call "
                    "optimize_function again with that value."
                )
        bound = kind.bind(*bound.args, **bound.kwargs)
        return flat_arguments(kind, bound)

    def accepts(self, flat: Sequence[Any]) -> bool:
        """Whether tensors fit the shapes and dtypes that the function was traced with."""
        specs = self.argument_specs
        return len(flat) == len(specs) and all(
            tensor.dtype == spec.dtype and tensor.shape.is_compatible_with(spec.shape)
            for tensor, spec in zip(flat, specs, strict=True)
        )

    def enter(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the tensors for ``sequence.inputs``: run what is hoisted."""
        slots = dict(enumerate([*inputs, *self._captures]))
        slots.update({slot: of_this_replica(variable).handle for slot, variable in self._variable_of.items()})
        for call in self._prologue:
            with contextlib.nullcontext() if self._may_be_trained(call) else stop_recording():
                call.run(slots)
        return [slots[slot] for slot in self.sequence.inputs]

    def finish(self, flat: Sequence[Any]) -> Any:
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
            trains = self._may_be_trained(call) and any(v.trainable for v in call.variables)
            if trains or not trained.isdisjoint(call.inputs):
                floats = map(has_gradients, call.operation.dtypes)
                trained.update(slot for slot, is_float in zip(call.outputs, floats, strict=True) if is_float)
        return frozenset(trained.intersection(made))

    def _may_be_trained(self, call: OpCall) -> bool:
        return not call.variables or any(id(variable) not in self._frozen for variable in call.variables)

    def _read_again(self) -> frozenset[int]:
        """Return the hoisted slots that are one of several reads of a variable, or made of one."""
        reads = [call for call in self._prologue if call.operation.type == "ReadVariableOp" and call.variables]
        times = Counter(id(call.variables[0]) for call in reads)
        again = {slot for call in reads if times[id(call.variables[0])] > 1 for slot in call.outputs}
        for call in self._prologue:
            if not again.isdisjoint(call.inputs):
                again.update(call.outputs)
        return frozenset(again)

    def _sorts_first(self, concrete: Any, calls: Sequence[OpCall]) -> bool:
        """Whether a call of the function has a name that sorts before that of the call of its gradient function.

        A function without state is called by a PartitionedCall, one with state by a StatefulPartitionedCall.
        """
        if all(call.operation.type not in _STATEFUL_CALLS for call in calls):
            return False
        graph = FuncGraph("gradient")
        with gradients_end_with_graphs(), graph.as_default():
            arguments = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in self.argument_specs]
            with tf.GradientTape() as tape:
                results = call_on_flat_tensors(concrete, arguments, self._captures)
            flat = tf.nest.flatten(results, expand_composites=True)
            floats = [tensor for tensor in flat if tensor is not None and tensor.dtype.is_floating]
            tape.gradient(floats, [variable for variable in self.variables if variable.trainable])
        names = [f"{each.name}/" for each in graph.get_operations() if each.type in FUNCTION_CALLS]
        release(graph)
        return bool(names) and names[0] < names[-1]

    def _hoisted(self, calls: Sequence[OpCall], count: int) -> tuple[list[OpCall], list[OpCall]]:
        """Part the calls into those that need no argument and can run first, and the others.

        Random numbers are made where they are read: they may be large, and a sum with them must stay one sum. What is
        assigned to a variable runs first only if the variable is used again, as the seed of a layer with several calls.
        """
        early = set(range(self.argument_count, count))
        last_use = {slot: place for place, call in enumerate(calls) for slot in call.inputs}
        written, used = set[int](), set[int]()
        hoisted, rest = [], []
        for place, call in enumerate(calls):
            resources = [slot for slot in call.inputs if slot in self._variable_of]
            is_read = call.operation.type == "ReadVariableOp"
            is_for_later = call.operation.type in ASSIGNMENTS and any(last_use[slot] > place for slot in resources)
            # Nothing overtakes what sets its variable, and what sets one overtakes nothing that has it in hand.
            in_turn = (is_read and written.isdisjoint(resources)) or (is_for_later and used.isdisjoint(resources))
            stays = call.operation.is_stateful or call.operation.type in RANDOM
            if (in_turn or not stays) and early.issuperset(call.reads):
                early.update(call.outputs)
                hoisted.append(call)
                continue
            used.update(resources)
            if not call.operation.only_reads:
                written.update(resources)
            rest.append(call)
        return hoisted, rest


def by_size(
    calls: Sequence[OpCall], outputs: Sequence[int], resident: frozenset[int], slots: Mapping[int, int]
) -> tuple[Call, ...]:
    """Return calls that make one large tensor each (a ``Grouping``)."""
    del slots
    return grouped(arranged(calls), outputs, resident)


def _python_values(argument: Any) -> list[Any]:
    """Return the leaves of an argument that are no tensors, ragged and sparse ones among them, and no specs of such."""
    specs_or_arrays = (tf.TypeSpec, np.ndarray, np.generic)
    leaves = tf.nest.flatten(argument)
    return [leaf for leaf in leaves if not (tf.is_tensor(leaf) or isinstance(leaf, specs_or_arrays))]


def _name_of(concrete: Any) -> str:
    """Return the name that a function has in Python, of which TensorFlow makes one of its own."""
    return re.sub(r"^__inference_(.+)_\d+$", r"\1", tf.compat.as_str(concrete.name))


def _spec(result: Any) -> Any:
    return result if result is None or isinstance(result, tf.TypeSpec) else tf.type_spec_from_value(result)
