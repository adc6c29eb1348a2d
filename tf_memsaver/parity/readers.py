"""Who reads a tensor, as graph optimisation sees it: identities and what ends a segment are taken out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tf_memsaver.cost.rules import METADATA_READERS
from tf_memsaver.parity.grappler import KEPT_IDENTITY
from tf_memsaver.tfgraph.emission import ends_segment

EXTRA_READERS = "memsaver_witness"
"""Name scope of the readers that are added for equal bits alone."""


def is_extra(operation: Any) -> bool:
    """Whether an operation is, or belongs to, a reader that was added for equal bits alone."""
    return EXTRA_READERS in operation.name


def readers_among(operations: Iterable[Any]) -> dict[int, list[Any]]:
    """Return, by tensor (id), those of the operations that read it."""
    readers: dict[int, list[Any]] = {}
    for operation in operations:
        for tensor in operation.inputs:
            readers.setdefault(id(tensor), []).append(operation)
    return readers


def readers_by_source(operations: Iterable[Any]) -> dict[int, list[Any]]:
    """Return the same, with what an operation passes on counted for the tensor that it passes on (``source_of``)."""
    readers: dict[int, list[Any]] = {}
    for operation in operations:
        if not passes_on(operation):
            for tensor in operation.inputs:
                readers.setdefault(id(source_of(tensor)), []).append(operation)
    return readers


def readers_of(tensor: Any) -> list[Any]:
    """Return what reads a tensor in its graph, be it passed on, but for its shape and extra readers."""
    found = []
    for reader in tensor.consumers():
        if reader.type in METADATA_READERS or is_extra(reader):
            continue
        if hands_on(reader):
            for place, passed in enumerate(reader.inputs):
                if passed is tensor:
                    found.extend(readers_of(reader.outputs[place]))
        else:
            found.append(reader)
    return found


def passes_on(operation: Any) -> bool:
    """Whether graph optimisation takes an operation out, and what it reads goes to those who read the operation.

    The end of a segment inside names what enters the segment, too, but nobody reads that there.
    """
    return operation.type == "Identity" or ends_segment(operation)


def source_of(tensor: Any) -> Any:
    """Return the tensor that was passed on unchanged as this one."""
    while passes_on(tensor.op):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def made_as(tensor: Any) -> Any:
    """Return what a tensor was when it was made: results of segments inside have been passed on since."""
    while hands_on(tensor.op):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def hands_on(operation: Any) -> bool:
    """Whether an operation only gives what it reads another name, be it taken out or not."""
    return operation.type == KEPT_IDENTITY or passes_on(operation)
