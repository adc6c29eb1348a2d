"""The operations of a function and of those that it calls as one list: order, names, waits and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tf_memsaver.errors import UnsupportedModelError
from tf_memsaver.program.inlining import LARGEST_REPEATED_CONSTANT, Inliner
from tf_memsaver.program.op_calls import Gathering, OpCall, slots_of
from tf_memsaver.program.unstacking import slices_as_one

Function = Callable[..., Any]

X = np.linspace(0.1, 1.4, 12, dtype=np.float32).reshape(3, 4)


def function(inner: Function, **options: Any) -> Any:
    return tf.function(inner, autograph=False, **options)


def traced(outer: Function) -> Any:
    return function(outer).get_concrete_function(tf.TensorSpec(X.shape, tf.float32))


class Listed:
    """A function of ``X``, with its operations listed."""

    def __init__(self, outer: Function, scope: str | None = None, unscoped: tuple[str, ...] = ()) -> None:
        self.source = traced(outer)
        graph = self.source.graph
        handles = {id(variable.handle): variable for variable in graph.variables}
        variable_of = {1 + place: handles[id(t)] for place, t in enumerate(self.source.captured_inputs)}
        self.inliner = Inliner(graph, variable_of, scope, unscoped, len(graph.outputs))
        self.calls: list[OpCall] = self.inliner.calls

    @property
    def labels(self) -> list[str]:
        return [call.label for call in self.calls]

    def of_type(self, kind: str) -> list[OpCall]:
        return [call for call in self.calls if call.operation.type == kind]

    def run(self, x: Any) -> list[Any]:
        slots = dict(enumerate([x, *self.source.captured_inputs]))
        for call in self.calls:
            call.run(slots)
        return [slots[slot] for slot in self.inliner.outputs]

    def graph(self) -> Any:
        return traced(self.run).graph

    def agrees(self, *variables: tf.Variable) -> bool:
        """Whether results, and gradients of their squares, are those of the source, bit for bit."""

        def step(of: Function, x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                results = tf.nest.flatten(of(x))
                loss = tf.add_n([tf.reduce_sum(result**2) for result in results])
            return results, tape.gradient(loss, [x, *variables])

        plain, ours = (
            [np.asarray(t).tobytes() for t in tf.nest.flatten(function(step)(of, tf.constant(X)))]
            for of in (self.source, function(self.run))
        )
        return plain == ours


# Calls of functions ---------------------------------------------------------------------------------------------------


def nested(x: Any) -> Any:
    innermost = function(lambda t: tf.sin(t) * 2.0)
    middle = function(lambda t: tf.exp(innermost(innermost(t))))
    return middle(tf.tanh(x))


def test_functions_inside_functions_are_listed_in_place() -> None:
    listed = Listed(nested)
    inside = "PartitionedCall/PartitionedCall"
    assert [label for label in listed.labels if not label.endswith("Identity")] == [
        "Tanh",
        f"{inside}/Sin",
        f"{inside}/mul",
        f"{inside}_1/Sin",
        f"{inside}_1/mul",
        "PartitionedCall/Exp",
    ]
    assert listed.agrees()


def test_copies_have_the_names_that_graph_optimisation_gives_to_what_it_inlines() -> None:
    listed = Listed(nested)
    names = [op.name for op in listed.graph().get_operations() if op.type not in ("Const", "Placeholder")]
    assert names[: len(listed.labels)] == listed.labels


def test_a_scope_that_the_calls_run_in_is_not_part_of_their_names() -> None:
    def scoped(x: Any) -> Any:
        with tf.name_scope("model"):
            return function(tf.sin)(tf.tanh(x))

    assert "model/Tanh" in Listed(scoped).labels and "model/PartitionedCall/Sin" in Listed(scoped).labels
    within = Listed(scoped, scope="model").labels
    assert "Tanh" in within and "PartitionedCall/Sin" in within


def test_a_compiled_function_stays_a_call() -> None:
    listed = Listed(lambda x: function(tf.sin, jit_compile=True)(tf.tanh(x)))
    kinds = [call.operation.type for call in listed.calls]
    assert "Sin" not in kinds and sum("PartitionedCall" in kind for kind in kinds) == 1


def test_a_function_called_twice_has_two_sets_of_calls() -> None:
    inner = function(lambda t: tf.sin(t) * 2.0)
    listed = Listed(lambda x: inner(x) - inner(tf.cos(x)))
    sines = listed.of_type("Sin")
    assert [call.label for call in sines] == ["PartitionedCall/Sin", "PartitionedCall_1/Sin"]
    assert not set(sines[0].outputs) & set(sines[1].outputs) and listed.agrees()


@pytest.mark.parametrize("size", [2, LARGEST_REPEATED_CONSTANT])
def test_small_constants_are_made_where_they_are_read(size: int) -> None:
    listed = Listed(lambda x: tf.tanh(x) * tf.reduce_sum(tf.constant(np.arange(size, dtype=np.float32))))
    kinds = [call.operation.type for call in listed.calls]
    (summed,) = listed.of_type("Sum")
    is_small = 4 * size <= LARGEST_REPEATED_CONSTANT
    assert ("Const" in kinds) is not is_small and (summed.constants[0] is not None) is is_small
    assert (summed.inputs[0] in summed.reads) is not is_small and listed.agrees()


def test_a_constant_that_is_a_result_is_a_call() -> None:
    listed = Listed(lambda x: (tf.tanh(x), tf.constant(3.0)))
    made = [slot for call in listed.calls for slot in call.outputs]
    assert set(listed.inliner.outputs) <= set(made) and listed.agrees()


def test_an_argument_may_be_a_result() -> None:
    listed = Listed(lambda x: function(lambda t: (t, tf.sin(t)))(x))
    assert listed.agrees()


def test_variables_are_those_of_the_calls_that_read_them() -> None:
    weight, scale = tf.Variable(np.eye(4, dtype=np.float32) * 0.7), tf.Variable(2.0)
    inner = function(lambda t: t @ weight * scale)
    listed = Listed(lambda x: inner(inner(x)))
    read = [call.variables for call in listed.of_type("ReadVariableOp")]
    # A variable has no order; what counts is which one it is.
    assert sorted(id(v) for (v,) in read) == sorted([id(weight), id(scale)] * 2)
    assert listed.agrees(weight, scale)


# What must run before -------------------------------------------------------------------------------------------------


def waited_for(call: OpCall) -> set[int]:
    return set(slots_of(call.after))


def test_a_read_waits_for_the_assignment_before_it() -> None:
    count = tf.Variable(0.0)

    def waiting(x: Any) -> Any:
        y = tf.tanh(x)
        count.assign_add(1.0)
        return y + count

    listed = Listed(waiting)
    assigned, read = (listed.of_type(kind) for kind in ("AssignAddVariableOp", "ReadVariableOp"))
    assert len(assigned) == 1 and listed.calls.index(assigned[0]) < listed.calls.index(read[-1])
    order = [operation.type for operation in listed.graph().get_operations()]
    assert order.index("AssignAddVariableOp") < order.index("ReadVariableOp")
    assert assigned[0].pinned == "runs AssignAddVariableOp, which must run once"


def test_who_waits_for_an_operation_waits_for_its_copy() -> None:
    def ordered(x: Any) -> Any:
        sine = tf.sin(x)
        with tf.control_dependencies([sine, tf.no_op("nothing")]):
            return tf.cos(x)

    listed = Listed(ordered)
    (sine,), (cosine,) = listed.of_type("Sin"), listed.of_type("Cos")
    assert waited_for(cosine) == set(sine.outputs)
    copy = next(op for op in listed.graph().get_operations() if op.type == "Cos")
    assert [op.type for op in copy.control_inputs] == ["Sin"]


def test_who_waits_for_a_call_waits_for_the_end_of_the_function() -> None:
    count = tf.Variable(0.0)

    def counting(t: Any) -> Any:
        count.assign_add(1.0)
        return tf.sin(t)

    listed = Listed(lambda x: function(counting)(x) + count)
    (read,) = listed.of_type("ReadVariableOp")
    assert [each.label for each in read.after if isinstance(each, Gathering)] == [
        "StatefulPartitionedCall/output_control_node"
    ]
    (result,) = function(listed.run)(tf.constant(X))
    assert np.allclose(result, np.sin(X) + 1.0) and count.numpy() == 1.0


# Gradients ------------------------------------------------------------------------------------------------------------


def scopes_of_gradients(listed: Listed) -> set[str]:
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            (y,) = listed.run(x)
        return tape.gradient(y, x, tf.ones_like(y))

    before = {op.name for op in listed.graph().get_operations()}
    added = {op.name for op in traced(step).graph.get_operations()} - before
    return {name.rpartition("/")[0] for name in added if name.startswith("gradient")}


def chain(x: Any) -> Any:
    with tf.name_scope("model"):
        return function(tf.sin)(tf.matmul(tf.exp(x), x, transpose_b=True))


def test_backward_operations_have_the_names_of_a_gradient_function() -> None:
    assert scopes_of_gradients(Listed(chain)) == {
        "gradients/model/MatMul_grad",
        "gradients/model/Exp_grad",
        "gradients/model/PartitionedCall/Sin_grad",
    }


def test_backward_operations_have_the_names_that_a_tape_gives_them() -> None:
    # One that was recorded in a scope of its own is named by it; an exponential by the scope that it lies in.
    listed = Listed(chain, scope="model", unscoped=("model/Exp",))
    assert scopes_of_gradients(listed) == {
        "gradient_tape/MatMul",
        "gradient_tape",
        "gradient_tape/PartitionedCall/Sin",
    }


@tf.custom_gradient
def fivefold(x: Any) -> Any:
    root = tf.sqrt(x)
    return root, lambda upstream: 5.0 * tf.cos(root) * upstream


@tf.custom_gradient
def of_the_first(x: Any, y: Any) -> Any:
    return x * y, lambda upstream: (tf.square(y) * upstream, None)


@pytest.mark.parametrize(
    "outer",
    [
        fivefold,
        lambda x: tf.tanh(fivefold(tf.exp(x))),
        lambda x: function(lambda t: fivefold(t) + t)(x),
        lambda x: tf.tanh(function(fivefold, jit_compile=True)(tf.exp(x))),
        lambda x: fivefold(fivefold(x)),
        lambda x: of_the_first(tf.exp(x), x),
        lambda x: tf.nn.silu(x) + tf.nn.silu(2.0 * x),
    ],
    ids=[
        "alone",
        "in the middle",
        "in a function",
        "in a function that XLA compiles",
        "twice",
        "of one argument",
        "silu",
    ],
)
def test_custom_gradients_come_along(outer: Function) -> None:
    assert Listed(outer).agrees()


def test_a_custom_gradient_is_listed_as_calls_over_the_slots_of_the_forward_pass() -> None:
    listed = Listed(lambda x: tf.tanh(fivefold(tf.exp(x))))
    end = next(call for call in listed.calls if call.gradient is not None)
    gradient = end.gradient
    assert end.operation.type == "IdentityN" and gradient is not None
    assert {call.operation.type for call in gradient.calls} >= {"Cos", "Mul"}
    (root,) = listed.of_type("Sqrt")
    assert set(gradient.captured) == set(root.outputs) and set(gradient.captured) <= set(end.reads)
    inside = {slot for call in gradient.calls for slot in call.outputs}
    assert inside.isdisjoint(slot for call in listed.calls for slot in call.outputs)
    assert not {call.label for call in gradient.calls} & set(listed.labels)


def test_a_custom_gradient_that_gives_none() -> None:
    listed = Listed(lambda x: of_the_first(tf.exp(x), x))
    (gradient,) = [call.gradient for call in listed.calls if call.gradient is not None]
    # Of the product itself, which ends the function too, and of the two arguments.
    assert [result is None for result in gradient.results] == [True, False, True]


def test_a_custom_gradient_that_reads_what_lies_outside_is_refused() -> None:
    with tf.Graph().as_default():
        outside = tf.constant(1.0)

    @tf.custom_gradient
    def reading(x: Any) -> Any:
        return tf.sqrt(x), lambda upstream: upstream * outside

    with pytest.raises(UnsupportedModelError, match="Pass it to the function with the custom gradient"):
        Listed(reading)


def reads_around(is_captured: bool) -> Function:
    """Return a function in whose inner one a gradient reads a tensor that the outer one makes."""

    def outer(x: Any) -> Any:
        around = tf.exp(x)

        @tf.custom_gradient
        def reading(y: Any) -> Any:
            return tf.sqrt(y), lambda upstream: upstream * around

        return function(lambda y: reading(y * around if is_captured else y))(x)

    return outer


def test_a_custom_gradient_may_read_what_its_function_has_captured() -> None:
    assert Listed(reads_around(is_captured=True)).agrees()


def test_a_custom_gradient_that_reads_what_its_function_has_not_captured_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="Pass it to the function with the custom gradient"):
        Listed(reads_around(is_captured=False))


@tf.custom_gradient
def halved_back(x: Any) -> Any:
    return tf.identity(x), lambda upstream: 0.5 * upstream


def looped(inner: Function) -> Function:
    return lambda x: tf.while_loop(lambda i, _: i < 3, lambda i, t: (i + 1, inner(t)), [0, x], maximum_iterations=3)[1]


def branched(inner: Function) -> Function:
    return lambda x: tf.cond(tf.reduce_sum(x) > -1e9, lambda: inner(x), lambda: tf.identity(x))


@pytest.mark.parametrize("around", [looped, branched, lambda inner: looped(branched(function(inner)))])
def test_a_custom_gradient_in_a_loop_or_branch(around: Callable[[Function], Function]) -> None:
    """A copy is made of the loop's definition, whose tensors are not those that the gradient reads."""
    assert Listed(around(halved_back)).agrees()
    with pytest.raises(UnsupportedModelError, match=r"inside of .*loop or branch.*granularity='layer'"):
        Listed(around(fivefold))


def test_branches_inside_of_a_loop_with_variables_of_their_own() -> None:
    """What a branch lacks of a gradient is zeros of the variable's shape, which its handle tells."""
    a, b = tf.Variable(2.0 * tf.ones(X.shape[-1])), tf.Variable(tf.ones(X.shape[-1]))

    def step(i: Any, x: Any) -> Any:
        return i + 1, tf.cond(i % 2 == 0, lambda: tf.tanh(x * a), lambda: tf.sin(x * b))

    assert Listed(lambda x: tf.while_loop(lambda i, _: i < 3, step, [0, x], maximum_iterations=3)[1]).agrees(a, b)


def test_one_of_several_branches() -> None:
    a = tf.Variable(2.0 * tf.ones(X.shape[-1]))

    def switched(x: Any) -> Any:
        branches = [lambda: tf.sin(x), lambda: tf.tanh(x * a), lambda: x * 2.0]
        return tf.switch_case(tf.cast(tf.reduce_sum(x) * 0.0, tf.int32) + 1, branches)

    listed = Listed(lambda x: switched(switched(x)))
    assert listed.agrees(a)
    with pytest.raises(UnsupportedModelError, match="loop or branch"):
        Listed(lambda x: tf.switch_case(tf.cast(tf.reduce_sum(x), tf.int32), [lambda: tf.sin(x), lambda: fivefold(x)]))


# Slices as one --------------------------------------------------------------------------------------------------------


def of_rows(x: Any) -> Any:
    y = tf.exp(x)
    return tf.stack([tf.tanh(y[place]) * (place + 1.0) for place in range(3)])


def of_columns(x: Any) -> Any:
    y = tf.exp(x)
    state = tf.zeros_like(y[:, 0])
    for place in range(4):
        state = 0.5 * state + y[:, place]
        state = state * tf.sigmoid(state)
    return state


def of_some(x: Any) -> Any:
    y = tf.exp(x)
    return [tf.tanh(y[:, place]) for place in range(3)]


def read_otherwise(x: Any) -> Any:
    y = tf.exp(x)
    return [tf.tanh(y[place]) for place in range(3)] + [tf.sin(y)]


def of_an_argument(x: Any) -> Any:
    return [tf.tanh(x[place]) for place in range(3)]


def of_a_sum(x: Any) -> Any:
    """The sum of the slices' gradients goes on to both terms."""
    y = x + tf.sin(x)
    return [tf.tanh(y[place]) for place in range(3)]


def terms_of_many(x: Any) -> Any:
    """They are sorted by their names, which they keep."""
    y = tf.exp(x)
    return y[0] + y[1] + y[2]


def that_keep_the_axis(x: Any) -> Any:
    y = tf.exp(x)
    return [tf.tanh(y[place : place + 1]) for place in range(3)]


@pytest.mark.parametrize(
    ("made", "unpacks", "slices"),
    [
        (of_rows, 1, 0),
        # One slice has only its shape read.
        (of_columns, 1, 1),
        (of_some, 0, 3),
        (read_otherwise, 0, 3),
        (of_an_argument, 0, 3),
        (of_a_sum, 0, 3),
        (terms_of_many, 1, 0),
        (that_keep_the_axis, 0, 3),
    ],
)
def test_which_slices_become_one_operation(made: Callable[[Any], Any], unpacks: int, slices: int) -> None:
    listed = Listed(made)
    listed.calls, _ = slices_as_one(listed.calls, listed.inliner.outputs, listed.inliner.slot_count)
    assert (len(listed.of_type("Unpack")), len(listed.of_type("StridedSlice"))) == (unpacks, slices)
    assert listed.agrees()
