"""Functions in segments of single operations: all gradients and all state, with a segment between any two cuts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tests.tensorflow import models
from tests.tensorflow.plans import plan_of
from tf_memsaver.capture.function_step import capture_function, concrete_function
from tf_memsaver.errors import InvalidRequestError, UnknownDimensionError, UnsupportedModelError
from tf_memsaver.ir.graph import Phase
from tf_memsaver.ir.segments import Segment, SegmentMode
from tf_memsaver.plan.problem import Problem
from tf_memsaver.plan.request import Request
from tf_memsaver.program.function_calls import FunctionCalls
from tf_memsaver.rewrite.optimized_function import make_optimized_function
from tf_memsaver.rewrite.segments import SegmentedForward
from tf_memsaver.tfgraph.operations import FUNCTION_CALLS, implements

MIB = 2**20
Case = tuple[Any, list[tf.Variable], list[tf.Tensor]]
"""A function, its variables, and the arguments to call it with."""


def spec_of(tensor: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype)


def cut_everywhere(calls: FunctionCalls, batch_size: int) -> tuple[Any, int]:
    """The function with a segment between any two candidate cuts, and how many of them are recomputed."""
    graph = capture_function(calls, batch_size=batch_size)
    problem = Problem.build(graph, Request())
    edges = [0, *(cut.position for cut in problem.cuts), len(graph.units)]
    segments = tuple(
        Segment(
            start=start,
            stop=stop,
            mode=SegmentMode.STORE if any(problem.pinned[start:stop]) else SegmentMode.RECOMPUTE,
        )
        for start, stop in itertools.pairwise(edges)
    )
    plan = plan_of(calls.sequence, segments, batch_size)
    recomputed = sum(segment.mode is SegmentMode.RECOMPUTE for segment in segments)
    return make_optimized_function(calls, plan), recomputed


def train(
    function: Any, variables: list[tf.Variable], arguments: list[tf.Tensor], steps: int = 2, free: bool = True
) -> list[Any]:
    """Losses, gradients and variables of some steps in a tf.function with a free batch; variables are put back."""
    weights = [v for v in variables if v.trainable]

    @tf.function(input_signature=[spec_of(t) for t in arguments] if free else None, autograph=False)
    def step(*batch: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            results = [t for t in tf.nest.flatten(function(*batch)) if t is not None and t.dtype.is_floating]
            loss = tf.add_n([tf.reduce_mean(tf.square(tf.cast(t, tf.float32))) for t in results])
        return loss, results, tape.gradient(loss, weights)

    before = [v.numpy() for v in variables]
    record: list[Any] = []
    for _ in range(steps):
        loss, results, gradients = step(*arguments)
        record += [loss.numpy(), *(t.numpy() for t in results)]
        for weight, gradient in zip(weights, gradients, strict=True):
            record.append(
                None if gradient is None else (type(gradient).__name__, tf.convert_to_tensor(gradient).numpy())
            )
            if gradient is not None:
                weight.assign_sub(0.1 * tf.cast(tf.convert_to_tensor(gradient), weight.dtype))
        record += [v.numpy() for v in variables]
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)
    return record


def differing(left: list[Any], right: list[Any]) -> list[int]:
    assert len(left) == len(right)
    return [k for k, (a, b) in enumerate(zip(left, right, strict=True)) if not _equal(a, b)]


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, tuple) or left is None:
        return type(left) is type(right) and (left is None or (left[0] == right[0] and _equal(left[1], right[1])))
    return bool(left.tobytes() == right.tobytes())


# Cases ----------------------------------------------------------------------------------------------------------------


def _keras(model: Any, x: Any) -> Case:
    return tf.function(lambda x: model(x, training=True)), [v.value for v in model.variables], [tf.constant(x)]


def _normal(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def dense(activation: Any = "gelu") -> Case:
    x = inputs = keras.Input((16,))
    for _ in range(4):
        x = layers.Dense(16, activation=activation)(x)
    return _keras(keras.Model(inputs, layers.Dense(2)(x)), _normal(64, 16))


def convolutions() -> Case:
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, padding="same")(inputs)
    for _ in range(3):
        y = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.Add()([x, layers.Dropout(0.2)(layers.Conv2D(8, 3, padding="same")(y))])
    return _keras(keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling2D()(x))), _normal(16, 8, 8, 3))


def attention() -> Case:
    x = inputs = keras.Input((12, 16))
    for _ in range(2):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.Dropout(0.1)(layers.MultiHeadAttention(2, 8)(y, y))])
        y = layers.Dense(32, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(16)(y)])
    return _keras(keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x))), _normal(16, 12, 16))


def recurrent() -> Case:
    inputs = keras.Input((6, 8))
    x = layers.Dense(8, activation="tanh")(inputs)
    x = layers.LSTM(8, return_sequences=True)(x)
    return _keras(keras.Model(inputs, layers.Dense(2)(layers.Dense(8, activation="tanh")(x))), _normal(32, 6, 8))


def embedding() -> Case:
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(50, 16)(inputs)
    x = layers.Dense(2)(layers.Dense(16, activation="tanh")(layers.Dense(16, activation="tanh")(x)))
    ids = np.random.default_rng(0).integers(0, 50, (32, 6)).astype(np.int32)
    return _keras(keras.Model(inputs, x), ids)


def silu() -> Case:
    return dense("silu")


def looped() -> Case:
    """A loop that reads a variable: its gradient function has state, and is called by another operation."""
    generator = np.random.default_rng(1)
    matrices = [tf.Variable(generator.standard_normal((16, 16)).astype(np.float32) / 4) for _ in range(6)]

    def call(x: tf.Tensor) -> tf.Tensor:
        for matrix in matrices:
            x = tf.nn.gelu(x @ matrix)
        for _ in tf.range(2):
            x = tf.tanh(x @ matrices[0])
        return x

    return tf.function(call), matrices, [tf.constant(_normal(64, 16))]


class OwnCall(keras.Model):
    """A model whose call is Python code, with a loop and a branch that tracing unrolls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [layers.Dense(16, activation="tanh") for _ in range(4)]
        self.drop, self.head = layers.Dropout(0.2), layers.Dense(2)

    def call(self, x: Any, training: bool = False) -> Any:
        for number, block in enumerate(self.blocks):
            x = x + block(x)
            if training and number % 2:
                x = self.drop(x, training=training)
        return self.head(x)


def own_call() -> Case:
    model, x = OwnCall(), _normal(64, 16)
    model(x)
    return _keras(model, x)


def half() -> Case:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        return dense("tanh")
    finally:
        keras.config.set_dtype_policy("float32")


def brain_half() -> Case:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return dense("relu")
    finally:
        keras.config.set_dtype_policy("float32")


class Module(tf.Module):
    """Control flow, a nested function, a custom gradient, hidden random state, and a counter assigned twice."""

    def __init__(self) -> None:
        super().__init__()
        generator = np.random.default_rng(1)
        self.matrices = [
            tf.Variable(generator.standard_normal((16, 16)).astype(np.float32) / 4, name=f"w{i}") for i in range(4)
        ]
        self.scale = tf.Variable(1.5, name="scale")
        self.count = tf.Variable(0, trainable=False, dtype=tf.int64, name="count")

    @tf.function
    def inner(self, x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return tf.tanh(x @ w) * self.scale

    @tf.function
    def __call__(self, x: tf.Tensor) -> Any:
        self.count.assign_add(1)
        x = tf.sin(self.inner(x, self.matrices[0]))
        x = tf.cond(tf.reduce_sum(x) > 0.0, lambda: x @ self.matrices[1], lambda: x @ self.matrices[2])
        for _ in tf.range(3):
            x = tf.tanh(x @ self.matrices[3])
        x = clipped(tf.exp(-tf.square(x)))
        self.count.assign(self.count * 3)
        return {"x": tf.sin(x), "count": self.count.read_value(), "pair": (x[:, :2], tf.shape(x)), "none": None}


def waiting() -> Case:
    """Layers as Keras 2 saves them: functions whose result waits for the reads of all their variables."""
    weights = [(tf.Variable(_normal(16, 16) / 4), tf.Variable(_normal(16))) for _ in range(4)]

    def layer(x: tf.Tensor, kernel: tf.Variable, bias: tf.Variable) -> tf.Tensor:
        reads = [kernel.read_value(), bias.read_value(), kernel.read_value(), bias.read_value()]
        y = tf.einsum("bi,ij->bj", tf.tanh(x), reads[0] + reads[2]) + (reads[1] + reads[3])
        with tf.control_dependencies([tf.group(*(read.op for read in reads))]):
            return tf.identity(y)

    layers_ = [tf.function(layer) for _ in weights]

    @tf.function
    def call(x: tf.Tensor) -> tf.Tensor:
        for each, (kernel, bias) in zip(layers_, weights, strict=True):
            x = x + each(x, kernel, bias)
        return x

    return call, [v for pair in weights for v in pair], [tf.constant(_normal(64, 16))]


def _called(looped: bool, **settings: Any) -> Case:
    """Layers that call a function of their own, made with the given settings, which graph optimisation leaves alone."""
    kernels = [tf.Variable(_normal(16, 16) / 4, name=f"kernel{number}") for number in range(4)]

    @tf.function(autograph=False, **settings)
    def layer(x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        def step(number: Any, state: tf.Tensor) -> Any:
            return number + 1, tf.nn.gelu(state @ kernel + x, approximate=True)

        if looped:
            y = tf.while_loop(lambda number, _: number < 3, step, (0, x), maximum_iterations=3)[1]
        else:
            y = step(0, step(0, x)[1])[1]
        return y + tf.sin(x) + x

    @tf.function
    def call(x: tf.Tensor) -> tf.Tensor:
        for kernel in kernels:
            x = tf.tanh(tf.exp(-tf.square(layer(x, kernel))))
        return x

    return call, kernels, [tf.constant(_normal(64, 16))]


def chosen_by_device() -> Case:
    """As the LSTM and GRU layers of Keras 2."""
    return _called(True, experimental_attributes={"api_implements": "layer_1", "api_preferred_device": "CPU"})


def compiled_inside() -> Case:
    return _called(False, jit_compile=True)


@tf.custom_gradient
def clipped(x: tf.Tensor) -> Any:
    return tf.sqrt(x), lambda upstream: tf.clip_by_value(upstream, -0.001, 0.001)


def module() -> Case:
    made = Module()
    return tf.function(lambda x: made(x)), [*made.matrices, made.scale, made.count], [tf.constant(_normal(64, 16))]


CASES: list[Callable[[], Case]] = [
    dense,
    convolutions,
    attention,
    recurrent,
    embedding,
    half,
    brain_half,
    module,
    looped,
    own_call,
    waiting,
    chosen_by_device,
    compiled_inside,
]


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_segments_between_all_cuts_train_alike(build: Callable[[], Case]) -> None:
    function, variables, arguments = build()
    calls = FunctionCalls(concrete_function(function, [spec_of(t) for t in arguments]))
    optimized, recomputed = cut_everywhere(calls, int(arguments[0].shape[0]))
    assert recomputed >= 2
    plain = train(function, variables, arguments)
    assert not differing(plain, train(function, variables, arguments))
    assert not differing(plain, train(optimized, variables, arguments))


@pytest.mark.parametrize(
    "activation", ["relu", "tanh", "silu", "softplus", "mish", "elu", "selu", "leaky_relu", models.approximate_gelu]
)
def test_activations_cut_anywhere(activation: Any) -> None:
    test_segments_between_all_cuts_train_alike(lambda: dense(activation))


@pytest.mark.parametrize("strategy", ["min_peak", "nested"])
def test_sums_of_several_shapes_behind_a_segment(strategy: str) -> None:
    """Graph optimisation orders their terms where it knows which operands of unknown size are of one shape."""
    stem, kernel = (tf.Variable(0.3 * _normal(3, 3, channels, 8)) for channels in (3, 8))
    scale, offset, head = (tf.Variable(_normal(*shape)) for shape in ((8,), (8,), (8, 10)))

    @tf.function(input_signature=[tf.TensorSpec((None, 8, 8, 3))])
    def function(x: Any) -> Any:
        x = tf.nn.conv2d(x, stem, 1, "SAME")
        h = tf.nn.conv2d(x, kernel, 1, "SAME")
        x += tf.nn.batch_normalization(h, *tf.nn.moments(h, [0, 1, 2]), offset, scale, 1e-3)
        return tf.reduce_mean(x, [1, 2]) @ head

    spec = tf.TensorSpec((None, 8, 8, 3))
    optimized = tf_memsaver.optimize_function(function, spec, batch_size=16, strategy=strategy, max_overhead=5.0)
    assert optimized.memsaver_plan.recomputed
    case = [stem, kernel, scale, offset, head], [tf.constant(_normal(16, 8, 8, 3))]
    assert not differing(train(function, *case, free=False), train(optimized, *case, free=False))


@pytest.mark.parametrize("build", [silu, convolutions, module, waiting], ids=lambda build: build.__name__)
def test_copies_have_names_shapes_and_order_of_the_source(build: Callable[[], Case]) -> None:
    # Graph optimisation sorts by names, folds by shapes, and fuses what nothing must run in between.
    function, _, arguments = build()
    concrete = concrete_function(function, [spec_of(t) for t in arguments])
    before = set(_described(concrete.graph))
    calls = FunctionCalls(concrete)
    count = len(calls.sequence.calls)
    forward = SegmentedForward(calls.sequence, [Segment(start=0, stop=count, mode=SegmentMode.STORE)])
    copy = tf.function(lambda x: calls.finish(forward(calls.enter([x]), training=True)), autograph=False)
    inlined = ("PartitionedCall", "Identity")
    missing = before - set(_described(copy.get_concrete_function(spec_of(arguments[0])).graph))
    assert [each for each in missing if not each[1].endswith(inlined)] == []


def _described(graph: Any) -> Iterator[tuple[str, str, str]]:
    """Name, type and shapes of operations, but for constants, arguments and what runs a second time."""
    for each in graph.get_operations():
        if each.type not in ("Const", "Placeholder"):
            yield each.name, each.type, str([t.shape for t in each.outputs])


@pytest.mark.parametrize("build", [chosen_by_device, compiled_inside], ids=lambda build: build.__name__)
def test_calls_that_graph_optimisation_leaves_alone_stay_calls(build: Callable[[], Case]) -> None:
    function, _, arguments = build()
    concrete = concrete_function(function, [spec_of(t) for t in arguments])
    optimized, _ = cut_everywhere(FunctionCalls(concrete), batch_size=64)

    def called(of: Any) -> int:
        operations = of.get_concrete_function(*[spec_of(t) for t in arguments]).graph.get_operations()
        return sum(operation.type in FUNCTION_CALLS for operation in operations)

    assert called(function) == called(optimized) == 4


def test_other_implementations_come_along() -> None:
    @tf.function(experimental_attributes={"api_implements": "layer_2", "api_preferred_device": "GPU"})
    def other(x: tf.Tensor) -> tf.Tensor:
        return tf.tanh(x)

    @tf.function(experimental_attributes={"api_implements": "layer_2", "api_preferred_device": "CPU"})
    def own(x: tf.Tensor) -> tf.Tensor:
        return tf.sinh(x) / tf.cosh(x)

    weight, spec = tf.Variable(_normal(16, 16)), tf.TensorSpec((None, 16))
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
    function, _, arguments = waiting()
    calls = FunctionCalls(concrete_function(function, [spec_of(t) for t in arguments]))
    apart = [call.label for call in calls.sequence.calls if "waits" in call.pinned]
    assert apart == ["add", "add_1", "add_2", "add_3"]
    count = len(calls.sequence.calls)
    forward = SegmentedForward(calls.sequence, [Segment(start=0, stop=count, mode=SegmentMode.STORE)])
    copy = tf.function(lambda x: calls.finish(forward(calls.enter([x]), training=True)), autograph=False)
    operations = copy.get_concrete_function(spec_of(arguments[0])).graph.get_operations()
    waits = {each.name: len(each.control_inputs) for each in operations if each.type == "NoOp"}
    ends = [f"{name}/output_control_node" for name in ("StatefulPartitionedCall", "StatefulPartitionedCall_3")]
    assert [waits[name] for name in ("NoOp", "StatefulPartitionedCall_2/group_deps", *ends)] == [4] * 4
    assert not any(name.endswith("_deps_1") for name in waits)


def test_a_function_with_its_own_gradient_is_one_unit() -> None:
    function, _, arguments = silu()
    calls = FunctionCalls(concrete_function(function, [spec_of(t) for t in arguments]))
    kinds = [[member.operation.type for member in call.members] for call in calls.sequence.calls]
    inside = [group for group in kinds if "IdentityN" in group]
    assert len(inside) == 4 and all({"Sigmoid", "Mul", "IdentityN"} <= set(group) for group in inside)


def test_gradients_keep_what_must_run_before() -> None:
    # The gradient of silu computes the sigmoid anew once the upstream gradient is there, not before.
    function, _, arguments = silu()
    calls = FunctionCalls(concrete_function(function, [spec_of(t) for t in arguments]))
    gradients = [m.gradient for call in calls.sequence.calls for m in call.members if m.gradient is not None]
    assert gradients and all(set(g.upstream) & {s for c in g.calls for s in c.after} for g in gradients)


@pytest.mark.parametrize(
    "build", [recurrent, waiting, chosen_by_device, compiled_inside], ids=lambda build: build.__name__
)
def test_a_function_that_was_trained_already(build: Callable[[], Case]) -> None:
    function, variables, arguments = build()
    spec, size = spec_of(arguments[0]), len(arguments[0])
    untrained = tf_memsaver.optimize_function(function, spec, batch_size=size, strategy="min_peak").memsaver_plan
    plain = train(function, variables, arguments)
    optimized = tf_memsaver.optimize_function(function, spec, batch_size=size, strategy="min_peak")
    assert not differing(plain, train(optimized, variables, arguments))
    # What the backward pass keeps was added to the results of the trained function, and is none of them.
    assert optimized.memsaver_plan.segments == untrained.segments
    assert optimized.memsaver_plan.recomputed


def test_what_lies_behind_a_loop_can_be_cut() -> None:
    function, _, arguments = recurrent()
    calls = FunctionCalls(concrete_function(function, [spec_of(t) for t in arguments]))
    graph = capture_function(calls, batch_size=32)
    loop = next(unit.index for unit in graph.units if "list of tensors" in unit.pinned)
    assert any(cut.position > loop + 1 for cut in graph.cuts)


def test_gradients_reach_what_lies_in_front_of_a_loop() -> None:
    # The gradient of a list of tensors passes no boundary of a unit, so that lists stay within one.
    function, _, arguments = recurrent()
    calls = FunctionCalls(concrete_function(function, [spec_of(t) for t in arguments]))
    graph = capture_function(calls, batch_size=32)
    loop = next(unit.index for unit in graph.units if "list of tensors" in unit.pinned)
    differentiated = {op.unit for op in graph.ops if op.phase is Phase.BACKWARD}
    before = {unit.index for unit in graph.units[:loop] if unit.kind == "Tanh"}
    assert before and before | {loop} <= differentiated


def test_embedding_gradients_stay_sparse() -> None:
    function, variables, arguments = embedding()
    optimized = tf_memsaver.optimize_function(function, spec_of(arguments[0]), batch_size=32, strategy="min_peak")
    kinds = {entry[0] for entry in train(optimized, variables, arguments, steps=1) if isinstance(entry, tuple)}
    assert kinds == {"IndexedSlices", "EagerTensor"}


def test_an_eager_tape() -> None:
    function, variables, arguments = dense("tanh")
    optimized = tf_memsaver.optimize_function(function, spec_of(arguments[0]), batch_size=64, strategy="min_peak")
    found = []
    for each in (function, optimized):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(each(*arguments)))
        found.append([g.numpy() for g in tape.gradient(loss, variables)])
    assert not differing(*found)


def test_memory_is_saved_and_about_what_the_plan_says() -> None:
    width, depth, batch = 64, 16, 8192
    x = inputs = keras.Input((width,))
    for _ in range(depth):
        x = layers.Dense(width, activation="gelu")(x)
    function, variables, arguments = _keras(keras.Model(inputs, layers.Dense(1)(x)), _normal(batch, width))
    optimized = tf_memsaver.optimize_function(function, spec_of(arguments[0]), batch_size=batch, strategy="min_peak")
    plan = optimized.memsaver_plan
    peaks = []
    for each in (function, optimized):

        @tf.function(input_signature=[spec_of(arguments[0])], autograph=False)
        def step(x: tf.Tensor, each: Any = each) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(each(x)))
            return tape.gradient(loss, variables)

        step(*arguments)
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        tf.config.experimental.reset_memory_stats("CPU:0")
        step(*arguments)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)
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
    kernels = [tf.Variable(_normal(8, 8) / 3) for _ in range(4)]

    def function(ragged: tf.RaggedTensor, sparse: tf.SparseTensor) -> Any:
        flat = ragged.flat_values
        for kernel in kernels:
            flat = tf.tanh(flat @ kernel)
        rows = tf.reduce_sum(ragged.with_flat_values(flat), axis=1)
        rows = tf.tanh(rows + tf.sparse.sparse_dense_matmul(sparse, kernels[0]))
        return {"ragged": ragged.with_flat_values(flat), "rows": rows, "sparse": sparse, "none": None}

    ragged = tf.RaggedTensor.from_row_lengths(tf.constant(_normal(12, 8)), [3, 0, 4, 5])
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
        (lambda x: x @ _WEIGHT, [tf.TensorSpec((2, None, 4))], UnknownDimensionError, "unknown dimension"),
        (lambda x: x @ _WEIGHT, [], InvalidRequestError, "specs"),
        (lambda x: x @ _WEIGHT, [tf.TensorSpec((2, 3))], InvalidRequestError, "cannot be traced"),
        ("function", [], InvalidRequestError, "expected a function"),
    ],
)
def test_functions_that_are_refused(function: Any, specs: list[Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        tf_memsaver.optimize_function(function, *specs)
