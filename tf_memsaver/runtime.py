"""Recompute one segment in the backward pass: the contract of ``tf.recompute_grad``, kept where that one does not.

``recompute`` runs a function without recording it and, when its gradient is asked for, runs it again under a tape.
``tf.recompute_grad`` (TensorFlow 2.21) does the same, but fails silently in the cases below, each shown in
``tests/tensorflow/test_traps.py`` or measured in ``tools/results/runtime.md``:

* it copies every argument before the replay, so that passing the weights as arguments copies them all;
* its replay waits for the gradient of the first output only: here for one element of every gradient, by data, because
  XLA ignores control dependencies, and by control dependency too, so that work on weights alone does not start early;
* it adds 0.0 to the arguments, which turns -0.0 into 0.0: here 0.0 is subtracted, which changes nothing;
* unconnected gradients come back as zeros: here as ``None``, as without a segment;
* integer, boolean and state tensors cannot be arguments: here they are *held* from the first run and given to the
  replay;
* a second derivative gives a wrong number or an obscure error: here ``SecondDerivativeError``.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.eager.record import stop_recording

from tf_memsaver.errors import SecondDerivativeError, UnsupportedModelError
from tf_memsaver.fan_out import first_run_witness, replay_witness

Tensors = Sequence[tf.Tensor]

FIRST_RUN = "unrecorded"
"""Name scope, below the model's, of first runs."""


_GRADIENT_SCOPES = {None: "gradient_tape", False: "0_gradients", True: "zz_gradients"}
"""Scopes that sort, relative to first runs, as the plain step's backward pass; by ``Replayable.forward_first``."""


def plain_name(name: str, graph: Any, forward_first: bool | None) -> str:
    """Return the name scope that sorts in a replay as that of the same operations does in the plain step.

    ``name`` is theirs in the first run, in ``graph`` (None if there was none).

    Graph optimisation sorts the terms of a sum and the factors of a product by name, and the order is part of the
    result. Where the backward pass is a function of its own, the plain step's forward and backward operations belong to
    two calls, whose names settle the order (``forward_first``). Replays belong to the backward call: a prefix puts them
    in front of ``gradients/``, or behind it.
    """
    parts = [part for part in name.split("/") if part and part != FIRST_RUN]
    apart = graph is not None and graph is not tf.compat.v1.get_default_graph()
    prefix = ["forward" if forward_first else "replayed"] if apart else []
    return "".join(f"{part}/" for part in (*prefix, *parts))


class Replayable(Protocol):
    """A function of tensors that can be run a second time with the same results and no second side effect."""

    @property
    def forward_first(self) -> bool | None:
        """Whether the plain step's forward pass sorts before its backward pass, by name (``CallSequence``)."""
        ...

    def gradient_name(self, place: int) -> str:
        """Return how the plain step names the gradient of output ``place``."""
        ...

    def first_run(self, inputs: Tensors, weights: Tensors) -> list[tf.Tensor]:
        """Run and return the differentiable outputs (floating tensors)."""

    def held(self) -> list[tf.Tensor]:
        """Return, after ``first_run``, the other tensors (of any dtype) that a replay must be given again."""

    def replay(self, inputs: Tensors, weights: Tensors, held: Tensors) -> list[tf.Tensor]:
        """Run again and return the same outputs, without any side effect."""


def recompute(function: Replayable, inputs: Tensors, weights: Tensors) -> list[tf.Tensor]:
    """Return ``function``'s outputs, keeping only ``inputs``, ``weights`` and what it holds for the backward pass.

    Args:
      function: what to run; it is run once now, and once more for every gradient taken.
      inputs: floating tensors that the outputs depend on; the replay reads them behind the order gate.
      weights: floating tensors of variables; never copied.

    Raises:
      SecondDerivativeError: (when it is asked for) on the gradient of a gradient.
    """
    count = len(inputs)
    reached: set[int] = set()

    @tf.custom_gradient
    def segment(*arguments: tf.Tensor) -> Any:
        with stop_recording():
            outputs, witness = _first_run(function, arguments[:count], arguments[count:])
        held = function.held()

        def gradient(*upstream: Any, variables: Any = None) -> Any:
            connected = sorted(reached) if reached else list(range(len(outputs)))
            reached.clear()
            arrived = {place: tf.convert_to_tensor(upstream[place]) for place in connected}
            replayed = _replay_gradients(function, arguments[:count], arguments[count:], held, arrived, witness)
            # Variables reach the segment as tensors; of those listed here a gradient would be lost.
            _refuse_trained(variables or ())
            return replayed if variables is None else (replayed, [None] * len(variables))

        return tuple(outputs), gradient

    outputs = segment(*inputs, *weights)
    if len(outputs) == 1:
        return list(outputs)
    return [_note_gradient(output, place, reached) for place, output in enumerate(outputs)]


def _first_run(
    function: Replayable, inputs: Tensors, weights: Tensors
) -> tuple[list[tf.Tensor], tuple[tf.Tensor, ...]]:
    """Run the function once; return its outputs and, in graph mode, what the gate of the replay must depend on."""
    if tf.executing_eagerly():
        return function.first_run(inputs, weights), ()
    graph = tf.compat.v1.get_default_graph()
    start = graph.num_operations()
    outputs = function.first_run(inputs, weights)
    scope = _GRADIENT_SCOPES[function.forward_first]
    witness = first_run_witness(graph.get_operations()[start:], [*inputs, *weights], outputs, scope)
    return outputs, () if witness is None else (witness,)


def _refuse_trained(variables: Sequence[Any]) -> None:
    """Check that the segment has read no trainable variable on its own.

    Raises:
      UnsupportedModelError: it names the variable.
    """
    for variable in variables:
        if variable.trainable:
            raise UnsupportedModelError(
                f"variable '{variable.name}' is read inside a recompute segment in a way that cannot be replayed, such "
                f"as from a tf.function or as a tf.Variable. Name its layer in keep=, and make a new plan."
            )


def _note_gradient(output: tf.Tensor, place: int, reached: set[int]) -> tf.Tensor:
    """Pass a tensor through; note in ``reached`` that a gradient arrives for it.

    A custom gradient gets zeros for outputs that the loss does not depend on, and cannot tell them from a gradient that
    is zero. With this note the replay leaves such outputs out, so that weights used by them alone keep gradient None.
    """

    @tf.custom_gradient
    def noted(tensor: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            reached.add(place)
            return upstream

        return tf.identity(tensor), gradient

    return noted(output)


def _replay_gradients(
    function: Replayable,
    inputs: Tensors,
    weights: Tensors,
    held: Tensors,
    upstream: dict[int, tf.Tensor],
    witness: Tensors,
) -> list[Any]:
    """Replay and return a gradient, or None, for each of inputs and weights."""
    places = list(upstream)
    shape = (len(places), len(inputs))
    connected: list[bool] = []

    # Everything enters as an argument, so that no path of a second derivative goes around the error.
    @tf.custom_gradient
    def backward(*tensors: tf.Tensor) -> Any:
        arrived, sources = tensors[: shape[0]], tensors[shape[0] :]
        gate = None if tf.executing_eagerly() else _gate([*arrived, *witness])
        with contextlib.ExitStack() as stack:
            if gate is not None:
                stack.enter_context(tf.control_dependencies([gate]))
            tape = stack.enter_context(tf.GradientTape(watch_accessed_variables=False))
            gated = [
                _gated(gate, *pair, function.forward_first) for pair in zip(sources[: shape[1]], inputs, strict=True)
            ]
            gated += [tf.identity(tensor) for tensor in sources[shape[1] :]]
            tape.watch(gated)
            start = _size_of_graph()
            outputs = function.replay(gated[: shape[1]], gated[shape[1] :], [_behind(gate, tensor) for tensor in held])
        end = _size_of_graph()
        targets = [outputs[place] for place in places]
        named = [
            _named(gate, function.gradient_name(place), gradient, output)
            for place, gradient, output in zip(places, arrived, targets, strict=True)
        ]
        # Sums of gradients lie there in a function's backward pass; copies of its operations name their scopes in full.
        with contextlib.nullcontext() if function.forward_first is None else tf.name_scope("gradients/"):
            gradients = tape.gradient(targets, gated, output_gradients=named)
        connected[:] = [gradient is not None for gradient in gradients]

        def second(*_: Any, variables: Any = None) -> Any:
            raise SecondDerivativeError

        found = [tf.convert_to_tensor(g) for g in gradients if g is not None]
        if gate is None:
            return tuple(found), second
        # Nobody gets a gradient before all are there: the replay of the segment before this one would otherwise start
        # while weight gradients here still hold replayed activations.
        added = gate.graph.get_operations()[start:]
        return tuple(_together(found, replay_witness(added[: end - start], added, found))), second

    found = iter(_as_tuple(backward(*upstream.values(), *inputs, *weights)))
    return [next(found) if there else None for there in connected]


def _as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (list, tuple)) else (result,)


def _size_of_graph() -> int:
    return 0 if tf.executing_eagerly() else tf.compat.v1.get_default_graph().num_operations()


def _together(tensors: Tensors, witness: tf.Tensor | None) -> list[tf.Tensor]:
    """Return the tensors unchanged, but none before all are there; the smallest depends on ``witness`` by data.

    Graph optimisation sorts the terms of a sum by name, and a gradient that passes straight through an addition becomes
    such a term: so each copy takes the name of the operation that made it, with an ending that sorts right behind it.
    """
    zero = None if witness is None else _gate([witness])
    smallest = min(range(len(tensors)), key=lambda place: tensors[place].shape.num_elements() or sys.maxsize, default=0)
    with tf.control_dependencies([t.op for t in tensors]):
        copies = []
        for place, tensor in enumerate(tensors):
            with tf.name_scope(f"{_maker(tensor).name}/"):
                copies.append(_behind(zero if place == smallest else None, tensor, _READY))
        return copies


def _maker(tensor: tf.Tensor) -> tf.Operation:
    """Return the operation that made a tensor, before it was passed on unchanged: by an addition's gradient, too."""
    while True:
        operation = tensor.op
        source = operation.inputs[tensor.value_index] if operation.type in ("Identity", "IdentityN") else None
        if operation.type == "Sub" and _COPY.search(operation.name):
            source = operation.inputs[0]
        if operation.type == "Reshape" and operation.inputs[0].op.type == "Sum":
            summed = operation.inputs[0].op.inputs[0]
            same = summed.shape.rank is not None and summed.shape.as_list() == tensor.shape.as_list()
            source = summed if same else None
        if source is None or source.op.type == "Placeholder":
            return operation
        tensor = source


_ARRIVED, _READY = "arrived", "ready"
"""Names of the copies of gradients that enter and leave a replay."""
_COPY = re.compile(rf"/({_ARRIVED}|{_READY})(_\d+)?$")

_OWN_GRADIENT_OPS = frozenset(
    """AvgPool BatchMatMulV2 BatchMatMulV3 Conv2D Conv3D DepthwiseConv2dNative Elu FusedBatchNormV3 IdentityN LeakyRelu
    MatMul MaxPool Relu Relu6 Selu Sigmoid Softplus Softsign Tanh""".split()
)
"""Ops whose gradients are kernels of their own, which graph optimisation does not reorder."""


def _named(gate: tf.Tensor | None, name: str, gradient: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
    """Return the gradient that arrived for a replayed output, under its name in the plain step where that matters.

    It becomes a term of a sum or a factor of a product, which are sorted by name. It comes from the IdentityN that ends
    the replay of another segment or, in a function of its own, as a saved custom gradient is, from an argument.
    """
    if gate is None or gradient.op.type not in ("IdentityN", "Placeholder"):
        return gradient
    # An output that the replay itself reads, too, gets a sum.
    if not output.consumers() and _first_to_change(output).type in _OWN_GRADIENT_OPS:
        return gradient
    with tf.name_scope(f"{name if gradient.op.type == 'Placeholder' else _maker(gradient).name}/"):
        return _behind(gate, gradient, _ARRIVED)


def _first_to_change(tensor: tf.Tensor) -> tf.Operation:
    """Return the operation that the gradient of a tensor comes to before it is changed."""
    operation = tensor.op
    while operation.type in ("BiasAdd", "Identity", "Reshape"):
        source = operation.inputs[0]
        if len(source.consumers()) > 1:
            break
        operation = source.op
    return operation


def _gated(gate: tf.Tensor | None, tensor: tf.Tensor, origin: tf.Tensor, forward_first: bool | None) -> tf.Tensor:
    """Return ``_behind`` of ``tensor``, with the name of ``origin``, which it is a copy of."""
    if gate is None:
        return _behind(None, tensor)
    with tf.name_scope(plain_name(_maker(origin).name, origin.graph, forward_first)):
        return _behind(gate, tensor, "gated")


def _gate(tensors: Tensors) -> tf.Tensor:
    """Return a float32 scalar that is always 0.0 and known only when every one of the tensors is.

    Through a cast to bool, so that NaN and infinity in a gradient do not get into the replay; a minimum rather than a
    product, because compilers fold products with zero.
    """
    with tf.name_scope("memsaver_gate"):
        firsts = [tf.reduce_max(tf.abs(tf.reshape(t, [-1])[:1])) for t in tensors]
        return tf.minimum(tf.add_n([tf.cast(tf.cast(t, tf.bool), tf.float32) for t in firsts]), 0.0)


def _behind(gate: tf.Tensor | None, tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
    """Return ``tensor`` unchanged, but not before ``gate`` is known; it stays where no arithmetic is defined on it."""
    if gate is None or not (tensor.dtype.is_floating or tensor.dtype.is_integer or tensor.dtype.is_bool):
        return tf.identity(tensor, name=name)
    zero = tf.cast(gate, tensor.dtype)
    return tf.math.logical_xor(tensor, zero) if tensor.dtype.is_bool else tf.subtract(tensor, zero, name=name)
