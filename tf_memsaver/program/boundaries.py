"""Whether the call of a layer in a traced step can be replayed as a whole: what it reads and what is read of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tf_memsaver.compat import keras_training
from tf_memsaver.cost import rules
from tf_memsaver.program.traced_layers import TracedLayer
from tf_memsaver.program.train_step import TapeNotes

_READ_ANYWHERE = ("Const", "ReadVariableOp")
"""What makes tensors that a layer may read without being given them."""

READS_LOGITS = "ends in a softmax or sigmoid whose logits the loss reads: return the logits, with from_logits=True"

_NOT_RETURNED = "makes a tensor that is read elsewhere and that it does not return"


def reason_against_replay(
    call: TracedLayer, reads: Iterable[int], read_elsewhere: Iterable[int], key: Callable[[Any], int | None]
) -> str:
    """Return why a call cannot be replayed as a whole, as far as its arguments and results tell, or an empty string.

    Args:
      call: the call.
      reads: what it is to get as arguments.
      read_elsewhere: what it is to return.
      key: returns what stands for a tensor in these two.
    """
    if not all(isinstance(tensor, tf.Tensor) for tensor in keras.tree.flatten(call.outputs)):
        return "returns something that is no tensor"
    if not {key(tensor) for tensor in call.given}.issuperset(reads):
        return "reads a tensor that is not among its arguments"
    missing = set(read_elsewhere).difference(key(tensor) for tensor in call.returned)
    if missing:
        logits = map(keras_training.get_logits, keras.tree.flatten(call.outputs))
        return READS_LOGITS if missing.issubset(key(each) for each in logits if each is not None) else _NOT_RETURNED
    return ""


class Boundaries:
    """The tensors of a traced step, and who reads them in its forward passes."""

    def __init__(self, graph: Any, notes: TapeNotes) -> None:
        """Take a step and what its tapes did: what they added is no forward pass."""
        self._operations = graph.get_operations()
        self._captured = {id(inner) for _, inner in graph.captures}
        ranges = [range(each.start, each.stop) for each in notes.taken]
        ranges += [range(each.start, each.stop) for each in notes.operations]
        backward = {place for each in ranges for place in each}
        of_kind = {operation.type: operation for operation in self._operations}
        numbered = {kind for kind, one in of_kind.items() if any(attr.name == "seed2" for attr in one.op_def.attr)}
        self._drawing = [place for place, operation in enumerate(self._operations) if operation.type in numbered]
        self._readers: dict[int, list[int]] = {}
        for place, operation in enumerate(self._operations):
            if place not in backward and operation.type not in rules.METADATA_READERS:
                for tensor in operation.inputs:
                    self._readers.setdefault(id(tensor), []).append(place)

    def reason(self, call: TracedLayer) -> str:
        """Return why a call cannot be replayed as a whole, or an empty string."""
        operations, made = self._operations[call.start : call.stop], self._made(call)
        read = {id(tensor): tensor for operation in operations for tensor in operation.inputs if id(tensor) not in made}
        reads = [key for key, tensor in read.items() if not self._is_known(tensor)]
        return reason_against_replay(call, reads, self._read_elsewhere(call, made), id)

    def _made(self, call: TracedLayer) -> set[int]:
        operations = self._operations[call.start : call.stop]
        return {id(tensor) for operation in operations for tensor in operation.outputs} - self._captured

    def _read_elsewhere(self, call: TracedLayer, made: Iterable[int]) -> list[int]:
        inside = range(call.start, call.stop)
        return [key for key in made if any(place not in inside for place in self._readers.get(key, ()))]

    def keeps_for_others(self, network: TracedLayer) -> bool:
        """Whether code around a network's call reads a tensor that it makes and does not return, such as an attribute.

        Masks, logits and losses are returned, too.
        """
        returned = {id(tensor) for tensor in (*network.returned, *network.losses)}
        returned |= {id(keras_training.get_logits(output)) for output in keras.tree.flatten(network.outputs)}
        return not returned.issuperset(self._read_elsewhere(network, self._made(network)))

    def draws_after_others(self, network: TracedLayer) -> bool:
        """Whether a network's call runs random operations that TensorFlow numbers in the step, and others come before.

        In a trace of its own, the network would begin with number 0, and draw other numbers.
        """
        inside = any(network.start <= place < network.stop for place in self._drawing)
        return inside and self._drawing[0] < network.start

    def _is_known(self, tensor: Any) -> bool:
        return tensor.dtype == tf.resource or id(tensor) in self._captured or tensor.op.type in _READ_ANYWHERE
