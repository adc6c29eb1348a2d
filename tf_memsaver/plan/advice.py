"""Why a plan saves little, or may not keep its budget, in words, and what to try instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tf_memsaver.cost.device import LEAST_OF_PREDICTED
from tf_memsaver.cost.rules import SUMS
from tf_memsaver.errors import InfeasibleBudgetError
from tf_memsaver.ir.graph import CODE, Graph, MemoryKind, Phase
from tf_memsaver.judge.contents import Contents, contents
from tf_memsaver.judge.estimate import Estimate, units_of
from tf_memsaver.judge.simulate import Simulator, Timeline
from tf_memsaver.plan.layers import is_by_layers, units_in_words
from tf_memsaver.plan.plan import Plan
from tf_memsaver.plan.request import Request
from tf_memsaver.units import format_bytes

WORTH_WHILE = 0.03
"""The least share of the plain step's peak that a plan should save."""

_SUM_OF_MANY = 3
"""How many terms a sum has whose order is part of the result, so that a segment holds all that makes them."""

_AT_ONCE = 4
"""So many gradients at once are more than one operation reads and makes."""

_MOST = 0.5
"""The share of bytes from which on one operation or one layer is the reason."""

_FIXED = 0.75
"""The share of the peak from which on what no plan changes is the reason."""

_FEW = 0.05
"""The share of a step's own bytes below which activations are few."""

_PINNED = 0.25
"""The same for layers that cannot be replayed, of bytes or of layers: what lies between them gains little, either."""

_NAMED = 3
"""How many layers are named."""

CUT_ALONG_TIME = ("ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D", "GRU", "LSTM", "RNN", "SimpleRNN")
"""The layers of Keras whose call is the loop of ``RNN`` over their cell, and nothing else: they can be cut along time.

So can a ``Bidirectional`` of them (``program.time_chunks``).
"""

_BATCH = "a larger batch, which has more activations to save"
_BY_ITSELF = "or optimize a network inside this model on its own"
_SMALLER_UNITS = {
    "layer": f"granularity='auto', which also plans inside layers, {_BY_ITSELF}",
    "auto": f"granularity='op', which plans inside all layers, {_BY_ITSELF}",
    "op": "",
}
"""What helps where whole layers are the reason, by the granularity that was asked for."""


_LAYERS_FOR_CODE = "layers (keras.layers.Layer) for it, which get their tensors as arguments and return them"


def advice(simulator: Simulator, plan: Plan) -> str:
    """Return why a plan saves little, or may not keep its budget, and what to try; or nothing.

    Little is less than ``WORTH_WHILE``, or less than the plan costs (``_costs_more_than_it_saves``).

    It also names a recurrent layer that makes most of the peak, since that can be cut along time, and says where much
    is in no figure.
    """
    time_chunks = time_chunks_advice(simulator.graph, plan.request, plan.peak_bytes)
    parts = (_of_savings(simulator, plan), _of_budget(plan), time_chunks, _of_small_tensors(simulator, plan))
    return " ".join(filter(None, parts))


def _of_small_tensors(simulator: Simulator, plan: Plan) -> str:
    """Return what to know where much of the step is in tensors that a CPU's allocator does not count."""
    uncounted = simulator.uncounted_bytes
    if uncounted < _MOST * plan.plain_peak_bytes:
        return ""
    return (
        f"The plain step also takes up to {format_bytes(uncounted)} in tensors below 256 KiB, such as those of single "
        f"time steps. TensorFlow does not count these on a CPU, so they are in none of these figures."
    )


def _of_budget(plan: Plan) -> str:
    """Return what to do about a budget that no plan keeps by what the allocator takes at most."""
    budget, highest = plan.request.budget_bytes, plan.highest_peak_bytes
    if budget is None or highest <= budget:
        return ""
    return (
        f"a step may take up to about {format_bytes(highest)}, more than the budget of {format_bytes(budget)}, since "
        f"TensorFlow's allocator wastes some memory. No plan was found that certainly stays below the budget. To see "
        f"what real steps take, use tf_memsaver.measure; for a plan whose real steps keep the budget, use "
        f"optimize(..., calibrate=True)."
    )


def advice_once_measured(plan: Plan, budget: int) -> str:
    """Return the advice of a plan whose real steps keep a budget, which it may have been planned for more than."""
    planned_for = plan.request.budget_bytes
    if not plan.recomputed_units and planned_for is not None and planned_for > budget:
        return f"the plan recomputes nothing: real steps of the plain model keep the budget of {format_bytes(budget)}"
    return plan.advice.replace(_of_budget(plan), "").strip()


def time_chunks_advice(graph: Graph, request: Request, peak_bytes: int) -> str:
    """Return what to do about a recurrent layer that makes most of a peak while it is replayed, or kept, as a whole.

    On GPUs one kernel of cuDNN may run it, which is not cut.
    """
    by_layers = is_by_layers(request.granularity, graph.opened)
    found = [unit.index for unit in graph.units if unit.kind in (*CUT_ALONG_TIME, "Bidirectional")]
    if not found or not by_layers or request.time_chunks is not None or graph.device == "GPU":
        return ""
    units = units_of(graph)
    largest = max((units[index] for index in found), key=lambda unit: unit.kept_bytes)
    if largest.kept_bytes < _MOST * peak_bytes:
        return ""
    return (
        f"One recurrent layer, '{largest.label}', keeps {format_bytes(largest.kept_bytes)} for the backward pass. "
        f"Try time_chunks='auto', which divides such layers along time."
    )


def may_be_kept(error: InfeasibleBudgetError) -> bool:
    """Whether real steps may keep a budget that no plan is predicted to keep: they may take less than predicted."""
    return LEAST_OF_PREDICTED * (error.predicted_bytes or error.least_bytes) <= error.budget_bytes


def smaller_budget_advice(graph: Graph, request: Request, error: InfeasibleBudgetError) -> str:
    """Return what may give a plan for less than the least budget, or nothing.

    To cut along time; or to plan inside layers, where much of what is kept for the backward pass does not leave its
    layer. Real steps may take less than the plan of least memory is predicted to.
    """
    units = _smaller_units_advice(graph, request, error.least_bytes)
    real = "Real steps may take less than predicted: optimize(..., calibrate=True) runs some to find out."
    return " ".join(filter(None, (units, real if may_be_kept(error) else "")))


def _smaller_units_advice(graph: Graph, request: Request, least_bytes: int) -> str:
    time_chunks = time_chunks_advice(graph, request, least_bytes)
    remedy = _SMALLER_UNITS[request.granularity]
    if time_chunks or not remedy or request.time_chunks is not None:
        return time_chunks
    units = units_of(graph)
    kept = sum(unit.kept_bytes for unit in units)
    inside = sum(max(0, unit.kept_bytes - unit.output_bytes) for unit in units)
    if inside < _PINNED * kept:
        return ""
    return (
        f"Layers make {format_bytes(kept)} of activations, and {format_bytes(inside)} of that stay inside a layer. "
        f"Try {remedy}."
    )


def _of_savings(simulator: Simulator, plan: Plan) -> str:
    request, replays, plain_peak_bytes = plan.request, plan.recomputed_units, plan.plain_peak_bytes
    saved = 1 - plan.peak_bytes / plain_peak_bytes if plain_peak_bytes else 0.0
    if replays and saved >= WORTH_WHILE and not _costs_more_than_it_saves(plan):
        return ""
    did = "recomputes nothing, so it saves no memory"
    if replays:
        did = f"saves {max(saved, 0.0):.1%} of the peak, for a step that takes {plan.step_overhead:.0%} longer"
    if request.strategy == "plain":
        return f"the plan {did}: strategy='plain' asks for that"
    if request.budget_bytes is not None and plain_peak_bytes <= request.budget_bytes:
        return (
            f"the plan {did}: the plain step ({format_bytes(plain_peak_bytes)}) already fits the budget of "
            f"{format_bytes(request.budget_bytes)}"
        )
    graph = simulator.graph
    found = _reasons(graph, request, contents(simulator, plan.segments), Estimate.from_graph(graph))
    reasons, remedies = zip(*found, strict=True)
    tried = dict.fromkeys(remedy for remedy in remedies if remedy)
    what_next = f" Try {', or '.join(tried)}." if tried else ""
    if graph.note:
        reasons = (*reasons, f"the plan is {graph.note}")
    sentences = (f"{reason[:1].upper()}{reason[1:].removesuffix('.')}." for reason in reasons)
    return f"the plan {did}. {' '.join(sentences)}{what_next}"


def _costs_more_than_it_saves(plan: Plan) -> bool:
    """Whether the product of a plan's peak and step time is not below the plain step's.

    Then a smaller batch would do as well: it takes less memory in the same proportion as less time. A budget, or a
    strategy other than the default, tells what is to be saved, whatever it costs.
    """
    is_free = plan.request.strategy == Request().strategy and plan.request.budget_bytes is None
    return is_free and plan.peak_bytes * (1 + plan.step_overhead) >= plan.plain_peak_bytes


def _reasons(graph: Graph, request: Request, step: Contents, estimate: Estimate) -> list[tuple[str, str]]:
    """Return reasons, the most important first, each with what helps; at least one."""
    found = [*_without_gradients(graph, request, step.timeline, estimate)]
    found += _gradients_at_the_peak(graph, request, step)
    if not found:
        found = [
            *_at_the_peak(graph, step.timeline),
            *_in_few_layers(graph, request, estimate),
            *_by_the_request(request),
        ]
    none = (
        f"the backward pass reads {format_bytes(estimate.activation_bytes)} of activations, and no other choice of "
        f"layers to recompute was found that needs less memory within the allowed time",
        _SMALLER_UNITS[request.granularity],
    )
    return found or [none]


def _without_gradients(
    graph: Graph, request: Request, timeline: Timeline, estimate: Estimate
) -> Iterator[tuple[str, str]]:
    """Yield that hardly a layer is trained, where that is why few activations are kept."""
    trained = {op.unit for op in graph.ops if op.phase is Phase.BACKWARD}
    others = [unit for unit in graph.units if unit.index not in trained]
    few = estimate.activation_bytes < _FEW * (timeline.peak_bytes - timeline.resident_bytes)
    if few and len(others) >= _MOST * len(graph.units):
        units = units_in_words(len(graph.units), request.granularity, graph.opened)
        yield (
            f"the backward pass reads only {format_bytes(estimate.activation_bytes)} of activations, since no gradient "
            f"is taken through {len(others)} of {units}: they are frozen, or lie before all that is trained",
            "optimizing again once layers are unfrozen",
        )


_OF_A_SLICE = "StridedSliceGrad"
"""The gradient of a slice, which is as large as the whole tensor."""


def _gradients_at_the_peak(graph: Graph, request: Request, step: Contents) -> Iterator[tuple[str, str]]:
    """Yield that gradients of intermediate results, several at once, take most of the peak's own bytes."""
    timeline = step.timeline
    maker = {value: op for op in graph.ops if op.phase is Phase.BACKWARD for value in op.outputs}
    live = step.live_at(timeline.peak_at)
    gradients = [each for each in live if graph.values[each.value].kind is MemoryKind.GRADIENT and each.value in maker]
    total, own = sum(each.nbytes for each in gradients), timeline.peak_bytes - timeline.resident_bytes
    if total < _MOST * own or len(gradients) < _AT_ONCE:
        return
    of_types = Counter[str]()
    for each in gradients:
        of_types[maker[each.value].type] += each.nbytes
    most, its_bytes = of_types.most_common(1)[0]
    its = [maker[each.value] for each in gradients if maker[each.value].type == most]
    unit = its[0].unit
    label = "" if unit is None else f" (the largest in the backward pass of '{graph.units[unit].label}')"
    by_operations = "granularity='op', where all slices of a tensor have one gradient together, or "
    yield (
        f"at the peak, {format_bytes(total)} of {format_bytes(own)} are gradients of intermediate results, which are "
        f"needed whatever is recomputed: {format_bytes(its_bytes)} are {len(its)} results of {most}{label}",
        (by_operations if most == _OF_A_SLICE and request.granularity != "op" else "")
        + "a smaller batch, or a layer there that makes fewer of them",
    )


def _at_the_peak(graph: Graph, timeline: Timeline) -> Iterator[tuple[str, str]]:
    """Yield what of the peak no plan changes: what is always live, the update, or the need of one operation."""
    if not timeline.instants:
        return
    peak, resident = timeline.peak_bytes, timeline.resident_bytes
    gradients = graph.bytes_of(MemoryKind.WEIGHT_GRADIENT)
    op = graph.ops[timeline.instants[timeline.peak_at].op]
    if op.phase is Phase.UPDATE:
        yield (
            f"the peak is in the optimizer's update ({op.type}), where no activations are left, only weights, "
            f"gradients and optimizer slots",
            f"{_BATCH}, or an optimizer with fewer slots",
        )
        return
    if resident + gradients >= _FIXED * peak:
        yield (
            f"weights, optimizer slots, gradients and the input batch take {format_bytes(resident + gradients)} of the "
            f"peak of {format_bytes(peak)}, which recomputation does not change",
            _BATCH,
        )
        return
    own = {graph.roots[value] for value in (*op.inputs, *op.outputs)}
    needed = op.workspace_bytes + sum(graph.values[v].nbytes for v in own if not graph.values[v].kind.resident)
    if needed >= _MOST * (peak - resident):
        where = "" if op.unit is None else f" of '{graph.units[op.unit].label}'"
        yield (
            f"the peak is at one operation ({op.type}, {op.phase.value}{where}), which alone needs "
            f"{format_bytes(needed)}",
            "",
        )


def _in_few_layers(graph: Graph, request: Request, estimate: Estimate) -> Iterator[tuple[str, str]]:
    """Yield what cannot be replayed, or not in parts."""
    total = estimate.activation_bytes
    if not total:
        yield "the backward pass reads no activations", ""
        return
    by_bytes = sorted(estimate.units, key=lambda unit: -unit.kept_bytes)
    reasons = {unit.label: unit.pinned for unit in graph.units}
    code = {unit.label for unit in graph.units if unit.kind == CODE}
    remedy = _SMALLER_UNITS[request.granularity]
    largest = by_bytes[0]
    if largest.kept_bytes >= _MOST * total and not reasons[largest.label]:
        yield (
            f"of the {format_bytes(total)} of activations, {format_bytes(largest.kept_bytes)} are made by one layer, "
            f"'{largest.label}', which is recomputed as a whole or not at all",
            remedy,
        )
        return
    of_code = sum(unit.kept_bytes for unit in by_bytes if unit.label in code)
    if of_code >= _PINNED * total:
        yield (
            f"of {format_bytes(total)} that the backward pass reads, {format_bytes(of_code)} are made by code between "
            f"layers, or by layers that are part of it since they cannot be replayed; it runs as it stands",
            _LAYERS_FOR_CODE,
        )
        return
    layers = [unit for unit in by_bytes if unit.label not in code]
    pinned = [unit for unit in layers if reasons[unit.label]]
    held = sum(unit.kept_bytes for unit in pinned)
    if held >= _PINNED * total or len(pinned) >= _PINNED * len(layers):
        named = "; ".join(f"'{unit.label}' {reasons[unit.label]}" for unit in pinned[:_NAMED])
        more = f"; and {len(pinned) - _NAMED} more" if len(pinned) > _NAMED else ""
        units = units_in_words(len(layers), request.granularity, graph.opened)
        yield (
            f"{len(pinned)} of {units} cannot be recomputed, and make {format_bytes(held)} of the "
            f"{format_bytes(total)} that the backward pass reads: {named}{more}",
            remedy,
        )
        return
    inner = [position for position in range(1, len(graph.units)) if position not in graph.joined]
    if len(inner) < len(graph.units) / 2:
        places = f"segments may end at {len(inner)} of {len(graph.units) - 1} places between layers"
        terms = _terms_of_the_longest_sum(graph)
        if terms >= _SUM_OF_MANY:
            yield (
                f"{places}, since {terms} tensors are added, and a segment that ends between the layers that make them "
                f"would change the rounding of this sum",
                "adding them in one place, with keras.layers.Add()(terms), where they are added one by one; or an "
                "activation after each term (it changes the model; then the layers between two terms can be replayed)",
            )
        else:
            yield f"{places}, since a segment that ends elsewhere would change the rounding of a sum", remedy


def _terms_of_the_longest_sum(graph: Graph) -> int:
    """Return how many terms the largest sum of the forward pass has: one that only a sum reads is part of that."""
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    readers = Counter(value for op in forward for value in op.inputs)
    terms: dict[int, int] = {}
    for op in forward:
        if op.type in SUMS:
            count = sum(terms.get(value, 1) if readers[value] == 1 else 1 for value in op.inputs)
            terms.update(dict.fromkeys(op.outputs, count))
    return max(terms.values(), default=0)


def _by_the_request(request: Request) -> Iterator[tuple[str, str]]:
    if request.keep or request.candidates:
        yield "the hints keep= and candidates= leave little to recompute", "fewer hints"
    elif request.max_overhead is not None and request.max_overhead < 1:
        yield f"the step may be at most {request.max_overhead:.0%} longer", "a larger max_overhead"
