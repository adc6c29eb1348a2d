"""A model with a ``call`` of its own as a program: its sublayers are calls, and the Python code between them.

In training that code runs, and the sublayers that a plan replays are run in segments. Each such call of a layer is a
segment of its own, made when it comes: the same runtime as for the layers of a Functional model, between tensors that
Python code passes on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
from absl import logging

from tf_memsaver.compat import keras_calls, keras_training
from tf_memsaver.errors import PlanMismatchError, UnsupportedModelError
from tf_memsaver.ir.graph import CODE, Unit
from tf_memsaver.plan.plan import Plan
from tf_memsaver.program.layer_paths import NamedCalls
from tf_memsaver.program.model_call import plain_call
from tf_memsaver.program.model_function import TracedProgram
from tf_memsaver.program.opened import taken_over
from tf_memsaver.program.program import ModelProgram, Segmenter, TrainingCall, Wanted
from tf_memsaver.program.signature import Given
from tf_memsaver.program.single_call import Replayed
from tf_memsaver.program.sublayer_calls import SublayerCalls


class SublayerProgram(TracedProgram):
    """The sublayers that a model's own ``call`` calls, and the code between them."""

    def __init__(self, model: Any, given: Given | None) -> None:
        """Trace ``model``; called as ``fit`` does if nothing is given.

        Raises:
          UnsupportedModelError: its inputs are not known, or its call cannot be traced.
        """
        self._traced = SublayerCalls(model, given)
        super().__init__(model, self._traced)

    @classmethod
    def of(cls, model: Any, wanted: Wanted) -> Any:
        """Return ``model``, called as is wanted, as a program."""
        return cls(model, wanted.given)

    def seen_through(self, output: Any) -> list[Any]:
        """Return the logits of what a network's layer makes; those of other results the trace returns."""
        logits = keras_training.get_logits(output)
        return [] if logits is None else [logits]

    def check_units(self, units: Sequence[Unit]) -> None:
        """Say in the log if the model calls a whole network, which is replayed as one or not at all.

        Raises:
          UnsupportedModelError: nothing can be replayed.
        """
        nested = self._traced.nested
        if all(unit.pinned for unit in units):
            raise _nothing_to_replay(self.model, units, nested)
        if nested:
            logging.warning(
                "model '%s' calls a whole network, which this plan recomputes as one unit or not at all. %s",
                self.model.name,
                _by_itself(self.model, nested),
            )

    def in_segments(self, plan: Plan, segmenter: Segmenter) -> TrainingCall:
        """Return the model's own call, in which some layers run as segments.

        Raises:
          PlanMismatchError: the plan replays code between layers.
        """
        labels, outputs, opened = self.sequence.labels, self._traced.outputs, self._traced.opened
        inside = {unit for each in opened for unit in range(each.start, each.stop)}
        # By place: layers that Keras names have other names in another copy of the model.
        replayed = [labels[unit] for unit in plan.recomputed_units if unit not in inside]
        code = [label for label in replayed if label not in outputs]
        if code:
            raise PlanMismatchError(f"it replays '{code[0]}', which is Python code between layers")
        runs: dict[str, _Run] = {label: Replayed(label, outputs[label], segmenter).run for label in replayed}
        for each in opened:
            part = each.part_of(plan)
            if part.recomputed_units:
                runs[each.path] = _run_of(each.program, each.program.training_call(part, segmenter))
        return _SublayersInSegments(runs, segmenter)


def _by_itself(model: Any, nested: Mapping[str, Any]) -> str:
    """Return the advice to optimize networks inside a model instead of it."""
    names = {id(value): f"self.{name}" for name, value in vars(model).items() if isinstance(value, keras.Model)}
    found = [names.get(id(network), f"network '{path}'") for path, network in nested.items()]
    target = found[0] if found[0] in names.values() else "network"
    return (
        f"Optimize {' and '.join(found)} by itself, where the model makes it: "
        f"{target} = tf_memsaver.optimize({target}, batch_size=...)"
    )


def _nothing_to_replay(model: Any, units: Sequence[Unit], nested: Mapping[str, Any]) -> UnsupportedModelError:
    if nested:
        return UnsupportedModelError(
            f"model '{model.name}' ({type(model).__name__}) computes in its own call(), and hands on what it gets to a "
            f"whole network. {_by_itself(model, nested)}."
        )
    layers = [unit for unit in units if unit.kind != CODE]
    found = "".join(f" Layer '{unit.label}' {unit.pinned}." for unit in layers[:3])
    return UnsupportedModelError(
        f"model '{model.name}' ({type(model).__name__}) computes in its own call(), and none of the layers that it "
        f"calls can be replayed.{found or ' It calls none.'} Put what repeats into layers "
        f"(keras.layers.Layer) that get their tensors as arguments and return them, or cut between operations: "
        f"tf_memsaver.optimize(..., granularity='op')."
    )


_Run = Callable[[Any, Any, Any, Any], Any]
"""Makes the call of a layer with arguments and keyword arguments, and with what a model's segments share."""


def _run_of(program: ModelProgram, call: TrainingCall) -> _Run:
    """Return what calls a network that runs by a plan of its own layers."""

    def run(network: Any, args: Any, kwargs: Any, shared: Any) -> Any:
        return taken_over(program, network, network, args, kwargs, functools.partial(call, shared=shared))

    return run


class _SublayersInSegments:
    """A model's own call, in which some layers run as segments."""

    def __init__(self, runs: Mapping[str, _Run], segmenter: Segmenter) -> None:
        self._runs, self._segmenter = runs, segmenter

    def __call__(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shared: Any = None) -> Any:
        with keras_calls.layer_calls_go_to(_Handler(self._runs, shared or self._segmenter.begin())):
            return plain_call(model, args, kwargs)


class _Handler(NamedCalls):
    """Makes the calls of layers in one call of the model."""

    def __init__(self, runs: Mapping[str, _Run], shared: Any) -> None:
        super().__init__()
        self._runs, self._shared = runs, shared

    def named(self, path: str, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if path not in self._runs:
            return call(*args, **kwargs)
        with keras_calls.layer_calls_go_to(None):
            return self._runs[path](layer, args, kwargs, self._shared)
