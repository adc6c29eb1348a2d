"""The first training of somebody else's program, heard of in its place: nothing is trained.

Read from Keras 3.12 to 3.15: ``trainers/trainer.py``, ``backend/tensorflow/trainer.py``,
``optimizers/base_optimizer.py``. ``fit`` and ``train_on_batch`` are looked up on ``keras.Model``, whatever a subclass
does before it calls them; a loop of somebody's own ends in ``Optimizer.apply``.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import keras

from tf_memsaver.compat.keras_training import preprocessing_of

Heard = Callable[[Any, "dict[str, Any]", FrameType], None]
"""Takes the model that ``fit`` is called on, the arguments by name, and the frame of who trains.

The first two are None and empty where something else than ``fit`` trains.
"""


_GENERATED = "__autograph_generated_file"
"""A part of the names of files that a ``tf.function`` is translated to (``autograph/pyct/loader.py``)."""


class TrainingReached(BaseException):
    """Ends a program where it would train. No ``Exception``, which programs catch."""


class _State(enum.Enum):
    WAITING = "waiting"
    HEARD = "heard"
    OVER = "over"


@contextlib.contextmanager
def first_training(hear: Heard) -> Iterator[None]:
    """Call ``hear`` in the place of the first training within the block, then end the program.

    While ``hear`` runs, Keras is as it was. What trains after it ends the program again.

    Raises:
      TrainingReached: from within what trains; the caller of the block catches it.
    """
    state = _State.WAITING

    def heard_in_place(of: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def called(subject: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal state
            if state is _State.HEARD:
                return original(subject, *args, **kwargs)
            if state is _State.WAITING:
                state = _State.HEARD
                try:
                    is_fit = of == "fit"
                    given = inspect.signature(original).bind(subject, *args, **kwargs).arguments if is_fit else {}
                    hear(subject if is_fit else None, given, _outside(subject))
                finally:
                    state = _State.OVER
            raise TrainingReached

        return called

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (keras.Model, "fit"),
            (keras.Model, "train_on_batch"),
            (keras.optimizers.Optimizer, "apply"),
        ):
            stack.enter_context(_replaced(owner, name, heard_in_place(name, getattr(owner, name))))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """Give a class a method, for a while; one that it inherits is inherited again after."""
    own = vars(owner).get(name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _outside(subject: Any) -> FrameType:
    """Return the frame that calls the training, behind those of Keras and of methods of the model or optimizer."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    found = frame.f_back
    while found.f_back is not None and (_is_librarys(found) or found.f_locals.get("self") is subject):
        found = found.f_back
    return found


def _is_librarys(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package in ("keras", "keras_hub", "tensorflow", __package__.partition(".")[0]) or (
        _GENERATED in frame.f_code.co_filename
    )


@contextlib.contextmanager
def data_prepared(model: Any) -> Iterator[None]:
    """Take the data of a KerasHub task as it is: its own ``fit`` has sent it through the preprocessor already.

    Read from KerasHub 0.20 and later: ``utils/pipeline_model.py``.
    """
    if preprocessing_of(model) is None:
        yield
        return
    vars(model)["preprocess_samples"] = None
    try:
        yield
    finally:
        del vars(model)["preprocess_samples"]
