"""A model with a ``call`` of its own as a list of calls: some of its sublayers, and the Python code between them.

What the sublayers compute is seen once, in a trace of the model's call, operation by operation. A plan may replay those
of them that get all they read as arguments and return all that is read of them; the code between stays as it is. In
training the model's own call runs, and the sublayers that a plan replays are run as segments when they are called
(``sublayer_program``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tf_memsaver.compat import keras_calls, keras_models
from tf_memsaver.parity.names import Names
from tf_memsaver.program.calls import Reader
from tf_memsaver.program.grouping import group_calls
from tf_memsaver.program.layer_paths import LayerPaths
from tf_memsaver.program.model_function import ModelFunction
from tf_memsaver.program.op_calls import GroupCall, OpCall
from tf_memsaver.tfgraph.operations import ASSIGNMENTS


@dataclass(kw_only=True, eq=False)
class TracedLayer:
    """The call of a layer in the trace: its operations are those from ``start`` to ``stop`` of the graph."""

    layer: Any
    path: str
    start: int
    stop: int = 0
    given: list[Any] = field(default_factory=list)
    outputs: Any = None
    children: list[TracedLayer] = field(default_factory=list)

    @property
    def returned(self) -> list[Any]:
        """The flat outputs, and the masks that hang on them."""
        return _with_masks(keras.tree.flatten(self.outputs))


def sections_of(root: TracedLayer) -> list[TracedLayer]:
    """Return the calls that are units: repeated blocks, and what stands beside them.

    Of layers that are called one after another and made of others, those of one class are blocks. A layer that holds
    such blocks somewhere inside is taken apart, as the model is; any other is a unit.
    """
    repeated = Counter(type(child.layer) for child in root.children if child.children)
    found = []
    for child in root.children:
        is_block = repeated[type(child.layer)] > 1
        found += sections_of(child) if not is_block and _holds_blocks(child) else [child]
    return found


def _holds_blocks(call: TracedLayer) -> bool:
    if keras_models.is_built_in(call.layer) and not isinstance(call.layer, keras.Model):
        return False
    kinds = Counter(type(child.layer) for child in call.children if child.children)
    return max(kinds.values(), default=0) > 1 or any(map(_holds_blocks, call.children))


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
        """The slots that are read behind it."""
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

    ``nested`` are those layers that are whole networks: Functional and Sequential models, which can be optimized alone.
    Its operations are only planned with: training runs the model's Python code.
    """

    def __init__(self, model: Any) -> None:
        """Trace ``model``, which is only read.

        Raises:
          UnsupportedModelError: its inputs are not known, or its call cannot be traced.
        """
        self.outputs: dict[str, Any] = {}
        self.nested: dict[str, Any] = {}
        super().__init__(model)
        del self._root, self._graph

    def called(self, model: Any, inputs: Any) -> Any:
        """Call the model and note which layers it calls."""
        self._graph = tf.compat.v1.get_default_graph()
        self._root = TracedLayer(layer=model, path="", start=0)
        recorder = _Recorder(self._root, self._graph)
        with keras_calls.layer_calls_go_to(recorder):
            return model(inputs, **self.arguments)

    def group(
        self, calls: Sequence[OpCall], outputs: Sequence[int], resident: frozenset[int], slots: Mapping[int, int]
    ) -> tuple[Section, ...]:
        """Return the sections, with one of Python code in front of each layer and behind the last."""
        (model_call,) = self._root.children
        layers = sections_of(model_call)
        number_of = _numbers(self._graph, layers, self.scope)
        pieces: list[list[OpCall]] = [[] for _ in range(2 * len(layers) + 1)]
        place = 0
        for call in calls:
            number = number_of(call.label)
            # Code between two layers lies behind the one that came last.
            place = 2 * number + 1 if number is not None else place + place % 2
            pieces[place].append(call)
        groups = group_calls(pieces, outputs, resident)
        sections = []
        for place, group in enumerate(groups):
            if place % 2 == 0:
                pinned = "is Python code between layers, which runs once"
                sections.append(Section(label=f"python_{place // 2}", kind="Python", group=group, pinned=pinned))
                continue
            layer = layers[place // 2]
            self.outputs[layer.path] = keras.tree.map_structure(lambda _: None, layer.outputs, none_is_leaf=False)
            if _is_network(layer.layer):
                self.nested[layer.path] = layer.layer
            pinned = _reason(layer, group, resident, slots) or _splits_a_sum(group, groups)
            kind = type(layer.layer).__name__
            sections.append(Section(label=layer.path, kind=kind, group=group, pinned=pinned))
        return tuple(sections)


def _is_network(layer: Any) -> bool:
    """Whether a layer is a network that can be optimized by itself, and is not."""
    is_plain = keras_models.own_class(layer) is type(layer)
    functional = keras_models.inner_functional(layer) if isinstance(layer, keras.Model) and is_plain else None
    return functional is not None and len(keras_models.nodes_in_order(functional)) > 2


class _Recorder:
    """Handles the calls of layers: notes them, in the graph that is traced."""

    def __init__(self, root: TracedLayer, graph: Any) -> None:
        self._open, self._paths, self._graph = [root], LayerPaths(), graph

    def __call__(self, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if tf.compat.v1.get_default_graph() is not self._graph:
            return call(*args, **kwargs)
        if len(self._open) == 1:
            # The model itself has no name in paths.
            return self._noted(layer, "", call, args, kwargs)
        with self._paths.entered(layer) as path:
            return self._noted(layer, path, call, args, kwargs)

    def _noted(self, layer: Any, path: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = _with_masks(keras.tree.flatten((args, kwargs)))
        noted = TracedLayer(layer=layer, path=path, start=self._graph.num_operations(), given=given)
        self._open[-1].children.append(noted)
        self._open.append(noted)
        try:
            noted.outputs = call(*args, **kwargs)
        finally:
            noted.stop = self._graph.num_operations()
            self._open.pop()
        return noted.outputs


def _with_masks(leaves: Sequence[Any]) -> list[Any]:
    masks = [keras_calls.get_keras_mask(leaf) for leaf in leaves if isinstance(leaf, tf.Tensor)]
    return [*leaves, *(mask for mask in masks if mask is not None)]


def _numbers(graph: Any, layers: Sequence[TracedLayer], scope: str) -> Callable[[str], int | None]:
    """Return a function from the label of an operation to the number of the layer that it belongs to."""
    operations = graph.get_operations()
    owner = {
        operation.name.removeprefix(f"{scope}/"): number
        for number, layer in enumerate(layers)
        for operation in operations[layer.start : layer.stop]
    }

    def number_of(label: str) -> int | None:
        # What is inlined has the name of its call in front.
        while label and label not in owner:
            label = label.rpartition("/")[0]
        return owner.get(label)

    return number_of


def _splits_a_sum(group: GroupCall, groups: Sequence[GroupCall]) -> str:
    """Return why a replay would change the order of a sum, or an empty string.

    The gradient of a tensor with several readers is one sum of all their terms. A replay adds up its own first, and the
    code behind it reads the tensor itself, so that no term of others can be passed in (as ``rewrite.blocks`` does).
    """
    made = {slot for each in groups for slot in each.outputs}
    for slot in made.intersection(group.inputs):
        if len(group.readers(slot)) > 1 and any(slot in each.inputs for each in groups if each is not group):
            return "reads a tensor several times that is read elsewhere, too: its gradient is one sum"
    return ""


def _reason(layer: TracedLayer, group: GroupCall, resident: frozenset[int], slots: Mapping[int, int]) -> str:
    """Return why a layer's call cannot be replayed, or an empty string."""
    returned = keras.tree.flatten(layer.outputs)
    if not all(isinstance(tensor, tf.Tensor) for tensor in returned):
        return "returns something that is no tensor"
    for member in group.members:
        if member.operation.is_stateful and member.operation.type not in {*ASSIGNMENTS, "ReadVariableOp"}:
            return f"runs {member.operation.type}, which must run once"
    known = {slots.get(id(tensor)) for tensor in layer.given}
    if not known.issuperset(slot for slot in group.inputs if slot not in resident):
        return "reads a tensor that is not among its arguments"
    passed = {slots.get(id(tensor)) for tensor in layer.returned}
    if not passed.issuperset(group.outputs):
        return "makes a tensor that is read elsewhere and that it does not return"
    return ""
