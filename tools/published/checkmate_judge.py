"""What Checkmate would say of a plan: peaks of orders of execution under its cost model, and bounds on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tf_memsaver.ir.graph import Graph
from tf_memsaver.ir.segments import Segment
from tf_memsaver.plan.problem import Problem
from tools.published.checkmate_graphs import FIXED_COPIES, HOLD, Network

CAPACITY = 16_000_000_000
"""Bytes of the device: ``platform_memory("p32xlarge")`` in Checkmate's ``platforms.py``."""


def largest_batch(network: Network, bytes_an_example: float, fixed_copies: int = FIXED_COPIES) -> float:
    """Return the batch at which a schedule that takes so many bytes an example fills the device, as a real number.

    Checkmate counts the parameters twice in the MILP, and four times in the script of the baselines: there the peak
    that is compared holds the fixed memory, and it is taken off the capacity once more.
    """
    return (CAPACITY - fixed_copies * network.parameter_bytes) / bytes_an_example


def schedule_peak(graph: Graph, executed: Sequence[int]) -> tuple[int, int]:
    """Return the most bytes live when ops run in this order, each as often as it stands there, and the op at the peak.

    As in Checkmate's ``schedule_from_rs``: an output stands from its execution to its last reader before it is executed
    again, an op's inputs and output stand together, replays read their inputs where they lie, and Holds are nothing.

    Raises:
      ValueError: an op reads what no op before it has made.
    """
    held = {op.outputs[0]: op.inputs[0] for op in graph.ops if op.type == HOLD}
    executed = [index for index in executed if graph.ops[index].type != HOLD]
    made_at: dict[int, int] = {}
    last = list(range(len(executed)))
    for place, index in enumerate(executed):
        for value in (held.get(value, value) for value in graph.ops[index].inputs):
            if value in made_at:
                last[made_at[value]] = place
            elif not graph.values[value].kind.resident:
                raise ValueError(f"op {graph.ops[index].name} reads {graph.values[value].name}, which is not there")
        for value in graph.ops[index].outputs:
            made_at[value] = place
    sizes = [sum(graph.values[value].nbytes for value in graph.ops[index].outputs) for index in executed]
    freed = [0] * len(executed)
    for place, end in enumerate(last):
        freed[end] += sizes[place]
    live = peak = graph.resident_bytes
    at = 0
    for index, size, free in zip(executed, sizes, freed, strict=True):
        live += size
        if live > peak:
            peak, at = live, index
        live -= free
    return peak, at


def working_set_bytes(graph: Graph) -> int:
    """Return the most that one op reads and writes, without what is resident: no schedule needs less beside that."""
    return max(
        sum(graph.values[v].nbytes for v in {*op.inputs, *op.outputs} if not graph.values[v].kind.resident)
        for op in graph.ops
    )


def retained_peak(network: Network) -> int:
    """Return the bytes that an example takes in Checkmate's *checkpoint all*, without fixed memory.

    Its ``gen_s_matrix_fixed_checkpoints`` holds every layer's output up to the last stage, also when the backward pass
    is beyond its readers. Grads stand until the last Grad that reads them has run, the last layer's first.
    """
    nodes = network.nodes
    outputs = sum(node.nbytes for node in nodes)
    needed_by = [min(node.inputs, default=j) for j, node in enumerate(nodes)]
    peaks = [
        outputs + sum(nodes[i].nbytes for i in range(j, len(nodes)) if i == j or needed_by[i] <= j)
        for j in range(1, len(nodes))
    ]
    return max(peaks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A plan of one example's step: bytes by our simulator and by Checkmate's rules, without the fixed ones; replays.

    ``replay_share`` is the time of all replays as a share of one forward pass; ``peak_at`` the op at Checkmate's peak.
    """

    planner: str
    simulated_bytes: int
    checkmate_bytes: int
    replay_share: float
    peak_at: str


def judged(problem: Problem, network: Network, planner: str, segments: Sequence[Segment]) -> Judged:
    """Return both judges' words on a plan."""
    timeline = problem.simulator.run(segments)
    peak, at = schedule_peak(problem.graph, [instant.op for instant in timeline.instants])
    fixed = problem.graph.resident_bytes
    return Judged(
        planner=planner,
        simulated_bytes=timeline.peak_bytes - fixed,
        checkmate_bytes=peak - fixed,
        replay_share=timeline.replay_seconds / (network.forward_cost * problem.graph.batch_size),
        peak_at=problem.graph.ops[at].name,
    )
