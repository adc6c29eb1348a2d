"""Plans that others make, under the same judge: store all, recompute all, keep products and recompute the rest."""

from __future__ import annotations

from collections.abc import Sequence

from tf_memsaver.cost.rules import MATRIX_OPS
from tf_memsaver.ir.graph import Phase
from tf_memsaver.ir.segments import Segment
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.registry import register_planner
from tf_memsaver.planners.chen import covered, unless_plain_is_smaller
from tf_memsaver.search.one_level import borders


@register_planner("plain", keeps_budget=False)
def plain(problem: Problem) -> Sequence[Segment]:
    """Return the cover that replays nothing but what a hint names."""
    return covered(problem, [])


@register_planner("recompute_all", keeps_budget=False)
def recompute_all(problem: Problem) -> Sequence[Segment]:
    """Keep what crosses each candidate cut and replay all between them; store all where that needs less."""
    return unless_plain_is_smaller(problem, [covered(problem, [cut.position for cut in problem.cuts])])


@register_planner("keep_products", keeps_budget=False)
def keep_products(problem: Problem) -> Sequence[Segment]:
    """Keep the results of convolutions and matrix products and replay what is made of them, as far as cuts allow.

    What PyTorch calls selective checkpointing by operations. Where that does not save anything, all is stored.
    """
    producing = {op.unit for op in problem.graph.ops if op.phase is Phase.FORWARD and op.type in MATRIX_OPS}
    after_products = [cut.position for cut in problem.cuts if cut.position - 1 in producing]
    return unless_plain_is_smaller(problem, [covered(problem, sorted({*after_products, *borders(problem)}))])
