"""What judging any plan of one graph needs, worked out once: buffers, who makes them, and the plain steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np

from tf_memsaver.ir.graph import Graph, MemoryKind, Op, Phase
from tf_memsaver.judge.rows import Ints, ScheduledOp, StepArrays
from tf_memsaver.judge.updates import last_updates, update_groups


class Prepared:
    """A graph, as the judge reads it. Lists over values have an entry for each value of the graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.roots = graph.roots
        """The value whose buffer a value uses: itself, or what it is a view of."""
        self.aliases = [value.alias_of for value in graph.values]
        self.nbytes = [0 if value.alias_of is not None else value.nbytes for value in graph.values]
        self.resident = [graph.values[root].kind.resident for root in self.roots]
        self.data_bytes = graph.bytes_of(MemoryKind.DATA)
        """Bytes of the data, which lie beside the step: nothing of it is made or freed there."""
        self.residents = {
            v.index: v.nbytes
            for v in graph.values
            if v.kind.resident and v.kind is not MemoryKind.DATA and v.alias_of is None
        }
        """The step's buffers that live all the time, and their bytes."""
        self.forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
        self.backward = [op for op in graph.ops if op.phase is not Phase.FORWARD]
        self.updates = last_updates(graph.ops)
        """The updates that the step ends with."""
        self.passes = list(_passes(graph.ops[: len(graph.ops) - len(self.updates)]))
        """The ops before those in execution order: of each tape the forward pass, then the backward pass."""
        self.unit_of = [-1] * len(graph.values)
        """The unit whose forward ops make a value; -1 for all others."""
        self.unit_forward: list[list[Op]] = [[] for _ in graph.units]
        for op in self.forward:
            if op.unit is not None:
                self.unit_forward[op.unit].append(op)
                for value in op.outputs:
                    self.unit_of[value] = op.unit
        self.is_gradient = [value.kind is MemoryKind.GRADIENT for value in graph.values]
        """For each value, whether it is the gradient of an intermediate result."""
        self.outlive = [self.roots[value] for value in graph.outputs if not self.resident[value]]
        """The buffers that are live when the step ends."""
        self.buffers = [(self._buffers((*op.inputs, *op.outputs)), self._buffers(op.overwrites)) for op in graph.ops]
        """For each op, the values that it touches and those that it may overwrite, each with its buffer."""
        self.static = [self._static_step(op) for op in graph.ops]
        """For each op, its step in the plain schedule."""

    @cached_property
    def rows(self) -> StepArrays:
        """``static`` as arrays."""
        return StepArrays.of(self.static)

    @cached_property
    def sizes(self) -> Ints:
        """``nbytes`` as an array."""
        return np.array(self.nbytes, dtype=np.int64)

    @cached_property
    def parts(self) -> Ints:
        """In how many buffers each value lies."""
        return np.array([value.parts for value in self.graph.values], dtype=np.int64)

    @cached_property
    def update_groups(self) -> dict[int, int]:
        """The group of each update (see ``update_groups``)."""
        return update_groups(self.graph)

    @cached_property
    def outlive_passes(self) -> list[int]:
        """The buffers that are live when the last updates begin, or that these touch."""
        touched = (buffer for op in self.updates for buffer in self.static[op.index].touches)
        return [*dict.fromkeys([*self.outlive, *touched])]

    @cached_property
    def in_one_pass(self) -> Prepared:
        """The same for ``Graph.in_one_pass``, as searches see the step."""
        joined = self.graph.in_one_pass
        return self if joined is self.graph else Prepared(joined)

    def _buffers(self, values: Iterable[int]) -> tuple[tuple[int, int], ...]:
        """Return values that are not resident, each with the value whose buffer it uses."""
        return tuple((value, self.roots[value]) for value in values if not self.resident[value])

    def _static_step(self, op: Op) -> ScheduledOp:
        touched, overwritten = self.buffers[op.index]
        return ScheduledOp(
            op=op.index,
            replay=False,
            touches=tuple(dict.fromkeys(root for _, root in touched)),
            allocates=tuple(v for v in op.outputs if self.roots[v] == v and not self.resident[v]),
            overwrites=tuple(dict.fromkeys(root for _, root in overwritten)),
            workspace=op.workspace_bytes,
        )


def _passes(ops: Sequence[Op]) -> Iterator[tuple[bool, list[Op]]]:
    """Yield whether ops are of a forward pass, and consecutive ones that are all of one pass, with its updates."""
    start, key = 0, (True, 0)
    for place, op in enumerate(ops):
        # An update may stand among the ops of another tape.
        its = key if op.phase is Phase.UPDATE and not key[0] else (op.phase is Phase.FORWARD, op.tape)
        if place > start and its != key:
            yield key[0], list(ops[start:place])
            start = place
        key = its
    if ops:
        yield key[0], list(ops[start:])
