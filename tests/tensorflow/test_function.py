"""Functions in segments of single operations: all gradients and all state, with a segment between any two cuts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tests.tensorflow.plans import cut_everywhere
from tf_memsaver.capture.function_step import capture_function, concrete_function
from tf_memsaver.errors import InvalidRequestError, UnknownDimensionError, UnsupportedModelError
from tf_memsaver.ir.graph import Phase
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.program.function_calls import FunctionCalls
from tf_memsaver.rewrite.segments import SegmentedForward
from tf_memsaver.tfgraph.operations import FUNCTION_CALLS, implements
from tools.shared.function_training import free_spec, train_function
from tools.shared.memory import peak_over_live
from tools.shared.models import functions
from tools.shared.models.real import approximate_gelu
from tools.shared.records import differing


@pytest.mark.parametrize("build", functions.CASES, ids=lambda build: build.__name__)
def test_segments_between_all_cuts_train_alike(build: Callable[[], functions.Case]) -> None:
    function, variables, arguments = build()
    calls = FunctionCalls(concrete_function(function, [free_spec(t) for t in arguments]))
    optimized, recomputed = cut_everywhere(calls, int(arguments[0].shape[0]))
    assert recomputed >= 2
    plain = train_function(function, variables, arguments)
    assert not differing(plain, train_function(function, variables, arguments))
    assert not differing(plain, train_function(optimized, variables, arguments))


@pytest.mark.parametrize(
    "activation", ["relu", "tanh", "silu", "softplus", "mish", "elu", "selu", "leaky_relu", approximate_gelu]
)
def test_activations_cut_anywhere(activation: Any) -> None:
    test_segments_between_all_cuts_train_alike(lambda: functions.dense(activation))


@pytest.mark.usefixtures("costs_with_onednn")
@pytest.mark.parametrize("strategy", ["min_peak", "nested"])
def test_sums_of_several_shapes_behind_a_segment(strategy: str) -> None:
    """Graph optimisation orders their terms where it knows which operands of unknown size are of one shape."""
    stem, kernel = (tf.Variable(0.3 * functions.normal(3, 3, channels, 8)) for channels in (3, 8))
    scale, offset, head = (tf.Variable(functions.normal(*shape)) for shape in ((8,), (8,), (8, 10)))

    @tf.function(input_signature=[tf.TensorSpec((None, 8, 8, 3))])
    def function(x: Any) -> Any:
        x = tf.nn.conv2d(x, stem, 1, "SAME")
        h = tf.nn.conv2d(x, kernel, 1, "SAME")
        x += tf.nn.batch_normalization(h, *tf.nn.moments(h, [0, 1, 2]), offset, scale, 1e-3)
        return tf.reduce_mean(x, [1, 2]) @ head

    spec = tf.TensorSpec((None, 8, 8, 3))
    optimized = tf_memsaver.optimize_function(function, spec, batch_size=16, strategy=strategy, max_overhead=5.0)
    assert optimized.memsaver_plan.recomputed
    case = [stem, kernel, scale, offset, head], [tf.constant(functions.normal(16, 8, 8, 3))]
    assert not differing(
        train_function(function, *case, free_batch=False), train_function(optimized, *case, free_batch=False)
    )


@pytest.mark.parametrize("readers", [1, 2])
def test_an_addition_that_one_operation_reads_is_not_parted_from_other_readers(readers: int) -> None:
    """Its gradient is that operation's, by whose name graph optimisation sorts the terms of a sum.

    See test_saved_model.py::test_source_and_rewritten_train_alike[convolutions-min_peak].
    """
    scale, offset, head = (tf.Variable(functions.normal(*shape)) for shape in ((8,), (8,), (8, 10)))

    @tf.function(input_signature=[tf.TensorSpec((None, 8, 8, 8))])
    def function(x: Any) -> Any:
        x = tf.tanh(x * offset)
        x += tf.nn.relu(tf.nn.batch_normalization(x, *tf.nn.moments(x, [0, 1, 2]), offset, scale, 1e-3))
        return sum(pool(x, [1, 2]) for pool in (tf.reduce_mean, tf.reduce_max)[:readers]) @ head

    graph = capture_function(FunctionCalls(function.get_concrete_function()), batch_size=16)
    kinds = [unit.kind for unit in graph.units]
    before_the_addition = kinds.index("Relu") + 1
    assert kinds[before_the_addition] == "AddV2"
    assert (before_the_addition in graph.joined) == (readers == 1)


@pytest.mark.parametrize(
    "build",
    [functions.silu, functions.convolutions, functions.module, functions.waiting],
    ids=lambda build: build.__name__,
)
def test_copies_have_names_shapes_and_order_of_the_source(build: Callable[[], functions.Case]) -> None:
    # Graph optimisation sorts by names, folds by shapes, and fuses what nothing must run in between.
    function, _, arguments = build()
    concrete = concrete_function(function, [free_spec(t) for t in arguments])
    before = set(_described(concrete.graph))
    calls = FunctionCalls(concrete)
    count = len(calls.sequence.calls)
    forward = SegmentedForward(calls.sequence, [Segment(start=0, stop=count, mode=SegmentMode.STORE)])
    copy = tf.function(lambda x: calls.finish(forward(calls.enter([x]), training=True)), autograph=False)
    inlined = ("PartitionedCall", "Identity")
    missing = before - set(_described(copy.get_concrete_function(free_spec(arguments[0])).graph))
    assert [each for each in missing if not each[1].endswith(inlined)] == []


def _described(graph: Any) -> Iterator[tuple[str, str, str]]:
    """Name, type and shapes of operations, but for constants, arguments and what runs a second time."""
    for each in graph.get_operations():
        if each.type not in ("Const", "Placeholder"):
            yield each.name, each.type, str([t.shape for t in each.outputs])


@pytest.mark.parametrize(
    "build", [functions.chosen_by_device, functions.compiled_inside], ids=lambda build: build.__name__
)
def test_calls_that_graph_optimisation_leaves_alone_stay_calls(build: Callable[[], functions.Case]) -> None:
    function, _, arguments = build()
    concrete = concrete_function(function, [free_spec(t) for t in arguments])
    optimized, _ = cut_everywhere(FunctionCalls(concrete), batch_size=64)

    def called(of: Any) -> int:
        operations = of.get_concrete_function(*[free_spec(t) for t in arguments]).graph.get_operations()
        return sum(operation.type in FUNCTION_CALLS for operation in operations)

    assert called(function) == called(optimized) == 4


def test_other_implementations_come_along() -> None:
    @tf.function(experimental_attributes={"api_implements": "layer_2", "api_preferred_device": "GPU"})
    def other(x: tf.Tensor) -> tf.Tensor:
        return tf.tanh(x)

    @tf.function(experimental_attributes={"api_implements": "layer_2", "api_preferred_device": "CPU"})
    def own(x: tf.Tensor) -> tf.Tensor:
        return tf.sinh(x) / tf.cosh(x)

    weight, spec = tf.Variable(functions.normal(16, 16)), tf.TensorSpec((None, 16))
    rival = other.get_concrete_function(spec)

    @tf.function
    def call(x: tf.Tensor) -> tf.Tensor:
        rival.add_to_graph()
        return own(x @ weight)

    optimized, _ = cut_everywhere(FunctionCalls(call.get_concrete_function(spec)), batch_size=64)
    graph = optimized.get_concrete_function(spec).graph
    assert {implements(function) for function in graph._functions.values()} == {b"layer_2"}
    assert len(graph._functions) == 2


def test_sums_that_wait_are_added_to_apart() -> None:
    # Else graph optimisation makes one sum of both where the first one waits for nothing.
    function, _, arguments = functions.waiting()
    calls = FunctionCalls(concrete_function(function, [free_spec(t) for t in arguments]))
    apart = [call.label for call in calls.sequence.calls if "waits" in call.pinned]
    assert apart == ["add", "add_1", "add_2", "add_3"]
    count = len(calls.sequence.calls)
    forward = SegmentedForward(calls.sequence, [Segment(start=0, stop=count, mode=SegmentMode.STORE)])
    copy = tf.function(lambda x: calls.finish(forward(calls.enter([x]), training=True)), autograph=False)
    operations = copy.get_concrete_function(free_spec(arguments[0])).graph.get_operations()
    waits = {each.name: len(each.control_inputs) for each in operations if each.type == "NoOp"}
    ends = [f"{name}/output_control_node" for name in ("StatefulPartitionedCall", "StatefulPartitionedCall_3")]
    assert [waits[name] for name in ("NoOp", "StatefulPartitionedCall_2/group_deps", *ends)] == [4] * 4
    assert not any(name.endswith("_deps_1") for name in waits)


def test_a_function_with_its_own_gradient_is_one_unit() -> None:
    function, _, arguments = functions.silu()
    calls = FunctionCalls(concrete_function(function, [free_spec(t) for t in arguments]))
    kinds = [[member.operation.type for member in call.members] for call in calls.sequence.calls]
    inside = [group for group in kinds if "IdentityN" in group]
    assert len(inside) == 4 and all({"Sigmoid", "Mul", "IdentityN"} <= set(group) for group in inside)


def test_gradients_keep_what_must_run_before() -> None:
    # The gradient of silu computes the sigmoid anew once the upstream gradient is there, not before.
    function, _, arguments = functions.silu()
    calls = FunctionCalls(concrete_function(function, [free_spec(t) for t in arguments]))
    gradients = [m.gradient for call in calls.sequence.calls for m in call.members if m.gradient is not None]
    assert gradients and all(set(g.upstream) & {s for c in g.calls for s in c.after} for g in gradients)


@pytest.mark.parametrize(
    "build",
    [functions.recurrent, functions.waiting, functions.chosen_by_device, functions.compiled_inside],
    ids=lambda build: build.__name__,
)
def test_a_function_that_was_trained_already(build: Callable[[], functions.Case]) -> None:
    function, variables, arguments = build()
    spec, size = free_spec(arguments[0]), len(arguments[0])
    untrained = tf_memsaver.optimize_function(function, spec, batch_size=size, strategy="min_peak").memsaver_plan
    plain = train_function(function, variables, arguments)
    optimized = tf_memsaver.optimize_function(function, spec, batch_size=size, strategy="min_peak")
    assert not differing(plain, train_function(optimized, variables, arguments))
    # What the backward pass keeps was added to the results of the trained function, and is none of them.
    assert optimized.memsaver_plan.segments == untrained.segments
    assert optimized.memsaver_plan.recomputed


def test_what_lies_behind_a_loop_can_be_cut() -> None:
    function, _, arguments = functions.recurrent()
    calls = FunctionCalls(concrete_function(function, [free_spec(t) for t in arguments]))
    graph = capture_function(calls, batch_size=32)
    loop = next(unit.index for unit in graph.units if "list of tensors" in unit.pinned)
    assert any(cut.position > loop + 1 for cut in graph.cuts)


def test_gradients_reach_what_lies_in_front_of_a_loop() -> None:
    # The gradient of a list of tensors passes no boundary of a unit, so that lists stay within one.
    function, _, arguments = functions.recurrent()
    calls = FunctionCalls(concrete_function(function, [free_spec(t) for t in arguments]))
    graph = capture_function(calls, batch_size=32)
    loop = next(unit.index for unit in graph.units if "list of tensors" in unit.pinned)
    differentiated = {op.unit for op in graph.ops if op.phase is Phase.BACKWARD}
    before = {unit.index for unit in graph.units[:loop] if unit.kind == "Tanh"}
    assert before and before | {loop} <= differentiated


def test_embedding_gradients_stay_sparse() -> None:
    function, variables, arguments = functions.embedding()
    optimized = tf_memsaver.optimize_function(function, free_spec(arguments[0]), batch_size=32, strategy="min_peak")
    record = train_function(optimized, variables, arguments, steps=1)
    kinds = {type(value) for key, value in record.items() if key[0] == "gradient"}
    assert record["gradient", 0, 0][0] == "sparse" and kinds == {tuple, np.ndarray}


def test_an_eager_tape() -> None:
    function, variables, arguments = functions.dense("tanh")
    optimized = tf_memsaver.optimize_function(function, free_spec(arguments[0]), batch_size=64, strategy="min_peak")
    found = []
    for each in (function, optimized):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(each(*arguments)))
        found.append({place: g.numpy() for place, g in enumerate(tape.gradient(loss, variables))})
    assert not differing(*found)


def test_memory_is_saved_and_about_what_the_plan_says() -> None:
    width, depth, batch = 64, 16, 8192
    x = inputs = keras.Input((width,))
    for _ in range(depth):
        x = layers.Dense(width, activation="gelu")(x)
    function, variables, arguments = functions.of_model(
        keras.Model(inputs, layers.Dense(1)(x)), functions.normal(batch, width)
    )
    optimized = tf_memsaver.optimize_function(function, free_spec(arguments[0]), batch_size=batch, strategy="min_peak")
    plan = optimized.memsaver_plan
    peaks = []
    for each in (function, optimized):

        @tf.function(input_signature=[free_spec(arguments[0])], autograph=False)
        def step(x: tf.Tensor, each: Any = each) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(each(x)))
            return tape.gradient(loss, variables)

        step(*arguments)
        peaks.append(peak_over_live(functools.partial(step, *arguments)))
    assert peaks[1] < 0.4 * peaks[0]
    assert plan.peak_bytes / plan.plain_peak_bytes == pytest.approx(peaks[1] / peaks[0], rel=0.3)


def test_structured_arguments_and_python_values() -> None:
    weight = tf.Variable(tf.eye(4))

    @tf.function
    def function(batch: dict[str, tf.Tensor], flag: tf.Tensor, *, training: bool, name: str = "a") -> Any:
        x = tf.tanh(batch["x"] @ weight) + tf.cast(batch["ids"], tf.float32)
        return [tf.where(flag, x, -x) * (2.0 if training else 1.0), {name: batch["text"]}]

    batch = {"x": tf.ones((3, 4)), "ids": tf.ones((3, 4), tf.int32), "text": tf.constant(["p", "q", "r"])}
    concrete = function.get_concrete_function(
        tf.nest.map_structure(tf.TensorSpec.from_tensor, batch), tf.TensorSpec((), tf.bool), training=True
    )
    optimized = tf_memsaver.optimize_function(concrete)
    plain, ours = (f(batch, tf.constant(False), training=True) for f in (function, optimized))
    tf.nest.assert_same_structure(plain, ours)
    assert plain[0].numpy().tobytes() == ours[0].numpy().tobytes() and list(ours[1]["a"].numpy()) == [b"p", b"q", b"r"]
    with pytest.raises(InvalidRequestError, match="training=True"):
        optimized(batch, tf.constant(False), training=False)


def test_ragged_and_sparse_arguments_and_results() -> None:
    kernels = [tf.Variable(functions.normal(8, 8) / 3) for _ in range(4)]

    def function(ragged: tf.RaggedTensor, sparse: tf.SparseTensor) -> Any:
        flat = ragged.flat_values
        for kernel in kernels:
            flat = tf.tanh(flat @ kernel)
        rows = tf.reduce_sum(ragged.with_flat_values(flat), axis=1)
        rows = tf.tanh(rows + tf.sparse.sparse_dense_matmul(sparse, kernels[0]))
        return {"ragged": ragged.with_flat_values(flat), "rows": rows, "sparse": sparse, "none": None}

    ragged = tf.RaggedTensor.from_row_lengths(tf.constant(functions.normal(12, 8)), [3, 0, 4, 5])
    sparse = tf.sparse.from_dense(tf.eye(4, 8))
    specs = [
        tf.RaggedTensorSpec((None, None, 8), tf.float32, ragged_rank=1),
        tf.SparseTensorSpec((None, 8), tf.float32),
    ]
    calls = FunctionCalls(concrete_function(function, specs))
    optimized, recomputed = cut_everywhere(calls, 12)
    assert recomputed >= 2
    found = []
    for each in (function, optimized):

        @tf.function(input_signature=specs, autograph=False)
        def step(ragged: Any, sparse: Any, each: Any = each) -> Any:
            with tf.GradientTape() as tape:
                result = each(ragged, sparse)
                loss = tf.reduce_sum(result["rows"] ** 2) + tf.reduce_sum(result["ragged"].flat_values ** 2)
            return result, tape.gradient(loss, kernels)

        found.append(step(ragged, sparse))
    tf.nest.assert_same_structure(*found, expand_composites=True)
    for plain, ours in zip(*(tf.nest.flatten(each, expand_composites=True) for each in found), strict=True):
        assert (plain is None and ours is None) or plain.numpy().tobytes() == ours.numpy().tobytes()


def _no_weights(x: tf.Tensor) -> tf.Tensor:
    return tf.tanh(x)


_WEIGHT = tf.Variable(tf.eye(4))


@pytest.mark.parametrize(
    ("function", "specs", "error", "says"),
    [
        (_no_weights, [tf.TensorSpec((2, 4))], UnsupportedModelError, "no trainable"),
        (lambda x: tf.shape(x @ _WEIGHT), [tf.TensorSpec((2, 4))], UnsupportedModelError, "no floating"),
        (lambda x: x @ _WEIGHT, [tf.TensorSpec((None, 4))], InvalidRequestError, "batch_size"),
        (lambda x: x @ _WEIGHT, [tf.TensorSpec((2, None, 4))], UnknownDimensionError, "is unknown"),
        (lambda x: x @ _WEIGHT, [], InvalidRequestError, "specs"),
        (lambda x: x @ _WEIGHT, [tf.TensorSpec((2, 3))], InvalidRequestError, "cannot be traced"),
        ("function", [], InvalidRequestError, "expected a function"),
    ],
)
def test_functions_that_are_refused(function: Any, specs: list[Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        tf_memsaver.optimize_function(function, *specs)


def test_a_function_has_the_name_that_it_has_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    weight = tf.Variable(tf.ones((8, 8)))

    @tf.function
    def squashed(x: Any) -> Any:
        return tf.tanh(tf.sin(x @ weight))

    tf_memsaver.optimize_function(squashed, tf.ones((4, 8)))
    assert "function 'squashed': predicted peak" in capsys.readouterr().err
