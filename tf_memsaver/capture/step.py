"""What a traced training step consists of, and what captures ask of whatever has one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import tensorflow as tf

from tf_memsaver.compat.graphs import led_to
from tf_memsaver.compat.keras_variables import local_variable
from tf_memsaver.cost.rules import METADATA_READERS
from tf_memsaver.ir.graph import CODE, MemoryKind, Phase
from tf_memsaver.program.calls import CallSequence
from tf_memsaver.program.train_step import Placeholders

MODEL_SCOPE = "model"
"""The name scope that stands for a model's in a traced step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """Something that is trained: ``variable`` is what a tape watches, ``owner`` what an optimizer takes.

    Under a tf.distribute strategy ``variable`` is that of the first replica.
    """

    path: str
    variable: tf.Variable
    owner: Any


Resident = tuple[str, tf.Variable, MemoryKind]
"""A variable that is live during the step, with its name and kind."""


def residents_of(parameters: Iterable[Any], slots: Iterable[Any]) -> list[Resident]:
    """Return the variables of models and of optimizers, each once: an optimizer lists those of its model, too."""
    # Those that an optimizer made itself may be of TensorFlow.
    pairs = [(v, MemoryKind.PARAMETER) for v in parameters] + [(v, MemoryKind.OPTIMIZER) for v in slots]
    found: dict[int, Resident] = {}
    for each, kind in pairs:
        variable = local_variable(each)
        found.setdefault(id(variable), (getattr(each, "path", each.name), variable, kind))
    return list(found.values())


class StepSource(Protocol):
    """What a Graph is made of: a training step that can be traced."""

    @property
    def name(self) -> str:
        """What errors and plans call it."""
        ...

    @property
    def sequence(self) -> CallSequence:
        """The calls, one unit each."""
        ...

    def residents(self) -> Sequence[Resident]:
        """Return all variables that are live during the step."""
        ...

    def trace(self, graph: Any) -> TracedStep:
        """Return the step, traced in a graph.

        Raises:
          UnsupportedModelError: nothing can be trained.
        """
        ...

    def close(self) -> None:
        """Forget what tracing left behind; called once the graph is no longer needed."""
        ...


class CalledStep(StepSource, Protocol):
    """A step that is put together of one call of a model: ``model_step`` and ``function_step`` have one each."""

    @property
    def optimizer(self) -> Any | None:
        """A built Keras optimizer, if the step has an update."""
        ...

    def update(self, gradients: list[tuple[Any, Any]]) -> None:
        """Update the weights: pairs of a gradient and the owner of a weight."""
        ...

    @property
    def weights(self) -> Sequence[Weight]:
        """What is trained."""
        ...

    def enter(self, placeholders: Placeholders) -> list[Any]:
        """Make the batch; return the tensors for ``sequence.inputs``."""
        ...

    def loss(self, outputs: list[Any]) -> Any:
        """Return the scalar loss for the tensors of ``sequence.outputs``."""
        ...

    def metrics(self, outputs: list[Any]) -> None:
        """Add what a step does with its results beside the loss."""
        ...

    def losses_of(self, operation: Any) -> list[Any]:
        """Return the losses that a call's operation has added."""
        ...

    def seen_through(self, output: Any) -> list[Any]:
        """Return the tensors that the loss may take instead of an output."""
        ...


def units_of_code(sequence: CallSequence) -> set[int]:
    """Return the units that are code of the user's, which no segment replays."""
    return {unit for unit, call in enumerate(sequence.calls) if call.kind == CODE}


@dataclass(kw_only=True)
class TracedStep:
    """The traced graph and, beside it, who made which operation.

    ``owners[i]`` is the (phase, unit) of operation ``i``; ``boundary[u]`` are the tensors that call ``u`` made;
    ``sparse_units`` are, by unit, the names of what it has a sparse gradient (IndexedSlices) for that is a term of a
    sum; ``drawing_units`` are the calls that drew from Python's or NumPy's random numbers; ``unknown_reads`` are, by
    unit, the names of the trainable variables that a call reads and that the source does not list;
    ``gradient_units[id(t)]`` are the calls that send a gradient to the boundary tensor ``t`` (None is the loss).
    ``passes[i]`` is the number of the tape's pass in which operation ``i`` runs, where there are several.
    ``networks`` are the first and last unit (exclusive) of each call of a network, where there is code in between.
    ``code`` are the units that are code of the user's, which runs as it stands. ``elsewhere`` are the devices of other
    replicas: what runs there is no part of the step.
    """

    graph: Any
    owners: list[tuple[Phase, int | None]] = field(default_factory=list)
    boundary: list[list[Any]] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    loss: Any = None
    weight_gradients: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    sparse_units: dict[int, str] = field(default_factory=dict)
    drawing_units: set[int] = field(default_factory=set)
    unknown_reads: dict[int, str] = field(default_factory=dict)
    gradient_units: dict[int, list[int | None]] = field(default_factory=dict)
    networks: list[tuple[int, int]] = field(default_factory=list)
    code: set[int] = field(default_factory=set)
    passes: list[int] = field(default_factory=list)
    elsewhere: frozenset[str] = frozenset()

    @cached_property
    def reachable(self) -> set[int]:
        """The ids of the operations that something outside depends on: the outputs and every assignment.

        An optimizer that accumulates gradients assigns in a branch.
        """
        effects = [op for op in self.graph.get_operations() if op.type.startswith(("Assign", "Case", "If", "Resource"))]
        return led_to(
            [*(tensor.op for tensor in self.outputs), *(op for op in effects if op.device not in self.elsewhere)]
        )

    @cached_property
    def readers(self) -> dict[int, list[Any]]:
        """The reachable operations that read more of a tensor than its shape, by the tensor's id."""
        readers: dict[int, list[Any]] = {}
        for operation in self.graph.get_operations():
            if id(operation) in self.reachable and operation.type not in METADATA_READERS:
                for tensor in operation.inputs:
                    readers.setdefault(id(tensor), []).append(operation)
        return readers
