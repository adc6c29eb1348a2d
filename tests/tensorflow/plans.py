"""Hand-made plans and the naive wrapper, so that tests of rewriting depend on no planner."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_memsaver.capture.function_step import capture_function
from tf_memsaver.capture.model_step import capture_graph
from tf_memsaver.compat import keras_models
from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.parity.names import Names
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tf_memsaver.program.calls import CallSequence
from tf_memsaver.program.function_calls import FunctionCalls
from tf_memsaver.program.kinds import program_of
from tf_memsaver.program.layer_calls import list_layer_calls
from tf_memsaver.rewrite.optimized_function import make_optimized_function
from tf_memsaver.rewrite.optimized_model import make_uncertified

Span = tuple[Any, ...]
"""``(first, last)`` labels of the layer calls that a recompute segment holds, or with a third item: child spans."""


def labels(model: Any) -> list[str]:
    return [call.label for call in list_layer_calls(model).calls]


def segments_of(names: Sequence[str], spans: Sequence[Span], start: int = 0, stop: int | None = None) -> list[Segment]:
    """Return segments that cover ``[start, stop)``: a recompute one for each span, store ones between them."""
    stop = len(names) if stop is None else stop
    made: list[Segment] = []
    position = start
    for span in spans:
        first, last = names.index(span[0]), names.index(span[1]) + 1
        if first > position:
            made.append(Segment(start=position, stop=first, mode=SegmentMode.STORE))
        children = tuple(segments_of(names, span[2], first, last)) if len(span) > 2 else ()
        made.append(Segment(start=first, stop=last, mode=SegmentMode.RECOMPUTE, children=children))
        position = last
    if position < stop:
        made.append(Segment(start=position, stop=stop, mode=SegmentMode.STORE))
    return made


def plan_of(sequence: CallSequence, segments: Sequence[Segment], batch_size: int = 4) -> Plan:
    return Plan(
        segments=tuple(segments),
        batch_size=batch_size,
        strategy="by_hand",
        planner="by_hand",
        peak_bytes=1,
        plain_peak_bytes=1,
        step_overhead=0.0,
        plan_seconds=0.0,
        request=Request(strategy="by_hand"),
        labels=tuple(call.label for call in sequence.calls),
        signatures=sequence.signatures,
        opened=sequence.opened,
    )


def hand_plan(model: Any, *spans: Span) -> Plan:
    """Return a plan with a recompute segment for each ``(first, last)`` pair of labels."""
    return plan_of(list_layer_calls(model), segments_of(labels(model), spans))


def optimized_by_hand(model: Any, *spans: Span) -> Any:
    return make_uncertified(model, hand_plan(model, *spans))


def runs_between_cuts(model: Any, *, batch_size: int = 4, length: int = 3, granularity: str = "layer") -> list[Segment]:
    """Return segments of at least ``length`` units that end at the graph's cuts and keep out what is pinned."""
    graph = capture_graph(model, batch_size=batch_size, granularity=granularity)
    stops = sorted({cut.position for cut in graph.cuts} | {len(graph.units)})
    segments: list[Segment] = []
    position = 0
    while position < len(graph.units):
        if graph.units[position].pinned:
            stop = next(p for p in stops if p > position)
            mode = SegmentMode.STORE
        else:
            end = next((u.index for u in graph.units[position:] if u.pinned), len(graph.units))
            fitting = [p for p in stops if position < p <= end]
            stop = next((p for p in fitting if p >= position + length), fitting[-1] if fitting else 0)
            mode = SegmentMode.RECOMPUTE
            if not fitting:
                stop, mode = next(p for p in stops if p > position), SegmentMode.STORE
        segments.append(Segment(start=position, stop=stop, mode=mode))
        position = stop
    return segments


def drawn_segments(graph: Graph, positions: Sequence[int], chance: Callable[[str], bool]) -> list[Segment]:
    """Return segments that end at some of the positions and replay nothing that is pinned, drawn by chance.

    ``chance`` says whether to ``"cut"`` at a position, whether to ``"store"`` a segment that could be replayed, and
    whether one has a ``"child"`` that ends at a position inside it.
    """
    count = len(graph.units)
    every = sorted({0, *positions, count})
    return _drawn(graph, [p for p in every if p in (0, count) or chance("cut")], every, chance)


def _drawn(graph: Graph, ends: Sequence[int], inner: Sequence[int], chance: Callable[[str], bool]) -> list[Segment]:
    made = []
    for start, stop in itertools.pairwise(ends):
        if any(unit.pinned for unit in graph.units[start:stop]) or chance("store"):
            made.append(Segment(start=start, stop=stop, mode=SegmentMode.STORE))
            continue
        inside = [p for p in inner if start < p < stop and chance("child")]
        children = _drawn(graph, [start, *inside, stop], (), chance) if inside else []
        made.append(Segment(start=start, stop=stop, mode=SegmentMode.RECOMPUTE, children=tuple(children)))
    return made


def optimized_between_cuts(model: Any, *, batch_size: int = 4, length: int = 3, granularity: str = "layer") -> Any:
    segments = runs_between_cuts(model, batch_size=batch_size, length=length, granularity=granularity)
    return optimized_in_segments(model, segments, batch_size, granularity)


def optimized_one_by_one(model: Any, *, batch_size: int = 4) -> Any:
    """Return a model whose plan makes a segment of each unit that is not pinned."""
    graph = capture_graph(model, batch_size=batch_size)
    segments = []
    for unit in graph.units:
        stays = unit.pinned or not {unit.index, unit.index + 1}.isdisjoint(graph.joined)
        mode = SegmentMode.STORE if stays else SegmentMode.RECOMPUTE
        segments.append(Segment(start=unit.index, stop=unit.index + 1, mode=mode))
    return optimized_in_segments(model, segments, batch_size, "layer")


def optimized_in_segments(model: Any, segments: Sequence[Segment], batch_size: int, granularity: str) -> Any:
    assert any(segment.mode is SegmentMode.RECOMPUTE for segment in segments)
    plan = plan_of(program_of(model, granularity).sequence, segments, batch_size)
    request = dataclasses.replace(plan.request, granularity=granularity)
    return make_uncertified(model, dataclasses.replace(plan, request=request))


def naive(model: Any, *spans: Span, capture_skips: bool = False) -> Any:
    """Return ``model`` as people wrap it by hand: ``tf.recompute_grad`` around runs of layer calls, and no more care.

    With ``capture_skips`` only a segment's first input is an argument and the rest is captured from outside.
    """
    plan = hand_plan(model, *spans)
    wrapped = make_uncertified(model, plan)
    wrapped._memsaver.run = _NaiveForward(list_layer_calls(model), plan, capture_skips)
    return wrapped


class _NaiveForward:
    def __init__(self, sequence: CallSequence, plan: Plan, capture_skips: bool) -> None:
        self._sequence, self._plan, self._capture_skips = sequence, plan, capture_skips

    def __call__(self, model: Any, args: Any, kwargs: Any) -> Any:
        functional, training = keras_models.inner_functional(model), kwargs["training"]
        names = Names.of_model()
        slots: list[Any] = [None] * self._sequence.slot_count
        for slot, tensor in zip(
            self._sequence.inputs, keras_models.standardize_inputs(functional, args[0]), strict=True
        ):
            slots[slot] = tensor
        for segment in self._plan.segments:
            calls = self._sequence.calls[segment.start : segment.stop]
            made = [slot for call in calls for slot in call.outputs]
            read = list(dict.fromkeys(s for call in calls for s in call.inputs if s not in made))
            if segment.mode is SegmentMode.STORE:
                self._run(calls, slots, training, names)
                continue
            later = {s for call in self._sequence.calls[segment.stop :] for s in call.inputs}
            made = [slot for slot in made if slot in later]
            arguments = read[:1] if self._capture_skips else read

            def run(*tensors: Any, calls: Any = calls, made: Any = made, arguments: Any = arguments) -> Any:
                inner = list(slots)
                for slot, tensor in zip(arguments, tensors, strict=True):
                    inner[slot] = tensor
                self._run(calls, inner, training, names)
                return tuple(inner[slot] for slot in made)

            outputs = tf.recompute_grad(run)(*[slots[slot] for slot in arguments])
            for slot, tensor in zip(made, outputs, strict=True):
                slots[slot] = tensor
        return keras_models.pack_outputs(functional, [slots[slot] for slot in self._sequence.outputs])

    def _run(self, calls: Any, slots: list[Any], training: bool, names: Names) -> None:
        for call in calls:
            for slot, tensor in zip(call.outputs, call.run(slots, training, names), strict=True):
                slots[slot] = tensor


def cut_everywhere(calls: FunctionCalls, batch_size: int) -> tuple[Any, int]:
    """Return the function with a segment between any two candidate cuts, and how many of them are recomputed."""
    graph = capture_function(calls, batch_size=batch_size)
    problem = Problem.build(graph, Request())
    edges = [0, *(cut.position for cut in problem.cuts), len(graph.units)]
    segments = tuple(
        Segment(
            start=start,
            stop=stop,
            mode=SegmentMode.STORE if any(problem.pinned[start:stop]) else SegmentMode.RECOMPUTE,
        )
        for start, stop in itertools.pairwise(edges)
    )
    plan = plan_of(calls.sequence, segments, batch_size)
    recomputed = sum(segment.mode is SegmentMode.RECOMPUTE for segment in segments)
    return make_optimized_function(calls, plan), recomputed
