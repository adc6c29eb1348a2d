"""The errors of tf_memsaver. Each has fields for programs, and a message that says what is wrong and what to do."""

from __future__ import annotations

from tf_memsaver.units import format_bytes


class MemsaverError(Exception):
    """Base of every error that tf_memsaver raises on purpose."""


class InvalidRequestError(MemsaverError):
    """An argument is not valid. The message names it and says what is accepted."""


class UnsupportedModelError(MemsaverError):
    """This kind of model cannot be planned or rewritten. The message says what would help."""


class UnknownDimensionError(MemsaverError):
    """The size of an input dimension other than the batch is not known.

    ``input_name`` is the input, ``shape`` its shape, with None for unknown sizes.
    """

    def __init__(self, input_name: str, shape: tuple[int | None, ...]) -> None:
        super().__init__(input_name, shape)
        self.input_name, self.shape = input_name, shape

    def __str__(self) -> str:
        return (
            f"input '{self.input_name}' has shape {self.shape}: memory cannot be counted if a dimension other than "
            f"the batch is unknown. Give data=, or inputs= (specs such as tf.TensorSpec((None, 128)) in the structure "
            f"of the model's inputs), or give keras.Input a full shape."
        )


class InfeasibleBudgetError(MemsaverError):
    """No plan that the planner found stays within the budget.

    ``budget_bytes`` is the budget, and ``least_bytes`` the smallest budget that a plan was found to keep. Of these,
    ``fixed_bytes`` are the same under every plan (0 if not known), and ``fixed`` describes them. ``remedy`` says what
    helps more than a larger budget or a smaller batch, if anything does. For a budget from ``predicted_bytes`` on (0 if
    not known), there is a plan too, but some steps may take up to ``least_bytes``. ``plain_bytes`` is the usual peak of
    the plain step (0 if not known).
    """

    def __init__(
        self,
        budget_bytes: int,
        least_bytes: int,
        fixed_bytes: int = 0,
        fixed: str = "",
        remedy: str = "",
        predicted_bytes: int = 0,
        plain_bytes: int = 0,
    ) -> None:
        super().__init__(budget_bytes, least_bytes, fixed_bytes, fixed, remedy, predicted_bytes, plain_bytes)
        self.budget_bytes, self.least_bytes, self.predicted_bytes = budget_bytes, least_bytes, predicted_bytes
        self.fixed_bytes, self.fixed, self.remedy = fixed_bytes, fixed, remedy
        self.plain_bytes = plain_bytes

    def __str__(self) -> str:
        fixed = f"No plan changes {format_bytes(self.fixed_bytes)} of that: {self.fixed}. " if self.fixed_bytes else ""
        remedy = f"{self.remedy} Or raise" if self.remedy else "Raise"
        least = f"{format_bytes(self.least_bytes)} ({self.least_bytes} bytes)"
        found = f"the smallest budget found that trains this model at this batch size is {least}. "
        if 0 < self.predicted_bytes < self.least_bytes:
            predicted = f"{format_bytes(self.predicted_bytes)} ({self.predicted_bytes} bytes)"
            found = (
                f"the plan of least memory takes {predicted} in most steps, and up to {least} in some. Give the "
                "smaller number as a budget to get this plan, or the larger one to leave room for all steps. "
            )
        plain = f"Most plain steps take {format_bytes(self.plain_bytes)}. " if self.plain_bytes else ""
        if 0 < self.plain_bytes <= (self.predicted_bytes or self.least_bytes):
            plain += "No plan was found that saves much. "
        return (
            f"no plan fits a budget of {format_bytes(self.budget_bytes)}; {found}{fixed}{plain}{remedy} the budget or "
            "lower the batch size."
        )


class InfeasibleOverheadError(MemsaverError):
    """No plan that the planner found keeps the predicted step time within ``max_overhead``.

    ``least_overhead`` is the extra time of the quickest of them. Both are shares of the plain step's time.
    """

    def __init__(self, max_overhead: float, least_overhead: float) -> None:
        super().__init__(max_overhead, least_overhead)
        self.max_overhead, self.least_overhead = max_overhead, least_overhead

    def __str__(self) -> str:
        return (
            f"this plan makes a step {self.least_overhead:.1%} longer than a plain one; max_overhead allows "
            f"{self.max_overhead:.1%}. Raise max_overhead, or leave out the strategy or hints that ask for this much."
        )


class HintError(MemsaverError):
    """A pattern of ``keep``, ``recompute`` or ``candidates`` matches no layer, or two hints contradict each other."""


class PlanMismatchError(MemsaverError):
    """A plan was made for another model. ``difference`` names the first layer that differs."""

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
    """A plan from a planner or from a file is not valid, or would change the results of training.

    ``strategy`` is the name of the planner that made the plan, ``reason`` says what is wrong.
    """

    def __init__(self, strategy: str, reason: str) -> None:
        super().__init__(strategy, reason)
        self.strategy, self.reason = strategy, reason

    def __str__(self) -> str:
        return (
            f"the plan of planner '{self.strategy}' cannot be used: {self.reason.rstrip('.')}. "
            f"Make a new plan with tf_memsaver.search_plan, or choose another strategy. If the planner is not your own "
            f"and nobody changed the plan, please report this."
        )


class SecondDerivativeError(MemsaverError):
    """A gradient of a gradient went through a recompute segment."""

    def __str__(self) -> str:
        return (
            "neither second nor forward-mode derivatives can be taken through layers that are recomputed. Give "
            "optimize data= (your training data, as for fit): then the part that a train_step or a compute_loss "
            "differentiates twice is automatically not recomputed. Or use tf_memsaver.strip(model) for that part."
        )


class MissingExtraError(MemsaverError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(package, extra)
        self.package, self.extra = package, extra

    def __str__(self) -> str:
        return f"this needs the package '{self.package}'. Install it with: pip install {self.package}"


class MeasurementError(MemsaverError):
    """Memory could not be measured: TensorFlow does not count it here, or the measuring process failed.

    The message says what to do, or has the end of the process's log.
    """


class OutputError(MemsaverError):
    """The output could not be written. No part of it is left. ``path`` is where, ``reason`` says why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return (
            f"'{self.path}' cannot be written: {self.reason}. No partial output was left. Check the disk space and the "
            f"permissions, or choose another path."
        )


class OutputExistsError(MemsaverError):
    """The output path already exists. ``reason`` says why it cannot be replaced; it is empty if it can."""

    def __init__(self, path: str, reason: str = "") -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        if self.reason:
            return f"'{self.path}' exists already and is not replaced: {self.reason}. Choose another path."
        return f"'{self.path}' exists already. Choose another path, or replace it: overwrite=True (--overwrite)."
