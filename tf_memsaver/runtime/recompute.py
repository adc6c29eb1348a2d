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
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import tensorflow as tf

from tf_memsaver.compat.graphs import wait_for_only
from tf_memsaver.compat.tapes import VariableWatcher, followed, record_operation, stop_recording
from tf_memsaver.errors import SecondDerivativeError, UnsupportedModelError
from tf_memsaver.parity.fan_out import first_run_witness, held_through_sums_behind, keep_convolutions, replay_witness
from tf_memsaver.parity.gates import Gates, behind, is_of_shapes
from tf_memsaver.parity.names import Names, plain_name
from tf_memsaver.runtime import twins
from tf_memsaver.tfgraph.emission import ends_segment, registered_segment
from tf_memsaver.tfgraph.operations import has_custom_gradient

Tensors = Sequence[tf.Tensor]

_GRADIENT_SCOPES = {None: "gradient_tape", False: "0_gradients", True: "zz_gradients"}
"""Scopes that sort, relative to first runs, as the plain step's backward pass; by ``Replayable.forward_first``."""


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
        """Whether output ``place`` may be a term of a sum behind the segment."""
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
    """What the segments of one forward pass share."""

    traces: twins.Traces = field(default_factory=twins.Traces)
    gates: Gates = field(default_factory=Gates)
    names: Names = field(default_factory=Names.of_model)


def recompute(function: Replayable, inputs: Tensors, weights: Tensors, shared: Shared | None = None) -> list[tf.Tensor]:
    """Return ``function``'s outputs, keeping only ``inputs``, ``weights`` and what it holds for the backward pass.

    Args:
      function: what to run; it is run once now, and once more for every gradient taken, unless a twin's is copied.
      inputs: floating tensors that the outputs depend on; the replay reads them behind the order gate.
      weights: floating tensors of variables; never copied.
      shared: what it has in common with the other segments of the same forward pass.

    Raises:
      SecondDerivativeError: (when it is asked for) on the gradient of a gradient.
    """
    shared = shared or Shared()
    reached: list[int] = []
    wanted = followed([*inputs, *weights])
    with stop_recording(), VariableWatcher() as watcher:
        first = _FirstRun.of(function, inputs, weights, wanted, shared.gates)
    if not first.outputs:
        return []
    # The last read is the first to send its gradient back.
    again = function.read_again()
    weights = [*(tensor for _, tensor in reversed(again)), *weights]
    first.variables = [*(place for place, _ in reversed(again)), *range(len(weights) - len(again))]
    first.wanted = followed([*inputs, *weights])

    def gradient(*upstream: tf.Tensor) -> list[Any]:
        connected = sorted(set(reached)) if reached else list(range(len(first.outputs)))
        reached.clear()
        arrived = {place: tf.convert_to_tensor(upstream[place]) for place in connected}
        replayed = _replay_gradients(function, inputs, weights, first, arrived, shared)
        # Variables reach the segment as tensors; of those listed here a gradient would be lost.
        _refuse_trained(watcher.watched_variables())
        return replayed

    outputs = _with_gradient(first.outputs, [*inputs, *weights], gradient)
    if len(outputs) == 1:
        return outputs
    noted = [_note_gradient(output, place, reached) for place, output in enumerate(outputs)]
    if tf.executing_eagerly():
        return noted
    return [_as_term(tensor) if function.may_be_term(place) else tensor for place, tensor in enumerate(noted)]


def _with_gradient(outputs: Tensors, inputs: Tensors, gradient: Callable[..., Sequence[Any]]) -> list[tf.Tensor]:
    """Return ``outputs`` with a gradient function of their own, which takes theirs and returns those of ``inputs``.

    As ``tf.custom_gradient``, but without its search through the graph for variables, and without zeros for gradients
    that nobody asks for.
    """
    with stop_recording():
        if tf.executing_eagerly():
            passed = [tf.identity(tensor) for tensor in outputs]
        else:
            # Read by SavedModels, and by the gradients of a function's graph.
            def of_identities(_: Any, *upstream: Any) -> list[Any]:
                return [*([None] * len(outputs)), *gradient(*upstream[: len(outputs)])]

            overridden = {"IdentityN": registered_segment(of_identities)}
            # One that is a term of a sum is sorted by its name.
            scope = f"{_maker(outputs[0]).name}/" if outputs else None
            with tf.compat.v1.get_default_graph().gradient_override_map(overridden), tf.name_scope(scope or "segment"):
                passed = tf.identity_n([*outputs, *inputs])[: len(outputs)]
    record_operation("segment", passed, list(inputs), gradient, _forward_mode)
    return passed


def _forward_mode(*_: Any) -> Any:
    raise SecondDerivativeError


@dataclass(slots=True, kw_only=True)
class _FirstRun:
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
    def of(cls, function: Replayable, inputs: Tensors, weights: Tensors, wanted: list[bool], gates: Gates) -> _FirstRun:
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


def _note_gradient(output: tf.Tensor, place: int, reached: list[int]) -> tf.Tensor:
    """Pass a tensor through; note in ``reached`` that a gradient arrives for it.

    A custom gradient gets zeros for outputs that the loss does not depend on, and cannot tell them from a gradient that
    is zero. With this note the replay leaves such outputs out, so that weights used by them alone keep gradient None.
    """

    def gradient(upstream: tf.Tensor) -> list[tf.Tensor]:
        reached.append(place)
        return [upstream]

    return _with_gradient([output], [output], gradient)[0]


_BEHIND = 16
"""So many operations are taken to lie behind a layer, for the order in which gradients come to it."""


def _late(output: tf.Tensor) -> tf.Tensor:
    """Pass a tensor through so that its gradient comes when those of losses have gone on.

    An eager tape adds terms in the order in which they come. The gradient of a loss that a layer has added is there at
    once in the plain step, while that of the layer's output passes all that is behind; a replay gets them together.
    """
    for _ in range(_BEHIND):
        output = _with_gradient([output], [output], lambda upstream: [upstream])[0]
    return output


def _replay_gradients(
    function: Replayable,
    inputs: Tensors,
    weights: Tensors,
    first: _FirstRun,
    upstream: dict[int, tf.Tensor],
    shared: Shared,
) -> list[Any]:
    """Replay and return a gradient, or None, for each of inputs and weights."""
    places, arrived = list(upstream), list(upstream.values())

    def trace() -> Sequence[tf.Tensor | None]:
        return _replay(function, inputs, weights, first, upstream, shared.gates)

    if tf.executing_eagerly():
        gradients = trace()
    else:
        # What reads the outputs is known by now.
        first.witness += held_through_sums_behind(first.needed, shared.gates)
        first.needed = ()
        first.witness += keep_convolutions(first.operations, inputs, shared.gates)
        described = _described(function, first, places, arrived, inputs, weights, shared.gates)
        gradients = shared.traces.gradients(described, trace, shared.names.kept)

    def second(*_: Any) -> Any:
        raise SecondDerivativeError

    # Everything enters as an argument, so that no path of a second derivative goes around the error.
    found = [gradient for gradient in gradients if gradient is not None]
    passed = iter(_with_gradient(found, [*arrived, *inputs, *weights], second))
    guarded = [None if gradient is None else next(passed) for gradient in gradients]
    if tf.executing_eagerly():
        return guarded
    terms = [_may_be_summed(tensor, first.operations) for tensor in inputs]
    terms += [first.variables.count(each) > 1 or function.is_read_elsewhere(each) for each in first.variables]
    return [
        _gradient_as_term(gradient, shared.gates) if term and gradient is not None else gradient
        for gradient, term in zip(guarded, terms, strict=True)
    ]


def _replay(
    function: Replayable,
    inputs: Tensors,
    weights: Tensors,
    first: _FirstRun,
    arrived: dict[int, tf.Tensor],
    gates: Gates,
) -> list[tf.Tensor | None]:
    """Replay under a tape and return a gradient, or None, for each of inputs and weights."""
    gate = None
    if not tf.executing_eagerly():
        gate = gates.gate([gates.first_elements(list(arrived.values())), *first.witness])
    with contextlib.ExitStack() as stack:
        if gate is not None:
            stack.enter_context(tf.control_dependencies([gate]))
        tape = stack.enter_context(tf.GradientTape(watch_accessed_variables=False))
        gated = [_gated(gate, tensor, function.forward_first) for tensor in inputs]
        sources = list(itertools.compress([*gated, *weights], first.wanted))
        tape.watch(sources)
        start = _size_of_graph()
        finished: list[int] = []
        noted = weights if gate is not None else [_note_gradient(w, place, finished) for place, w in enumerate(weights)]
        held = [t if place in first.ungated else behind(gate, t) for place, t in enumerate(first.held)]
        outputs = function.replay(gated, noted, held)
        losses = [function.is_loss(place) for place in range(len(outputs))]
        if gate is None and any(losses):
            outputs = [t if is_loss else _late(t) for t, is_loss in zip(outputs, losses, strict=True)]
    end = _size_of_graph()
    named = [
        _named(gate, function.gradient_name(place), gradient, outputs[place]) for place, gradient in arrived.items()
    ]
    # Sums of gradients lie there in a function's backward pass; copies of its operations name their scopes in full.
    with contextlib.nullcontext() if function.forward_first is None else tf.name_scope("gradients/"):
        results = tape.gradient([outputs[place] for place in arrived], sources, output_gradients=named)
    given = iter(results)
    gradients = [next(given) if wanted else None for wanted in first.wanted]
    if gate is None:
        of_weights = _as_finished(gradients[len(gated) :], first.variables, finished)
        return [*gradients[: len(gated)], *of_weights]
    # Nobody gets a gradient before all are there: the replay of the segment before this one would otherwise start
    # while weight gradients here still hold replayed activations.
    found = [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]
    added = gate.graph.get_operations()[start:]
    _free_constants(added[: end - start], gate)
    witness = replay_witness(added[: end - start], added, outputs, arrived, found, gates)
    products = [place >= len(gated) and _is_product(gradient) for place, gradient in enumerate(gradients)]
    if witness is not None and all(
        gradient is None or free for gradient, free in zip(gradients, products, strict=True)
    ):
        products = [False] * len(gradients)
    waiting = [not free and gradient is not None for gradient, free in zip(gradients, products, strict=True)]
    copies = _together(
        list(itertools.compress(gradients, waiting)),
        sum(waiting[: len(gated)]),
        None if witness is None else gates.gate([witness]),
    )
    together = iter(copies)
    return [next(together) if waits else gradient for gradient, waits in zip(gradients, waiting, strict=True)]


def _is_product(gradient: Any) -> bool:
    """Whether a weight's gradient is a product, whose factors the optimizer's own product may be joined with.

    Graph optimisation multiplies such a gradient's factors by a learning rate in the order of their sizes
    (``MinimizeBroadcasts``), if nothing stands in between. No factor is larger than the weight.
    """
    return isinstance(gradient, tf.Tensor) and _maker(gradient).type == "Mul"


def _free_constants(operations: Iterable[Any], gate: tf.Tensor) -> None:
    """Let constants not wait for the gate: graph optimisation moves only free ones through chains of products and sums.

    Those of gradient functions, which wait for the gradient that arrives, do so in the plain step, too.
    """
    for operation in operations:
        if operation.type == "Const" and gate.op in operation.control_inputs:
            others = [each for each in operation.control_inputs if each is not gate.op]
            wait_for_only(operation, others)


def _as_finished(gradients: list[Any], variables: Sequence[int], finished: Sequence[int]) -> list[Any]:
    """Return gradients of weights so that those of one variable are in the order in which they were finished.

    That is the order in which the plain step's tape adds them.
    """
    arranged: list[Any] = [None] * len(gradients)
    for variable in dict.fromkeys(variables):
        places = [place for place, its in enumerate(variables) if its == variable]
        for place, source in zip(places, (each for each in finished if each in places), strict=False):
            arranged[place] = gradients[source]
    return arranged


def _described(
    function: Replayable,
    first: _FirstRun,
    places: Sequence[int],
    arrived: Tensors,
    inputs: Tensors,
    weights: Tensors,
    gates: Gates,
) -> twins.Replay | None:
    """Return what the trace of ``_replay`` depends on, or None if that cannot be said."""
    sources = [*inputs, *weights]
    read = [*arrived, *sources, *first.held, *first.witness]
    described = twins.description(first.operations, [*read, *first.outputs])
    if described is None:
        return None
    operations, outside = described
    kinds = tuple(gradient.op.type if gradient.op.type in _RENAMED else "" for gradient in arrived)

    # A frozen layer runs the same operations as others, but its variables are held, and get no gradient.
    variables = tuple(first.variables)

    def named(operations: Iterable[Any]) -> list[str]:
        return [
            plain_name(operation.name, graph, function.forward_first).rstrip("/")
            for operation in operations
            for graph in (operation.graph, None)
        ]

    return twins.Replay(
        key=(function.forward_first, tuple(places), tuple(first.wanted), variables, first.ungated, kinds, operations),
        sources=(*read, *outside, *gates.constants()),
        forward=tuple(named(first.operations)),
        names=(
            *named(_maker(tensor) for tensor in (*arrived, *sources)),
            *(function.gradient_name(place) for place in places),
        ),
    )


def _size_of_graph() -> int:
    return 0 if tf.executing_eagerly() else tf.compat.v1.get_default_graph().num_operations()


def _together(tensors: Tensors, first: int, gate: tf.Tensor | None) -> list[tf.Tensor]:
    """Return the tensors unchanged, but none before all are there; the smallest depends on ``gate`` by data.

    The smallest of those from ``first`` on, of weights, if there are any: nobody may want the gradient of an input, if
    all that is in front of the segment is frozen, and graph optimisation would take it out.

    Graph optimisation sorts the terms of a sum by name, and a gradient that passes straight through an addition becomes
    such a term: so each copy takes the name of the operation that made it, with an ending that sorts right behind it.
    """
    places = range(first if first < len(tensors) else 0, len(tensors))
    smallest = min(places, key=lambda place: tensors[place].shape.num_elements() or sys.maxsize, default=0)
    with tf.control_dependencies([t.op for t in tensors]):
        copies = []
        for place, tensor in enumerate(tensors):
            with tf.name_scope(f"{_maker(tensor).name}/"):
                copies.append(behind(gate if place == smallest else None, tensor, _READY))
        return copies


def _maker(tensor: tf.Tensor) -> tf.Operation:
    """Return the operation that made a tensor, before it was passed on unchanged: by an addition's gradient, too."""
    return _history(tensor)[0]


def _history(tensor: tf.Tensor) -> tuple[tf.Operation, list[tf.Operation]]:
    """Return the operation that made a tensor, and the ends of gradients of additions that passed it on, last first."""
    additions: list[tf.Operation] = []
    while True:
        operation = tensor.op
        source = operation.inputs[tensor.value_index] if operation.type in ("Identity", "IdentityN") else None
        if operation.type in ("EnsureShape", "Sub") and _COPY.search(operation.name):
            source = operation.inputs[0]
        if operation.type == "Reshape" and operation.inputs[0].op.type == "Sum":
            summed = operation.inputs[0].op.inputs[0]
            same = summed.shape.rank is not None and summed.shape.as_list() == tensor.shape.as_list()
            source = summed if same else None
        if source is None:
            return operation, additions
        if operation.type == "Reshape":
            additions.append(operation)
        tensor = source


_ARRIVED, _READY, _TERM = "arrived", "ready", "term"
"""Names of the copies of gradients that enter and leave a replay, and of tensors that pass under another name."""
_COPY = re.compile(rf"/({_ARRIVED}|{_READY}|{_TERM})(_\d+)?$")

_RENAMED = ("IdentityN", "Placeholder")
"""Kinds of operations that hand a gradient over under a name of their own."""

_OWN_GRADIENT_OPS = frozenset(
    """AvgPool BatchMatMulV2 BatchMatMulV3 Conv2D Conv3D DepthwiseConv2dNative Elu FusedBatchNormV3 IdentityN LeakyRelu
    MatMul MaxPool Relu Relu6 Selu Sigmoid Softplus Softsign Tanh""".split()
)
"""Ops whose gradients are kernels of their own, which graph optimisation does not reorder."""


def _named(gate: tf.Tensor | None, name: str, gradient: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
    """Return the gradient that arrived for a replayed output, under its name in the plain step where that matters.

    It becomes a term of a sum or a factor of a product, which are sorted by name. And operations of gradients wait for
    it, as the sigmoid does that the gradient of silu computes: that keeps graph optimisation from taking them for the
    same ones of the forward pass. All that is replayed waits for the gradient as it arrived, by the gate, but not for
    its copy.
    """
    # An output that the replay itself reads, too, gets a sum.
    if gate is None or (not output.consumers() and _goes_to_a_kernel(output)):
        return gradient
    return _copied(gate, gradient, _ARRIVED, name if gradient.op.type == "Placeholder" else None)


def _copied(gate: tf.Tensor, gradient: tf.Tensor, ending: str, name: str | None = None) -> tf.Tensor:
    """Return a gradient as an operation with its name in the plain step, or with another one.

    Where graph optimisation cannot tell that an addition's operands are of one shape, it keeps what sums their
    gradients up to their shapes, and its names: so these operations, which change nothing, follow once more.
    """
    maker, additions = _history(gradient)
    with tf.name_scope(f"{name or maker.name}/"):
        copy = behind(gate, gradient, ending)
    for reshape in reversed(additions if name is None else []):
        total = reshape.inputs[0].op
        with tf.name_scope(f"{reshape.name.rpartition('/')[0]}/"):
            copy = tf.raw_ops.Sum(input=copy, axis=total.inputs[1], name=total.name.rpartition("/")[2])
            copy = tf.reshape(copy, reshape.inputs[1], name=reshape.name.rpartition("/")[2])
    return copy


def _may_be_summed(tensor: tf.Tensor, segment: Sequence[tf.Operation]) -> bool:
    """Whether the gradient of what a segment reads may become a term of a sum outside, as it is."""
    inside = {id(operation) for operation in segment}
    if any(id(reader) not in inside and reader.type != "IdentityN" for reader in tensor.consumers()):
        return True
    # The replay of another segment names what arrives itself.
    return not ends_segment(tensor.op) and not _goes_to_a_kernel(tensor)


def _gradient_as_term(gradient: tf.Tensor, gates: Gates) -> tf.Tensor:
    """Return a gradient under its name in the plain step, by an operation that tells graph optimisation its shape."""
    gate = gates.gate([gates.first_elements([gradient])])
    return _copied(gate, gradient, _TERM)


def _as_term(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor under its name in the plain step, since it may be a term of a sum, which is sorted by name.

    Graph optimisation leaves ``EnsureShape`` in place, whose kernel copies nothing; but behind it a size that is not
    known is another unknown one, and operands are no longer known to be of one shape. Where there is such a size, an
    identity has to do. It is taken out, with the ``IdentityN`` in front of it, which has one name for all that it
    passes on if that is more than one tensor.
    """
    with tf.name_scope(f"{_maker(tensor).name}/"):
        if tensor.shape.is_fully_defined():
            return tf.raw_ops.EnsureShape(input=tensor, shape=tensor.shape, name=_TERM)
        return tf.raw_ops.Identity(input=tensor, name=_TERM)


def _goes_to_a_kernel(tensor: tf.Tensor) -> bool:
    """Whether the first that changes the gradient of a tensor is a kernel, which graph optimisation leaves as it is."""
    operation = _first_to_change(tensor)
    if operation.type == "IdentityN" and has_custom_gradient(operation):
        return ends_segment(operation)
    return operation.type in _OWN_GRADIENT_OPS


def _first_to_change(tensor: tf.Tensor) -> tf.Operation:
    """Return the operation that the gradient of a tensor comes to before it is changed."""
    operation = tensor.op
    while operation.type in ("BiasAdd", "Identity", "Reshape"):
        source = operation.inputs[0]
        if len(source.consumers()) > 1:
            break
        operation = source.op
    return operation


def _gated(gate: tf.Tensor | None, tensor: tf.Tensor, forward_first: bool | None) -> tf.Tensor:
    """Return ``behind`` of ``tensor``, with its name in the plain step."""
    if gate is None:
        return behind(None, tensor)
    with tf.name_scope(plain_name(_maker(tensor).name, tensor.graph, forward_first)):
        return behind(gate, tensor, "gated")
