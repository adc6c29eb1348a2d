"""What a traced operation tells of itself: bytes, attributes, the functions that it calls, and what they cost."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import weakref
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from tf_memsaver.compat import graphs
from tf_memsaver.compat.devices import has_gpu, last_cache_bytes
from tf_memsaver.compat.onednn import has_onednn_for
from tf_memsaver.cost import rules
from tf_memsaver.cost.workspace import workspace_bytes
from tf_memsaver.tfgraph.loops import added_by_step, added_up, kept_by_branch, most_live, shared

FUNCTION_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
"""Ops that call one function and nothing else."""

LOOPS = frozenset({"StatelessWhile", "While"})
BRANCHES = frozenset({"Case", "If", "StatelessCase", "StatelessIf"})
_CALLS = FUNCTION_CALLS | LOOPS | BRANCHES

ASSIGNMENTS = {"AssignAddVariableOp": "assign_add", "AssignSubVariableOp": "assign_sub", "AssignVariableOp": "assign"}
"""Operations that set a variable, and the variable's methods that make them."""

_CUDNN_RECURRENT = frozenset({"CudnnRNN", "CudnnRNNV2", "CudnnRNNV3"})
_RESERVE = 3
"""The output of these that only their gradients read; its shape is known as they run."""

_RESERVED = {"gru": 6, "lstm": 5, "rnn_relu": 1, "rnn_tanh": 1}
"""What they keep in it, in numbers for each number of their first output: as read on an H100 (cuDNN 9.3) of one layer,
which is what Keras makes, for six combinations of sizes."""

_NO_REPLAY_STATE = frozenset(ASSIGNMENTS).union(
    {
        "Assert",
        "ReadVariableOp",
        "ResourceGather",
        "ResourceGatherNd",
        "StatelessCase",
        "StatelessIf",
        "StatelessWhile",
        "VarHandleOp",
    }
)
"""Stateful by definition, yet the runtime replays them exactly: variables are read once and assigned once."""


_KEPT: weakref.WeakKeyDictionary[Any, dict[tuple[str, int], tuple[int, ...]]] = weakref.WeakKeyDictionary()
"""The bytes of what a branch keeps in each of its outputs, by graph, name and number of outputs."""

_TOLD: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
"""The loops, by graph and name, of which a warning has said that their steps are not known."""


def known_shape(tensor: Any, free: int | None = None) -> tuple[int, ...] | None:
    """Return the shape of a tensor, dimensions that are not known being ``free``; None if there is no telling."""
    if tensor.shape.rank is None:
        return None
    found: list[Any] = [free if size is None else size for size in tensor.shape]
    return None if None in found else tuple(found)


def tensor_bytes(tensor: Any, free: int | None = None) -> int:
    """Return the bytes of a tensor of the traced graph; 0 for resources and strings, whose storage is elsewhere.

    A tensor whose shape depends on the data counts 0: such tensors are indices and masks of preprocessing. Those of
    activations are found by ``capture.data_shapes``. What a loop or a branch keeps for its gradient, in lists and
    optionals, is counted where it makes them. Where ``free`` is given, dimensions that are not known are as large as
    that.
    """
    if tensor.dtype == tf.variant:
        if tensor.op.type == "TensorListFromTensor":
            # It copies each of its elements.
            return tensor_bytes(tensor.op.inputs[0], free)
        return _branch_bytes(tensor) if tensor.op.type in BRANCHES else _loop_list_bytes(tensor)
    if tensor.dtype in (tf.resource, tf.string) or not tensor.dtype.size:
        return 0
    if tensor.op.type in _CUDNN_RECURRENT and tensor.value_index == _RESERVE:
        return _RESERVED[tensor.op.get_attr("rnn_mode").decode()] * tensor_bytes(tensor.op.outputs[0], free)
    shape = known_shape(tensor, free)
    return 0 if shape is None else math.prod(shape) * tensor.dtype.size


def parts_of(tensor: Any) -> int:
    """Return in how many buffers of the same size a tensor lies: a list of tensors has one for each."""
    if tensor.dtype != tf.variant:
        return 1
    if tensor.op.type == "TensorListFromTensor":
        shape = known_shape(tensor.op.inputs[0])
        return max(1, shape[0]) if shape else 1
    return (trip_count(tensor.op) or 1) if is_loop(tensor.op) else 1


def waiting_terms(operation: Any) -> tuple[int, int]:
    """Return how many terms of a sum over the steps of a loop may wait to be added, and the bytes of one.

    TensorFlow begins up to ``parallel_iterations`` steps. In the backward pass of a recurrent layer, the gradients of
    one of its kernels then wait for each other: all of them but the one that is added, for small kernels in most steps
    (seen for an LSTM and a GRU).
    """
    body = function_graph(operation.graph, operation.get_attr("body").name) if is_loop(operation) else None
    largest = 0 if body is None else max(map(tensor_bytes, added_up(body)), default=0)
    if not largest:
        return 0, 0
    at_once = operation.get_attr("parallel_iterations")
    return max(0, min(at_once, trip_count(operation) or at_once) - 1), largest


def _loop_list_bytes(tensor: Any) -> int:
    """Return the bytes of a list that a while loop fills, one element a step: outputs and values for the gradient."""
    if tensor.op.type not in LOOPS:
        return 0
    body = function_graph(tensor.op.graph, tensor.op.get_attr("body").name)
    added = None if body is None else added_by_step(body, tensor.value_index)
    if added is None:
        return 0
    trips = trip_count(tensor.op)
    told = _TOLD.setdefault(tensor.op.graph, set())
    if trips is None and tensor.op.name not in told:
        told.add(tensor.op.name)
        logging.warning(
            "loop '%s' runs an unknown number of steps, so the values that it keeps are not counted. "
            "Leave room for them in the budget.",
            tensor.op.name,
        )
    return 0 if trips is None else trips * tensor_bytes(added)


def _branch_bytes(tensor: Any) -> int:
    """Return the bytes of what the branch that keeps the most keeps in an output for its gradient."""
    branches = tensor.op
    known, key = _KEPT.setdefault(branches.graph, {}), (branches.name, len(branches.outputs))
    if key not in known:
        places = [place for place, output in enumerate(branches.outputs) if output.dtype == tf.variant]
        found = [(0,) * len(branches.outputs)]
        for body in called_functions(branches, branches.graph):
            kept = {place: kept_by_branch(body, place) for place in places}
            found.append(
                tuple(
                    0 if kept.get(place) is None else tensor_bytes(kept[place])
                    for place in range(len(branches.outputs))
                )
            )
        known[key] = max(found, key=sum)
    return known[key][tensor.value_index]


def has_gradients(dtype: tf.DType) -> bool:
    """Whether gradients are taken for tensors of a type: floating and complex numbers, as a Fourier transform's."""
    return bool(dtype.is_floating or dtype.is_complex)


def is_loop(operation: Any) -> bool:
    """Whether an operation is a while loop."""
    return operation.type in LOOPS


def trip_count(operation: Any) -> int | None:
    """Return how many steps a while loop runs at most, from its limit or the lists that it reads; None if unknown."""
    if operation.type not in LOOPS:
        return None
    sizes = []
    for tensor in operation.inputs:
        if tensor.op.type == "TensorListFromTensor":
            sizes.append(tensor.op.inputs[0].shape[0])
        elif tensor.op.type == "TensorListReserve":
            sizes.append(_static_count(tensor.op.inputs[1]))
    limit = _static_count(operation.inputs[1]) if len(operation.inputs) > 1 else None
    known = [limit, *sizes] if limit is not None and limit >= 0 else sizes
    counts = [int(size) for size in known if size is not None and size >= 0]
    return max(counts) if counts else None


def _static_count(tensor: Any) -> int | None:
    """Return a scalar integer that is known when tracing, else None."""
    if not tensor.dtype.is_integer or tensor.shape.rank != 0:
        return None
    value = graphs.constant_value(tensor)
    return None if value is None else int(value)


def kernels_here() -> rules.Kernels:
    """Return whose kernels run the operations of a step on this machine, as far as costs depend on it."""
    if has_gpu():
        return rules.Kernels(on_cpu=False)
    return rules.Kernels(
        threads=tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count() or 1,
        by_eigen=frozenset(each for each in ("bfloat16", "float16", "float32", "float64") if not has_onednn_for(each)),
        cache_bytes=last_cache_bytes(),
    )


def spec_of(operation: Any, kernels: rules.Kernels, free: int | None = None) -> rules.OpSpec:
    """Return what the cost rules see of an operation, dimensions that are not known being ``free``."""
    names = "transpose_a adj_x equation strides padding explicit_paddings data_format is_training".split()
    known = operation.node_def.attr
    attributes = {name: operation.get_attr(name) for name in names if name in known}
    if isinstance(attributes.get("equation"), bytes):
        attributes["equation"] = attributes["equation"].decode()
    if operation.outputs:
        attributes["T"] = operation.outputs[0].dtype.name
    if operation.type == "Transpose":
        order = graphs.constant_value(operation.inputs[1])
        attributes["perm"] = None if order is None else tuple(map(int, order))
    if operation.type == "Pow":
        attributes["exponent"] = constant_exponent(operation.inputs[1])
    if operation.type in rules.POOLS:
        maker = operation.inputs[1].op
        while maker.type in rules.VIEWS:
            maker = maker.inputs[0].op
        attributes["pooled_by"] = maker.type
    return rules.OpSpec(
        type=operation.type,
        input_shapes=tuple(known_shape(t, free) or () for t in operation.inputs),
        input_bytes=tuple(tensor_bytes(t, free) for t in operation.inputs),
        output_shapes=tuple(known_shape(t, free) or () for t in operation.outputs),
        output_bytes=tuple(tensor_bytes(t, free) for t in operation.outputs),
        attributes=attributes,
        kernels=kernels,
    )


def constant_exponent(tensor: Any) -> float | None:
    """Return the number that all elements of a constant are, or of the difference of two; None for another tensor."""
    parts = tensor.op.inputs if tensor.op.type == "Sub" else (tensor,)
    values = [graphs.constant_value(part) for part in parts]
    if any(value is None for value in values):
        return None
    numbers = np.unique(functools.reduce(np.subtract, values))
    return float(numbers[0]) if numbers.size == 1 and numbers.dtype.kind != "c" else None


class Costs(NamedTuple):
    """FLOPs, those of them in matrix products, operations done one number at a time, and workspace bytes.

    ``slowness`` is how many times as long it takes as these and its bytes say (see ``rules.slowness``).
    """

    flops: int = 0
    matrix_flops: int = 0
    scalar_operations: int = 0
    workspace_bytes: int = 0
    slowness: float = 1.0


def costs_of(operation: Any, spec: rules.OpSpec, graph: Any, free: int | None = None) -> Costs:
    """Return what an operation costs; of a called function, for all its ops.

    ``free`` is how large dimensions are that are not known, as in a function that was traced for any batch size.
    """
    bodies = list(called_functions(operation, graph))
    if not bodies:
        flops = rules.flops(spec)
        matrix_flops = flops if spec.type in rules.MATRIX_OPS else 0
        scalar_operations = rules.scalar_operations(spec)
        return Costs(flops, matrix_flops, scalar_operations, workspace_bytes(spec), rules.slowness(spec))
    kernels = spec.kernels
    if graphs.COMPILED_BY_XLA in operation.node_def.attr:
        kernels = dataclasses.replace(kernels, compiled=True)
    times = trip_count(operation) or 1
    flops = matrix_flops = scalar_operations = workspace = 0
    here = [list(_on_device_of(operation, body)) for body in bodies]
    for body, inside in zip(bodies, here, strict=True):
        given = given_for_free(operation, body) or free
        for inner in inside:
            costs = costs_of(inner, spec_of(inner, kernels, given), body, given)
            flops += times * costs.flops
            matrix_flops += round(times * costs.slowness * costs.matrix_flops)
            scalar_operations += round(times * costs.slowness * costs.scalar_operations)
            workspace = max(workspace, costs.workspace_bytes)
    if operation.type not in FUNCTION_CALLS:
        # Calls are inlined; a loop or a branch has its tensors for itself, beside what it is given, keeps and returns.
        ending = _read_last(operation, graph)
        counted = {id(shared(tensor)) for body in bodies for tensor in _counted_outside(operation, body)}

        def bytes_inside(tensor: Any) -> int:
            return 0 if id(tensor) in counted else tensor_bytes(tensor)

        def takes_over(inner: Any) -> Sequence[int]:
            # Threads run a branch's operations beside one another, which takes about what taking over saves.
            return rules.overwritable_inputs(spec_of(inner, kernels)) if is_loop(operation) else ()

        alive = (
            most_live(body, inside, bytes_inside, takes_over, [body.inputs[place] for place in ending])
            for body, inside in zip(bodies, here, strict=True)
        )
        workspace += sum(alive) if is_loop(operation) else max(alive)
    return Costs(flops, matrix_flops, scalar_operations, workspace)


def given_for_free(call: Any, body: Any) -> int | None:
    """Return how large that is which a function is called with where its arguments are of any size.

    None for what is no call, or where nothing is of any size or the call does not tell how large it is.
    """
    if call.type not in FUNCTION_CALLS:
        return None
    sizes = Counter(
        size
        for argument, given in zip(body.inputs, call.inputs, strict=False)
        if argument.shape.rank is not None and argument.shape.rank == given.shape.rank
        for free, size in zip(argument.shape, given.shape, strict=True)
        if free is None and size is not None
    )
    return sizes.most_common(1)[0][0] if sizes else None


def _counted_outside(operation: Any, body: Any) -> Iterator[Any]:
    """Yield the tensors of a loop's step or a branch that are counted as what comes out of the operation."""
    for place, output in enumerate(body.outputs):
        if is_loop(operation):
            found = added_by_step(body, place) if output.dtype == tf.variant else None
        else:
            found = kept_by_branch(body, place) if output.dtype == tf.variant else output
        if found is not None:
            yield found


def tensors_read(operation: Any, running: Collection[int]) -> list[Any]:
    """Return the inputs of an operation that anything is made of: a loop or a branch may be given more.

    Its results are all but the lists and optionals that no operation in ``running``, by their ids, reads.
    """
    bodies = list(called_functions(operation, operation.graph)) if operation.type in LOOPS | BRANCHES else []
    if not bodies:
        return list(operation.inputs)
    wanted = {
        place
        for place, output in enumerate(operation.outputs)
        if output.dtype != tf.variant or any(id(each) in running for each in output.consumers())
    }
    if not is_loop(operation):
        read = set().union(*(_read_inputs(body, wanted) for body in bodies))
        return [operation.inputs[0], *(operation.inputs[1 + place] for place in sorted(read))]
    while True:
        # A loop's test has one output, and each of its results comes back as an input.
        more = set().union(*(_read_inputs(body, wanted if len(body.outputs) > 1 else [0]) for body in bodies))
        if more <= wanted:
            return [operation.inputs[place] for place in sorted(wanted)]
        wanted |= more


def _read_inputs(body: Any, wanted: Iterable[int]) -> set[int]:
    """Return which inputs of a function are read to make the outputs ``wanted``, or by what has side effects.

    A gradient takes all that its forward pass kept out of its list or optional, and uses a part of it: graph
    optimisation takes the others out.
    """
    effects = (each for each in body.get_operations() if not only_reads(each, body))
    ends = [*(body.outputs[place].op for place in wanted), *effects]
    running = graphs.led_to(ends)

    def makers(operation: Any) -> list[Any]:
        return [*(tensor.op for tensor in tensors_read(operation, running)), *operation.control_inputs]

    read = graphs.led_to(ends, makers)
    return {place for place, tensor in enumerate(body.inputs) if id(tensor.op) in read}


def _on_device_of(call: Any, body: Any) -> Iterator[Any]:
    """Yield the operations of a function that run on the device of its call; those of other replicas do not."""
    for inner in body.get_operations():
        if not (call.device and inner.device and inner.device != call.device):
            yield inner


def bytes_made(operation: Any, graph: Any) -> int:
    """Return the bytes of activations that an operation makes, with all that it calls, for a batch of one."""
    here = sum(tensor_bytes(tensor, 1) for tensor in operation.outputs if tensor.dtype.is_floating)
    inside = sum(
        bytes_made(inner, body) for body in called_functions(operation, graph) for inner in body.get_operations()
    )
    return here + (trip_count(operation) or 1) * inside


def _read_last(branch: Any, graph: Any) -> list[int]:
    """Return which inputs of a branch's functions nobody reads afterwards; TensorFlow runs a branch inlined."""
    if branch.type not in BRANCHES:
        return []
    operations = graph.get_operations()
    after = next(place for place, each in enumerate(operations) if each is branch) + 1
    wanted = {id(shared(tensor)) for each in operations[after:] for tensor in each.inputs}
    wanted |= {id(shared(tensor)) for tensor in getattr(graph, "outputs", ())}
    made = [shared(tensor) for tensor in branch.inputs[1:]]
    return [
        place
        for place, each in enumerate(made)
        if each.op.type not in ("Const", "Placeholder") and id(each) not in wanted
    ]


def functions_in(value: Any) -> Sequence[Any]:
    """Return the functions that an attribute names."""
    return [value.func] if value.HasField("func") else value.list.func


def in_order(graph: Any) -> list[Any]:
    """Return a graph's operations, each after those that it reads from, else in the order in which they were made.

    A loop whose gradient was taken reads from operations that were made after it.
    """
    done: set[int] = set()
    ordered: list[Any] = []
    for operation in graph.get_operations():
        waiting = [operation]
        while waiting:
            top = waiting[-1]
            before = [t.op for t in top.inputs if t.op.graph is graph and id(t.op) not in done]
            if before and id(top) not in done:
                waiting.extend(before)
                continue
            waiting.pop()
            if id(top) not in done:
                done.add(id(top))
                ordered.append(top)
    return ordered


def called_functions(operation: Any, graph: Any) -> Iterator[Any]:
    """Yield the graphs of the functions that an operation calls (branches, loop bodies, calls)."""
    if operation.type not in _CALLS:
        return
    for attribute in operation.node_def.attr.values():
        for named in functions_in(attribute):
            body = function_graph(graph, named.name) if named.name else None
            if body is not None:
                yield body


def inside_branches(kind: str, bodies: Iterable[Any], inside: bool = False) -> Iterator[Any]:
    """Yield what lies in branches, at any depth, of an operation of this type that calls these functions."""
    inside = inside or kind in BRANCHES
    for body in bodies:
        for operation in body.get_operations():
            if inside:
                yield operation
            yield from inside_branches(operation.type, called_functions(operation, body), inside)


def library_function(graph: Any, name: str) -> Any | None:
    """Return a function by name, looked up from the graph that calls it outwards."""
    while graph is not None:
        function = graphs.function_named(graph, name)
        if function is not None:
            return function
        graph = getattr(graph, "outer_graph", None)
    return None


def function_graph(graph: Any, name: str) -> Any | None:
    """Return the graph of the function that ``library_function`` finds."""
    return graphs.traced_by(library_function(graph, name))


def called_function(operation: Any) -> Any | None:
    """Return the function that a call was made of, if it is a call whose gradient can be taken.

    The gradient function makes the operation call another one.
    """
    if operation.type not in FUNCTION_CALLS:
        return None
    return graphs.called_by_gradient(graphs.own_gradient_function(operation))


def own_outputs(operation: Any) -> list[Any]:
    """Return an operation's outputs but for those that taking a call's gradient has added (``called_function``)."""
    called, outputs = called_function(operation), list(operation.outputs)
    return outputs if called is None else outputs[: len(graphs.definition_of(called).signature.output_arg)]


def implements(function: Any) -> bytes:
    """Return what a function is one of several implementations of, or nothing.

    Graph optimisation chooses one of them for the device at hand; until then it does not inline calls of them. The LSTM
    and GRU layers of Keras 2 are made so.
    """
    attributes = {} if function is None else graphs.definition_of(function).attr
    # Asking a map of messages for what it lacks would put it there.
    return bytes(attributes["api_implements"].s) if "api_implements" in attributes else b""


def rivals(graph: Any, function: Any) -> list[Any]:
    """Return the other implementations of what a function implements that its graph has."""
    own = implements(function)
    found = graphs.functions_of(graph) if own else ()
    return [other for other in found if other is not function and implements(other) == own]


def hidden_state(operation: Any, graph: Any) -> str:
    """Return the type of the first op, in the operation or in a function that it calls, that cannot be replayed."""
    if operation.type in _CALLS:
        for body in called_functions(operation, graph):
            for inner in body.get_operations():
                found = hidden_state(inner, body)
                if found:
                    return found
        return ""
    if not operation.op_def.is_stateful or operation.type in _NO_REPLAY_STATE:
        return ""
    return operation.type if operation.type != "Placeholder" else ""


def only_reads(operation: Any, graph: Any) -> bool:
    """Whether an operation, with all that it calls, has no state but variables, which it does not set."""
    if operation.type in _CALLS:
        bodies = called_functions(operation, graph)
        return all(only_reads(inner, body) for body in bodies for inner in body.get_operations())
    return not operation.op_def.is_stateful or operation.type in ("Placeholder", "ReadVariableOp")


def has_custom_gradient(operation: Any) -> bool:
    """Whether an operation ends a function that has a gradient of its own."""
    return operation.type == "IdentityN" and graphs.CUSTOM_GRADIENT in operation.node_def.attr


def custom_gradient_bodies(
    reads: Sequence[Sequence[Hashable]], makes: Sequence[Sequence[Hashable]], ends: Iterable[int]
) -> list[list[int]]:
    """Return the places of the operations in each function that has a gradient of its own, in order.

    ``tf.custom_gradient`` runs the function and ends it with an IdentityN of its results and arguments. What the
    results are made of after the last of the arguments is the function.

    Args:
      reads: the tensors that each operation reads, in the order in which they run.
      makes: the tensors that each operation makes.
      ends: the places of the IdentityNs.
    """
    maker = {tensor: place for place, made in enumerate(makes) for tensor in made}
    bodies = []
    for end in ends:
        inputs = set(reads[end])
        body: list[int] = []
        for argument in sorted(inputs, key=lambda tensor: maker.get(tensor, -1), reverse=True):
            after = range(maker.get(argument, -1) + 1, end)
            reached = {argument}
            for place in after:
                if not reached.isdisjoint(reads[place]):
                    reached.update(makes[place])
            wanted = reached.intersection(inputs) - {argument}
            if wanted:
                for place in reversed(after):
                    if not wanted.isdisjoint(makes[place]):
                        wanted.update(reads[place])
                        body.append(place)
                break
        bodies.append(sorted(body))
    return bodies
