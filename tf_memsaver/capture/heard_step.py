"""Capture of a model's own ``train_step``: it is traced as it stands, and layers and tapes are heard.

Which call an operation belongs to is known by counting; which call an operation of a backward pass belongs to, by the
operation that it is the gradient of.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_memsaver.capture.notes import CallNotes, SparseGradients, complete_shape
from tf_memsaver.capture.step import Resident, TracedStep, residents_of, units_of_code
from tf_memsaver.compat import keras_calls, keras_training, keras_variables, tapes
from tf_memsaver.compat.replicas import other_devices
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.ir.graph import Phase
from tf_memsaver.parity.names import Names
from tf_memsaver.program import batch
from tf_memsaver.program.kept_objects import KeptObjects
from tf_memsaver.program.layer_paths import NamedCalls
from tf_memsaver.program.model_call import arguments_of
from tf_memsaver.program.opened import OpenedCall, taken_over
from tf_memsaver.program.step_program import StepProgram
from tf_memsaver.program.train_step import Differentiated, TapeNotes, left_as_it_was, run_train_step, what_is_traced


class HeardStep:
    """The ``train_step`` of a Keras model (see ``step.StepSource``)."""

    def __init__(self, model: Any, batch_size: int, program: StepProgram) -> None:
        """Prepare the step of a model, which is only read."""
        self._model, self._program = model, program
        self.name: str = model.name
        self.sequence = program.sequence
        self._specs = batch.batch_specs(model, batch_size)
        self._stack = contextlib.ExitStack()
        self._optimizers = self._stack.enter_context(left_as_it_was(model))
        networks = {id(each.network): each.network for each in program.opened}
        variables = {id(v): v for part in (model, *networks.values()) for v in part.variables}
        self._variables = list(variables.values())
        self._trained = {
            id(keras_variables.local_variable(v).handle): v for v in self._variables if keras_variables.is_trained(v)
        }

    def residents(self) -> Sequence[Resident]:
        """Return the variables of the model and of all networks, and those of the optimizers."""
        return residents_of(self._variables, KeptObjects(*self._optimizers).variables)

    def trace(self, graph: Any) -> TracedStep:
        """Trace the step in a graph.

        Raises:
          UnsupportedModelError: no tape takes a gradient.
        """
        networks = [(each.start, each.stop) for each in self._program.opened]
        step = TracedStep(
            graph=graph,
            networks=networks,
            code=units_of_code(self.sequence),
            elsewhere=other_devices(self._model.distribute_strategy),
        )
        known = {id(variable) for _, variable, _ in self.residents()}
        notes = TapeNotes()

        def placeholders(specs: Sequence[tf.TensorSpec]) -> list[Any]:
            step.inputs = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs]
            return step.inputs

        with graph.as_default():
            running = _Running(self._program, step, known)
            logs = run_train_step(self._model, self._specs, placeholders, running, notes)
        if not notes.taken:
            raise UnsupportedModelError(
                f"{what_is_traced(self._model)} takes no gradient with a tf.GradientTape, so there is nothing to plan."
            )
        step.outputs = [each for each in keras.tree.flatten(logs) if tf.is_symbolic_tensor(each)]
        _Assignment(step, running.ranges, notes, self._trained).run()
        return step

    def close(self) -> None:
        """Forget what tracing left behind."""
        self._stack.close()


class _Running(NamedCalls):
    """Handles calls of layers: runs networks call by call, and notes what each adds to the graph."""

    def __init__(self, program: StepProgram, step: TracedStep, known: Collection[int]) -> None:
        super().__init__()
        self._opened = {each.path: each for each in program.opened}
        self._step, self._known = step, known
        self._step.boundary = [[] for _ in program.sequence.calls]
        self.ranges: list[tuple[int, int, int]] = []
        """First and last operation (exclusive) of each unit, and its number."""

    def named(self, path: str, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        opened = self._opened.get(path)
        if opened is None:
            return call(*args, **kwargs)

        def run(network: Any, given: Any, named: Any) -> Any:
            return self._run(opened, network, given, named)

        return taken_over(opened.program, layer, call, args, kwargs, run)

    def _run(self, opened: OpenedCall, network: Any, args: Any, kwargs: Any) -> Any:
        """Return what a call that is opened returns."""
        program, sequence, graph = opened.program, opened.program.sequence, self._step.graph
        slots: list[Any] = [None] * sequence.slot_count
        kwargs = keras_calls.accepted_arguments(network, kwargs)
        for slot, tensor in zip(sequence.inputs, program.enter_call(network, args, kwargs), strict=True):
            slots[slot] = tensor
        names = Names.of_model()
        training = arguments_of(network, args, kwargs).get("training", keras_calls.training_of_call())
        notes = CallNotes(self._step, self._known, [call.operation for call in sequence.calls])
        for unit, call in enumerate(sequence.calls, opened.start):
            start = graph.num_operations()
            before = {id(loss) for loss in keras_training.losses_of(call.operation)}
            with tapes.VariableWatcher() as watcher:
                made = call.run(slots, training=training, names=names)
            # In a replica of tf.distribute a tape watches the variable of all replicas.
            notes.note(unit, map(keras_variables.local_variable, watcher.watched_variables()))
            added = [loss for loss in keras_training.losses_of(call.operation) if id(loss) not in before]
            for slot, tensor in zip(call.outputs, made, strict=True):
                complete_shape(tensor, sequence.shapes.get(slot), self._step)
                slots[slot] = tensor
            self._step.boundary[unit] = [*made, *added]
            self.ranges.append((start, graph.num_operations(), unit))
        return program.finish([slots[slot] for slot in sequence.outputs])


class _Assignment:
    """Tells which phase and unit each operation of a traced step belongs to, and what passes between units."""

    def __init__(
        self, step: TracedStep, ranges: list[tuple[int, int, int]], notes: TapeNotes, trained: dict[int, Any]
    ) -> None:
        self._step, self._ranges, self._notes, self._trained = step, ranges, notes, trained
        self._operations = step.graph.get_operations()
        self._place = {id(operation): place for place, operation in enumerate(self._operations)}
        self._units: list[int | None] = [None] * len(self._operations)

    def run(self) -> None:
        """Fill in the step."""
        phases = self._phases()
        self._forward_units()
        self._backward_units(phases)
        self._step.owners = list(zip(phases, self._units, strict=True))
        self._step.passes = self._passes(phases)
        self._pass_gradients()

    def _phases(self) -> list[Phase]:
        """Backward is what tapes add, an update what is made of that; a gradient that a tape records is forward.

        So is what a network computes from the gradients of a tape before it (of images that are changed against it),
        and all else that a later tape takes a gradient of.
        """
        phases = [Phase.FORWARD] * len(self._operations)
        for taken in self._notes.taken:
            if not taken.nested:
                phases[taken.start : taken.stop] = [Phase.BACKWARD] * (taken.stop - taken.start)
        forward = {id(each.operation) for each in self._notes.operations}
        for start, stop, _ in self._ranges:
            forward.update(map(id, self._operations[start:stop]))
        after_tapes: set[int] = set()
        for place, operation in enumerate(self._operations):
            if phases[place] is Phase.BACKWARD:
                after_tapes.add(id(operation))
            elif id(operation) not in forward and any(id(tensor.op) in after_tapes for tensor in operation.inputs):
                after_tapes.add(id(operation))
                phases[place] = Phase.UPDATE
        return phases

    def _passes(self, phases: Sequence[Phase]) -> list[int]:
        """Return the tape's pass that each operation is of: as many were over when it was added.

        What no gradient is taken through, such as a metric, is run as soon as it can be.
        """
        starts = [taken.start for taken in self._notes.taken if not taken.nested]
        passes = [
            bisect.bisect_right(starts, place) - (phase is not Phase.FORWARD) for place, phase in enumerate(phases)
        ]
        if len(starts) == 1:
            return [0] * len(passes)
        in_turn = {place for place, unit in enumerate(self._units) if unit is not None}
        in_turn |= {self._place[id(each.operation)] for each in self._notes.operations}
        for place in range(len(phases) - 1, -1, -1):
            if place in in_turn:
                in_turn.update(self._place[id(tensor.op)] for tensor in self._operations[place].inputs)
        for place, operation in enumerate(self._operations):
            if phases[place] is Phase.FORWARD and place not in in_turn:
                passes[place] = max((passes[self._place[id(tensor.op)]] for tensor in operation.inputs), default=0)
        return passes

    def _forward_units(self) -> None:
        """Give units their operations, and code between two networks what stands there."""
        end, last = 0, None
        for start, stop, unit in self._ranges:
            if last is not None and last + 1 < unit:
                self._units[end:start] = [unit - 1] * (start - end)
            self._units[start:stop] = [unit] * (stop - start)
            end, last = stop, unit

    def _backward_units(self, phases: Sequence[Phase]) -> None:
        for each in self._notes.operations:
            place = self._place[id(each.operation)]
            if phases[place] is Phase.FORWARD and phases[each.start : each.stop].count(Phase.BACKWARD):
                self._units[each.start : each.stop] = [self._units[place]] * (each.stop - each.start)

    def _pass_gradients(self) -> None:
        """Note which units send gradients to what others made, and those of variables."""
        step = self._step
        makers = {id(t): unit for unit, made in enumerate(step.boundary) for t in made if isinstance(t, tf.Tensor)}
        step.gradient_units = {key: list(units) for key, units in self._senders(makers).items()}
        step.sparse_units = self._sparse_units(makers)
        step.weight_gradients.extend(self._weight_gradients())

    def _sent(self) -> Iterator[tuple[int | None, Any, Any]]:
        """Yield the unit, the operand and the gradient of all that operations send."""
        for each in self._notes.operations:
            yield from self._sent_by(each)

    def _sent_by(self, each: Differentiated) -> Iterator[tuple[int | None, Any, Any]]:
        unit = self._units[self._place[id(each.operation)]]
        for tensor, gradient in zip(each.operation.inputs, each.gradients, strict=False):
            if gradient is not None:
                yield unit, tensor, gradient

    def _senders(self, makers: Mapping[int, int]) -> dict[int, dict[int | None, None]]:
        """Return, by the id of a tensor, the other units that send gradients to it, in order."""
        found: dict[int, dict[int | None, None]] = {}
        for unit, tensor, _ in self._sent():
            if makers.get(id(tensor), unit) != unit:
                found.setdefault(id(tensor), {})[unit] = None
        return found

    def _sparse_units(self, makers: Mapping[int, int]) -> dict[int, str]:
        """Return what units have sparse gradients for that are terms of sums; each tape adds up its own."""
        by_tape: dict[int, SparseGradients] = {}
        inner = {id(internal): id(external) for external, internal in self._step.graph.captures}
        starts = [taken.start for taken in self._notes.taken]
        for each in self._notes.operations:
            sparse = by_tape.setdefault(bisect.bisect_right(starts, each.start), SparseGradients())
            for unit, tensor, gradient in self._sent_by(each):
                is_sparse, source = isinstance(gradient, tf.IndexedSlices), _source(tensor)
                variable = self._trained.get(inner.get(id(source), 0))
                if variable is not None:
                    sparse.add(variable.path, unit, is_sparse, variable)
                elif is_sparse and makers.get(id(source), unit) != unit:
                    sparse.leaves(source.name, unit)
        return {unit: name for sparse in by_tape.values() for unit, name in sparse.summed().items()}

    def _weight_gradients(self) -> Iterator[Any]:
        """Yield the gradients that tapes return for weights; a sparse one as its values."""
        for taken in self._notes.taken:
            for source, result in zip(taken.sources, taken.results, strict=True):
                if result is not None and id(source) in self._trained and not taken.nested:
                    yield result.values if isinstance(result, tf.IndexedSlices) else result


def _source(tensor: Any) -> Any:
    """Return what the sparse gradient of a tensor goes to: a variable, if the tensor is read from one."""
    while tensor.op.type in ("Cast", "Identity", "ReadVariableOp"):
        tensor = tensor.op.inputs[0]
    return tensor
