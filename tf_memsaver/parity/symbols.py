"""Which operations give a size that is not known a symbol of its own, by which graph optimisation compares shapes."""

from __future__ import annotations

from typing import Any

from tf_memsaver.parity.grappler import OF_SIZES_OF_THEIR_OWN
from tf_memsaver.tfgraph.operations import is_loop


def makes_symbols(operation: Any) -> bool:
    """Whether an operation gives the sizes of its result new symbols: a ``Reshape`` to a constant shape, for the -1."""
    if operation.type == "Reshape":
        return bool(operation.inputs[1].op.type == "Const")
    return is_loop(operation) or operation.type in OF_SIZES_OF_THEIR_OWN
