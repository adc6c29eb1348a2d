"""Keras models in segments of single operations: a segment between any two cuts, all gradients and all state."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from keras import layers

import tf_memsaver
from tests.tensorflow.plans import optimized_between_cuts, optimized_in_segments, segments_of
from tf_memsaver.capture.model_step import capture_graph
from tf_memsaver.errors import InvalidRequestError, PlanMismatchError, UnsupportedModelError
from tf_memsaver.ir.graph import Phase
from tf_memsaver.ir.segments import Segment, SegmentMode, stored
from tf_memsaver.judge.simulate import Simulator
from tf_memsaver.options.table import Granularity
from tf_memsaver.plan.plan import Plan
from tf_memsaver.program import model_function
from tf_memsaver.program.kinds import program_of
from tf_memsaver.program.model_function import ModelFunction
from tf_memsaver.program.moved_cuts import MovedCuts, longest_increasing
from tf_memsaver.program.signature import trace_call, usual_call
from tools.shared.models import small as models
from tools.shared.models.real import gpt2
from tools.shared.records import assert_close
from tools.shared.training import assert_fit_alike, assert_trains_alike, batch_for, train

MODELS: list[Callable[[], Any]] = [
    models.dropout_chain,
    models.residual_net,
    models.unet,
    models.text_lstm,
    models.text_attention,
    models.two_by_two,
    models.transfer,
    models.siamese,
    models.adds_losses,
    models.small_bert,
    models.small_gpt2,
    models.small_vit,
]


@pytest.mark.parametrize("free_batch", [True, False], ids=["free", "known"])
@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_segments_between_all_cuts_train_alike(build: Callable[[], Any], free_batch: bool) -> None:
    keras.utils.set_random_seed(0)
    model = build()
    optimized = optimized_between_cuts(model, length=1, granularity="op")
    assert_trains_alike(model, optimized, modes=("graph",), free_batch=free_batch)


@pytest.mark.parametrize(
    "build", [models.small_bert, models.small_gpt2, models.small_vit], ids=lambda build: build.__name__
)
def test_layers_of_transformers_between_all_cuts_train_alike(build: Callable[[], Any]) -> None:
    keras.utils.set_random_seed(0)
    model = build()
    assert_trains_alike(model, optimized_between_cuts(model, length=1), modes=("graph",), free_batch=True)


class Jitter(layers.Layer):
    """Adds noise to what a product makes, as a router of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.seed = layers.Dense(64), keras.random.SeedGenerator(3)

    def call(self, x: Any) -> Any:
        x = self.dense(x)
        return x + keras.random.uniform(x.shape, 0.9, 1.1, seed=self.seed)


def test_noise_of_a_known_shape_is_made_where_it_is_added() -> None:
    """Made in front of all segments, two would read it: a first run and its replay, and no sum would be joined."""
    inputs = keras.Input((64,), batch_size=128)
    x = inputs
    for _ in range(3):
        x = layers.LayerNormalization()(Jitter()(x))
    model = keras.Model(inputs, layers.Dense(2)(x))
    optimized = optimized_between_cuts(model, length=4, granularity="op", batch_size=128)
    assert_trains_alike(model, optimized, modes=("graph",), batch_size=128)


def test_biases_of_heads_that_all_levels_share() -> None:
    """A segment holds several calls: the terms of a bias's gradient keep their names, as those of a kernel's do."""
    keras.utils.set_random_seed(0)
    heads = [layers.Conv2D(8, 3, padding="same", activation="relu") for _ in range(3)]
    x = inputs = keras.Input((32, 32, 8))
    made = []
    for _ in range(4):
        y = x
        for head in heads:
            y = head(y)
        made.append(layers.GlobalAveragePooling2D()(y))
        x = layers.AveragePooling2D(2)(x)
    model = keras.Model(inputs, layers.Dense(2)(layers.Concatenate()(made)))
    optimized = optimized_between_cuts(model, length=30, granularity="op")
    assert_trains_alike(model, optimized, modes=("graph",), free_batch=True)


class SequenceOfEachNode(layers.Layer):
    """Runs a recurrent layer over the sequences of all nodes of a graph at once: its batch is a multiple."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = layers.LSTM(16)

    def call(self, x: Any) -> Any:
        batch, nodes = keras.ops.shape(x)[0], x.shape[1]
        y = self.lstm(keras.ops.reshape(x, (batch * nodes, *x.shape[2:])))
        return keras.ops.reshape(y, (batch, nodes, 16))


def test_a_loop_over_a_multiple_of_the_batch_trains_alike() -> None:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5, 6, 3))
    x = layers.Dense(4, "tanh")(layers.Dense(4, "tanh")(inputs))
    model = keras.Model(inputs, layers.Dense(2)(SequenceOfEachNode()(x)))
    optimized = optimized_between_cuts(model, length=2, granularity="op")
    assert_trains_alike(model, optimized, modes=("graph",), free_batch=True)


def _convolutions_in_a_loop() -> Any:
    x = inputs = keras.Input((3, 12, 12, 2))
    x = layers.TimeDistributed(layers.Conv2D(4, 3, padding="same"))(x)
    x = layers.ConvLSTM2D(4, 3)(x)
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))


def _sequences_of_nodes() -> Any:
    inputs = keras.Input((5, 6, 3))
    return keras.Model(inputs, layers.Dense(2)(SequenceOfEachNode()(layers.Dense(4)(inputs))))


class SequencesBesideTheirGraph(layers.Layer):
    """Runs a loop over the sequences of all nodes, and over one state for each graph: two free sizes."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x: Any) -> Any:
        nodes, width = x.shape[1], x.shape[-1]
        sequences = tf.reshape(x, (-1, x.shape[2], width))
        states, graphs = sequences[:, 0], tf.reduce_mean(x, (1, 2))[:, :3]
        made = tf.TensorArray(x.dtype, x.shape[2], element_shape=states.shape)

        def step(at: Any, states: Any, graphs: Any, made: Any) -> Any:
            states = tf.tanh(tf.matmul(states, self.kernel) + sequences[:, at])
            return at + 1, states, tf.tanh(graphs), made.write(at, states)

        loop = tf.while_loop(lambda at, *_: at < x.shape[2], step, (0, states, graphs, made), maximum_iterations=6)
        stacked = tf.transpose(loop[3].stack(), (1, 0, 2))
        return tf.reshape(stacked, (-1, nodes, x.shape[2], width)) * tf.reduce_sum(loop[2])


def _two_free_sizes() -> Any:
    inputs = keras.Input((5, 6, 3))
    x = SequencesBesideTheirGraph()(layers.Dense(16)(inputs))
    return keras.Model(inputs, layers.Dense(2)(x))


def test_a_list_that_a_loop_of_two_free_sizes_fills_has_that_of_its_elements() -> None:
    def stacked(granularity: str) -> list[int]:
        graph = capture_graph(_two_free_sizes(), batch_size=16, granularity=granularity)
        return [graph.values[op.outputs[0]].nbytes for op in graph.ops if op.type == "TensorListStack"]

    assert stacked("op") == stacked("layer") != []


class Equilibrium(layers.Layer):
    """Looks for a fixed point in a loop, and takes a few more steps with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = layers.Dense(32, "gelu"), layers.Dense(8, "tanh")

    def call(self, x: Any) -> Any:
        def nearer(z: Any) -> Any:
            return self.narrow(self.wide(z)) + x

        z = tf.stop_gradient(tf.while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, nearer(z)), (0, x))[1])
        return nearer(nearer(z))


def test_a_loop_that_reads_a_weight_does_not_set_it() -> None:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(2)(Equilibrium()(layers.Dense(8)(inputs))))
    graph = capture_graph(model, batch_size=8, granularity="op")
    assert not any("ReadVariableOp" in unit.pinned for unit in graph.units)
    optimized = optimized_between_cuts(model, length=3, granularity="op")
    assert_trains_alike(model, optimized, modes=("graph",), free_batch=True)


class RowsInALoop(layers.Layer):
    """A loop inside a branch goes over the rows of all samples: their number is not that of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(8, "tanh")

    def build(self, shape: Any) -> None:
        self.dense.build((None, 8))

    def call(self, x: Any) -> Any:
        def rows() -> Any:
            loop = tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, self.dense(y)), (0, tf.reshape(x, (-1, 8))))
            return tf.reshape(loop[1], tf.shape(x))

        return tf.cond(tf.reduce_sum(x) > -1e9, rows, lambda: x)


@pytest.mark.parametrize("granularity", ["op"])
def test_a_loop_over_rows_in_a_branch_trains_alike(granularity: Granularity, caplog: pytest.LogCaptureFixture) -> None:
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((5, 8))
    for _ in range(2):
        x = layers.Dense(8, "tanh")(RowsInALoop()(x))
    model = keras.Model(inputs, layers.Dense(2)(x))
    optimized = optimized_between_cuts(model, length=1, granularity=granularity)
    assert "not known" not in caplog.text
    assert_trains_alike(model, optimized, modes=("graph",), free_batch=True)


class Counting(layers.Layer):
    """Has a number that a loop or a branch reads, that is set then, and that is read again."""

    def __init__(self, reads: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.dense, self.reads = layers.Dense(8, "tanh"), reads

    def build(self, shape: Any) -> None:
        self.number = self.add_weight(shape=(), initializer="ones", trainable=False)

    def call(self, x: Any) -> Any:
        x = self.reads(self.dense(x), self.number)
        self.number.assign(self.number * 2.0)
        self.number.assign_add(3.0)
        return self.reads(x, self.number) * self.number


def _in_a_loop(x: Any, number: Any) -> Any:
    return tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, tf.tanh(x * number)), (0, x))[1]


def _in_a_branch(x: Any, number: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) > 0.0, lambda: x * tf.convert_to_tensor(number), lambda: x)


@pytest.mark.parametrize("reads", [_in_a_loop, _in_a_branch])
def test_what_sets_a_number_does_not_overtake_a_loop_that_reads_it(reads: Any) -> None:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    model = keras.Model(inputs, layers.Dense(2)(Counting(reads)(layers.Dense(8, "tanh")(inputs))))
    optimized = optimized_between_cuts(model, length=2, granularity="op")
    assert_trains_alike(model, optimized, modes=("graph",), free_batch=True)


class AddsInABranch(layers.Layer):
    """Adds its input to what a branch makes, which adds it, too: both terms of the gradient lie in one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = layers.Dense(256, "relu"), layers.Dense(64)

    def call(self, x: Any) -> Any:
        y = self.narrow(self.wide(x))
        return x + tf.cond(tf.reduce_sum(x) > -1e9, lambda: y + x, lambda: y)


def test_terms_of_a_gradient_that_lie_in_one_buffer_are_added_in_the_same_order() -> None:
    """What sums gradients starts with the first of them whose buffer nobody else has."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((16, 64))
    for layer in (layers.Dense(64), AddsInABranch(), AddsInABranch()):
        x = layer(x)
    model = keras.Model(inputs, layers.Dense(8)(layers.GlobalAveragePooling1D()(x)))
    units = len(capture_graph(model, batch_size=16, granularity="op").units)
    first = Segment(start=0, stop=9, mode=SegmentMode.RECOMPUTE)
    segments = [first, Segment(start=9, stop=units, mode=SegmentMode.STORE)]
    assert_trains_alike(model, optimized_in_segments(model, segments, 16, "op"), modes=("graph",), free_batch=True)


@pytest.mark.parametrize("build", [_convolutions_in_a_loop, _sequences_of_nodes])
def test_what_a_loop_keeps_and_takes_is_the_same_by_layers_and_by_operations(build: Any) -> None:
    def loops(granularity: str) -> list[float]:
        graph = capture_graph(build(), batch_size=16, granularity=granularity)
        found = [op for op in graph.ops if op.type in ("StatelessWhile", "While")]
        kept = (sum(graph.values[value].nbytes for value in op.outputs) for op in found)
        return [float(nbytes) for nbytes in (*kept, *(op.workspace_bytes for op in found))]

    by_layers = loops("layer")
    assert len(by_layers) == 4 and min(by_layers) > 10_000
    # Apart from counters, which are constants in the one and not in the other.
    assert loops("op") == pytest.approx(by_layers, rel=0.01)


def test_what_xla_compiles_in_a_layer_takes_the_same_by_layers_and_by_operations(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Keras has XLA compile the convolutions of groups, in a function that is traced for any batch size."""

    def costs(granularity: str) -> tuple[list[tuple[int, int, list[int]]], int]:
        x = inputs = keras.Input((16, 16, 64))
        for _ in range(2):
            x = layers.Conv2D(64, 3, padding="same", groups=16)(x)
        model = keras.Model(inputs, layers.Activation("gelu")(x))
        graph = capture_graph(model, batch_size=16, granularity=granularity)
        calls = [op for op in graph.ops if op.type in ("PartitionedCall", "StatefulPartitionedCall")]
        bytes_of = [sorted(graph.values[value].nbytes for value in op.outputs) for op in calls]
        taken = [(op.flops, op.workspace_bytes, made) for op, made in zip(calls, bytes_of, strict=True)]
        return sorted(taken), Simulator(graph).reported_peak(stored(len(graph.units)))

    by_layers, peak = costs("layer")
    assert len(by_layers) == 4 and min(by_layers)[0] > 10_000_000
    assert costs("op") == (by_layers, pytest.approx(peak, rel=0.001)) and not caplog.text


class Fourier(layers.Layer):
    """Mixes tokens by a Fourier transform, as FNet does."""

    def call(self, x: Any) -> Any:
        return x + tf.math.real(tf.signal.fft2d(tf.cast(x, tf.complex64)))


def test_gradients_of_complex_numbers_pass_segments() -> None:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((16, 8))
    x = inputs
    for _ in range(2):
        x = layers.Dense(8, "gelu")(layers.LayerNormalization()(Fourier()(layers.Dense(8)(x))))
    model = keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))
    optimized = optimized_between_cuts(model, length=1, granularity="op")
    assert_trains_alike(model, optimized, modes=("graph",), free_batch=True)


def test_eager_steps_run_in_a_graph_of_their_own() -> None:
    model = models.dropout_chain()
    optimized = optimized_between_cuts(model, granularity="op")
    assert_close(train(model, mode="eager"), train(optimized, mode="eager"))


def test_fit_evaluate_save_and_load(tmp_path: Any) -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((16,)), *[layers.Dense(16, activation="gelu") for _ in range(6)], layers.Dense(4, "softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    x = np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32)
    y = np.arange(64) % 4
    weights = model.get_weights()
    plain = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    model.set_weights(weights)
    model.optimizer = None
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    optimized = tf_memsaver.optimize(model, batch_size=16, strategy="min_peak", granularity="op")
    assert optimized.memsaver_plan.request.granularity == "op" and optimized.memsaver_plan.recomputed
    assert optimized.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history == plain
    optimized.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.memsaver_plan == optimized.memsaver_plan
    assert np.array_equal(loaded.predict(x, verbose=0), optimized.predict(x, verbose=0))
    assert Plan.from_json(optimized.memsaver_plan.to_json()) == optimized.memsaver_plan


def test_softmax_is_recomputed_and_the_products_around_it_are_kept() -> None:
    model = gpt2(layers=2, width=64, heads=8, length=128, vocabulary=50)
    plan = tf_memsaver.search_plan(model, batch_size=32, max_overhead=0.1, granularity="op")
    graph = capture_graph(model, batch_size=32, granularity="op")
    # A product that ends a segment is kept, though its group lies in what is recomputed.
    replayed = [graph.ops[instant.op] for instant in Simulator(graph).run(plan.segments).instants if instant.replay]
    products = [op for op in graph.ops if op.phase is Phase.FORWARD and "MatMul" in op.type]
    assert "Softmax" in {op.type for op in replayed}
    assert sum("MatMul" in op.type for op in replayed) < len(products) / 4


def test_freezing_a_layer_traces_anew() -> None:
    keras.utils.set_random_seed(0)
    model = models.chain(depth=6)
    optimized = optimized_between_cuts(model, granularity="op")
    assert_trains_alike(model, optimized, modes=("graph",), free_batch=True)
    model.layers[1].trainable = False
    assert_trains_alike(model, optimized, modes=("graph",), free_batch=True)


def test_what_is_refused() -> None:
    model = models.chain()
    with pytest.raises(InvalidRequestError, match="granularity"):
        tf_memsaver.search_plan(model, batch_size=4, granularity="tensor")
    plan = tf_memsaver.search_plan(model, batch_size=4, granularity="op")
    with pytest.raises(PlanMismatchError):
        tf_memsaver.apply_plan(models.residual_net(), plan)
    optimized = tf_memsaver.apply_plan(model, plan)
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope(), pytest.raises(UnsupportedModelError, match="strategy"):
        optimized(tf.ones((4, *model.input_shape[1:])), training=True)


def test_graphs_that_were_only_listed_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def noted(*args: Any) -> Any:
        concrete = trace_call(*args)
        graphs.append(weakref.ref(concrete.graph))
        return concrete

    monkeypatch.setattr(model_function, "trace_call", noted)
    optimized = optimized_between_cuts(models.residual_net(), length=3, granularity="op")
    gc.collect()
    assert graphs and all(graph() is None for graph in graphs)
    x = batch_for(optimized)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(optimized(x, training=True))
    assert all(gradient is not None for gradient in tape.gradient(loss, optimized.trainable_variables))


@pytest.mark.parametrize("build", [models.dropout_chain, models.residual_net, models.small_vit])
def test_gradients_that_nobody_wants_are_not_traced(build: Callable[[], Any]) -> None:
    def backward_operations(model: Any) -> list[str]:
        @tf.function(autograph=False)
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x, training=True))
            return tape.gradient(loss, model.trainable_variables)

        spec = tf.TensorSpec((None, *model.inputs[0].shape[1:]))
        operations = step.get_concrete_function(spec).graph.get_operations()
        return sorted(each.type for each in operations if each.name.startswith("gradient_tape/"))

    plain = build()
    stored = tf_memsaver.optimize(plain, batch_size=4, granularity="op", keep="*")
    assert not stored.memsaver_plan.recomputed
    assert backward_operations(stored) == backward_operations(plain)


@pytest.mark.parametrize("batch", [4, 5])
def test_known_shapes_are_traced_again(batch: int) -> None:
    """Operations that ask for sizes are gone then, and others have their names: segments are found all the same."""
    inputs = keras.Input((6, 4, 4, 2))
    x = layers.TimeDistributed(layers.Conv2D(4, 3, padding="same", activation="relu"))(inputs)
    x = layers.TimeDistributed(layers.Dense(8, activation="tanh"))(x)
    model = keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling3D()(x)))
    planned = ModelFunction(model).calls.sequence
    known = MovedCuts(model, planned, usual_call(model), [tf.TensorShape((batch, 6, 4, 4, 2))])
    assert len(planned.calls) > len(known.calls.sequence.calls)
    labels = [call.label for call in planned.calls]
    relu, tanh = (next(i for i, label in enumerate(labels) if name in label) for name in ("Relu_3", "Tanh_2"))
    segments = [
        Segment(start=0, stop=relu + 1, mode=SegmentMode.RECOMPUTE),
        Segment(start=relu + 1, stop=tanh + 1, mode=SegmentMode.STORE),
        Segment(start=tanh + 1, stop=len(labels), mode=SegmentMode.RECOMPUTE),
    ]
    found = known.segments(segments)
    assert [segment.mode for segment in found] == [segment.mode for segment in segments]
    ends = [known.calls.sequence.calls[segment.stop - 1].label for segment in found]
    assert ends == [labels[segment.stop - 1] for segment in segments]


class Scaled(layers.Layer):
    """Reads attributes in Python, which Keras does when a model is compiled again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factor, self.is_squared = layers.Dense(6, activation="gelu"), 0.5, False

    def call(self, x: Any) -> Any:
        made = self.inner(x) * self.factor
        return made**2 if self.is_squared else made


@pytest.mark.parametrize("granularity", ["op", "auto", "layer"])
@pytest.mark.parametrize(("name", "value"), [("factor", 2.0), ("is_squared", True)])
def test_attributes_that_changed_count_when_it_is_compiled_again(
    granularity: str, name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    model = keras.Model(inputs, layers.Dense(1)(Scaled()(Scaled()(inputs))))
    model.compile("sgd", "mse", jit_compile=False)
    optimized = optimized_between_cuts(model, length=2, granularity=granularity)
    x = np.random.default_rng(0).random((8, 6), "float32")

    def trained(each: Any) -> list[bytes]:
        first = [np.array(variable) for variable in model.variables]
        each.fit(x, np.ones((8, 1)), verbose=0)
        found = [np.array(variable).tobytes() for variable in model.variables]
        for variable, before in zip(model.variables, first, strict=True):
            variable.assign(before)
        return found

    before = trained(optimized)
    assert before == trained(model)
    setattr(model.layers[1], name, value)
    for each in (model, optimized):
        each.compile("sgd", "mse", jit_compile=False)
    assert before != trained(optimized) == trained(model)
    assert ("after its code or settings changed" in caplog.text) is (name == "is_squared" and granularity != "layer")


class ScaledModel(keras.Model):
    """Reads an attribute in its own ``call``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.factor = [Scaled(), Scaled()], 0.5

    def call(self, x: Any, training: Any = None) -> Any:
        for block in self.blocks:
            x = x + self.factor * block(x)
        return x


class ScaledStep(ScaledModel):
    """Reads it in its own step, too."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.factor * tf.reduce_mean((self(x, training=True) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("build", [ScaledStep, ScaledModel, None], ids=["step", "call", "functional"])
@pytest.mark.parametrize("granularity", ["op", "auto"])
def test_attributes_that_are_set_before_the_first_fit_count(granularity: str, build: Any) -> None:
    x = np.random.default_rng(0).random((8, 6), "float32")

    def trained(is_optimized: bool, factor: float) -> list[bytes]:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        model = build() if build else keras.Model(inputs, Scaled()(Scaled()(inputs)))
        model(x)
        model.compile("sgd", "mse", jit_compile=False)
        if is_optimized:
            model = tf_memsaver.optimize(model, data=(x, x), granularity=granularity, strategy="recompute_all")
            assert model.memsaver_plan.recomputed
        changed = model if build else model.layers[1]
        changed.factor = factor
        model.fit(x, x, verbose=0)
        return [np.array(variable).tobytes() for variable in model.variables]

    plain = trained(False, 2.0)
    assert trained(True, 2.0) == plain != trained(False, 0.5)


class Noisy(ScaledModel):
    """Draws random numbers without a seed of their own."""

    def call(self, x: Any, training: Any = None) -> Any:
        for block in self.blocks:
            x = x + keras.random.dropout(block(x + tf.random.normal(tf.shape(x), stddev=0.1)), 0.2)
        return x


def noisy(kind: Any, x: Any) -> Any:
    """Return such a model, compiled, as if it were the first of the process: names count."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    model = kind()
    model(x)
    model.compile("sgd", "mse", jit_compile=False)
    return model


class NoisyStep(Noisy):
    """Draws them in a step of its own."""

    train_step = ScaledStep.train_step


@pytest.mark.parametrize("kind", [Noisy, NoisyStep])
@pytest.mark.parametrize("granularity", ["op", "auto"])
def test_a_seed_that_is_set_before_the_first_fit_counts(
    granularity: str, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    x = np.random.default_rng(0).random((8, 6), "float32")

    def trained(is_optimized: bool, seed: int) -> list[bytes]:
        model = noisy(kind, x)
        if is_optimized:
            model = tf_memsaver.optimize(model, data=(x, x), granularity=granularity, strategy="recompute_all")
            assert model.memsaver_plan.recomputed
        keras.utils.set_random_seed(seed)
        model.fit(x, x, epochs=3, verbose=0)
        return [np.array(variable).tobytes() for variable in model.variables]

    plain = trained(False, 1)
    assert trained(True, 1) == plain != trained(False, 2)
    assert "last bits" not in caplog.text


class DrawsBefore(Noisy):
    """Draws in its step before it calls itself, and calls itself twice."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            first, second = (self(x + tf.random.normal(tf.shape(x)), training=True) for _ in range(2))
            loss = tf.reduce_mean((first - y) ** 2) + tf.reduce_mean((first - second) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_a_network_that_draws_after_others_in_the_step_is_planned_by_layers() -> None:
    # TensorFlow numbers random operations in each graph: a trace of the network alone begins with number 0.
    x = np.random.default_rng(0).random((8, 6), "float32")

    def trained(is_optimized: bool) -> list[bytes]:
        model = noisy(DrawsBefore, x)
        if is_optimized:
            with pytest.raises(UnsupportedModelError, match="draws random numbers without a seed, after others"):
                tf_memsaver.optimize(model, data=(x, x), granularity="op")
            model = tf_memsaver.optimize(model, data=(x, x), strategy="recompute_all")
            assert "draws random numbers without a seed" in model.memsaver_plan.note
        keras.utils.set_random_seed(1)
        model.fit(x, x, epochs=3, verbose=0)
        return [np.array(variable).tobytes() for variable in model.variables]

    assert trained(True) == trained(False)


class Mean(layers.Layer):
    """Divides by the sizes of its input: constants of a trace that knows them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = layers.Conv2D(8, 3, padding="same", activation="gelu"), layers.Conv2D(4, 1)

    def call(self, x: Any) -> Any:
        shape = keras.ops.shape(x)
        mean = keras.ops.sum(x, axis=(1, 2), keepdims=True) / keras.ops.cast(shape[1] * shape[2], x.dtype)
        return x + self.narrow(self.wide(x)) + keras.ops.tanh(mean)


def of_sizes(*sizes: int, are_told: bool = False) -> Any:
    """Return batches of images, of other sizes than the first one has."""

    def images() -> Any:
        generator = np.random.default_rng(0)
        for size in sizes:
            yield generator.random((4, size, size, 4), "float32"), np.ones((4, 1), "float32")

    size = sizes[0] if are_told else None
    specs = tf.TensorSpec((None, size, size, 4)), tf.TensorSpec((None, 1))
    data = tf.data.Dataset.from_generator(images, output_signature=specs)
    return data.apply(tf.data.experimental.assert_cardinality(len(sizes)))


@pytest.mark.parametrize("granularity", ["op", "auto", "layer"])
def test_other_sizes_than_the_plan_was_made_for_train_alike(granularity: str) -> None:
    """A network for images of any size was trained with the sizes of the first batch as constants."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((None, None, 4))
    for _ in range(3):
        x = Mean()(x)
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))
    mixed, told = of_sizes(16, 12, 8), of_sizes(12, 12, are_told=True)
    model.compile("sgd", "mse", jit_compile=False)
    optimized = tf_memsaver.optimize(model, data=mixed, granularity=granularity, strategy="recompute_all")
    assert optimized.memsaver_plan.recomputed
    first = [np.array(variable) for variable in model.variables]
    found = []
    for each in (model, optimized):
        for variable, value in zip(model.variables, first, strict=True):
            variable.assign(value)
        each.compile("sgd", "mse", jit_compile=False)
        for data in (mixed, told):
            each.fit(data, shuffle=False, verbose=0)
        found.append([np.array(variable) for variable in model.variables])
    assert all(np.array_equal(*pair) for pair in zip(*found, strict=True))
    x = tf.random.stateless_normal((2, 10, 10, 4), (0, 0))
    assert_close({0: model(x, training=True)}, {0: optimized(x, training=True)}, 1e-5)


def test_a_segment_of_known_shapes_replays_nothing_that_is_pinned() -> None:
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(2)])
    planned = ModelFunction(model).calls.sequence
    known = MovedCuts(model, planned, usual_call(model), [tf.TensorShape((4, 8))])
    with pytest.raises(PlanMismatchError, match="AssignVariableOp"):
        known.segments([Segment(start=0, stop=len(planned.calls), mode=SegmentMode.RECOMPUTE)])


@given(st.lists(st.integers(-1, 12), max_size=12))
def test_the_longest_increasing_places(places: list[int]) -> None:
    places = [place if place not in places[:i] else -1 for i, place in enumerate(places)]
    kept = longest_increasing(places)
    assert all(new in (None, old) for new, old in zip(kept, places, strict=True))
    found = [place for place in kept if place is not None]
    assert found == sorted(set(found))
    chosen = [c for n in range(len(places) + 1) for c in itertools.combinations([p for p in places if p >= 0], n)]
    assert len(found) == max((len(c) for c in chosen if list(c) == sorted(c)), default=0)


def _operations_of_a_step(model: Any, x: Any) -> list[tf.Operation]:
    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    return list(step.get_concrete_function().graph.get_operations())


def test_backward_operations_have_the_names_of_the_plain_steps() -> None:
    """Graph optimisation adds three gradients of one tensor in the order of their names."""
    x = inputs = keras.Input((8,))
    y = layers.Dense(8)(x)
    ops = keras.ops
    y = ops.exp(y) + ops.square(y) - ops.exp(ops.sin(y)) * y + ops.mean(y, axis=-1, keepdims=True)
    model = keras.Model(inputs, layers.Dense(2)(ops.tanh(y)))
    optimized = optimized_between_cuts(model, length=1, granularity="op")
    x = batch_for(model, 4)

    def names(trained: Any) -> set[str]:
        made = _operations_of_a_step(trained, x)
        kinds = ("Mul", "Neg", "Cos", "TanhGrad", "MatMul", "BiasAddGrad")
        return {each.name for each in made if each.type in kinds and each.name.startswith("gradient_tape")}

    assert len(names(model)) > 8 and names(model) <= names(optimized)


def test_operations_of_custom_gradients_have_the_names_of_the_plain_steps() -> None:
    """A tape opens no scope for them: a term of a residual sum was sorted by that of its layer, and added elsewhere."""
    x = inputs = keras.Input((8,))
    for _ in range(2):
        x = x + layers.Dense(8, activation="sigmoid")(x) * keras.ops.silu(layers.Dense(8)(x) + x)
    model = keras.Model(inputs, layers.Dense(2)(x))
    optimized = optimized_between_cuts(model, length=1, granularity="op")
    x = batch_for(model, 4)

    def names(trained: Any) -> set[str]:
        made = _operations_of_a_step(trained, x)
        return {each.name for each in made if each.type == "Mul" and "/" not in each.name}

    assert len(names(model)) > 8 and names(model) == names(optimized)
    assert_trains_alike(model, optimized, modes=("graph",), free_batch=True)


def test_a_pass_whose_gradient_nobody_takes_is_fused_as_the_plain_one() -> None:
    """A product, its bias and a GELU become one operation, which rounds otherwise, if nothing lies in between."""
    x = inputs = keras.Input((32,))
    for _ in range(3):
        x = layers.Dropout(0.2)(layers.BatchNormalization()(layers.Dense(64, activation="gelu")(x)))
    model = keras.Model(inputs, layers.Dense(4)(x))
    names = [call.label for call in ModelFunction(model).calls.sequence.calls]
    stops = [place + 1 for place, name in enumerate(names) if name.endswith("BiasAdd")][:-1]
    assert len(stops) == 3
    cuts = itertools.pairwise([0, *stops])
    segments = [Segment(start=start, stop=stop, mode=SegmentMode.RECOMPUTE) for start, stop in cuts]
    segments.append(Segment(start=stops[-1], stop=len(names), mode=SegmentMode.STORE))
    optimized = optimized_in_segments(model, segments, batch_size=1024, granularity="op")
    batch = batch_for(model, 1024)
    outputs = []
    for trained in (model, optimized):
        start = [variable.numpy() for variable in model.variables]
        outputs.append([tf.function(trained)(batch, training=True).numpy(), *(v.numpy() for v in model.variables)])
        for variable, value in zip(model.variables, start, strict=True):
            variable.assign(value)
    for plain, segmented in zip(*outputs, strict=True):
        np.testing.assert_array_equal(plain, segmented)


def test_random_numbers_of_a_replay_have_a_shape_that_graph_optimisation_sees() -> None:
    """Else it takes out what it does for unequal shapes later than in the plain step, and folds other constants."""
    inputs = keras.Input((32,))
    x = layers.Dropout(0.1, dtype="mixed_float16")(layers.Dense(64, "gelu", dtype="mixed_float16")(inputs))
    x = layers.Dense(64, "gelu", dtype="float64", name="after")(x)
    model = keras.Model(inputs, layers.Dense(4)(x))
    calls = [call.label for call in program_of(model, "op").sequence.calls]
    start, stop = (next(n for n, label in enumerate(calls) if each in label) for each in ("Uniform", "after_1/Gelu"))
    optimized = optimized_in_segments(model, segments_of(calls, [(calls[start], calls[stop - 1])]), 64, "op")
    assert_trains_alike(model, optimized, modes=("graph",), batch_size=64, free_batch=True)
    assert_close(*(train(each, mode="xla", batch_size=64) for each in (model, optimized)), tolerance=1e-2)


def test_the_sum_of_a_later_blocks_gradients_is_one_term_of_a_residual_sum() -> None:
    """``x`` is read by a convolution in its own segment and by an addition behind it, whose gradient is a sum."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, padding="same")(x)
    for _ in range(3):
        y = layers.Conv2D(8, 3, padding="same", use_bias=False)(x)
        x = layers.Add()([x, layers.ReLU()(layers.BatchNormalization()(y))])
    model = keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))
    optimized = tf_memsaver.optimize(model, batch_size=64, granularity="op", strategy="min_peak")
    stored = [segment.mode is SegmentMode.STORE for segment in optimized.memsaver_plan.segments]
    assert stored[:2] == [False, True]
    assert_trains_alike(model, optimized, modes=("graph",), batch_size=64)


class Reversible(layers.Layer):
    """Its own gradient function calls a layer again, whose weights are no arguments of it."""

    def build(self, shape: Any) -> None:
        self.dense = layers.Dense(shape[-1])
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def run(x: Any) -> Any:
            def gradient(dy: Any, variables: Any = None) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    made = self.dense(x)
                first, *others = tape.gradient(made, [x, *(variables or ())], dy)
                return dy + first, others

            return x + self.dense(x), gradient

        return run(x)


class Recomputing(layers.Layer):
    """It recomputes by itself, as Keras users do by hand."""

    def build(self, shape: Any) -> None:
        self.dense = layers.Dense(shape[-1], "tanh")
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        return tf.recompute_grad(lambda inputs: self.dense(inputs))(x)


class Stack(keras.Model):
    """It calls layers whose own gradients read variables, and computes in between."""

    def __init__(self, own: type) -> None:
        super().__init__()
        self.blocks = [layer for _ in range(3) for layer in (layers.Dense(64, "gelu"), layers.Dense(64), own())]
        self.head = layers.Dense(1)

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block(x) * 0.5
        return self.head(x)


@pytest.mark.parametrize("own", [Reversible, Recomputing])
@pytest.mark.parametrize("granularity", ["auto", "op", "layer"])
@pytest.mark.parametrize("is_subclassed", [False, True])
def test_layers_whose_own_gradients_read_variables_train_alike(
    own: type, granularity: Granularity, is_subclassed: bool
) -> None:
    def make() -> keras.Model:
        keras.utils.set_random_seed(3)
        stack = Stack(own)
        model = stack if is_subclassed else keras.Sequential([keras.Input((64,)), *stack.blocks, stack.head])
        model(np.zeros((1, 64), "float32"))
        model.compile("sgd", "mse", jit_compile=False)
        return model

    x, y = np.random.default_rng(0).normal(size=(2, 256, 64)).astype("float32")
    data = x, y[:, :1]
    optimized = tf_memsaver.optimize(make(), data=data, batch_size=64, strategy="min_peak", granularity=granularity)
    plan = optimized.memsaver_plan
    if granularity == "layer":
        assert sum("reads variables" in layer.reason for layer in plan.layers) == 3
    # By layers, what the subclassed model computes in between is kept.
    assert plan.recomputed_units or (is_subclassed and granularity == "layer")
    assert_fit_alike(make(), optimized, *data, batch_size=64)
