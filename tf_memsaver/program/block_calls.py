"""A model's call as operations where that pays, and as whole layers elsewhere: what ``granularity="auto"`` plans.

It is run as any trace of operations is (``operation_program``), with fewer places to cut: those of a layer that is
whole lie in one group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from tf_memsaver.compat import keras_calls
from tf_memsaver.cost import rules
from tf_memsaver.parity.extra_readers import may_round_otherwise
from tf_memsaver.parity.grappler import BIAS
from tf_memsaver.program.block_choice import PASSED_ON, OperationsOfLayers, with_all_below
from tf_memsaver.program.calls import Call
from tf_memsaver.program.grouping import arranged, grouped
from tf_memsaver.program.layer_program import runs_layer_by_layer
from tf_memsaver.program.model_function import ModelFunction
from tf_memsaver.program.op_calls import GroupCall, OpCall
from tf_memsaver.program.signature import Given
from tf_memsaver.program.traced_layers import Recorder, TracedLayer, numbers_in
from tf_memsaver.tfgraph.emission import Template
from tf_memsaver.tfgraph.operations import ASSIGNMENTS, LOOPS

OWN_CALL = "call()"
"""Stands for what a model computes between the layers that it calls."""


class BlockCalls(ModelFunction):
    """The training call of a model; ``opened`` names the layers that are taken apart, and ``OWN_CALL`` if it is.

    There are none where nothing that somebody wrote is worth it, or where layers are better left whole: ``whole_since``
    says why.
    """

    def __init__(self, model: Any, given: Given | None = None, opened: Collection[str] | None = None) -> None:
        """Trace ``model``, which is only read; its layers in ``opened`` are taken apart, or those where it pays.

        The latter also where a name in ``opened`` is no layer's.

        Raises:
          UnsupportedModelError: its inputs are not known, or its call cannot be traced.
        """
        self._has_own_call = not runs_layer_by_layer(model)
        self._wanted = opened
        self.opened: tuple[str, ...] = ()
        self.whole_since = ""
        super().__init__(model, given)
        del self._root, self._graph

    def again(self, model: Any, given: Given) -> ModelFunction:
        """Return the call with other arguments or settings, cut as this one is."""
        return BlockCalls(model, given, self.opened)

    def called(self, model: Any, flat: Sequence[Any]) -> Any:
        """Call the model and note which layers it calls."""
        self._graph = tf.compat.v1.get_default_graph()
        self._root = TracedLayer(layer=model, path="", start=0)
        with keras_calls.layer_calls_go_to(Recorder(self._root, self._graph)):
            return self.given.called(model, flat)

    def group(
        self, calls: Sequence[OpCall], outputs: Sequence[int], resident: frozenset[int], slots: Mapping[int, int]
    ) -> tuple[Call, ...]:
        """Return operations as calls (a ``function_calls.Grouping``)."""
        del slots
        calls = arranged(calls)
        (model_call,) = self._root.children
        layers = list(with_all_below(model_call))
        number_of = numbers_in(self._graph, layers, self.scope)
        owners = [layers[number_of(call.label) or 0] for call in calls]
        paths = {OWN_CALL, *(layer.path for layer in layers)}
        # A model that comes from a file may have other names: what pays there is what paid for its plan.
        if self._wanted is None or not paths.issuperset(self._wanted):
            worth_it = self._worth_it(OperationsOfLayers(calls, owners), model_call)
            self.whole_since = _reason_to_stay_whole(calls, owners, resident) if worth_it else ""
            self.opened = () if self.whole_since else worth_it
        else:
            self.opened = tuple(self._wanted)
        names = _Names(_whole(model_call, set(self.opened)))
        groups = grouped(calls, outputs, resident, _together(calls, owners, names.whole_of))
        owner_of = {id(call): owner for call, owner in zip(calls, owners, strict=True)}
        return tuple(replace(group, name=names.of(group, owner_of[id(group.members[-1])])) for group in groups)

    def _worth_it(self, operations: OperationsOfLayers, model_call: TracedLayer) -> tuple[str, ...]:
        opened = list(operations.opened(model_call))
        own = (OWN_CALL,) if self._has_own_call else ()
        is_much = operations.share_of(opened) >= _OPENED_SHARE
        return (*own, *(layer.path for layer in opened)) if own or is_much else ()


_OPENED_SHARE = 0.05
"""Of what a call makes, what layers make at least that are taken apart: each adds to the time that planning takes."""

_LOOPS_SHARE = 0.25
"""Of what a call makes, what loops in its layers make at least, so that these are better left whole."""


def _reason_to_stay_whole(calls: Sequence[OpCall], owners: Sequence[TracedLayer], resident: frozenset[int]) -> str:
    """Return why no layer is taken apart, or an empty string."""
    if _looks_up_again(calls, owners, resident):
        return "it looks up one embedding several times, whose gradients are added as they come"
    loops = [
        (call.operation, owner)
        for call, owner in zip(calls, owners, strict=True)
        if owner.path and call.pinned and _is_recomputed_by_layers(call.operation)
    ]
    made = sum(operation.bytes_made for operation, _ in loops)
    # One alone may be most of the model: to recompute it as a whole would save nothing.
    several = len({id(owner) for _, owner in loops}) > 1
    if several and made >= _LOOPS_SHARE * sum(call.operation.bytes_made for call in calls):
        return f"'{loops[0][1].path}' runs a loop, which is recomputed with its whole layer or not at all"
    return ""


def _is_recomputed_by_layers(operation: Template) -> bool:
    """Whether it is a loop that may run again with its layer."""
    is_loop = operation.type in LOOPS and operation.only_reads
    return is_loop and not may_round_otherwise(operation.type, operation.bodies)


def _looks_up_again(calls: Sequence[OpCall], owners: Sequence[TracedLayer], resident: frozenset[int]) -> bool:
    """Whether several calls of one layer look rows up in a weight, as those of a shared embedding do.

    TensorFlow adds the parts of such a sparse gradient in the order in which they come.
    """
    looking = {
        id(owner): owner.layer
        for call, owner in zip(calls, owners, strict=True)
        if call.looks_rows_up and call.operation.dtypes[0].is_floating and call.inputs[0] in resident
    }
    return any(count > 1 for count in Counter(map(id, looking.values())).values())


_OF_STATE = {*ASSIGNMENTS, "ReadVariableOp"}
"""What reads and changes variables."""

_TAKEN_ALONG = PASSED_ON | {BIAS}
"""What stays with the product whose result it is given."""


def _whole(layer: TracedLayer, opened: Collection[str]) -> Iterator[TracedLayer]:
    """Yield the calls below one that are not taken apart, but lie in something that is."""
    for child in layer.children:
        if child.path in opened:
            yield from _whole(child, opened)
        else:
            yield child


def _together(
    calls: Sequence[OpCall], owners: Sequence[TracedLayer], whole_of: Mapping[int, TracedLayer]
) -> list[Hashable]:
    """Return for each operation a key, the same for consecutive ones that stay together.

    Those of a whole layer do, but for what updates its state, where that is read again: statistics of a
    ``BatchNormalization`` that is called several times. Of what an opened one computes itself each product does, with
    what only moves its inputs and its result, and all between two products, which is cheap to make anew.
    """
    ahead: list[bool] = []
    for place in range(len(calls) - 1, -1, -1):
        moved = bool(ahead) and owners[place] is owners[place + 1] and ahead[-1] and _kind(calls[place]) in PASSED_ON
        ahead.append(moved or _kind(calls[place]) in rules.MATRIX_OPS)
    leads_to_product = ahead[::-1]
    keys: list[Hashable] = []
    number, has_product = 0, False
    for place, (call, owner) in enumerate(zip(calls, owners, strict=True)):
        is_same = place > 0 and owner is owners[place - 1]
        belongs = _kind(call) in (_TAKEN_ALONG if has_product else ()) or leads_to_product[place] == (
            is_same and leads_to_product[place - 1]
        )
        if not is_same or not belongs or (has_product and _kind(call) not in _TAKEN_ALONG):
            number, has_product = number + 1, False
        has_product |= _kind(call) in rules.MATRIX_OPS
        whole = whole_of.get(id(owner))
        if call.pinned and _kind(call) in _OF_STATE:
            number += 1
            keys.append(number)
        else:
            keys.append(number if whole is None else id(whole))
    return keys


def _kind(call: OpCall) -> str:
    return call.operation.type


class _Names:
    """Names groups of operations by the layers that they are part of; ``whole_of`` are those that stay whole."""

    def __init__(self, whole: Iterable[TracedLayer]) -> None:
        self.whole_of = {id(below): layer for layer in whole for below in with_all_below(layer)}
        self._seen: Counter[str] = Counter()

    def of(self, group: GroupCall, owner: TracedLayer) -> str:
        """Return the name of a group: that of the layer that is whole in it, or else of its last operation."""
        whole = self.whole_of.get(id(owner))
        operation = group.end.rpartition("/")[2]
        name = whole.path if whole is not None else f"{owner.path}/{operation}".lstrip("/")
        self._seen[name] += 1
        return name if self._seen[name] == 1 else f"{name}#{self._seen[name]}"
