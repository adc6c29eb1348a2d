"""Which layers of a traced call are worth being taken apart, as far as their operations tell.

To replay a layer as a whole is as good as to cut inside, unless it makes something dear (a product) and, beside it,
values that its own gradients read: then a plan may keep the product and make the values anew, or the reverse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from tf_memsaver.cost import rules
from tf_memsaver.parity.grappler import READS_INPUT, READS_OTHER_INPUTS, READS_OUTPUT
from tf_memsaver.program.op_calls import OpCall
from tf_memsaver.program.traced_layers import TracedLayer

PASSED_ON = rules.VIEWS | {"Cast", "Transpose"}
"""Operations whose result stands for what they are given: to keep the one is to keep the other."""

_READ = READS_INPUT | READS_OTHER_INPUTS


class OperationsOfLayers:
    """The operations of the calls of layers in a trace, those of the layers that they call among them."""

    def __init__(self, calls: Sequence[OpCall], owners: Sequence[TracedLayer]) -> None:
        """Take the operations, and the innermost call of a layer that each is part of."""
        self._own: dict[int, list[OpCall]] = {}
        for call, owner in zip(calls, owners, strict=True):
            self._own.setdefault(id(owner), []).append(call)

    def opened(self, root: TracedLayer) -> Iterator[TracedLayer]:
        """Yield the calls below ``root`` that are worth being taken apart."""
        looking = [layer for layer in with_all_below(root) if layer is not root and self._looks_up_its_own(layer)]
        # One alone may be most of the model: to replay it as a whole would save nothing.
        yield from self._opened(root, whole=looking if len(looking) > 1 else ())

    def share_of(self, layers: Sequence[TracedLayer]) -> float:
        """Return how much of the bytes that all operations make those of some layers make, with all below them."""
        inside = {id(call): call for layer in layers for call in self._of(layer)}
        made = sum(call.operation.bytes_made for calls in self._own.values() for call in calls)
        return sum(call.operation.bytes_made for call in inside.values()) / max(1, made)

    def _opened(self, root: TracedLayer, whole: Collection[TracedLayer]) -> Iterator[TracedLayer]:
        for child in root.children:
            if child not in whole and _gains_inside(list(self._of(child))):
                yield child
                yield from self._opened(child, whole)

    def _looks_up_its_own(self, layer: TracedLayer) -> bool:
        """Whether a layer, and none inside it, makes a tensor, looks rows of it up, and reads it otherwise, too.

        The gradient of the rows is sparse and a term of a sum, which stays in a segment with all of its terms. Cut
        inside, the layer would keep these.
        """
        inside = set[int]().union(*(_looked_up(list(self._of(child))) for child in layer.children))
        return not _looked_up(list(self._of(layer))) <= inside

    def _of(self, layer: TracedLayer) -> Iterator[OpCall]:
        for each in with_all_below(layer):
            yield from self._own.get(id(each), ())


def with_all_below(layer: TracedLayer) -> Iterator[TracedLayer]:
    """Yield the call of a layer, and those that it makes, at whatever depth."""
    yield layer
    for child in layer.children:
        yield from with_all_below(child)


def _looked_up(calls: Sequence[OpCall]) -> set[int]:
    """Return the slots of floats that operations make, look rows up in, and read otherwise, too."""
    looked_up = {call.inputs[0] for call in calls if call.looks_rows_up}
    if not looked_up:
        return set()
    made = {slot for call in calls for slot in call.differentiable}
    readers = Counter(
        slot for call in calls if call.operation.type not in rules.METADATA_READERS for slot in set(call.reads)
    )
    return {slot for slot in made & looked_up if readers[slot] > 1}


def _gains_inside(calls: Sequence[OpCall]) -> bool:
    """Whether operations make a product and, inside, values that their gradients read."""
    if not any(call.operation.type in rules.MATRIX_OPS for call in calls):
        return False
    source = _sources(calls)
    read_inside = {source[slot] for call in calls for slot in call.reads if slot in source}
    for call in calls:
        kind = call.operation.type
        if kind in _READ and any(source.get(slot) is not None for slot in call.reads):
            return True
        if kind in READS_OUTPUT and not read_inside.isdisjoint(call.outputs):
            return True
    return False


def _sources(calls: Sequence[OpCall]) -> Mapping[int, int | None]:
    """Return, for the slots of floats that operations make, which each stands for; None for one from outside of them.

    Sizes have no gradient.
    """
    source: dict[int, int | None] = {}
    for call in calls:
        passed_on = call.operation.type in PASSED_ON and bool(call.reads)
        for slot in call.differentiable:
            source[slot] = source.get(call.reads[0]) if passed_on else slot
    return source
