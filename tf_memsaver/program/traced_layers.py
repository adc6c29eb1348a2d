"""The calls of layers in a trace, at whatever depth, and which of them are units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tf_memsaver.compat import keras_calls, keras_models
from tf_memsaver.compat.functions import in_recorded_function
from tf_memsaver.compat.keras_training import losses_of
from tf_memsaver.compat.tapes import could_possibly_record
from tf_memsaver.program.layer_paths import LayerPaths
from tf_memsaver.program.layer_program import is_network


@dataclass(kw_only=True, eq=False)
class TracedLayer:
    """The call of a layer in the trace: its operations are those from ``start`` to ``stop`` of the graph.

    ``training`` is what it runs with where it is not told. ``is_taped`` tells that a tape may record it;
    ``in_function`` that a ``tf.function`` makes it, with the tape outside; ``has_masks`` that tensors which it is given
    have Keras's masks. ``frozen`` are the layer's variables that were not trainable then, ``losses`` those that a model
    and what is in it have added.
    """

    layer: Any
    path: str
    start: int
    stop: int = 0
    args: Any = ()
    kwargs: Any = None
    training: bool | None = None
    is_taped: bool = False
    in_function: bool = False
    has_masks: bool = False
    frozen: tuple[Any, ...] = ()
    losses: tuple[Any, ...] = ()
    outputs: Any = None
    children: list[TracedLayer] = field(default_factory=list)

    @property
    def may_be_differentiated(self) -> bool:
        """Whether a gradient may be taken of it, as far as can be seen while it is made."""
        return self.is_taped or bool((self.kwargs or {}).get("training"))

    @property
    def given(self) -> list[Any]:
        """The flat arguments, and the masks that hang on them."""
        return _with_masks(keras.tree.flatten((self.args, self.kwargs)))

    @property
    def returned(self) -> list[Any]:
        """The flat outputs, and the masks that hang on them."""
        return _with_masks(keras.tree.flatten(self.outputs))


def sections_of(root: TracedLayer) -> list[TracedLayer]:
    """Return the calls that are units: repeated blocks, and what stands beside them.

    Of layers that are called one after another and made of others, those of one class are blocks. A layer that holds
    such blocks or a network somewhere inside is taken apart, as the model is; any other is a unit. So is a network,
    which may be opened then.
    """
    repeated = Counter(type(child.layer) for child in root.children if child.children)
    found = []
    for child in root.children:
        is_whole = is_network(child.layer) or repeated[type(child.layer)] > 1 or not _holds_blocks(child)
        found += [child] if is_whole else sections_of(child)
    return found


def _holds_blocks(call: TracedLayer) -> bool:
    if keras_models.is_built_in(call.layer) and not isinstance(call.layer, keras.Model):
        return False
    kinds = Counter(type(child.layer) for child in call.children if child.children)
    repeats = max(kinds.values(), default=0) > 1
    return repeats or any(is_network(child.layer) or _holds_blocks(child) for child in call.children)


class Recorder:
    """Handles the calls of layers: notes them, in the graph that is traced."""

    def __init__(self, root: TracedLayer, graph: Any, *, of_model: bool = True) -> None:
        """Take what the calls are noted in; with ``of_model`` the first is the model's, and the others are below it."""
        self._open, self._paths, self._graph, self._of_model = [root], LayerPaths(), graph, of_model

    def __call__(self, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make the call of a layer (see ``keras_calls.layer_calls_go_to``)."""
        if tf.compat.v1.get_default_graph() is not self._graph:
            return call(*args, **kwargs)
        if self._of_model and len(self._open) == 1:
            # The model itself has no name in paths.
            return self._noted(layer, "", call, args, kwargs)
        with self._paths.entered(layer) as path:
            return self._noted(layer, path, call, args, kwargs)

    def _noted(self, layer: Any, path: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        noted = TracedLayer(layer=layer, path=path, start=self._graph.num_operations(), args=args, kwargs=kwargs)
        noted.training, noted.is_taped = keras_calls.training_of_call(), could_possibly_record()
        noted.in_function = in_recorded_function()
        # Keras takes masks off tensors once their readers have run.
        noted.has_masks = any(
            keras_calls.get_keras_mask(leaf) is not None for leaf in keras.tree.flatten((args, kwargs))
        )
        self._open[-1].children.append(noted)
        self._open.append(noted)
        try:
            noted.outputs = call(*args, **kwargs)
            noted.losses = tuple(losses_of(layer) if isinstance(layer, keras.Model) else ())
            noted.frozen = tuple(variable for variable in layer.variables if not variable.trainable)
        finally:
            noted.stop = self._graph.num_operations()
            self._open.pop()
        return noted.outputs


def numbers_in(graph: Any, layers: Sequence[TracedLayer], scope: str) -> Callable[[str], int | None]:
    """Return a function from the label of an operation to the number of the layer that it belongs to.

    Of layers that call others, those come later.
    """
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


def _with_masks(leaves: Sequence[Any]) -> list[Any]:
    masks = [keras_calls.get_keras_mask(leaf) for leaf in leaves if isinstance(leaf, tf.Tensor)]
    return [*leaves, *(mask for mask in masks if mask is not None)]
