"""Check that an optimized model trains like the plain one: compare loss, gradients and variables over some steps."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from tf_memsaver.check.training_step import KeptState
from tf_memsaver.check.trial import Record, Trial
from tf_memsaver.compat.eager import deterministic_operations, is_deterministic
from tf_memsaver.compat.keras_training import own_optimizer
from tf_memsaver.compat.messages import first_line
from tf_memsaver.errors import InvalidRequestError
from tf_memsaver.options.table import Mode, RunOptions
from tf_memsaver.options.verbs import takes
from tf_memsaver.program.model_check import check_model
from tf_memsaver.program.signature import is_planned_as_a_step
from tf_memsaver.program.told import Told, subject_of, told_of
from tf_memsaver.summary import MOST_LINES, Rows, Summarized

if TYPE_CHECKING:
    from typing_extensions import Unpack

XLA_TOLERANCE = 1e-3
"""The largest difference that passes under XLA, as a share of the largest element of a tensor. XLA compiles the two
programs separately and may order sums differently. It also applies if the plain model's own runs differ; otherwise only
equal bits pass."""

_PLAIN_RUNS = 4
"""The number of runs of the plain model if one differs from the optimized model's run. TensorFlow may add terms in the
order in which they arrive; then any of these orders is one of the plain model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One compared tensor: its kind, its name, the training step, and the largest difference (0 if bits are equal).

    ``relative_difference`` is the difference as a share of the plain tensor's largest absolute value.
    """

    kind: str
    name: str
    step: int
    identical: bool
    largest_difference: float
    relative_difference: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verification(Summarized):
    """The result of ``verify``.

    ``identical`` is true if all bits are equal to those of a run of the plain model. ``passed`` is true if they are
    equal or, under XLA or if the plain model varies, if all differences are within rounding. ``deterministic_ops`` says
    that the comparison ran under ``tf.config.experimental.enable_op_determinism``, since two runs of the plain model
    differed without it. ``plain_varies`` says that they differed even with it, or that TensorFlow has no deterministic
    operations for the model, so that equal bits cannot be expected.
    """

    mode: Mode
    batch_size: int
    steps: int
    deterministic_ops: bool
    checks: tuple[Comparison, ...]
    plain_varies: bool = False

    @property
    def identical(self) -> bool:
        """Whether every compared tensor had the same bits."""
        return all(check.identical for check in self.checks)

    @property
    def passed(self) -> bool:
        """Whether the optimized model trains like the plain one in this mode."""
        if self.mode != "xla" and not self.plain_varies:
            return self.identical
        return all(check.relative_difference <= XLA_TOLERANCE for check in self.checks)

    @property
    def worst(self) -> Comparison:
        """The check with the largest relative difference."""
        return max(self.checks, key=lambda check: (check.relative_difference, not check.identical))

    def summary(self) -> tuple[str, Rows]:
        """Return what ``repr`` shows."""
        kinds = list(dict.fromkeys(check.kind for check in self.checks))
        rows = [("outcome", str(self))]
        for kind in kinds[: MOST_LINES - 2]:
            checks = [check for check in self.checks if check.kind == kind]
            rows.append((kind, f"{sum(check.identical for check in checks)} of {len(checks)} identical"))
        return f"Verification over {_steps(self.steps)}, {self.mode} mode, batch size {self.batch_size}", rows

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON data: the number of checks by kind, and the checks that differ."""
        return {
            "mode": self.mode,
            "batch_size": self.batch_size,
            "steps": self.steps,
            "deterministic_ops": self.deterministic_ops,
            "plain_varies": self.plain_varies,
            "identical": self.identical,
            "passed": self.passed,
            "compared": self._kinds(self.checks),
            "differing": [dataclasses.asdict(check) for check in self.checks if not check.identical],
        }

    def __str__(self) -> str:
        under = ", with deterministic ops" if self.deterministic_ops else ""
        over = f"in {self.mode} mode over {_steps(self.steps)}"
        if self.identical:
            compared = ", ".join(f"{count} {kind}" for kind, count in self._kinds(self.checks).items())
            return f"bit-identical {over} ({compared}){under}"
        every, worst = self._kinds(self.checks), self.worst
        differing = self._kinds([check for check in self.checks if not check.identical])
        found = ", ".join(f"{count} of {every[kind]} {kind}" for kind, count in differing.items())
        cause = ", since TensorFlow adds in another order each time" if self.deterministic_ops else ""
        own = f". Runs of the plain model differ from each other, too{cause}"
        return (
            f"{'within rounding' if self.passed else 'DIFFERENT'} {over}{under}: {found} differ, at most by "
            f"{worst.largest_difference:.3g} ({worst.relative_difference:.3g} of the largest element) in {worst.kind} "
            f"{worst.name}, step {worst.step}{own if self.plain_varies else ''}"
        )

    @staticmethod
    def _kinds(checks: Sequence[Comparison]) -> dict[str, int]:
        """Return how many checks there are of each kind."""
        return dict(Counter(check.kind for check in checks))


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


@takes(RunOptions)
def verify(model: Any, optimized: Any, **options: Unpack[RunOptions]) -> Verification:
    """Train both models from the same state on the same batches, and compare all results bit by bit.

    The batches come from ``data``, or are made up. For every step, the loss, every gradient (``None`` must stay
    ``None``) and, after the update, every variable are compared: weights, BatchNorm statistics, dropout seeds. A
    compiled model is trained with its optimizer, another model with plain SGD.

    TensorFlow optimizes a step that returns its gradients differently from one that only applies them. So a compiled
    model is also trained by Keras's own ``fit`` (except in eager mode), and its logs after each step and all variables
    at the end, with the optimizer's, are compared, too. A model with its own ``train_step`` is trained by ``fit`` only,
    if you give ``data``. With ``step``, your step runs; what it returns and all variables at the end are compared.

    If the compiled loss cannot be computed on made-up targets, the mean square of the outputs replaces it, ``fit`` is
    left out, and the log says so. If results differ, the plain model is run a few more times; one run with the same
    bits is enough. Afterwards, models, variables and the optimizer are as before.

    Example::

        print(tf_memsaver.verify(model, optimized, data=train_ds))

    Args:
      model: the plain model or models, as in ``optimize``.
      optimized: what ``optimize`` or ``apply_plan`` returned for ``model``; it has the same variables.

    Raises:
      InvalidRequestError: the models do not share their variables, or an argument is not valid.
      UnsupportedModelError: no Keras model, or its call cannot be traced.
    """
    told, steps, mode = told_of(model, options), options["steps"], options["mode"]
    model, optimized = told.model, subject_of(optimized, options)
    check_model(optimized, needs_call=False)
    if {id(v) for v in model.variables} != {id(v) for v in optimized.variables}:
        raise InvalidRequestError(
            "the two models do not share their variables. Compare a model with the one that "
            "tf_memsaver.optimize(model) returned for it."
        )
    with KeptState(model, optimized):
        own = own_optimizer(model)
        if own is not None and not own.built:
            # Before its state is taken down, so that what is traced keeps its slots when that is restored.
            own.build(model.trainable_variables)
        checks, deterministic, varies = _compared(model, optimized, told, steps, mode)
    return Verification(
        mode=mode,
        batch_size=told.batch_size,
        steps=steps,
        deterministic_ops=deterministic,
        checks=checks,
        plain_varies=varies,
    )


class _Outcome(NamedTuple):
    """The comparisons, whether they were made with deterministic operations, and whether the plain model varied."""

    checks: tuple[Comparison, ...]
    deterministic_ops: bool
    plain_varies: bool


def _compared(model: Any, optimized: Any, told: Told, steps: int, mode: Mode) -> _Outcome:
    """Train both models, and compare what comes out."""
    with KeptState(model, optimized) as state:
        trial = Trial(model, told, steps, mode, state)
        if is_planned_as_a_step(model):
            return _compared_by(trial.fit if model.compiled else trial.loop, model, optimized, mode)
        plain_step = trial.step_of(model)
        plain, fits = trial.train(model, plain_step), False
        if own_optimizer(model) is not None and mode != "eager" and not trial.stand_in:
            try:
                plain |= trial.fit(model)
                fits = True
            except Exception as error:  # Whatever a train_step that somebody wrote may raise.
                logging.warning(
                    "model '%s' cannot be trained by fit on this data (%s). Only its step in a loop is compared; "
                    "to compare fit, too, give data=.",
                    model.name,
                    first_line(error),
                )

        def trained(subject: Any) -> Record:
            # What was traced without deterministic operations would run without them.
            step = plain_step if subject is model and not is_deterministic() else trial.step_of(subject)
            return {**trial.train(subject, step), **(trial.fit(subject) if fits else {})}

        return _compared_by(trained, model, optimized, mode, plain)


def _compared_by(
    train: Callable[[Any], Record], model: Any, optimized: Any, mode: Mode, plain: Record | None = None
) -> _Outcome:
    """Train both models in one way, and compare; ``plain`` is the plain model's first record, if it is there.

    Where the records differ, the plain model is trained again, to tell whether it differs from itself; where it does,
    all is done once more with deterministic operations, if TensorFlow has them for this model.
    """
    plain = train(model) if plain is None else plain
    if mode == "xla":
        return _Outcome(_compare(plain, train(optimized)), False, False)
    found = _against_plain_runs(train, model, optimized, plain) if _is_same(plain, train(model)) else None
    if found is not None and not found.plain_varies:
        return found
    try:
        with deterministic_operations():
            once_more = _against_plain_runs(train, model, optimized, train(model))
        return _Outcome(once_more.checks, True, once_more.plain_varies)
    except (RuntimeError, tf.errors.OpError) as error:  # An operation draws without a seed, or has no such kernel.
        logging.warning(
            "model '%s' cannot be trained with deterministic operations (%s). Its plain runs differ, so equal "
            "bits cannot be expected.",
            model.name,
            first_line(error),
        )
    found = found or _against_plain_runs(train, model, optimized, plain)
    return _Outcome(found.checks, False, True)


def _against_plain_runs(train: Callable[[Any], Record], model: Any, optimized: Any, plain: Record) -> _Outcome:
    """Compare with the plain record and, where that differs, with more of them, one of which may be the same."""
    other, varies = train(optimized), False
    for _ in range(_PLAIN_RUNS):
        found = _compare(plain, other)
        if all(check.identical for check in found):
            return _Outcome(found, False, False)
        again = train(model)
        varies = varies or not _is_same(plain, again)
        plain = again
    return _Outcome(_compare(plain, other), False, varies)


def _is_same(left: Record, right: Record) -> bool:
    return all(check.identical for check in _compare(left, right))


def _compare(plain: Record, other: Record) -> tuple[Comparison, ...]:
    return tuple(_check(*key, plain.get(key, _MISSING), other.get(key, _MISSING)) for key in plain | other)


_MISSING = np.array([], dtype=np.void)
"""In place of what a record does not have: no tensor of a model is like it."""


def _check(
    kind: str, name: str, step: int, plain: np.ndarray[Any, Any] | None, other: np.ndarray[Any, Any] | None
) -> Comparison:
    if plain is None or other is None or plain is _MISSING or other is _MISSING:
        same = plain is other
        difference = relative = 0.0 if same else float("inf")
    elif plain.shape != other.shape or plain.dtype != other.dtype:
        same, difference, relative = False, float("inf"), float("inf")
    else:
        same = plain.tobytes() == other.tobytes()
        difference = relative = 0.0
        if not same:
            difference = _largest_difference(plain, other)
            largest = np.max(np.abs(plain.astype(np.float64)), where=np.isfinite(plain), initial=0.0)
            relative = difference / max(float(largest), float(np.finfo(np.float32).tiny))
    return Comparison(
        kind=kind, name=name, step=step, identical=same, largest_difference=difference, relative_difference=relative
    )


def _largest_difference(plain: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """Return it, infinite where one of two elements is NaN or they are infinite in other ways."""
    left, right = plain.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        differences = np.where((left == right) | (np.isnan(left) & np.isnan(right)), 0.0, np.abs(left - right))
    return float(np.max(np.nan_to_num(differences, nan=np.inf, posinf=np.inf)))
