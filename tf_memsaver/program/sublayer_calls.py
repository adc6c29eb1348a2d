"""A model with a ``call`` of its own as a list of calls: some of its sublayers, and the Python code between them.

What the sublayers compute is seen once, in a trace of the model's call, operation by operation. A plan may replay those
of them that get all they read as arguments and return all that is read of them; the code between stays as it is. Whole
networks among them are opened: their layers are calls. In training the model's own call runs, and what a plan replays
is run in segments when it is called (``sublayer_program``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tf_memsaver.compat import keras_calls
from tf_memsaver.ir.graph import CODE
from tf_memsaver.parity.names import Names
from tf_memsaver.program.boundaries import reason_against_replay
from tf_memsaver.program.calls import Call, Reader
from tf_memsaver.program.grouping import group_calls
from tf_memsaver.program.layer_program import is_network
from tf_memsaver.program.model_function import ModelFunction
from tf_memsaver.program.op_calls import GroupCall, OpCall
from tf_memsaver.program.opened import OpenedCall
from tf_memsaver.program.opening import Opener
from tf_memsaver.program.signature import Given
from tf_memsaver.program.traced_layers import Recorder, TracedLayer, numbers_in, sections_of
from tf_memsaver.tfgraph.operations import ASSIGNMENTS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Section:
    """A sublayer's call, or the code between two of them, as a unit (see ``calls.Call``)."""

    label: str
    kind: str
    group: GroupCall
    pinned: str

    @property
    def operation(self) -> Any:
        """Nothing: losses of layers are outputs of the trace."""
        return None

    @property
    def inputs(self) -> tuple[int, ...]:
        """The slots that its operations read."""
        return self.group.inputs

    @property
    def outputs(self) -> tuple[int, ...]:
        """The slots that are read after it."""
        return self.group.outputs

    @property
    def signature(self) -> str:
        """The class of the layer and what its operations are."""
        return f"{self.kind}: {self.group.signature}"

    def readers(self, slot: int) -> list[Reader]:
        """Return the operations that read a slot."""
        return self.group.readers(slot)

    def run(self, slots: Sequence[Any], training: bool | None, names: Names) -> list[Any]:
        """Emit the operations, as they were traced."""
        return self.group.run(slots, training, names)


class SublayerCalls(ModelFunction):
    """The training call of a model as sections; ``outputs`` are the structures that those of layers return, by label.

    ``opened`` are the networks (Functional and Sequential models) whose layers are units, ``nested`` those that are
    units as a whole, but can be optimized alone.
    Its operations are only planned with: training runs the model's Python code.
    """

    def __init__(self, model: Any, given: Given | None = None) -> None:
        """Trace ``model``, which is only read; called as ``fit`` does if nothing is given.

        Raises:
          UnsupportedModelError: its inputs are not known, or its call cannot be traced.
        """
        self.outputs: dict[str, Any] = {}
        self.nested: dict[str, Any] = {}
        self.opened: list[OpenedCall] = []
        super().__init__(model, given)
        del self._root, self._graph

    def replica(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Return nothing: Python code may exchange values with the other replicas, here with nobody."""
        return contextlib.nullcontext()

    def called(self, model: Any, flat: Sequence[Any]) -> Any:
        """Call the model and note which layers it calls."""
        self._graph = tf.compat.v1.get_default_graph()
        self._root = TracedLayer(layer=model, path="", start=0)
        recorder = Recorder(self._root, self._graph)
        with keras_calls.layer_calls_go_to(recorder):
            return self.given.called(model, flat)

    def group(
        self, calls: Sequence[OpCall], outputs: Sequence[int], resident: frozenset[int], slots: Mapping[int, int]
    ) -> tuple[Call, ...]:
        """Return the sections, with one of Python code in front of each layer and after the last."""
        (model_call,) = self._root.children
        layers = sections_of(model_call)
        number_of = numbers_in(self._graph, layers, self.scope)
        pieces: list[list[OpCall]] = [[] for _ in range(2 * len(layers) + 1)]
        place = 0
        for call in calls:
            number = number_of(call.label)
            # Code between two layers lies after the one that came last.
            place = 2 * number + 1 if number is not None else place + place % 2
            pieces[place].append(call)
        groups = group_calls(pieces, outputs, resident)
        used = {*outputs, *resident, *(slot for call in calls for slot in (*call.inputs, *call.outputs))}
        opener = Opener(slots, resident, max(used) + 1)
        sections: list[Call] = []
        for place, group in enumerate(groups):
            if place % 2 == 0:
                pinned = "is Python code between layers, which runs once"
                sections.append(Section(label=f"python_{place // 2}", kind=CODE, group=group, pinned=pinned))
                continue
            layer = layers[place // 2]
            self.outputs[layer.path] = keras.tree.map_structure(lambda _: None, layer.outputs, none_is_leaf=False)
            if is_network(layer.layer):
                inside = opener.calls_of(layer, group, len(sections))
                sections += inside
                if inside:
                    continue
                self.nested[layer.path] = layer.layer
            pinned = _reason(layer, group, resident, slots)
            kind = type(layer.layer).__name__
            sections.append(Section(label=layer.path, kind=kind, group=group, pinned=pinned))
        self.opened = opener.opened
        return tuple(sections)


def _reason(layer: TracedLayer, group: GroupCall, resident: frozenset[int], slots: Mapping[int, int]) -> str:
    """Return why a layer's call cannot be replayed, or an empty string."""
    for member in group.members:
        if not member.operation.only_reads and member.operation.type not in ASSIGNMENTS:
            return f"runs {member.operation.type}, which must run once"
    reads = [slot for slot in group.inputs if slot not in resident]
    return reason_against_replay(layer, reads, group.outputs, lambda tensor: slots.get(id(tensor)))
