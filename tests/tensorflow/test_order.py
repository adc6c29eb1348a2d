"""The ordered step: kernels follow each other, replays and the passes of several tapes take turns; no bit changes."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tests.tensorflow.graphs import model_graph
from tests.tensorflow.plans import optimized_between_cuts
from tf_memsaver.capture.model_step import capture_graph
from tf_memsaver.cost.rules import Kernels
from tf_memsaver.parity import control
from tf_memsaver.parity.control import is_backward
from tf_memsaver.parity.gates import is_gate
from tf_memsaver.runtime import groups
from tf_memsaver.runtime.order import _ordered, _touched
from tools.conformance.small_models import autoencoder
from tools.shared.processes import run_code
from tools.shared.records import array_of
from tools.shared.step_graphs import graphs_run
from tools.shared.training import assert_fit_alike

X = tf.constant(np.random.default_rng(0).standard_normal((8, 16)).astype("float32"))


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs side by side, however much room there is."""
    monkeypatch.setattr(groups, "NEAR_PEAK", 0.0)


def network() -> Any:
    inputs = keras.Input((16,))
    x = inputs
    for _ in range(6):
        x = layers.Dense(16, "tanh")(x)
    return optimized_between_cuts(keras.Model(inputs, layers.Dense(2)(x)), length=3)


def ancestors(operation: Any) -> set[str]:
    """Return the names of what an operation comes after."""
    found: set[str] = set()
    pending = [operation]
    while pending:
        each = pending.pop()
        if each.name not in found:
            found.add(each.name)
            pending += [*each.control_inputs, *(tensor.op for tensor in each.inputs)]
    return found


def graph_of(step: Any) -> Any:
    return tf.function(step, autograph=False).get_concrete_function().graph


def test_replays_of_two_calls_follow_each_other() -> None:
    model = network()

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(X, training=True)) * tf.reduce_sum(model(2 * X, training=True) ** 2)
        return [tf.convert_to_tensor(each) for each in tape.gradient(loss, model.trainable_variables)]

    graph = graph_of(step)
    gates = [each for each in graph.get_operations() if each.name in _ordered[graph].gates]
    assert len(gates) >= 4
    for before, after in itertools.pairwise(gates):
        assert before.name in ancestors(after)


@pytest.mark.parametrize("scales", [False, True])
def test_nobody_waits_for_what_hands_on_a_product(scales: bool) -> None:
    # The gradient of a BatchNorm's scale is one, which is joined with the optimizer's own product.
    inputs = keras.Input((16,))
    norm = layers.BatchNormalization() if scales else layers.Dense(16)
    x = layers.Dense(16, "tanh")(norm(layers.Dense(16, "tanh")(inputs)))
    model = optimized_between_cuts(keras.Model(inputs, layers.Dense(2)(x)), length=1)

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(X, training=True)) * tf.reduce_sum(model(2 * X, training=True) ** 2)
        return [tf.convert_to_tensor(each) for each in tape.gradient(loss, model.trainable_variables)]

    waited = {each for op in graph_of(step).get_operations() if is_gate(op) for each in op.control_inputs}
    products = [each for each in waited if each.type == "IdentityN" and "Mul" in {t.op.type for t in each.inputs}]
    assert not products and any(each.type == "IdentityN" for each in waited)


@pytest.mark.filterwarnings("ignore:.*this layer does not support masking")
def test_a_second_pass_in_one_graph_has_the_masks_of_the_first() -> None:
    """What it reads waits for the replays of the first pass, and is another tensor."""
    tokens, inputs = keras.Input((12,), dtype="int32"), keras.Input((12, 16))
    embedded = keras.Model(tokens, layers.Embedding(9, 16, mask_zero=True)(tokens))
    x = layers.GRU(16)(layers.Dense(16, "tanh")(layers.Dense(16, "tanh")(inputs)))
    plain = keras.Model(inputs, layers.Dense(2)(x))
    given = np.random.default_rng(0).integers(1, 9, (2, 8, 12)) * (np.arange(12) < 7)

    def step(model: Any) -> Any:
        losses, found = [], []
        for each in given:
            with tf.GradientTape() as tape:
                losses.append(tf.reduce_sum(model(embedded(each), training=True) ** 2))
            found.append(tape.gradient(losses[-1], model.trainable_variables))
        return losses, [a + b for a, b in zip(*found, strict=True)]

    results = [
        tf.nest.map_structure(lambda each: each.numpy().tobytes(), tf.function(step, autograph=False)(model))
        for model in (plain, optimized_between_cuts(plain, length=2))
    ]
    assert results[0] == results[1]


def test_devices_do_not_wait_for_each_other() -> None:
    model = network()

    def step() -> Any:
        found = []
        for device in ("CPU:0", "CPU:1"):
            with tf.device(device):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(model(X + 1.0, training=True) ** 2)
                found.append(tape.gradient(loss, model.trainable_variables))
        return [a + b for a, b in zip(*found, strict=True)]

    gates = [each for each in graph_of(step).get_operations() if is_gate(each)]
    first, second = ([each for each in gates if each.device.endswith(f"CPU:{number}")] for number in range(2))
    assert first and second
    assert not any(before.name in ancestors(after) for before in first for after in second)


def test_the_next_forward_pass_waits_for_the_backward_pass_of_another_tape() -> None:
    model = network()

    def step() -> Any:
        found = []
        for factor in (1.0, 2.0):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(factor * X, training=True) ** 2)
            found.append(tape.gradient(loss, model.trainable_variables))
        return [a + b for a, b in zip(*found, strict=True)]

    operations = graph_of(step).get_operations()
    products = [each for each in operations if each.type == "MatMul" and "gradient" not in each.name]
    first_gate = next(each for each in operations if is_gate(each))
    place = operations.index(first_gate)
    forward = [each for each in products if operations.index(each) < place]
    assert forward and not any(first_gate.name in ancestors(each) for each in forward)
    assert all(first_gate.name in ancestors(each) for each in products if operations.index(each) > place)


def plain_convolutions() -> Any:
    """Convolutions over tensors of some MiB, with biases, between a branch and its sum."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((64, 64, 3))
    x = branch = layers.Conv2D(16, 3, padding="same", activation="relu")(inputs)
    for _ in range(4):
        x = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    x = layers.GlobalAveragePooling2D()(layers.Concatenate()([x, branch]))
    model = keras.Model(inputs, layers.Dense(2)(x))
    model.compile("adam", "mse", jit_compile=False)
    return model


def convolutions(**options: Any) -> Any:
    return tf_memsaver.optimize(plain_convolutions(), **{"batch_size": 8, "strategy": "min_peak", **options})


def operations_of(model: Any, compiled: bool | None = None) -> Any:
    """The operations of a step with a free batch dimension, by type."""

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        return [tf.convert_to_tensor(each) for each in tape.gradient(loss, model.trainable_variables)]

    function = tf.function(step, autograph=False, jit_compile=compiled)
    found: dict[str, list[Any]] = {}
    for each in function.get_concrete_function(tf.TensorSpec((None, 64, 64, 3))).graph.get_operations():
        found.setdefault(each.type, []).append(each)
    return found


@pytest.mark.usefixtures("one_by_one")
def test_no_control_input_parts_the_two_gradients_that_one_kernel_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "has_onednn_for", lambda dtype: True)
    operations = operations_of(convolutions())
    pairs = [
        (kernel, bias)
        for kernel in operations["Conv2DBackpropFilter"]
        for bias in operations["BiasAddGrad"]
        if bias.inputs[0] is kernel.inputs[2]
    ]
    assert len(pairs) == 5
    assert not any(each.control_inputs for pair in pairs for each in pair)
    # The gradient of the images is wanted by nobody, and nothing keeps graph optimisation from taking it out.
    *later, of_images = operations["Conv2DBackpropInput"]
    assert len(later) == 4 and all({*pair_of(each, pairs)} <= {*each.control_inputs} for each in later)
    assert not of_images.control_inputs
    assert not any(of_images in each.control_inputs for found in operations.values() for each in found)


@pytest.mark.usefixtures("one_by_one")
def test_gradients_of_kernels_take_turns_where_two_kernels_make_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each unfolds images into as much as 30 MiB, which two at a time would take twice.
    monkeypatch.setattr(control, "has_onednn_for", lambda dtype: False)
    found = [each for each in operations_of(convolutions())["Conv2DBackpropFilter"] if each.control_inputs]
    assert len(found) >= 4


def test_an_operation_is_as_large_as_what_it_works_with() -> None:
    sizes = [(3, 3, 8, 8), (None, 8, 8, 8)]  # 16 KiB in batches of 8, and an unfolded image of 18 KiB, by the hundred.
    signature = [tf.TensorSpec(size) for size in sizes]

    @tf.function(input_signature=signature)
    def step(kernel: Any, gradient: Any) -> Any:
        shape = tf.shape(gradient)
        return tf.raw_ops.Conv2DBackpropInput(
            input_sizes=shape, filter=kernel, out_backprop=gradient, strides=[1] * 4, padding="SAME"
        )

    operations = step.get_concrete_function().graph.get_operations()
    (operation,) = (each for each in operations if each.type == "Conv2DBackpropInput")
    operation.outputs[0].set_shape((None, 8, 8, 8))
    assert _touched(operation, 8, Kernels()) < 1 << 18
    assert _touched(operation, 8, Kernels(by_eigen=frozenset({"float32"}))) > 1 << 24


def pair_of(gradient: Any, pairs: Any) -> Any:
    return next(pair for pair in pairs if pair[0].inputs[2] is gradient.inputs[2])


def backward_ones(operations: Any, *types: str) -> list[Any]:
    return [each for name in types for each in operations[name] if "gradient_tape" in each.name]


@pytest.mark.usefixtures("one_by_one")
def test_large_kernels_come_one_after_another() -> None:
    operations = operations_of(convolutions())
    held = backward_ones(operations, "ReluGrad", "Conv2DBackpropInput", "Slice")
    before = [(each, ancestors(each)) for each in held if each.control_inputs]
    assert len(before) >= 9
    for one, comes_after in before:
        assert all(one is other or other.name in comes_after or one.name in those for other, those in before)


def test_a_scaled_softmax_is_not_copied_before_its_gradient_is_there() -> None:
    # Graph optimisation multiplies the softmax by the scale of its scores, and the gradient by that.
    keras.utils.set_random_seed(0)
    inputs = keras.Input((96, 48))
    x = layers.Dense(48)(inputs)
    for _ in range(3):
        x = layers.Add()([x, layers.MultiHeadAttention(4, 12)(x, x)])
    plain = keras.Model(inputs, layers.Dense(2)(x))
    plain.compile("sgd", "mse", jit_compile=False)
    model = optimized_between_cuts(plain, batch_size=16)
    graph = model_graph(model)
    held = [each for each in graph.get_operations() if "held_back" in each.name]
    assert len(held) == 3 and all(each.inputs[0].op.type == "Softmax" for each in held)
    assert all(is_backward(before) for each in held for before in each.control_inputs)
    rng = np.random.default_rng(0)
    images, targets = rng.normal(size=(40, 96, 48)).astype("float32"), rng.normal(size=(40, 96, 2)).astype("float32")
    assert_fit_alike(plain, model, images, targets, batch_size=16)


@pytest.mark.parametrize(
    ("name", "dropout", "copies"), [("functional", 0.0, 3), ("vit", 0.0, 0), ("functional", 0.1, 0)]
)
def test_the_plain_step_is_told_with_its_copies_of_softmaxes(name: str, dropout: float, copies: int) -> None:
    # The scale goes to the softmax if that sorts before its gradient, which is in gradient_tape/. The gradient of a
    # dropout is scaled, too, but has two readers.
    x = inputs = keras.Input((96, 48))
    for _ in range(3):
        x = layers.Add()([x, layers.MultiHeadAttention(4, 12, dropout=dropout)(x, x)])
    model = keras.Model(inputs, layers.Dense(2)(x), name=name)
    model.compile("sgd", "mse", jit_compile=False)
    graph = capture_graph(model, batch_size=16)
    scaled = [graph.values[value].name for op in graph.ops for value in op.scaled]
    assert len(scaled) == copies and all("Softmax" in each for each in scaled)
    ran = graphs_run(lambda: model.fit(np.zeros((16, 96, 48)), np.zeros((16, 96, 2)), batch_size=16, verbose=0))
    nodes = [node for each in ran for node in each.post_optimization_graph.node if node.op == "Mul"]
    early = [node for node in nodes if "gradient_tape" in node.name and any("Softmax" in each for each in node.input)]
    assert sum(not any("gradient_tape" in each for each in node.input) for node in early) == copies


@pytest.mark.usefixtures("one_by_one")
def test_products_of_attention_come_one_after_another() -> None:
    # Side by side, the gradients of queries, keys and values took 82 MiB in a small language model, and 68 in turn.
    inputs = keras.Input((64, 64, 3))
    x = layers.Reshape((64, 192))(inputs)
    for _ in range(3):
        x = layers.Add()([x, layers.MultiHeadAttention(4, 64)(x, x)])
    model = keras.Model(inputs, layers.Dense(2)(x))
    model.compile("adam", "mse", jit_compile=False)
    model = tf_memsaver.optimize(model, batch_size=8, strategy="min_peak", granularity="layer")
    held = backward_ones(operations_of(model), "Einsum")
    assert len(held) == 12 and all(each.control_inputs for each in held)
    for one, other in itertools.combinations(held, 2):
        assert one.name in ancestors(other) or other.name in ancestors(one)


@pytest.mark.parametrize(("options", "compiled"), [({"order": False}, None), ({"strategy": "plain"}, None), ({}, True)])
def test_nothing_waits_where_no_order_is_asked_for_or_nothing_is_replayed_or_xla_decides(
    options: dict[str, Any], compiled: bool | None
) -> None:
    operations = operations_of(convolutions(**options), compiled)
    held = [each for name in ("ReluGrad", "Conv2DBackpropInput") for each in operations[name]]
    assert held and not any(each.control_inputs for each in held if "gradient_tape" in each.name)


def test_the_backward_pass_of_a_function_is_in_order() -> None:
    """Also in a process that has optimized no model."""
    done = run_code("from tests.tensorflow import test_order\ntest_order.assert_a_function_is_in_order()")
    assert done.returncode == 0, done.stderr[-3000:]


def assert_a_function_is_in_order() -> None:
    groups.NEAR_PEAK = 0.0
    plain = plain_convolutions()
    function = tf_memsaver.optimize_function(
        lambda x: plain(x, training=True), tf.TensorSpec((None, 64, 64, 3)), batch_size=8, strategy="min_peak"
    )

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(function(x) ** 2)
        return tape.gradient(loss, plain.trainable_variables)

    graph = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec((None, 64, 64, 3))).graph
    called = [graph._get_function(each.get_attr("f").name) for each in graph.get_operations() if "Call" in each.type]
    held = [n for f in called for n in f.cached_definition.node_def if n.op in ("ReluGrad", "Conv2DBackpropInput")]
    assert sum(any(name.startswith("^") for name in node.input) for node in held) >= 8


def test_kernels_run_side_by_side_where_there_is_room() -> None:
    """What they may take is in ``test_groups.py``."""
    operations = operations_of(convolutions())
    held = backward_ones(operations, "ReluGrad", "Conv2DBackpropInput", "Conv2DBackpropFilter")
    before = [(each, ancestors(each)) for each in held]
    pairs = list(itertools.combinations(before, 2))
    free = [(a, b) for (a, of_a), (b, of_b) in pairs if a.name not in of_b and b.name not in of_a]
    assert 0 < len(free) < len(pairs) / 2


def test_results_in_fit_are_those_of_the_plain_model() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((24, 64, 64, 3)).astype("f"), generator.standard_normal((24, 2)).astype("f")
    found = []
    for prepared in (tf_memsaver.strip, lambda model: model):
        model = prepared(convolutions())
        model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
        found.append([np.asarray(each).tobytes() for each in (*model.variables, *model.optimizer.variables)])
    assert found[0] == found[1]


def test_a_gradient_that_is_passed_on_as_it_is_is_no_kernel() -> None:
    """The gradient of a sum of equal shapes reads as a reduction, which graph optimisation takes out."""

    def step(x: Any, y: Any, bias: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, y, bias])
            loss = tf.reduce_sum((x - y + bias) ** 2)
        return tape.gradient(loss, [x, y, bias])

    free = tf.TensorSpec((None, 16))
    traced = tf.function(step).get_concrete_function(free, free, tf.TensorSpec((16,)))
    held = {each.operation for each in control.held_in_order(traced.graph.get_operations(), ())}
    sums = [each for each in traced.graph.get_operations() if each.type == "Sum" and "gradient_tape" in each.name]
    shapes = [reader.outputs[0].shape.as_list() for each in sums for reader in each.outputs[0].consumers()]
    assert sorted(shapes, key=len) == [[16], [None, 16], [None, 16]]
    assert [each for each in sums if each in held] == [sums[shapes.index([16])]]


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_sum_of_three_terms_begins_where_that_of_the_plain_step_does(policy: str) -> None:
    """One of the terms is such a gradient: an identity that waits kept its buffer from being taken over."""
    keras.mixed_precision.set_global_policy(policy)
    try:
        model = autoencoder()
        model.compile("sgd", "mse", jit_compile=False)
        plan = tf_memsaver.search_plan(model, batch_size=1024, strategy="min_peak")
        assert any(segment.mode.value == "recompute" for segment in plan.segments)
        start = [np.asarray(each) for each in model.variables]
        x = np.random.default_rng(0).standard_normal((1024, 32)).astype("float32")

        def gradients(model: Any) -> list[bytes]:
            for variable, value in zip(model.variables, start, strict=True):
                variable.assign(value)

            @tf.function(input_signature=[tf.TensorSpec((None, 32))])
            def step(x: Any) -> Any:
                with tf.GradientTape() as tape:
                    loss = model.compute_loss(x=x, y=x, y_pred=model(x, training=True), training=True)
                return tape.gradient(loss, [each.value for each in model.trainable_variables])

            return [tf.convert_to_tensor(each).numpy().tobytes() for each in step(x)]

        assert gradients(model) == gradients(tf_memsaver.apply_plan(model, plan))
    finally:
        keras.mixed_precision.set_global_policy("float32")


def residual_with_penalties() -> Any:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(8, 3, padding="same")(inputs)
    for _ in range(4):
        y = layers.BatchNormalization()(x)
        y = layers.Conv2D(8, 3, padding="same", use_bias=False, kernel_regularizer="l2")(layers.ReLU()(y))
        x = layers.Add()([x, y])
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling2D()(x)))


def of_one_loss(model: Any, first: Any, second: Any) -> Any:
    """A gradient of three terms: those that leave a replay early had another's name, by which terms are sorted."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(first, training=True) ** 2) + tf.reduce_mean(model(second, training=True))
        loss += tf.add_n(model.losses)
    return tape.gradient(loss, [each.value for each in model.trainable_variables])


def of_two_losses(model: Any, first: Any, second: Any) -> Any:
    """Each has a term of its own, which may be a product: graph optimisation multiplies one of its factors by 0.3."""
    with tf.GradientTape(persistent=True) as tape:
        losses = [tf.reduce_mean(model(each, training=True) ** 2) for each in (first, second)]
    variables = [each.value for each in model.trainable_variables]
    return [a + 0.3 * b for a, b in zip(*(tape.gradient(loss, variables) for loss in losses), strict=True)]


@pytest.mark.parametrize("gradients", [of_one_loss, of_two_losses])
def test_weights_of_a_network_that_is_called_twice_have_the_gradients_of_the_plain_step(gradients: Any) -> None:
    plain = residual_with_penalties()
    start = [np.asarray(each) for each in plain.variables]
    images = [np.random.default_rng(seed).standard_normal((8, 16, 16, 3)).astype("float32") for seed in range(2)]

    def found(model: Any) -> list[bytes]:
        for variable, value in zip(model.variables, start, strict=True):
            variable.assign(value)
        signature = [tf.TensorSpec((None, 16, 16, 3))] * 2
        step = tf.function(lambda *given: gradients(model, *given), input_signature=signature, autograph=False)
        return [tf.convert_to_tensor(each).numpy().tobytes() for each in step(*images)]

    assert found(plain) == found(optimized_between_cuts(plain, length=4))


class Distiller(keras.Model):
    """Its loss has a frozen network read the data, too."""

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher
        teacher.trainable = False

    def call(self, x: Any) -> Any:
        return self.student(x)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        return keras.ops.mean((y - y_pred) ** 2) + keras.ops.mean((self.teacher(x, training=False) - y_pred) ** 2)


def test_a_teacher_begins_when_the_student_is_over() -> None:
    """With 32 images of 64×64, the step of a student took 115 MiB for 84 predicted; in turn 87."""

    def network(filters: int) -> Any:
        inputs = x = keras.Input((64, 64, 3))
        for _ in range(3):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(layers.MaxPooling2D(8)(x))))

    def trained(**options: Any) -> tuple[list[Any], Any]:
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        model = Distiller(network(16), network(24))
        model.compile("adam", jit_compile=False)
        x, y = np.random.default_rng(0).random((16, 64, 64, 3), np.float32), np.ones((16, 2), np.float32)
        if options:
            model = tf_memsaver.optimize(model, data=(x, y), batch_size=8, **options)
            assert model.memsaver_plan.recomputed_units
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        step = tf.function(lambda x, y: model.train_step((x, y)))
        specs = [tf.TensorSpec((None, *each.shape[1:])) for each in (x, y)]
        return [array_of(each) for each in model.variables], step.get_concrete_function(*specs).graph

    plain, _ = trained()
    for order in (True, False):
        ours, graph = trained(strategy="min_peak", order=order)
        assert all(np.array_equal(*both) for both in zip(plain, ours, strict=True))
        forward = [each for each in graph.get_operations() if not is_backward(each)]
        pool = next(each for each in forward if each.type == "MaxPool" and "unrecorded" in each.name)
        taught = [each for each in forward if each.type == "Conv2D" and each.outputs[0].shape[-1] == 24]
        assert len(taught) == 3 and all((pool.name in ancestors(each)) == order for each in taught)
        # A convolution that waits would not be fused with its bias.
        assert not any(each.control_inputs for each in taught)


def two_branches() -> tuple[Any, Any]:
    """Two networks of convolutions without norms, each of which is called on what the other makes."""
    keras.utils.set_random_seed(0)

    def one() -> Any:
        inputs = x = keras.Input((64, 64, 3))
        for _ in range(4):
            x = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
        return keras.Model(inputs, layers.Conv2D(3, 3, padding="same")(x))

    return optimized_between_cuts(one(), length=2), optimized_between_cuts(one(), length=2)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_backward_pass_begins_when_the_forward_passes_of_all_branches_are_over(
    passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "has_onednn_for", lambda dtype: True)
    first, second = two_branches()

    def step(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            cycled = [
                tf.reduce_mean(tf.abs(x - second(first(x, training=True), training=True))),
                tf.reduce_mean(tf.abs(x - first(second(x, training=True), training=True))),
            ]
            losses = cycled if passes == 2 else [cycled[0] + cycled[1]]
        weights = [*first.trainable_variables, *second.trainable_variables]
        return [cycled, *([tf.convert_to_tensor(g) for g in tape.gradient(loss, weights)] for loss in losses)]

    function = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec((None, 64, 64, 3)))
    operations = function.graph.get_operations()
    forward = [each for each in operations if each.type == "Conv2D" and "gradient" not in each.name][:20]
    gates = [each for each in operations if is_gate(each)]
    assert gates and operations.index(forward[-1]) < operations.index(gates[0])
    over = ancestors(gates[0])
    assert [each.name for each in forward if each.name not in over] == []
    # What one kernel of oneDNN's makes of two operations waits for nothing.
    merged = [each for each in operations if each.type in ("Conv2DBackpropFilter", "BiasAddGrad")]
    assert merged and not any(each.control_inputs for each in merged)
