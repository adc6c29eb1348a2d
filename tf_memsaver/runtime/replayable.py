"""What can be recomputed, and what the segments of one forward pass share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import tensorflow as tf

from tf_memsaver.parity.gates import Gates
from tf_memsaver.parity.level import Parity, level_here
from tf_memsaver.parity.names import Names
from tf_memsaver.runtime import twins

Tensors = Sequence[tf.Tensor]


class Replayable(Protocol):
    """A function of tensors that can be run a second time with the same results and no second side effect."""

    @property
    def forward_first(self) -> bool | None:
        """Whether the plain step's forward pass sorts before its backward pass, by name (``CallSequence``)."""
        ...

    def gradient_name(self, place: int) -> str:
        """Return how the plain step names the gradient of output ``place``."""
        ...

    def is_loss(self, place: int) -> bool:
        """Whether output ``place`` is a loss that a layer has added."""
        ...

    def may_be_term(self, place: int) -> bool:
        """Whether output ``place`` may be a term of a sum after the segment."""
        ...

    def is_one_of_several(self, place: int) -> bool:
        """Whether a sum or product after the segment may read output ``place`` and another one."""
        ...

    def is_input_of_others(self, place: int) -> bool:
        """Whether, after ``first_run``, others read input ``place``, too, so that its gradient is a sum outside."""
        ...

    def first_run(self, inputs: Tensors, weights: Tensors) -> list[tf.Tensor]:
        """Run and return the differentiable outputs (floating tensors)."""

    def read_again(self) -> list[tuple[int, tf.Tensor]]:
        """Return, after ``first_run``, a tensor for every further read of a variable, with its place in the weights.

        Each read sends a gradient of its own to the variable, which adds them all at once. A replay is given these
        tensors in front of the weights, the last one first.
        """

    def is_read_elsewhere(self, place: int) -> bool:
        """Whether others read the variable of weight ``place``, too, so that its gradient is a term of a sum."""
        ...

    def held(self) -> list[tf.Tensor]:
        """Return, after ``first_run``, the other tensors (of any dtype) that a replay must be given again."""

    def replay(self, inputs: Tensors, weights: Tensors, held: Tensors) -> list[tf.Tensor]:
        """Run again and return the same outputs, without any side effect."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What the segments of one forward pass share.

    ``read_by_makers`` are the ids of the tensors that who made them reads, too: outputs of segments, and what a replay
    hands to the segments inside. In eager mode nothing tells which these are. ``ordered`` is the batch size of a plan
    whose step is held in order (see ``order``), or None.
    """

    traces: twins.Traces = field(default_factory=twins.Traces)
    gates: Gates = field(default_factory=Gates)
    names: Names = field(default_factory=lambda: level_here().names())
    parity: Parity = field(default_factory=level_here)
    read_by_makers: set[int] = field(default_factory=set)
    ordered: int | None = None
