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


class Optimize(keras.callbacks.Callback):  # type: ignore[misc]
    """Trains by a plan what ``fit`` is called on, for scripts in which the model is made elsewhere.

    ``model.fit(train_ds, callbacks=[tf_memsaver.callbacks.Optimize(data=train_ds, budget="6GiB")])`` plans as
    ``optimize`` does, before the first step, and has the steps of this ``fit`` run by the plan, with the same results.
    The model itself stays as it is: another ``fit`` without the callback, and whatever else is done with it, is plain.
    But after a ``fit`` that was interrupted the model goes on training by the plan, with the same results, until a
    ``fit`` with this callback has ended, or ``model.make_train_function(force=True)``.

    ``plan`` is the plan, once training has begun.
    """

    @takes(PlanOptions)
    def __init__(self, **options: Unpack[PlanOptions]) -> None:
        """Take what ``optimize`` is given: ``data`` or ``batch_size``, too, since ``fit`` shows a callback no data."""
        super().__init__()
        self._options = options
        self._plain: Any = None
        self.plan: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Plan, and give the model the function that trains its optimized form by a batch.

        Raises:
          MemsaverError: what ``optimize`` raises; nothing is trained then.
        """
        optimized = optimize(self.model, **self._options)
        share_compiled_parts(self.model, optimized)
        optimized.make_train_function()
        self.plan = optimized.memsaver_plan
        # A fit that was interrupted has not given it back.
        self._plain = self._plain or self.model.train_function
        self.model.train_function = optimized.train_function

    def on_train_end(self, logs: Any = None) -> None:
        """Give the model back the function that trains it as it is."""
        self.model.train_function, self._plain = self._plain, None


class MemoryMonitor(StepWatch):
    """Puts the memory of training into the logs: ``peak_bytes`` and ``current_bytes``, by the device's allocator.

    ``model.fit(train_ds, callbacks=[tf_memsaver.callbacks.MemoryMonitor()])`` has both in ``History`` and, if the
    monitor stands before it in the list, in TensorBoard. An epoch's peak is the largest of its steps, without
    validation; what is current is what is allocated when the epoch has ended. The peak is the device's: what other
    models and data keep there counts, too.

    The first step whose peak is above the one that the plan predicted is a warning.
    """

    def __init__(self, every: int | None = None, plan: Plan | None = None) -> None:
        """Take how many steps there are between two entries into the logs of steps, and the plan to hold them to.

        Args:
          every: the logs of every so many steps get the step's figures, too; None: only those of epochs.
          plan: what the peaks are compared with. An optimized model's own, if none is given.

        Raises:
          InvalidRequestError: ``every`` is no such number.
          MeasurementError: TensorFlow does not count this processor's memory; the sentence says how it will.
        """
        super().__init__()
        self._every = none_or(whole(1))("every", every)
        self._plan, self._warned = plan, False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Forget the steps before."""
        self.steps = Steps()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Take down the step's figures; warn of the first peak that is above the plan's."""
        super().on_train_batch_end(batch, logs)
        peak = self.steps.peaks[-1]
        if self._every and isinstance(logs, dict) and (batch + 1) % self._every == 0:
            logs.update(self._figures(peak))
        plan = self._plan or getattr(self.model, "memsaver_plan", None)
        if plan is not None and peak > plan.peak_bytes and not self._warned:
            self._warned = True
            budget = plan.request.budget_bytes
            logging.warning(
                "tf_memsaver: step %d took %s, %.1f%% above the %s that its plan predicts%s. Data and other models "
                "on %s count, too; tf_memsaver.measure(model, data=...) measures the steps alone.",
                batch,
                format_bytes(peak),
                100 * (peak / plan.peak_bytes - 1),
                format_bytes(plan.peak_bytes),
                "" if budget is None else f", for a budget of {format_bytes(budget)}",
                self.device,
            )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Put the epoch's figures into its logs."""
        if logs is not None and self.steps.peaks:
            logs.update(self._figures(max(self.steps.peaks)))

    def _figures(self, peak: int) -> dict[str, int]:
        current = tf.config.experimental.get_memory_info(self.device)["current"]
        return {"peak_bytes": int(peak), "current_bytes": int(current)}
