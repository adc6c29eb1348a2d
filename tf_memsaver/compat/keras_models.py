"""Models of Keras: whose class they have, the graph of layers that they run, and the layers that they hold.

Read from Keras 3.12 to 3.15: ``models/functional.py`` and ``sequential.py``, ``ops/function.py``, ``layers/layer.py``,
``utils/io_utils.py``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.models.functional import Functional as Functional
from keras.src.utils import io_utils


def own_class(layer: Any) -> type:
    """Return the class of a layer, of an optimized model the one that it was made from (``memsaver_base``)."""
    return getattr(type(layer), "memsaver_base", type(layer))


def is_built_in(layer: Any) -> bool:
    """Whether Keras itself has the layer's class."""
    return own_class(layer).__module__.partition(".")[0] == "keras"


def has_no_call(model: Any) -> bool:
    """Whether a model's class says nothing of how it is called, as where a ``train_step`` does all."""
    return own_class(model).call is keras.Model.call  # type: ignore[attr-defined]


def inner_functional(model: Any) -> Functional | None:
    """Return the Functional graph that ``model`` runs, or ``None`` when its ``call`` is its own code.

    Uses ``Sequential._functional``, and compares the class's ``call`` with the two classes' own.
    """
    call = own_class(model).call  # type: ignore[attr-defined]
    if "call" in vars(model):  # Somebody set it on the object.
        return None
    if isinstance(model, keras.Sequential):
        return model._functional if call is keras.Sequential.call else None
    if isinstance(model, Functional):
        return model if call is Functional.call else None
    return None


def nodes_in_order(functional: Functional) -> list[Any]:
    """Return the nodes that ``Function._run_through_graph`` runs, in its order (``_nodes_by_depth``, deepest first)."""
    nodes: list[Any] = []
    for depth in sorted(functional._nodes_by_depth, reverse=True):
        nodes.extend(n for n in functional._nodes_by_depth[depth] if n.operation and not n.is_input)
    return nodes


def standardize_inputs(functional: Functional, inputs: Any) -> list[Any]:
    """Return the flat, converted inputs as ``Functional.call`` makes them (``_standardize_inputs``)."""
    return functional._standardize_inputs(inputs)


def pack_outputs(functional: Functional, flat: list[Any]) -> Any:
    """Return flat outputs as ``Functional.call`` returns them (``_outputs_struct``, a single one unpacked)."""
    packed = keras.tree.pack_sequence_as(functional._outputs_struct, flat)
    return packed[0] if isinstance(packed, (list, tuple)) and len(packed) == 1 else packed


def identity(model: Any) -> Any:
    """Return what models of one class over the same layers and variables have in common, to compare and to hash.

    A subclass of Functional may list some layers twice (``_layers``), and nothing is there before it is built.
    """
    parts = [*model._layers, *model._trainable_variables, *model._non_trainable_variables]
    return (own_class(model), frozenset(map(id, parts))) if parts else id(model)


def all_layers(layer: Any) -> list[Any]:
    """Return a layer and all that it holds, at whatever depth (``_flatten_layers``)."""
    return list(layer._flatten_layers())


def python_values(layer: Any) -> dict[str, Any]:
    """Return the numbers, texts and flags that a layer has as attributes, beside those that Keras gives every layer."""
    found = ((name, value) for name, value in vars(layer).items() if isinstance(value, (bool, int, float, str)))
    return {name: value for name, value in found if name not in _names_in_every_layer()}


@contextlib.contextmanager
def python_values_put_back(model: Any) -> Iterator[None]:
    """Put back what the layers of a model, as far as they are built, change of such attributes: a counter of calls."""
    before = [(layer, python_values(layer)) for layer in all_layers(model) if layer.built]
    try:
        yield
    finally:
        for layer, values in before:
            vars(layer).update({name: value for name, value in values.items() if vars(layer).get(name) is not value})


@functools.cache
def _names_in_every_layer() -> frozenset[str]:
    # Named, so that Keras's counters of names stay as they are. The last attribute is a checkpoint's (``Trackable``).
    layers = keras.layers.Layer(name="layer"), keras.Model(name="model")
    return frozenset({name for layer in layers for name in vars(layer)} | {"_self_update_uid"})


def sublayers(layer: Any) -> list[Any]:
    """Return the layers that a layer holds itself (``_flatten_layers``)."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def print_below_summary(text: str) -> None:
    """Print a text where ``summary`` prints, if it was told nothing else."""
    io_utils.print_msg(text)
