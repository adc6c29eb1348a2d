"""What a loop keeps for its gradient: lists whose elements take memory, and lists that share that of others."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tf_memsaver.ir.graph import Phase
from tf_memsaver.ir.segments import SegmentMode
from tf_memsaver.tfgraph.operations import is_loop, tensor_bytes
from tools.shared import memory

STEPS, BATCH, UNITS = 40, 4, 256
KERNEL = 4 * UNITS * UNITS


def recurrent(*kinds: Any, steps: int = STEPS) -> Any:
    x = inputs = keras.Input((steps, UNITS))
    for number, layer in enumerate(kinds, 1):
        x = layer(UNITS, return_sequences=number < len(kinds))(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile(keras.optimizers.SGD(), "mse", jit_compile=False)
    return model


def test_what_all_steps_of_a_loop_read_takes_no_memory_in_its_lists() -> None:
    """Both kernels are in the loop's lists, forty times each: 20 MiB that nobody allocates."""

    def predicted(steps: int) -> int:
        data = (np.zeros((BATCH, steps, UNITS), np.float32), np.zeros((BATCH, 1), np.float32))
        return tf_memsaver.estimate(recurrent(layers.SimpleRNN, steps=steps), data=data).peak_bytes

    # A further step adds some outputs of the layer, and no kernel.
    assert predicted(2 * STEPS) - predicted(STEPS) < STEPS * 10 * 4 * BATCH * UNITS < STEPS * KERNEL
    model, x = recurrent(layers.SimpleRNN), np.zeros((BATCH, STEPS, UNITS), np.float32)
    forward = tf.function(lambda: model(x, training=True))
    forward()
    assert memory.peak_over_live(forward) < KERNEL


def _lists(step: Any, *inputs: Any) -> list[int]:
    """Return the bytes of the lists that the forward loop of a step makes, the empty ones left out."""
    graph = tf.function(step).get_concrete_function(*inputs).graph
    loop = next(each for each in graph.get_operations() if is_loop(each))
    return [tensor_bytes(each) for each in loop.outputs if each.dtype == tf.variant and tensor_bytes(each) > 4 * STEPS]


def test_what_one_step_makes_and_the_next_begins_with_counts_once() -> None:
    kernel = tf.Variable(tf.eye(UNITS))

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)

            def body(number: Any, state: Any, written: Any) -> Any:
                state = tf.tanh(tf.matmul(state, kernel))
                return number + 1, state, written.write(number, state)

            array = tf.TensorArray(tf.float32, STEPS, element_shape=x.shape)
            _, _, array = tf.while_loop(lambda number, *_: number < STEPS, body, (0, x, array))
            loss = tf.reduce_sum(array.stack())
        return tape.gradient(loss, [x, kernel])

    # Kept are the outputs, which are the states that steps begin with and what the gradient of tanh reads.
    assert _lists(step, tf.zeros((BATCH, UNITS))) == [4 * STEPS * BATCH * UNITS]


@pytest.mark.parametrize("layer", [layers.LSTM, layers.GRU])
def test_the_gates_of_a_recurrent_layer_are_counted(layer: Any) -> None:
    """Of each step at least the gates are kept, of a size with its output."""
    model = recurrent(layer)
    data = (np.zeros((BATCH, STEPS, UNITS), np.float32), np.zeros((BATCH, 1), np.float32))
    kept = tf_memsaver.estimate(model, data=data).activation_bytes
    output = 4 * STEPS * BATCH * UNITS
    assert 4 * output <= kept <= 12 * output


def test_a_list_made_of_a_tensor_is_a_copy_that_lives_as_long_as_the_loop_s_gradient_reads_it() -> None:
    model = recurrent(layers.LSTM, layers.LSTM)
    data = (np.zeros((BATCH, STEPS, UNITS), np.float32), np.zeros((BATCH, 1), np.float32))
    graph = tf_memsaver.trace(model, data=data).graph
    values, output = graph.values, 4 * STEPS * BATCH * UNITS
    made = [op for op in graph.ops if op.type == "TensorListFromTensor" and op.phase is Phase.FORWARD]
    assert [values[op.outputs[0]].nbytes for op in made] == [output, output]
    # What a step takes out of it is in another list of the loop, which the backward pass reads.
    for op in made:
        views = {value.index for value in values if value.alias_of == op.outputs[0]}
        readers = [each for each in graph.ops if not views.isdisjoint(each.inputs)]
        assert [(each.type, each.phase) for each in readers] == [("StatelessWhile", Phase.BACKWARD)]


def in_a_branch(block: Any, x: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) > -1e9, lambda: block(x), lambda: x)


def in_a_loop(block: Any, x: Any) -> Any:
    step = lambda number, x: (number + 1, block(x))  # noqa: E731
    return tf.while_loop(lambda number, _: number < 1, step, (0, x), maximum_iterations=1)[1]


def in_a_loop_in_a_branch(block: Any, x: Any) -> Any:
    return in_a_branch(lambda x: in_a_loop(block, x), x)


@pytest.mark.parametrize("where", [in_a_branch, in_a_loop, in_a_loop_in_a_branch])
def test_a_loop_or_branch_keeps_what_the_same_layers_keep_outside(where: Any) -> None:
    """Also what a gradient takes out of its lists and uses for nothing: the half of gelu's two products."""

    class Block(layers.Layer):
        def __init__(self, where: Any) -> None:
            super().__init__()
            self.where, self.first, self.second = where, layers.Dense(4 * UNITS, "gelu"), layers.Dense(UNITS)

        def build(self, shape: Any) -> None:
            self.first.build(shape)
            self.second.build((*shape[:-1], 4 * UNITS))

        def call(self, x: Any) -> Any:
            return self.where(lambda x: x + self.second(self.first(x)), x)

    def kept(where: Any) -> int:
        x = inputs = keras.Input((STEPS, UNITS))
        for _ in range(2):
            x = Block(where)(x)
        model = keras.Model(inputs, layers.Dense(1)(x))
        model.compile(keras.optimizers.SGD(), "mse", jit_compile=False)
        data = (np.zeros((BATCH, STEPS, UNITS), np.float32), np.zeros((BATCH, STEPS, 1), np.float32))
        return int(tf_memsaver.trace(model, data=data, granularity="op").estimate().activation_bytes)

    outside = kept(lambda block, x: block(x))
    assert 0.95 * outside < kept(where) < 1.05 * outside


def test_a_loop_that_goes_back_takes_one_step_at_a_time() -> None:
    """By itself TensorFlow works out the gradients of a kernel for many steps of the loop at once, and adds them up.

    Measured with four LSTMs of 256 units over 60 steps: 113 MiB as it is, 44 in turn, in the same time.
    """
    x = np.random.default_rng(0).normal(size=(16 * BATCH, STEPS, UNITS)).astype(np.float32)
    data = (x, np.zeros((16 * BATCH, 1), np.float32))
    plain = recurrent(*[layers.SimpleRNN] * 3)
    found = {}
    for order in (True, False):
        model = tf_memsaver.optimize(plain, data=data, strategy="recompute_all", order=order)
        assert any(each.mode is SegmentMode.RECOMPUTE for each in model.memsaver_plan.segments)

        def step(x: Any, model: Any = model) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x, training=True) ** 2)
            return tape.gradient(loss, model.trainable_variables)

        traced = tf.function(step).get_concrete_function(tf.TensorSpec(x.shape))
        loops = [each for each in traced.graph.get_operations() if is_loop(each) and "gradient_tape" in each.name]
        assert {each.get_attr("parallel_iterations") for each in loops} == {1 if order else 32}
        found[order] = [gradient.numpy() for gradient in traced(tf.constant(x))]
    assert all(np.array_equal(*both) for both in zip(*found.values(), strict=True))


@pytest.mark.parametrize(("units", "waiting"), [(UNITS, 31), (UNITS // 4, 0)])
def test_elements_of_lists_and_gradients_that_wait_to_be_added_are_known(units: int, waiting: int) -> None:
    """Tensors below 256 KiB do not count on a CPU: neither the elements of lists nor the gradients of small kernels."""
    inputs = keras.Input((STEPS, units))
    model = keras.Model(inputs, layers.Dense(1)(layers.GRU(units)(inputs)))
    model.compile("sgd", "mse", jit_compile=False)
    data = (np.zeros((BATCH, STEPS, units), np.float32), np.zeros((BATCH, 1), np.float32))
    graph = tf_memsaver.trace(model, data=data).graph
    lists = [value for value in graph.values if value.parts > 1]
    assert len(lists) > 4 and {value.parts for value in lists} == {STEPS}
    # A GRU's kernel has three gates. TensorFlow begins up to 32 steps of the loop.
    kernel = 3 * 4 * units * units
    assert sum(op.racing_bytes for op in graph.ops) == waiting * kernel


class Settling(layers.Layer):
    """Runs as many steps as its values say."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Dense(8)

    def call(self, x: Any) -> Any:
        def goes_on(i: Any, h: Any) -> Any:
            return keras.ops.cast(i, "float32") + 0.0 * keras.ops.sum(h) < 2.0

        return keras.ops.while_loop(goes_on, lambda i, h: (i + 1, keras.ops.tanh(self.inner(h))), (0, x))[1]


def test_steps_that_are_not_known_are_said_once_of_each_loop(caplog: pytest.LogCaptureFixture) -> None:
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(1)(Settling()(Settling()(inputs))))
    model.compile("adam", "mse", jit_compile=False)
    tf_memsaver.estimate(model, batch_size=4)
    assert caplog.text.count("runs an unknown number of steps") == 2
