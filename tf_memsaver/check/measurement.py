"""The memory and time of real training steps, and how they are measured in this process."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tf_memsaver.check.running import How, StepRunner, runner_of
from tf_memsaver.check.training_step import KeptState
from tf_memsaver.check.watch import device_name
from tf_memsaver.compat.keras_variables import bytes_of, is_trained
from tf_memsaver.options.table import MeasureMode
from tf_memsaver.program.data import Batch
from tf_memsaver.program.told import Told
from tf_memsaver.rewrite.optimized_model import strip
from tf_memsaver.summary import Rows, Summarized
from tf_memsaver.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Measurement(Summarized):
    """The result of ``measure``: memory in bytes, as the device's allocator counts it, and times in seconds.

    ``peak_bytes`` is the largest peak of ``steps`` whole steps (weights, optimizer slots, batch, gradients,
    activations, scratch), ``least_peak_bytes`` the smallest. ``live_bytes`` is what was live before a step. It is the
    smallest value of all steps, since on a busy machine a step may begin before the buffers of the previous one are
    freed. ``data_bytes`` of both are what the training data holds beside the batch in ``fit`` on a CPU, as far as that
    is known; they are added, since the data is not in the process that measures. ``gradient_bytes`` is the size of the
    weights' gradients, and ``activation_bytes`` is the peak without both. ``step_seconds`` is the median step time;
    ``step_seconds_range`` are the quartiles. ``trace_seconds`` is the time to trace the step (0 in eager mode; under
    XLA it includes compilation).

    With ``beside_plain``, ``plain_step_seconds`` is the median time of plain steps. ``slowdown`` is the extra time as a
    share of the plain step's time, and ``slowdown_range`` its smallest and largest value over ``ROUNDS`` rounds, in
    which plain and optimized steps alternate. Without it, these are None.
    """

    device: str
    mode: MeasureMode
    batch_size: int
    peak_bytes: int
    least_peak_bytes: int
    live_bytes: int
    gradient_bytes: int
    step_seconds: float
    step_seconds_range: tuple[float, float]
    trace_seconds: float
    steps: int
    plain_step_seconds: float | None = None
    slowdown_range: tuple[float, float] | None = None
    data_bytes: int = 0

    @property
    def activation_bytes(self) -> int:
        """The peak without what was live before the step and without the weights' gradients."""
        return self.peak_bytes - self.live_bytes - self.gradient_bytes

    @property
    def slowdown(self) -> float | None:
        """The extra time of a step as a share of the plain step's time; None if no plain steps were run."""
        return None if self.plain_step_seconds is None else self.step_seconds / self.plain_step_seconds - 1

    def beside(self, data_bytes: int) -> Measurement:
        """Return what the steps take beside so many bytes of data."""
        return dataclasses.replace(
            self,
            peak_bytes=self.peak_bytes + data_bytes,
            least_peak_bytes=self.least_peak_bytes + data_bytes,
            live_bytes=self.live_bytes + data_bytes,
            data_bytes=data_bytes,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields, ``activation_bytes`` and ``slowdown`` as plain JSON data."""
        data = dataclasses.asdict(self)
        return {**data, "activation_bytes": self.activation_bytes, "slowdown": self.slowdown}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        """Return what ``to_json`` described."""
        fields: dict[str, Any] = {field.name: data[field.name] for field in dataclasses.fields(cls)}
        for name in ("step_seconds_range", "slowdown_range"):
            fields[name] = None if fields[name] is None else tuple(fields[name])
        return cls(**fields)

    def summary(self) -> tuple[str, Rows]:
        """Return what ``repr`` shows."""
        shortest, longest = self.step_seconds_range
        data = f", of data in memory {format_bytes(self.data_bytes)}" if self.data_bytes else ""
        rows = [
            ("peak", f"{format_bytes(self.peak_bytes)} (smallest of the steps {format_bytes(self.least_peak_bytes)})"),
            ("activations", format_bytes(self.activation_bytes)),
            ("before a step", f"{format_bytes(self.live_bytes)} of weights, slots and batch{data}"),
            ("gradients", f"{format_bytes(self.gradient_bytes)} of the weights"),
            ("step", f"{self.step_seconds:.3f} s (middle half {shortest:.3f} to {longest:.3f} s)"),
            ("tracing", f"{self.trace_seconds:.1f} s"),
        ]
        if self.slowdown is not None and self.slowdown_range is not None:
            least, most = self.slowdown_range
            rows.append(("slowdown", f"{self.slowdown:+.0%} of the plain step ({least:+.0%} to {most:+.0%})"))
        where = f"{self.mode} on {self.device}, batch size {self.batch_size}"
        return f"Measurement of {self.steps} steps, {where}", rows

    def __str__(self) -> str:
        text = (
            f"{self.mode} on {self.device}: peak {format_bytes(self.peak_bytes)} (smallest of {self.steps} steps "
            f"{format_bytes(self.least_peak_bytes)}), activations {format_bytes(self.activation_bytes)}, step "
            f"{self.step_seconds:.3f} s"
        )
        if self.slowdown is None or self.slowdown_range is None:
            return text
        least, most = self.slowdown_range
        longer = "shorter" if self.slowdown < 0 else "longer"
        return f"{text}, {abs(self.slowdown):.0%} {longer} than a plain step (rounds: {least:+.0%} to {most:+.0%})"


ROUNDS = 4
"""How often plain and optimized steps alternate, so that other work on the machine affects both."""


def measure_here(model: Any, told: Told, given: Batch, how: How, steps: int, beside_plain: bool) -> Measurement:
    """Measure in this process, where buffers of other work may be counted; see ``measure``."""
    plain = strip(model) if beside_plain else None
    with KeptState(*filter(None, (model, plain))), runner_of(model, told, given, how) as runner:
        first, found = runner.run(1), runner.run(steps)
        beside = None
        if plain is not None:
            with runner_of(plain, told, given, how) as other:
                beside = _in_turns(runner, other, max(2, steps // ROUNDS))
    timed = found.seconds if beside is None else beside.seconds
    seconds = statistics.median(timed)
    quartiles = statistics.quantiles(timed, n=4) if len(timed) > 1 else timed * 3
    return Measurement(
        device=device_name(),
        mode=how.mode,
        batch_size=told.batch_size,
        peak_bytes=max(found.peaks),
        least_peak_bytes=min(found.peaks),
        live_bytes=min(found.lives),
        gradient_bytes=sum(bytes_of(v) for v in model.trainable_variables if is_trained(v)),
        step_seconds=seconds,
        step_seconds_range=(quartiles[0], quartiles[-1]),
        trace_seconds=0.0 if how.mode == "eager" else max(0.0, first.seconds[0] - seconds),
        steps=steps,
        plain_step_seconds=None if beside is None else beside.plain_seconds,
        slowdown_range=None if beside is None else beside.slowdown_range,
    )


class _Beside(NamedTuple):
    """Seconds of steps that alternated with plain ones, their median, and the range of the ratio minus one."""

    seconds: list[float]
    plain_seconds: float
    slowdown_range: tuple[float, float]


def _in_turns(runner: StepRunner, plain: StepRunner, count: int) -> _Beside:
    """Run steps of both alternately, in ``ROUNDS`` rounds; the first step of each turn does not count."""
    plain.run(1)
    rounds = [[each.run(1 + count).seconds[1:] for each in (plain, runner)] for _ in range(ROUNDS)]
    theirs, ours = zip(*rounds, strict=True)
    ratios = [statistics.median(b) / statistics.median(a) - 1 for a, b in rounds]
    return _Beside(
        seconds=list(itertools.chain(*ours)),
        plain_seconds=statistics.median(itertools.chain(*theirs)),
        slowdown_range=(min(ratios), max(ratios)),
    )
