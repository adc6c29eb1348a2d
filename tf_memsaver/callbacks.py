"""Callbacks for Keras's ``fit``. Importing this loads TensorFlow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from tf_memsaver.api import optimize
from tf_memsaver.compat.keras_training import share_compiled_parts
from tf_memsaver.options.table import PlanOptions
from tf_memsaver.options.verbs import takes

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
