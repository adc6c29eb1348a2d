"""One error family: fields for programs, one sentence for people."""

from __future__ import annotations

from tf_memsaver.units import format_bytes


class MemsaverError(Exception):
    """Base of every error that tf_memsaver raises on purpose."""


class InvalidRequestError(MemsaverError):
    """An argument has no meaning here; the sentence names it and what is accepted."""


class UnsupportedModelError(MemsaverError):
    """The model is of a kind that cannot be captured or rewritten; the sentence says what would help."""


class UnknownDimensionError(MemsaverError):
    """An input has a dimension, other than the batch, that is not known."""

    def __init__(self, input_name: str, shape: tuple[int | None, ...]) -> None:
        super().__init__(input_name, shape)
        self.input_name, self.shape = input_name, shape

    def __str__(self) -> str:
        return (
            f"input '{self.input_name}' has shape {self.shape}: an unknown dimension cannot be counted in bytes. "
            f"Tell what the model is called with (inputs=, specs such as tf.TensorSpec((None, 128)) in the structure "
            f"of its inputs), or give keras.Input a full shape."
        )


class InfeasibleBudgetError(MemsaverError):
    """No plan of the planner's class stays within the budget.

    ``least_bytes`` is the smallest that was found to train the model. Of these, ``fixed_bytes`` are the same with every
    plan, where that is known; ``fixed`` says in words what they are. ``remedy`` is what helps more than a larger budget
    or a smaller batch, where something does, in sentences.
    """

    def __init__(
        self, budget_bytes: int, least_bytes: int, fixed_bytes: int = 0, fixed: str = "", remedy: str = ""
    ) -> None:
        super().__init__(budget_bytes, least_bytes, fixed_bytes, fixed, remedy)
        self.budget_bytes, self.least_bytes = budget_bytes, least_bytes
        self.fixed_bytes, self.fixed, self.remedy = fixed_bytes, fixed, remedy

    def __str__(self) -> str:
        fixed = f"No plan changes {format_bytes(self.fixed_bytes)} of that: {self.fixed}. " if self.fixed_bytes else ""
        remedy = f"{self.remedy} Or raise" if self.remedy else "Raise"
        return (
            f"no plan fits {format_bytes(self.budget_bytes)}; the smallest found that trains this model at this "
            f"batch size is {format_bytes(self.least_bytes)} ({self.least_bytes} bytes). {fixed}"
            f"{remedy} the budget or lower the batch size."
        )


class InfeasibleOverheadError(MemsaverError):
    """No plan keeps the predicted step within ``max_overhead``."""

    def __init__(self, max_overhead: float, least_overhead: float) -> None:
        super().__init__(max_overhead, least_overhead)
        self.max_overhead, self.least_overhead = max_overhead, least_overhead

    def __str__(self) -> str:
        return (
            f"the plan asked for needs a step {self.least_overhead:.1%} longer, more than the {self.max_overhead:.1%} "
            f"allowed. Raise max_overhead, or choose strategy='auto'."
        )


class HintError(MemsaverError):
    """A ``keep``, ``recompute`` or ``candidates`` pattern matches no layer, or two hints contradict each other."""


class PlanMismatchError(MemsaverError):
    """A plan was made for another graph."""

    def __init__(self, difference: str) -> None:
        super().__init__(difference)
        self.difference = difference

    def __str__(self) -> str:
        return (
            f"the plan was made for another model: {self.difference}. "
            f"Make a new plan for this model with tf_memsaver.search_plan."
        )


class PlanFormatError(MemsaverError):
    """A file or dictionary is not a plan that this version can read."""


class CertificationError(MemsaverError):
    """A plan, as a planner proposed it or as a file has it, would change the training's results or is none.

    ``strategy`` is the name of the planner that made it.
    """

    def __init__(self, strategy: str, reason: str) -> None:
        super().__init__(strategy, reason)
        self.strategy, self.reason = strategy, reason

    def __str__(self) -> str:
        return (
            f"the plan of planner '{self.strategy}' is not certified: {self.reason.rstrip('.')}. "
            f"Make a new plan with tf_memsaver.search_plan, or choose another strategy; if the planner is not your own "
            f"and nobody changed the plan, please report this."
        )


class SecondDerivativeError(MemsaverError):
    """A gradient of a gradient went through a recompute segment."""

    def __str__(self) -> str:
        return (
            "neither second nor forward-mode derivatives can be taken through a recompute segment. Optimize with "
            "data=, what fit is given: then what a train_step or a compute_loss differentiates twice stays plain by "
            "itself. Or use tf_memsaver.strip(model) for that part of the training."
        )


class MissingExtraError(MemsaverError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(package, extra)
        self.package, self.extra = package, extra

    def __str__(self) -> str:
        return f"this needs the package '{self.package}'. Install it with: pip install {self.package}"


class MeasurementError(MemsaverError):
    """A measuring process failed; the sentence carries the end of its log."""


class OutputError(MemsaverError):
    """The output could not be written; nothing is left of it."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"'{self.path}' cannot be written: {self.reason}. Nothing was left behind; see to space and permissions."


class OutputExistsError(MemsaverError):
    """The output path holds something already. ``reason`` says why it may not be replaced; empty if it may be."""

    def __init__(self, path: str, reason: str = "") -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        if self.reason:
            return f"'{self.path}' exists already and is not replaced: {self.reason}. Choose another path."
        return f"'{self.path}' exists already. Choose another path, or replace it: overwrite=True (--overwrite)."
