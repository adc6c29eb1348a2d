"""A Functional or Sequential model as one flat list of layer calls over numbered slots.

Nested Functional models are flattened recursively, a layer shared by two calls becomes two calls. ``capture`` makes one
unit of each call and ``rewrite`` runs them in segments, so both see the same positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from tf_memsaver.compat import keras_calls, keras_models
from tf_memsaver.parity.grappler import ADDITIONS
from tf_memsaver.parity.names import Names
from tf_memsaver.program.calls import CallSequence, Reader
from tf_memsaver.program.model_check import check_model

Enclosing = tuple[tuple[Any, Mapping[str, Any]], ...]
"""Nested models, outermost first, with the keyword arguments that each is called with."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in the list of tensors that layer calls read and write."""

    index: int


class ModelEntry:
    """The input conversion that a nested model does at its door, as an operation of its own."""

    def __init__(self, model: Any, functional: Any) -> None:
        self.name = f"{model.name}/inputs"
        self.scope = model.name
        self._functional = functional

    def __call__(self, inputs: Any) -> list[Any]:
        """Return the flat, converted inputs."""
        return keras_models.standardize_inputs(self._functional, inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """One call of an operation: its arguments hold ``Slot`` leaves, its flat outputs go to ``outputs``.

    ``number`` is its place among the calls. ``enclosing`` are the nested models that it is in, outermost first, each
    with the keyword arguments that it is called with; ``home`` is the number of the call that enters the innermost.
    """

    number: int
    operation: Any
    label: str
    args: Any
    kwargs: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    enclosing: Enclosing
    home: int | None
    signature: str

    @property
    def kind(self) -> str:
        """The class of the layer."""
        return type(self.operation).__name__

    @property
    def pinned(self) -> str:
        """Nothing that a layer call shows on its own: what its operations are decides."""
        return ""

    def readers(self, slot: int) -> list[Reader]:
        """Return the layer, if it reads a slot: what happens inside is not known."""
        passes_to = self.outputs[0] if self.kind in ADDITIONS else None
        return [Reader(self.label, "", passes_to)] if slot in self.inputs else []

    def run(self, slots: Sequence[Any], training: bool | None, names: Names) -> list[Any]:
        """Call the operation on the tensors in ``slots``; return its flat outputs."""
        for model, given in self.enclosing:
            training = keras_calls.training_seen_by(model, given, training)
        if isinstance(self.operation, ModelEntry):
            scope = names.entered(self.number, self.home, self.operation.scope)
        else:
            scope = names.inside(self.home)

        def fill(leaf: Any) -> Any:
            return slots[leaf.index] if isinstance(leaf, Slot) else leaf

        args = keras.tree.map_structure(fill, self.args)
        kwargs = keras.tree.map_structure(fill, self.kwargs)
        bound = keras_calls.bind_training(self.operation, training)
        with scope:
            made = keras.tree.flatten(bound(*args, **kwargs))
        # Like Keras: a layer may return more than it said it would (GroupQueryAttention's scores in Keras 3.12).
        return made[: len(self.outputs)]


def list_layer_calls(model: Any) -> CallSequence:
    """Flatten a Functional or Sequential model into its layer calls.

    Raises:
      UnsupportedModelError: another Keras backend, or an unbuilt model.
    """
    check_model(model)
    return _Flattener().flatten(keras_models.inner_functional(model))


class _Flattener:
    def __init__(self) -> None:
        self._calls: list[LayerCall] = []
        self._slot_count = 0
        self._labels: dict[str, int] = {}
        self._producer: dict[int, str] = {}
        self._shapes: dict[int, tuple[int | None, ...]] = {}

    def flatten(self, functional: Any) -> CallSequence:
        inputs = self._new_slots(len(functional.inputs))
        for number, (slot, tensor) in enumerate(zip(inputs, functional.inputs, strict=True)):
            self._producer[slot] = f"in{number}:{_spec(tensor)}"
            self._shapes[slot] = tuple(tensor.shape)
        outputs = self._walk(functional, inputs, prefix="", enclosing=(), home=None)
        return CallSequence(
            calls=tuple(self._calls),
            inputs=inputs,
            outputs=outputs,
            slot_count=self._slot_count,
            shapes=self._shapes,
        )

    def _new_slots(self, count: int) -> tuple[int, ...]:
        first = self._slot_count
        self._slot_count += count
        return tuple(range(first, first + count))

    def _walk(
        self, functional: Any, inputs: tuple[int, ...], prefix: str, enclosing: Enclosing, home: int | None
    ) -> tuple[int, ...]:
        slot_of = {id(tensor): slot for tensor, slot in zip(functional.inputs, inputs, strict=True)}

        def to_slot(leaf: Any) -> Any:
            return Slot(slot_of[id(leaf)]) if isinstance(leaf, keras.KerasTensor) else leaf

        for node in keras_models.nodes_in_order(functional):
            if any(id(tensor) not in slot_of for tensor in node.input_tensors):
                continue
            args, kwargs = node.arguments.convert(to_slot)
            inner = self._inner_functional(node.operation, args, kwargs)
            if inner is None:
                outputs = self._new_slots(len(node.outputs))
                label = prefix + node.operation.name
                self._add(node.operation, label, args, kwargs, outputs, enclosing, home, node.outputs)
            else:
                outputs = self._enter(node.operation, inner, args, kwargs, prefix, enclosing, home)
            for tensor, slot in zip(node.outputs, outputs, strict=True):
                slot_of[id(tensor)] = slot
        return tuple(slot_of[id(tensor)] for tensor in functional.outputs)

    def _enter(
        self, model: Any, inner: Any, args: Any, kwargs: Any, prefix: str, enclosing: Enclosing, home: int | None
    ) -> tuple[int, ...]:
        entry = ModelEntry(model, inner)
        entered = self._new_slots(len(inner.inputs))
        number = len(self._calls)
        self._add(entry, prefix + entry.name, args, {}, entered, enclosing, home, inner.inputs)
        within = (*enclosing, (model, kwargs))
        return self._walk(inner, entered, prefix=f"{prefix}{model.name}/", enclosing=within, home=number)

    def _inner_functional(self, operation: Any, args: Any, kwargs: Any) -> Any | None:
        """Return the graph of a nested model that can be flattened here; anything unusual stays one call."""
        if not isinstance(operation, keras.Model):
            return None
        inner = keras_models.inner_functional(operation)
        others = keras.tree.flatten([value for name, value in kwargs.items() if name != "training"])
        plain_call = len(args) == 1 and all(value is None for value in others)
        own_state = operation.activity_regularizer is not None
        return inner if inner is not None and plain_call and not own_state else None

    def _add(
        self,
        operation: Any,
        label: str,
        args: Any,
        kwargs: Any,
        outputs: tuple[int, ...],
        enclosing: Enclosing,
        home: int | None,
        specs: Sequence[Any],
    ) -> None:
        repeat = self._labels.get(label, 0)
        self._labels[label] = repeat + 1
        leaves = keras.tree.flatten((args, kwargs))
        inputs = tuple(dict.fromkeys(leaf.index for leaf in leaves if isinstance(leaf, Slot)))
        number = len(self._calls)
        reads = " ".join(self._producer[slot] for slot in inputs)
        makes = " ".join(_spec(tensor) for tensor in specs)
        for position, slot in enumerate(outputs):
            self._producer[slot] = f"{number}.{position}"
            self._shapes[slot] = tuple(specs[position].shape)
        self._calls.append(
            LayerCall(
                number=number,
                operation=operation,
                label=label if repeat == 0 else f"{label}#{repeat + 1}",
                args=args,
                kwargs=kwargs,
                inputs=inputs,
                outputs=outputs,
                enclosing=enclosing,
                home=home,
                signature=f"{type(operation).__name__}({reads}) -> {makes}",
            )
        )


def _spec(tensor: Any) -> str:
    dims = ",".join("?" if dim is None else str(dim) for dim in tensor.shape)
    return f"{tensor.dtype}[{dims}]"
