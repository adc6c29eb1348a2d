"""The step of a loop of somebody's own as a program: a ``train_step`` of which only whole networks are planned for.

The step calls the networks by itself, so that no ``train_step`` runs by the plan, but each network's call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tf_memsaver.compat import functions
from tf_memsaver.plan.plan import Plan
from tf_memsaver.program.data import Batch
from tf_memsaver.program.loop import Loop, warn_of_plain_networks
from tf_memsaver.program.networks import HeardCall, heard_calls, whole_networks
from tf_memsaver.program.program import MadeOptimized, Segmenter
from tf_memsaver.program.step_program import StepProgram
from tf_memsaver.program.traced_layers import TracedLayer
from tf_memsaver.program.train_step import TapeNotes

_ADVICE = (
    "It must run in a tf.function. Give what the loop calls for each element of data, and that data. If it reads the "
    "batch size in Python (x.shape[0]), give a dataset of batches of one size: batch(..., drop_remainder=True), or "
    "tf.data.Dataset.from_tensors(batch)."
)


def is_loop(model: Any) -> bool:
    """Whether what is trained is a loop."""
    return isinstance(model, Loop)


class LoopProgram(StepProgram):
    """What the step of a loop trains."""

    def _heard(self, model: Loop, specs: Batch) -> Iterable[HeardCall]:
        def chosen(graph: Any, root: TracedLayer, notes: TapeNotes) -> Iterable[HeardCall]:
            model.check_called([call.layer for call in root.children])
            return whole_networks(graph, root, notes, model.left_out)

        return heard_calls(model, specs, chosen, _ADVICE)

    @staticmethod
    def by_layers_since(model: Loop) -> str:
        """Return why granularity ``"auto"`` takes no layer of the networks apart, or an empty string."""
        step = model.memsaver_step
        if not functions.is_tf_function(step.function):
            found = f"step '{step.name}' is no tf.function"
            return f"{found}, so it may run eagerly (give the tf.function that the loop calls)"
        return "XLA compiles its steps" if functions.is_compiled(step.function) else ""

    def optimized(self, model: Loop, plan: Plan, segmenter: Segmenter, made: MadeOptimized) -> Any:
        """Return the networks of a loop, in the structure in which they were given; what stays plain is as it was."""
        by_plan = self.in_segments(plan, segmenter)
        parts = [(network, by_plan.of_network(network)) for network in model.networks]
        warn_of_plain_networks(model)
        return model.packed([network if run is None else made(network, "call", run) for network, run in parts])
