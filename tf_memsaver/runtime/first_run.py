"""What the first run of a segment leaves for its replay."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import tensorflow as tf

from tf_memsaver.parity.fan_out import first_run_witness
from tf_memsaver.parity.gates import Gates, is_of_shapes
from tf_memsaver.runtime.replayable import Replayable, Tensors

_GRADIENT_SCOPES = {None: "gradient_tape", False: "0_gradients", True: "zz_gradients"}
"""Scopes that sort, relative to first runs, as the plain step's backward pass; by ``Replayable.forward_first``."""


@dataclass(slots=True, kw_only=True)
class FirstRun:
    """What a first run left: ``witness`` is what the gate of the replay must depend on, in graph mode.

    ``needed`` are the outputs that the plain step needs until the backward pass, and this one does not. ``wanted``
    tells for which inputs and weights a gradient is, ``variables`` which weights are reads of the same variable, and
    ``ungated`` has the places of the held tensors that a replay reads as they are.
    """

    outputs: list[tf.Tensor]
    held: list[tf.Tensor]
    wanted: list[bool]
    variables: list[int] = field(default_factory=list)
    witness: tuple[tf.Tensor, ...] = ()
    needed: tuple[tf.Tensor, ...] = ()
    operations: tuple[tf.Operation, ...] = ()
    ungated: frozenset[int] = frozenset()

    @classmethod
    def of(cls, function: Replayable, inputs: Tensors, weights: Tensors, wanted: list[bool], gates: Gates) -> FirstRun:
        """Run a function, and note what it adds to the graph."""
        if tf.executing_eagerly():
            return cls(outputs=function.first_run(inputs, weights), held=function.held(), wanted=wanted)
        graph = tf.compat.v1.get_default_graph()
        start = graph.num_operations()
        outputs = function.first_run(inputs, weights)
        operations = tuple(graph.get_operations()[start:])
        scope = _GRADIENT_SCOPES[function.forward_first]
        sources = itertools.compress([*inputs, *weights], wanted)
        witness, needed = first_run_witness(operations, sources, outputs, scope, gates)
        held = function.held()
        return cls(
            outputs=outputs,
            held=held,
            wanted=wanted,
            witness=() if witness is None else (witness,),
            needed=needed,
            operations=operations,
            ungated=frozenset(p for p, t in enumerate(held) if tf.is_symbolic_tensor(t) and is_of_shapes(t)),
        )
