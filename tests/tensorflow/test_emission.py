"""Copies of single operations: what they compute, under which names, and what a tape makes of them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tests.tensorflow.copies import Function, copy_of, traced, with_gradients
from tf_memsaver.tfgraph.emission import Template, ends_segment, registered_segment
from tools.shared.records import array_of

A = np.linspace(-0.9, 0.8, 12, dtype=np.float32).reshape(3, 4)
B = np.linspace(0.5, 1.5, 12, dtype=np.float32).reshape(3, 4)
SQUARE = np.linspace(-0.5, 0.7, 16, dtype=np.float32).reshape(4, 4)
IMAGES = np.linspace(-1.0, 1.0, 2 * 5 * 5 * 3, dtype=np.float32).reshape(2, 5, 5, 3)
KERNEL = np.linspace(-0.3, 0.4, 3 * 3 * 3 * 2, dtype=np.float32).reshape(3, 3, 3, 2)


def described(graph: Any) -> list[tuple[str, str, str]]:
    """Name, type and shapes of operations, in order, but for those of arguments and results."""
    operations = [op for op in graph.get_operations() if op.type != "Placeholder"]
    return [(op.name, op.type, str([(t.shape, t.dtype) for t in op.outputs])) for op in operations]


def bits(results: Any) -> list[Any]:
    """All numbers of a structure of tensors, to compare exactly."""
    arrays = [np.asarray(tensor) for tensor in tf.nest.flatten(results, expand_composites=True)]
    return [a.tolist() if a.dtype == object else (a.dtype, a.shape, a.tobytes()) for a in arrays]


def loop(x: Any) -> Any:
    return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, tf.tanh(y) * x), (0, x), maximum_iterations=3)[1]


def branch(x: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.exp(x), lambda: tf.sin(x) * x)


CASES: list[tuple[Function, Sequence[Any]]] = [
    (lambda x, w: tf.nn.relu(tf.nn.bias_add(x @ w, w[0])), (A, SQUARE)),
    (lambda x, k: tf.nn.conv2d(x, k, 1, "SAME"), (IMAGES, KERNEL)),
    (lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID"), (IMAGES,)),
    (lambda x: tf.split(x, 2, axis=1), (A,)),
    (lambda x: tf.unstack(tf.exp(x), axis=1)[2], (A,)),
    (lambda x: tf.nn.moments(x, [0]), (A,)),
    (lambda x, y: tf.einsum("ij,kj->ik", x, y), (A, B)),
    (lambda x, y: tf.concat([x, tf.math.divide_no_nan(x, y)], 0), (A, B)),
    (lambda x, y: tf.nn.softmax_cross_entropy_with_logits(y, x), (A, B)),
    (lambda x: tf.math.top_k(x, 2), (A,)),
    (lambda x: tf.gather(x, tf.constant([2, 0, 2])), (A,)),
    (lambda x: tf.cast(tf.cast(x, tf.float16), tf.float32), (A,)),
    (lambda x: tf.argmax(x, axis=1), (A,)),
    (lambda x: tf.strings.as_string(x), (A,)),
    (lambda x: tf.stop_gradient(tf.exp(x)) * x, (A,)),
    (loop, (A,)),
    (branch, (A,)),
]


# The copy itself ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("free", [False, True], ids=["fixed", "free"])
@pytest.mark.parametrize(("function", "tensors"), CASES)
def test_values_and_gradients_are_those_of_the_source(function: Function, tensors: Sequence[Any], free: bool) -> None:
    copy = copy_of(traced(function, *tensors, free=free))
    given = [tf.constant(tensor) for tensor in tensors]
    plain, ours = (bits(traced(with_gradients(f), *tensors, free=free)(*given)) for f in (function, copy))
    assert plain and ours == plain


@pytest.mark.parametrize("free", [False, True], ids=["fixed", "free"])
@pytest.mark.parametrize(("function", "tensors"), CASES)
def test_operations_are_those_of_the_source(function: Function, tensors: Sequence[Any], free: bool) -> None:
    source = traced(function, *tensors, free=free)
    copy = traced(copy_of(source), *tensors, free=free)
    before, after = described(source.graph), described(copy.graph)
    # A function ends with an identity of each result; the copy has those of the source as well.
    assert after[: len(before)] == before and {kind for _, kind, _ in after[len(before) :]} <= {"Identity"}


def test_a_shape_that_was_told_stays_known() -> None:
    def function(x: Any, size: Any) -> Any:
        y = tf.reshape(x, size)
        y.set_shape([None, 2])
        return y

    copy = traced(copy_of(traced(function, A, np.array([6, 2]))), A, np.array([6, 2]))
    assert copy.outputs[0].shape.as_list() == [None, 2]


def test_a_template_does_not_keep_its_graph() -> None:
    concrete = traced(lambda x: tf.nn.relu(x), A)
    graph = weakref.ref(concrete.graph)
    copy = copy_of(concrete)
    del concrete
    gc.collect()
    assert graph() is None
    assert np.array_equal(traced(copy, A)(tf.constant(A))[0], np.maximum(A, 0.0))


# Loops, branches and calls --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("of", "attribute"), [(loop, "body"), (branch, "then_branch")])
def test_every_copy_has_functions_of_its_own(of: Function, attribute: str) -> None:
    """The gradient of a loop or a branch rewrites its functions."""
    source = traced(of, A)
    copy = copy_of(source)
    twice = traced(lambda x: [copy(x)[0], copy(x)[0]], A)
    operations = [*source.graph.get_operations(), *twice.graph.get_operations()]
    names = [op.get_attr(attribute).name for op in operations if attribute in op.node_def.attr]
    assert len(names) == 3 and len(set(names)) == 3


def test_a_loop_whose_gradient_was_taken_after_it_was_listed() -> None:
    source = traced(loop, A)
    copy = copy_of(source)
    plain = bits(traced(with_gradients(loop), A)(tf.constant(A)))
    for _ in range(2):
        assert bits(traced(with_gradients(copy), A)(tf.constant(A))) == plain


def test_a_called_function_comes_along() -> None:
    inner = tf.function(lambda x: tf.tanh(x) * 2.0, autograph=False)
    source = traced(lambda x: inner(x) + inner(2.0 * x), A)
    calls = [op for op in source.graph.get_operations() if "PartitionedCall" in op.type]
    assert len(calls) == 2
    copy = traced(copy_of(source), A)
    assert np.array_equal(copy(tf.constant(A))[0], source(tf.constant(A)))


# Gradients ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [lambda x, w: x @ w, lambda x, w: tf.exp(x) * tf.reduce_sum(w)])
def test_backward_operations_are_in_the_scope_that_is_given(function: Function) -> None:
    source = traced(function, A, SQUARE)
    copy = copy_of(source, backward_scope=lambda name: f"backward/of/{name}.")
    added = {op.name for op in traced(with_gradients(copy), A, SQUARE).graph.get_operations()}
    scopes = {name.removeprefix("backward/of/").partition(".")[0] for name in added if name.startswith("backward/of/")}
    kinds = ("MatMul", "Exp", "Mul", "Sum")
    assert scopes == {name for name, kind, _ in described(source.graph) if kind in kinds}


def test_a_tape_is_told_what_nobody_wants() -> None:
    def unwanted(of_tape: bool) -> int:
        copy = copy_of(traced(lambda x, w: x @ w, A, SQUARE), of_tape=of_tape)

        def step(x: Any, w: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(w)
                y = copy(x, w)[0]
            return tape.gradient(y, w)

        return [op.type for op in traced(step, A, SQUARE).graph.get_operations()].count("MatMul")

    # Forward and for the weight; without a word to the gradient function, also for the input.
    assert (unwanted(of_tape=True), unwanted(of_tape=False)) == (2, 3)


def test_a_gradient_function_can_be_given() -> None:
    given = []

    def gradient(operation: Any, upstream: Any) -> Any:
        given.append(operation.type)
        return 7.0 * upstream

    template = Template(next(op for op in traced(tf.tanh, A).graph.get_operations() if op.type == "Tanh"))
    copy = traced(with_gradients(lambda x: template.emit([x], "copy", gradient)[0]), A)
    results, (gradients,) = copy(tf.constant(A))
    assert given == ["Tanh"] and np.array_equal(gradients, 7.0 * (2.0 * results[0]))


def test_a_custom_gradient_of_the_source_is_kept() -> None:
    @tf.custom_gradient
    def clipped(x: Any) -> Any:
        return tf.sqrt(x), lambda upstream: 5.0 * upstream

    source = traced(clipped, B)
    for function in (clipped, copy_of(source)):
        results, (gradient,) = traced(with_gradients(function), B)(tf.constant(B))
        assert np.allclose(gradient, 5.0 * (2.0 * np.sqrt(B))) and np.array_equal(results[0], np.sqrt(B))


def test_a_copy_on_no_tape_has_no_gradient() -> None:
    template = Template(next(op for op in traced(tf.tanh, A).graph.get_operations() if op.type == "Tanh"))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = template.copy(tf.compat.v1.get_default_graph(), [x], "again").outputs[0]
        assert tape.gradient(y, x) is None
        return y

    assert np.array_equal(traced(step, A)(tf.constant(A)), tf.tanh(A))


def test_an_operation_without_gradient_fails_only_if_one_is_asked_for() -> None:
    copy = copy_of(traced(lambda w: tf.raw_ops.Bincount(arr=[0, 1, 1], size=2, weights=w), A[0, :3]))
    assert np.array_equal(traced(lambda w: copy(w)[0], A[0, :3])(tf.constant(A[0, :3])), [A[0, 0], A[0, 1] + A[0, 2]])
    with pytest.raises(LookupError, match="'Bincount' of type Bincount has no gradient"):
        traced(with_gradients(copy), A[0, :3])


# Segments -------------------------------------------------------------------------------------------------------------


def test_what_ends_a_segment_is_known_by_its_gradient() -> None:
    def step(x: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        with graph.gradient_override_map({"IdentityN": registered_segment(lambda _, upstream: [upstream])}):
            y = tf.identity_n([x])[0]
        assert ends_segment(y.op) and not ends_segment(tf.identity_n([y])[0].op)
        return y

    traced(step, A)


class ConnectionistLoss(layers.Layer):
    """Adds the loss of Keras's example of reading text, whose loops are functions as TensorFlow 1 made them."""

    def call(self, labels: Any, found: Any) -> Any:
        many, steps, length = tf.shape(labels)[0], tf.shape(found)[1], tf.shape(labels)[1]
        lengths = tf.fill((many,), length), tf.fill((many,), steps)
        logits = tf.math.log(tf.transpose(found, (1, 0, 2)) + 1e-7)
        self.add_loss(tf.reduce_mean(tf.nn.ctc_loss(tf.cast(labels, tf.int32), logits, *lengths, blank_index=-1)))
        return found


@pytest.mark.parametrize("granularity", ["auto", "layer", "op"])
def test_loops_that_have_no_graph_in_python_run_as_they_are(granularity: str) -> None:
    random = np.random.default_rng(0)
    image, labels = random.random((8, 32, 16, 1), np.float32), random.integers(0, 9, (8, 3)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices({"image": image, "labels": labels}).batch(4)

    def trained(**options: Any) -> list[Any]:
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        image, labels = keras.Input((32, 16, 1), name="image"), keras.Input((None,), name="labels")
        x = layers.MaxPooling2D((2, 4))(layers.Conv2D(16, 3, padding="same", activation="relu")(image))
        x = layers.Bidirectional(layers.LSTM(8, return_sequences=True))(layers.Reshape((16, 64))(x))
        x = ConnectionistLoss()(labels, layers.Dense(11, "softmax")(x))
        model = keras.Model([image, labels], x)
        model.compile("adam", jit_compile=False)
        if options:
            model = tf_memsaver.optimize(model, data=data, **options)
            assert model.memsaver_plan.recomputed_units
        history = model.fit(data, epochs=2, shuffle=False, verbose=0).history
        return [*history["loss"], *(array_of(variable) for variable in model.variables)]

    plain, ours = trained(), trained(strategy="min_peak", granularity=granularity)
    assert all(np.array_equal(*both) for both in zip(plain, ours, strict=True))
