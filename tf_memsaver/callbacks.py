"""Callbacks for Keras's ``fit``. Importing this loads TensorFlow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from absl import logging

from tf_memsaver.api import optimize
from tf_memsaver.check.watch import Steps, StepWatch
from tf_memsaver.compat.keras_training import share_compiled_parts
from tf_memsaver.options.checks import none_or, whole
from tf_memsaver.options.table import PlanOptions
from tf_memsaver.options.verbs import takes
from tf_memsaver.plan.plan import Plan
from tf_memsaver.units import format_bytes

if TYPE_CHECKING:
    from typing_extensions import Unpack


_PLAIN = "memsaver_plain"
"""The attribute of a train function that stands in for a model's own one, which it holds."""


def _own_train_function(model: Any) -> Any:
    """Return the train function that a model has of its own, also if a ``fit`` was interrupted."""
    return getattr(model.train_function, _PLAIN, model.train_function)


class Optimize(keras.callbacks.Callback):  # type: ignore[misc]
    """Trains the model of a ``fit`` in less memory, for scripts where you can only change the call of ``fit``.

    It plans before the first step, as ``tf_memsaver.optimize`` does. The steps of this ``fit`` run by the plan, with
    the same results. The model itself does not change: a later ``fit`` without the callback is plain. The exception is
    a ``fit`` that was interrupted: the model then trains by the plan, with the same results, until a ``fit`` with such
    a callback ends, or until you call ``model.make_train_function(force=True)``.

    The attribute ``plan`` is the plan (a ``Plan``), from the start of training on; before, it is None.

    Example::

        model.fit(train_ds, callbacks=[tf_memsaver.callbacks.Optimize(data=train_ds, budget="6GiB")])
    """

    @takes(PlanOptions)
    def __init__(self, **options: Unpack[PlanOptions]) -> None:
        """Take the options of ``optimize``. Give ``data`` or ``batch_size``: a callback cannot see them."""
        super().__init__()
        self._options = options
        self.plan: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Plan, and replace the model's train function by that of the optimized model.

        Raises:
          MemsaverError: the errors of ``optimize``; nothing is trained then.
        """
        optimized = optimize(self.model, **self._options)
        share_compiled_parts(self.model, optimized)
        optimized.make_train_function()
        self.plan = optimized.memsaver_plan
        setattr(optimized.train_function, _PLAIN, _own_train_function(self.model))
        self.model.train_function = optimized.train_function

    def on_train_end(self, logs: Any = None) -> None:
        """Restore the model's own train function."""
        self.model.train_function = _own_train_function(self.model)


class MemoryMonitor(StepWatch):
    """Adds the memory of training to fit's logs: ``peak_bytes`` and ``current_bytes``, as the allocator counts them.

    ``peak_bytes`` of an epoch is the largest peak of its training steps, without validation; ``current_bytes`` is
    what is allocated at the end of the epoch. Both are in bytes and for the whole device, so memory of other models and
    of data counts, too; a plan has the data that it was made with (``data=``). They are in ``History`` and, if the
    monitor comes before the TensorBoard callback in the list, in TensorBoard.

    A warning is logged for the first step whose peak is above the plan's budget or, if it has none, above the most that
    its steps are predicted to take (``Plan.highest_peak_bytes``). On a GPU the first step of each ``fit`` is left out:
    there TensorFlow tries out algorithms of convolutions, in memory that it does without if there is none.

    Example::

        history = model.fit(train_ds, callbacks=[tf_memsaver.callbacks.MemoryMonitor()]).history
        print(history["peak_bytes"])
    """

    def __init__(self, every: int | None = None, plan: Plan | None = None) -> None:
        """Take the interval of log entries, and the plan to compare with.

        Args:
          every: also add the figures to the logs of every n-th step; None: only to those of epochs.
          plan: the plan that peaks are compared with; by default, the plan of the optimized model.

        Raises:
          InvalidRequestError: ``every`` is not a whole number of 1 or more.
          MeasurementError: TensorFlow does not count memory on this CPU; the message says how to switch it on.
        """
        super().__init__()
        self._every = none_or(whole(1))("every", every)
        self._plan, self._warned, self._tries = plan, False, False

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin with a step that tries out algorithms, if the device is a GPU."""
        self._tries = self.device.startswith("GPU")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start a new epoch without the peaks of the previous one."""
        self.steps = Steps()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the step's figures; warn of the first peak that is above what the plan allows."""
        super().on_train_batch_end(batch, logs)
        peak = self.steps.peaks[-1]
        if self._every and isinstance(logs, dict) and (batch + 1) % self._every == 0:
            logs.update(self._figures(peak))
        plan = self._plan or getattr(self.model, "memsaver_plan", None)
        if plan is not None and not self._warned and not self._tries:
            self._warned = self._warn(plan, batch, peak)
        self._tries = False

    def _warn(self, plan: Plan, batch: int, peak: int) -> bool:
        """Warn if a step took more than a plan allows; return whether it did."""
        budget = plan.request.budget_bytes
        limit = budget or max(plan.peak_bytes, plan.highest_peak_bytes)
        if peak > limit:
            logging.warning(
                "tf_memsaver: step %d took %s, %.1f%% above the %s %s. Other models on %s count, too, and so does data "
                "that optimize was not given as data=. tf_memsaver.measure(model, data=...) measures the steps alone, "
                "and optimize(..., budget=..., calibrate=True) makes a plan that real steps keep.",
                batch,
                format_bytes(peak),
                100 * (peak / limit - 1),
                format_bytes(limit),
                "of its plan's budget" if budget else "that its plan's steps are predicted to take at most",
                self.device,
            )
        return peak > limit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Add the epoch's figures to its logs."""
        if logs is not None and self.steps.peaks:
            logs.update(self._figures(max(self.steps.peaks)))

    def _figures(self, peak: int) -> dict[str, int]:
        current = tf.config.experimental.get_memory_info(self.device)["current"]
        return {"peak_bytes": int(peak), "current_bytes": int(current)}
