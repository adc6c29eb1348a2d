"""A model's own ``train_step`` as a program: the calls that it makes of networks and layers, and the code between them.

In training the user's ``train_step`` runs. The calls of networks that it makes are taken over, each by the segments of
a plan for what that network calls; those of other layers are replayed as a whole or not at all. So nothing has to be
replaced where networks and layers hang.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import tensorflow as tf

from tf_memsaver.compat import keras_calls, keras_models
from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.ir.graph import CODE, Unit
from tf_memsaver.parity.names import Names
from tf_memsaver.plan.plan import Plan
from tf_memsaver.program.block_program import not_in_graph
from tf_memsaver.program.calls import Call, CallSequence, Reader
from tf_memsaver.program.data import Batch
from tf_memsaver.program.layer_paths import NamedCalls
from tf_memsaver.program.memo import once
from tf_memsaver.program.model_call import plain_call
from tf_memsaver.program.model_function import settings_of
from tf_memsaver.program.network_programs import NetworkPrograms
from tf_memsaver.program.networks import NO_GRADIENT, HeardCall, heard_calls
from tf_memsaver.program.opened import OpenedCall, taken_over
from tf_memsaver.program.operation_program import OperationProgram, OperationsInSegments
from tf_memsaver.program.program import (
    MadeOptimized,
    ModelProgram,
    Segmenter,
    TrainingCall,
    TrainingProgram,
    Wanted,
    joined_notes,
)
from tf_memsaver.program.signature import knows_inputs, traced_for
from tf_memsaver.program.train_step import what_is_traced

_NAMED = 5
"""How many calls a sentence names."""


class StepProgram(TrainingProgram):
    """What a ``train_step`` trains; ``opened`` are its calls of networks and of other layers, in order."""

    runs_step: Literal[True] = True
    cuts_time = True

    def __init__(self, model: Any, wanted: Wanted) -> None:
        """Trace the step of ``model``, which is only read, to hear which networks it calls.

        Raises:
          UnsupportedModelError: it cannot be traced, or it trains no network that can be planned for.
        """
        self.model = model
        specs = traced_for(model)
        assert specs is not None, "a step is traced on data"
        is_free = wanted.granularity == "auto" and wanted.opened is None
        by_layers_since = self.by_layers_since(model) if is_free else ""
        if by_layers_since:
            wanted = wanted._replace(granularity="layer")
        self._granularity = wanted.granularity
        self.opened: list[OpenedCall] = []
        self._plain: dict[str, str] = {}
        self._recorded: dict[int, list[str]] = {}
        self._needs_more = set[int]()
        calls: list[Call] = []
        shift = 0
        all_heard = tuple(self._heard(model, specs))
        programs = NetworkPrograms(wanted, all_heard)
        for heard in all_heard:
            if heard.is_recorded:
                self._recorded.setdefault(id(heard.layer), []).append(heard.path)
            program = self._program(heard, programs)
            if heard.given is not None and (heard.given.tensors or not knows_inputs(heard.layer)):
                self._needs_more.add(id(heard.layer))
            if program is None:
                continue
            if calls:
                calls.append(_Between(len(self.opened), calls[-1].outputs))
            opened = OpenedCall(path=heard.path, network=heard.layer, program=program, start=len(calls), shift=shift)
            calls += opened.calls
            self.opened.append(opened)
            shift += program.sequence.slot_count
        if not self.opened:
            raise self._nothing_to_plan()
        self.sequence = _joined(calls, self.opened, shift)
        if by_layers_since:
            self.noted(f"by layers alone, since {by_layers_since}")

    @classmethod
    def of(cls, model: Any, wanted: Wanted) -> Any:
        """Return the program of a model's step, which is heard once for all that is done until ``memo.forget``."""

        def heard(opened: Sequence[str] | None) -> Any:
            def key() -> Any:
                return wanted.granularity, opened, wanted.time_chunks, repr(traced_for(model)), settings_of(model)

            return once(model, key, lambda: cls(model, wanted._replace(opened=opened)))

        if wanted.opened is None:
            return heard(None)
        with contextlib.suppress(UnsupportedModelError):
            # In another copy of the model networks may have other names, and each other's.
            chosen = heard(None)
            if len(chosen.sequence.opened) == len(wanted.opened):
                return chosen
        return heard(tuple(wanted.opened))

    @staticmethod
    def by_layers_since(model: Any) -> str:
        """Return why granularity ``"auto"`` takes no layer of the networks apart, or an empty string."""
        return not_in_graph(model)

    def _heard(self, model: Any, specs: Batch) -> Iterable[HeardCall]:
        """Return the calls of layers that the step makes."""
        return heard_calls(model, specs)

    def _program(self, heard: HeardCall, programs: NetworkPrograms) -> ModelProgram | None:
        """Return the program of a call that is heard, or None where it stays plain."""
        if heard.plain:
            self._plain[heard.path] = heard.plain
            return None
        if heard.closed is not None:
            return heard.closed
        try:
            return programs.of(heard)
        except UnsupportedModelError as error:
            self._plain[heard.path] = str(error)
            return None

    def _nothing_to_plan(self, units: Sequence[Unit] = ()) -> UnsupportedModelError:
        pinned = [(unit.label, unit.pinned) for unit in units if unit.kind != CODE]
        reasons = "; ".join(f"'{path}' {reason}" for path, reason in [*self._plain.items(), *pinned][:_NAMED])
        # By default, plans have looked inside layers already: what no layer could be planned for stays plain.
        may_open = self._granularity == "layer" or (self._granularity == "auto" and pinned)
        inside = "Try granularity='op', which plans inside all layers, or put" if may_open else "Put"
        return UnsupportedModelError(
            f"{what_is_traced(self.model)} trains nothing that a plan could replay: {reasons or 'it calls no layer'}. "
            f"{inside} what it trains into networks (keras.Sequential, or keras.Model with a call()), or into layers "
            "that get their tensors as arguments and return them."
        )

    def check_units(self, units: Sequence[Unit]) -> None:
        """Look at what can be replayed (see ``TrainingProgram``).

        Raises:
          UnsupportedModelError: nothing can be replayed.
        """
        if all(unit.pinned for unit in units):
            raise self._nothing_to_plan(units)

    @property
    def stays_plain(self) -> str:
        """The calls that keep their activations, and why, in a sentence; empty if there are none."""
        found = [f"'{path}' ({reason})" for path, reason in self._plain.items() if reason != NO_GRADIENT]
        if not found:
            return ""
        more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        return f"{what_is_traced(self.model)} keeps the activations of {', '.join(found[:_NAMED])}{more}"

    def optimized(self, model: Any, plan: Plan, segmenter: Segmenter, made: MadeOptimized) -> Any:
        """Return ``model`` as one whose ``train_step`` trains by a plan."""
        return made(model, "train_step", self.in_segments(plan, segmenter))

    def in_segments(self, plan: Plan, segmenter: Segmenter) -> StepInSegments:
        """Return what runs the ``train_step`` by a plan.

        Raises:
          PlanMismatchError: the plan was made for another model.
        """
        plan.check_matches(self.sequence.signatures, self.sequence.labels)
        calls: dict[str, tuple[ModelProgram, TrainingCall]] = {}
        plans: dict[int, Plan] = {}
        for opened in self.opened:
            own = opened.part_of(plan)
            plans.setdefault(id(opened.network), own)
            if own.recomputed_units:
                calls[opened.path] = opened.program, opened.program.training_call(own, segmenter)
        in_turn = {
            key: CallsInTurn(
                [calls[path][1] if path in calls else None for path in paths],
                None if key in self._needs_more else plans[key],
            )
            for key, paths in self._recorded.items()
            if key in plans
        }
        return StepInSegments(self.model, calls, in_turn)


class StepInSegments:
    """Runs a ``train_step`` in which calls of networks run in segments."""

    def __init__(
        self,
        model: Any,
        calls: Mapping[str, tuple[ModelProgram, TrainingCall]],
        by_network: Mapping[int, CallsInTurn],
    ) -> None:
        """Take what was planned for; the programs of calls, and what makes them, by their names.

        ``by_network`` are the networks' calls by their ids.
        """
        self._model, self._calls, self._by_network = model, calls, by_network

    def of_network(self, network: Any) -> CallsInTurn | None:
        """Return what one of the networks runs where the step is a function that calls it; None if it stays plain."""
        return self._by_network.get(id(network))

    def renew(self, model: Any | None) -> None:
        """Trace calls anew when they are made next (see ``operation_program``)."""
        for program, call in self._calls.values():
            is_of_model = isinstance(program, OperationProgram) and program.model is self._model
            _trace_anew(call, model if is_of_model else None)

    def __call__(self, model: Any, data: Any) -> Any:
        """Return what the ``train_step`` of a model's own class returns."""
        with keras_calls.layer_calls_go_to(_Handler(self._calls)):
            return keras_models.own_class(model).train_step(model, data)  # type: ignore[attr-defined]


class CallsInTurn:
    """What a network runs that a loop of somebody's own calls: in each step its first call, its second, and so on.

    The calls that may be differentiated are counted in each graph that is traced, where a step begins with the first,
    and else for each thread. ``plan`` is the part of the step's plan that is for the first call that is planned for;
    None where the network cannot be called with its first argument alone.
    """

    def __init__(self, calls: Sequence[TrainingCall | None], plan: Plan | None) -> None:
        """Take a network's calls in their order; None runs plainly."""
        self._calls, self.plan = calls, plan
        self._made = _Counts()

    def renew(self, model: Any | None) -> None:
        """Trace calls anew when they are made next (see ``operation_program``)."""
        for call in self._calls:
            _trace_anew(call, model)

    def __call__(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shared: Any = None) -> Any:
        """Return what the model's own ``call`` returns (see ``program.TrainingCall``)."""
        graph = tf.compat.v1.get_default_graph()
        number = self._made.by_graph.get(graph, 0)
        self._made.by_graph[graph] = number + 1
        call = self._calls[number % len(self._calls)]
        return plain_call(model, args, kwargs) if call is None else call(model, args, kwargs, shared)


def _trace_anew(call: TrainingCall | None, model: Any | None) -> None:
    """Trace a network's call anew when it is made next, if a trace stands for its code."""
    if isinstance(call, OperationsInSegments):
        call.renew(model)


class _Counts(threading.local):
    """Calls that were made in each graph: replicas of tf.distribute are traced into one graph by threads."""

    def __init__(self) -> None:
        self.by_graph: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class _Handler(NamedCalls):
    """Makes the calls of layers in one ``train_step``."""

    def __init__(self, calls: Mapping[str, tuple[ModelProgram, TrainingCall]]) -> None:
        super().__init__()
        self._calls = calls

    def named(self, path: str, layer: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if path not in self._calls:
            return call(*args, **kwargs)
        program, run = self._calls[path]
        return taken_over(program, layer, call, args, kwargs, run)


class _Between:
    """The code of a step between two calls of networks, which runs once."""

    operation: Any = None
    kind = signature = CODE
    pinned = "is Python code between networks, which runs once"
    outputs: tuple[int, ...] = ()

    def __init__(self, number: int, inputs: tuple[int, ...]) -> None:
        self.label, self.inputs = f"python_{number}", inputs

    def readers(self, slot: int) -> list[Reader]:
        return [Reader("", "", None)] if slot in self.inputs else []

    def run(self, slots: Sequence[Any], training: bool | None, names: Names) -> list[Any]:
        raise AssertionError("code between networks runs as the user wrote it")


def _joined(calls: Sequence[Call], opened: Sequence[OpenedCall], slot_count: int) -> CallSequence:
    """Return the calls of all networks as one sequence."""

    def all_of(name: str) -> list[int]:
        return [slot + each.shift for each in opened for slot in getattr(each.program.sequence, name)]

    first: dict[int, OpenedCall] = {}
    for each in opened:
        first.setdefault(id(each.program), each)

    return CallSequence(
        calls=tuple(calls),
        inputs=tuple(all_of("inputs")),
        outputs=tuple(all_of("outputs")),
        slot_count=slot_count,
        resident=frozenset(all_of("resident")),
        weights=frozenset(all_of("weights")),
        read_again=frozenset(all_of("read_again")),
        note=joined_notes(each.program.sequence.note for each in opened),
        opened=tuple(f"{each.path}/{name}" for each in first.values() for name in each.program.sequence.opened),
    )
