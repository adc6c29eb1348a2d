"""What capture and rewriting know of a model, whatever kind it is: its calls, and what is around them.

Each kind of Keras model has a class of its own (``layer_program``, ``sublayer_program``, ``operation_program``,
``block_program``, ``step_program``, ``loop_program``), and ``kinds`` says which model is of which kind. A function of
TensorFlow is a program, too: ``function_calls``.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from tf_memsaver.ir.graph import Unit
from tf_memsaver.ir.segments import Segment
from tf_memsaver.options.table import Granularity, TimeChunks
from tf_memsaver.plan.plan import Plan
from tf_memsaver.program.calls import CallSequence
from tf_memsaver.program.model_call import arguments_of
from tf_memsaver.program.signature import Given

if TYPE_CHECKING:
    from typing_extensions import Self


class Program(abc.ABC):
    """A model or function as calls that can be run one by one: those of ``sequence``."""

    sequence: CallSequence

    @abc.abstractmethod
    def enter(self, inputs: Any) -> list[Any]:
        """Return the tensors for ``sequence.inputs`` of a call with ``inputs``."""

    @abc.abstractmethod
    def finish(self, flat: Sequence[Any]) -> Any:
        """Return what the call returns for the tensors of ``sequence.outputs``."""


class TrainingCall(Protocol):
    """What runs instead of the ``call`` of an optimized model where a gradient may be taken."""

    def __call__(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], shared: Any = None) -> Any:
        """Return what the model's own ``call`` returns for these arguments; ``shared`` if it is part of another one.

        That is what ``Segmenter.begin`` made for the call of the other model.
        """
        ...


class SegmentedCalls(Protocol):
    """A sequence of calls that is run in segments."""

    def __call__(self, inputs: Sequence[Any], training: bool | None, shared: Any = None) -> list[Any]:
        """Return the tensors of ``sequence.outputs`` for those of ``sequence.inputs``."""
        ...


class Segmenter(NamedTuple):
    """How calls are run in segments. A program is handed it by ``rewrite``, which lies above.

    ``prepare`` makes the calls of a sequence run in segments that cover it. Where several are prepared for parts of one
    model, ``begin`` makes, for each call of the model, what they are given as ``shared``.
    """

    prepare: Callable[[CallSequence, Sequence[Segment]], SegmentedCalls]
    begin: Callable[[], Any]


class Wanted(NamedTuple):
    """How a model is to be cut: in units of ``granularity``.

    With ``"auto"`` the layers in ``opened`` are taken apart; if it is None, those where that pays. Recurrent layers are
    cut into chunks of ``time_chunks``. ``of_call`` makes the program of a model's call, whether or not its step is
    planned; a program is handed it by ``kinds``, which lies above.

    Where a step of somebody's own calls the model, ``given`` tells how, and the step has said whether operations may
    be units.
    """

    granularity: Granularity
    opened: Collection[str] | None
    time_chunks: TimeChunks
    of_call: Callable[[Any, Wanted], ModelProgram]
    given: Given | None = None

    def by_layers(self, model: Any) -> ModelProgram:
        """Return the program of a model's call in units of whole layers."""
        return self.of_call(model, self._replace(granularity="layer", opened=None))


class MadeOptimized(Protocol):
    """Makes an optimized model. A program is handed it by ``rewrite``, which lies above."""

    def __call__(self, model: Any, method: Literal["call", "train_step"], run: Callable[..., Any]) -> Any:
        """Return ``model`` with ``run`` in the place of that method; it gets the model and what the method gets.

        For ``"call"`` it is a ``TrainingCall``.
        """
        ...


def joined_notes(notes: Iterable[str]) -> str:
    """Return notes of plans as one, each once."""
    return "; ".join(dict.fromkeys(filter(None, notes)))


class TrainingProgram(abc.ABC):
    """A Keras model as calls, for a plan to be made of and to train by.

    ``runs_step`` says that the calls are those of the model's ``train_step``, and not of its ``call``;
    ``cuts_time`` that recurrent layers among them are cut into chunks of time where that is asked for.
    """

    sequence: CallSequence
    runs_step: bool
    cuts_time = False

    @classmethod
    def of(cls, model: Any, wanted: Wanted) -> Any:
        """Return the program of ``model``, which is only read; its kind may leave it to another class."""
        del wanted
        return cls(model)  # type: ignore[call-arg]

    def noted(self, note: str) -> Self:
        """Return the program; its plans tell this, too, such as why layers were not taken apart."""
        self.sequence = replace(self.sequence, note=joined_notes([self.sequence.note, note]))
        return self

    def check_units(self, units: Sequence[Unit]) -> None:
        """Look at what of the calls can be replayed, once that is known; the log says what is in the way of it.

        Raises:
          UnsupportedModelError: no plan can save anything.
        """
        del units

    @abc.abstractmethod
    def optimized(self, model: Any, plan: Plan, segmenter: Segmenter, made: MadeOptimized) -> Any:
        """Return ``model`` as one that trains by a plan, or what takes its place.

        Raises:
          PlanMismatchError: the plan was made for another model.
        """


class ModelProgram(Program, TrainingProgram):
    """The call of a Keras model.

    ``replaces_whole_call`` says that it stands for ``layer(...)``, with all that Keras does around a layer's ``call``,
    and not for that ``call`` alone.
    """

    runs_step: Literal[False] = False
    replaces_whole_call = False

    def enter_call(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the tensors for ``sequence.inputs`` of a call with these arguments."""
        return self.enter(next(iter(arguments_of(model, args, kwargs).values())))

    def seen_through(self, output: Any) -> list[Any]:
        """Return the tensors that a loss of Keras may take instead of one of ``sequence.outputs``."""
        del output
        return []

    def optimized(self, model: Any, plan: Plan, segmenter: Segmenter, made: MadeOptimized) -> Any:
        """Return ``model`` as one whose call trains by a plan."""
        return made(model, "call", self.training_call(plan, segmenter))

    def training_call(self, plan: Plan, segmenter: Segmenter) -> TrainingCall:
        """Return the training call that runs by a plan.

        Raises:
          PlanMismatchError: the plan was made for another model.
        """
        plan.check_matches(self.sequence.signatures, self.sequence.labels)
        return self.in_segments(plan, segmenter)

    @abc.abstractmethod
    def in_segments(self, plan: Plan, segmenter: Segmenter) -> TrainingCall:
        """Return the training call that runs by a plan of such calls."""
