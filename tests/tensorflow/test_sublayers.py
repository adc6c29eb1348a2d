"""Models that compute in a ``call`` of their own, with sublayers in segments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tests.tensorflow.plans import optimized_one_by_one
from tf_memsaver.errors import PlanMismatchError, UnsupportedModelError
from tf_memsaver.ir.graph import Phase
from tf_memsaver.program.signature import note_inputs
from tools.shared.models import own_call
from tools.shared.models.small import register
from tools.shared.records import assert_identical
from tools.shared.training import assert_trains_alike, train


@register
class Block(layers.Layer):
    """A transformer block with a scale of its own."""

    def __init__(self, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, width // 2, dropout=0.1)
        self.norms = [layers.LayerNormalization() for _ in range(2)]
        self.up, self.down = layers.Dense(4 * width, activation="gelu"), layers.Dense(width)
        self.drop = layers.Dropout(0.1)
        self.scale = self.add_weight(shape=(width,), initializer="ones", name="scale")

    def call(self, x: Any, training: bool = False) -> Any:
        y = self.norms[0](x)
        x = tf.add(x, self.attention(y, y, training=training))
        return x + self.scale * self.drop(self.down(self.up(self.norms[1](x))), training=training)


@register
class Encoder(layers.Layer):
    """Blocks, and a BatchNorm behind them."""

    def __init__(self, width: int, blocks: int = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.blocks = [Block(width) for _ in range(blocks)]
        self.norm = layers.BatchNormalization()

    def call(self, x: Any, training: bool = False) -> Any:
        for block in self.blocks:
            x = block(x, training=training)
        return self.norm(x, training=training)


@register
class Classifier(keras.Model):
    """Words through an encoder, with TensorFlow's own functions between, a loss and a counter."""

    def __init__(self, width: int = 16, blocks: int = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.width, self.blocks = width, blocks
        self.embedding, self.encoder = layers.Embedding(9, width), Encoder(width, blocks)
        self.head = layers.Dense(3)
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, name="steps")

    def call(self, words: Any, training: bool = False) -> Any:
        x = self.encoder(self.embedding(words), training=training)
        if training:
            self.steps.assign(self.steps + 1.0)
            self.add_loss(1e-3 * tf.reduce_mean(tf.square(x)))
        return self.head(tf.reduce_mean(x, axis=1))

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, "width": self.width, "blocks": self.blocks}


class Odd(layers.Layer):
    """Does what a replay could not."""

    def __init__(self, how: str) -> None:
        super().__init__(name=how)
        self.how, self.dense, self.seen = how, layers.Dense(4), None

    def call(self, x: Any, other: Any = None) -> Any:
        self.seen = self.dense(x)
        if self.how == "reads":
            return self.seen + self.outside.seen
        if self.how == "draws":
            return self.seen * tf.random.uniform(())
        return (self.seen, None) if self.how == "returns_none" else tf.tanh(self.seen)


class Odds(keras.Model):
    """Calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = [Odd(how) for how in ("plain", "draws", "returns_none", "reads")]
        self.odd[-1].outside = self.odd[0]
        self.head = layers.Dense(2)

    def call(self, x: Any) -> Any:
        for layer in self.odd:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(x)


class Recurrent(layers.Layer):
    """A block with a recurrent layer, whose loop reads its weights."""

    def __init__(self, rnn: Any) -> None:
        super().__init__()
        self.norm, self.rnn, self.down = layers.LayerNormalization(), rnn, layers.Dense(8)
        self.supports_masking = True

    def call(self, x: Any, mask: Any, training: bool = False) -> Any:
        return x + self.down(self.rnn(self.norm(x), mask=mask, training=training))


class Counting(layers.Layer):
    """A loop that sets a variable."""

    def __init__(self) -> None:
        super().__init__(name="counting")
        self.supports_masking = True
        self.dense = layers.Dense(8)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, x: Any) -> Any:
        def step(each: Any) -> Any:
            self.count.value.assign_add(1.0)
            return tf.tanh(each)

        return tf.map_fn(step, self.dense(x))


class Reader(keras.Model):
    """Recurrent blocks over words, some of which are masked."""

    def __init__(self, odd: Any = None) -> None:
        super().__init__()
        rnns = layers.GRU, layers.LSTM, layers.SimpleRNN
        self.embedding, self.head, self.odd = layers.Embedding(9, 8, mask_zero=True), layers.Dense(3), odd
        self.blocks = [Recurrent(rnn(16, return_sequences=True, dropout=0.1)) for rnn in rnns]
        note_inputs(self, tf.TensorSpec((None, 6), tf.int32))

    def call(self, words: Any, training: bool = False) -> Any:
        x, mask = self.embedding(words), self.embedding.compute_mask(words)
        for block in self.blocks:
            x = block(x, mask, training=training)
        return self.head(x if self.odd is None else self.odd(x))


def recurrent() -> Any:
    return Reader()


def classifier(width: int = 16, blocks: int = 2) -> Any:
    model = Classifier(width, blocks)
    note_inputs(model, tf.TensorSpec((None, 6), tf.int32))
    return model


@pytest.mark.parametrize(
    "build",
    [classifier, recurrent, own_call.blocks, own_call.blocks_half, own_call.dictionaries, own_call.of_a_graph],
    ids=lambda build: build.__name__,
)
def test_all_layers_that_can_be_replayed_train_alike(build: Callable[[], Any]) -> None:
    keras.utils.set_random_seed(0)
    model = build()
    optimized = optimized_one_by_one(model)
    assert_trains_alike(model, optimized, modes=("graph", "eager"), free_batch=True)


class Pair(layers.Layer):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = layers.Dense(64, activation="gelu"), layers.Dense(16, activation="tanh")

    def call(self, x: Any) -> Any:
        return self.down(self.up(x))


class InLoopAndBehind(keras.Model):
    """Calls a layer in the body of a loop, and once more behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.pair, self.head = Pair(), layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.head(self.pair(tf.map_fn(self.pair, x)))


def test_calls_in_the_body_of_a_loop_are_not_counted() -> None:
    model = InLoopAndBehind()
    note_inputs(model, tf.TensorSpec((None, 6, 16)))
    assert_trains_alike(model, optimized_one_by_one(model), modes=("graph",))


def test_repeated_blocks_are_units() -> None:
    graph = tf_memsaver.capture_graph(classifier(), batch_size=4)
    layers_of = {unit.label: unit for unit in graph.units if unit.kind != "Python"}
    names = ["embedding", "encoder/block", "encoder/block_1", "encoder/batch_normalization", "dense_4"]
    assert list(layers_of) == names
    assert not layers_of["encoder/block_1"].pinned
    assert not layers_of["embedding"].pinned
    assert all(unit.pinned for unit in graph.units if unit.kind == "Python")
    # A layer that is called again is another unit.
    model = own_call.dictionaries()
    again = [unit.label for unit in tf_memsaver.capture_graph(model, batch_size=4).units]
    assert {model.dense.name, f"{model.dense.name}#2", f"{model.dense.name}#3"} <= set(again)


def test_what_is_kept_out_of_segments() -> None:
    model = Odds()
    note_inputs(model, tf.TensorSpec((None, 4)))
    found = {unit.label: unit.pinned for unit in tf_memsaver.capture_graph(model, batch_size=4).units}
    assert "returns something that is no tensor" in found["returns_none"]
    assert "RandomUniform" in found["draws"]
    assert "not among its arguments" in found["reads"]
    assert "does not return" in found["plain"]


def test_a_block_with_a_loop_is_replayed_unless_the_loop_sets_a_variable() -> None:
    found = {unit.label: unit.pinned for unit in tf_memsaver.capture_graph(Reader(Counting()), batch_size=4).units}
    assert [found[name] for name in found if name.startswith("recurrent")] == ["", "", ""]
    assert found["counting"] == "runs While, which must run once"


def test_fit_is_the_same() -> None:
    x = np.random.default_rng(0).integers(0, 9, (32, 6))
    found = []
    for optimize in (False, True):
        keras.utils.set_random_seed(0)
        model: Any = classifier()
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
        if optimize:
            model = tf_memsaver.optimize(model, batch_size=64, strategy="min_peak")
            assert isinstance(model, Classifier) and model.memsaver_plan.recomputed
        history = model.fit(x, np.arange(32) % 3, batch_size=16, epochs=2, shuffle=False, verbose=0).history
        assert float(model.steps) == 4
        found.append((history, [weight.tobytes() for weight in model.get_weights()]))
    assert found[0] == found[1]


def test_less_memory() -> None:
    model = classifier(64, blocks=4)
    optimized = tf_memsaver.optimize(model, batch_size=256, strategy="min_peak")
    plan = optimized.memsaver_plan
    blocks_of = [f"{model.encoder.name}/{block.name}" for block in model.encoder.blocks]
    assert len(set(blocks_of).intersection(plan.recomputed)) >= 3
    assert plan.peak_bytes < 0.8 * plan.plain_peak_bytes
    peaks = [
        tf_memsaver.measure(m, batch_size=256, isolate=False, steps=1).activation_bytes for m in (model, optimized)
    ]
    assert peaks[1] < 0.8 * peaks[0]


def test_what_is_frozen_afterwards_and_told_not_to_train() -> None:
    class Told(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head = Encoder(16), layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.head(self.encoder(x, training=False))

    model = Told()
    note_inputs(model, tf.TensorSpec((None, 4, 16)))
    optimized = optimized_one_by_one(model)
    assert_trains_alike(model, optimized, modes=("eager",))
    model.encoder.blocks[1].trainable = False
    assert_trains_alike(model, optimized, modes=("graph", "eager"), free_batch=True)


def test_replicas() -> None:
    devices = tf.config.list_logical_devices("CPU")
    strategy = tf.distribute.MirroredStrategy([device.name for device in devices])
    x = np.random.default_rng(0).integers(0, 9, (16, 6))
    found = []
    for optimize in (False, True):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model: Any = classifier()
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
            if optimize:
                model = tf_memsaver.optimize(model, batch_size=4, strategy="min_peak")
        model.fit(x, np.arange(16) % 3, batch_size=8, shuffle=False, verbose=0)
        found.append([weight.tobytes() for weight in model.get_weights()])
    assert found[0] == found[1]


def test_save_and_load(tmp_path: Path) -> None:
    optimized = tf_memsaver.optimize(classifier(), batch_size=4, strategy="min_peak")
    optimized.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.memsaver_plan == optimized.memsaver_plan
    assert_identical(train(tf_memsaver.strip(loaded)), train(loaded))


def test_what_is_refused() -> None:
    class Nothing(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = self.add_weight(shape=(4, 4), name="kernel")

        def call(self, x: Any) -> Any:
            return tf.tanh(tf.matmul(tf.tanh(tf.matmul(x, self.kernel)), self.kernel))

    with pytest.raises(UnsupportedModelError, match=r"calls none.*keras.layers.Layer.*granularity='op'"):
        tf_memsaver.optimize(Nothing(), batch_size=4, inputs=tf.TensorSpec((None, 4)))
    with pytest.raises(UnsupportedModelError, match="inputs="):
        tf_memsaver.optimize(Classifier(), batch_size=4)
    plan = tf_memsaver.search_plan(classifier(), batch_size=4)
    with pytest.raises(PlanMismatchError):
        tf_memsaver.apply_plan(own_call.blocks(), plan)


def network(name: str, width: int = 8) -> Any:
    return keras.Sequential(
        [keras.Input((width,)), *(layers.Dense(width, activation="tanh") for _ in range(6))], name=name
    )


class TrainStepAlone(keras.Model):
    """Two networks that only a ``train_step`` brings together."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = network("encoder"), network("decoder")

    def train_step(self, x: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.decoder(self.encoder(x, training=True), training=True) - x))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize("inputs", [None, tf.TensorSpec((None, 8))], ids=["untold", "told"])
def test_networks_inside_a_model_without_a_call(inputs: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"has no call\(\).*Give data= "):
        tf_memsaver.optimize(TrainStepAlone(), batch_size=4, inputs=inputs)
    losses = []
    for optimize in (False, True):
        keras.utils.set_random_seed(0)
        model = TrainStepAlone()
        if optimize:
            model.encoder = tf_memsaver.optimize(model.encoder, batch_size=4096, strategy="min_peak")
            model.decoder = tf_memsaver.optimize(model.decoder, batch_size=4096, strategy="min_peak")
            assert model.encoder.memsaver_plan.recomputed and model.decoder.memsaver_plan.recomputed
        model.compile("adam", jit_compile=False)
        x = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
        losses.append(model.fit(x, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"])
    assert losses[0] == losses[1]


class Wrapper(keras.Model):
    """A head on a whole network, or nothing but the network."""

    def __init__(self, has_head: bool) -> None:
        super().__init__()
        self.base, self.head = network("base", 256), layers.Dense(2) if has_head else None

    def build(self, shape: Any) -> None:
        if self.head is not None:
            self.head.build(shape)

    def call(self, x: Any) -> Any:
        return self.base(x) if self.head is None else self.head(self.base(x))


class Wrapping(layers.Layer):
    """A layer around a layer around a network, which takes two tensors and a third by name."""

    def __init__(self, depth: int, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inner = Wrapping(depth - 1, width) if depth else two_inputs(width)

    def call(self, a: Any, b: Any, *, scale: Any = 1.0, training: Any = None) -> Any:
        if isinstance(self.inner, Wrapping):
            return self.inner(a, b, scale=scale, training=training)
        # A term of the sum of three gradients of a, of which two are inside.
        return a + self.inner([a, b * scale], training=training)


def two_inputs(width: int) -> Any:
    a, b = keras.Input((width,)), keras.Input((width,))
    x = layers.Add()([layers.Dense(width, activation="tanh")(a), layers.Multiply()([a, b])])
    for _ in range(4):
        x = layers.Dropout(0.1)(layers.BatchNormalization()(layers.Dense(width, activation="gelu")(x)))
    return keras.Model([a, b], layers.Dense(width)(x))


class Wrapped(keras.Model):
    """A network in wrappers, one whose statistics stay as they are, and one that ends with the probabilities."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.outer, self.told = layers.Dense(width), Wrapping(2, width), two_inputs(width)
        ends = [layers.Dense(2), layers.Activation("softmax")]
        self.classes = keras.Sequential([keras.Input((width,)), layers.Dense(width, activation="relu"), *ends])

    def call(self, inputs: Any, training: Any = None) -> Any:
        a, b = self.first(inputs["a"]), inputs["b"]
        x = self.outer(a, b, scale=keras.ops.max(a, axis=-1, keepdims=True), training=training)
        return self.classes(x + self.told([x, b], training=False))


def wrapped(width: int = 16) -> Any:
    model = Wrapped(width)
    note_inputs(model, {name: tf.TensorSpec((None, width)) for name in ("a", "b")})
    return model


def test_networks_inside_are_opened() -> None:
    model = wrapped()
    graph = tf_memsaver.capture_graph(model, batch_size=4)
    found = {unit.label: unit.pinned for unit in graph.units if unit.kind != "Python"}
    layer, path = model.outer, []
    while isinstance(layer, Wrapping):
        layer, path = layer.inner, [*path, layer.name]
    networks = ["/".join([*path, layer.name]), model.told.name, model.classes.name]
    inside = {network: [label for label in found if label.startswith(f"{network}/")] for network in networks}
    assert [len(each) for each in inside.values()] == [16, 16, 3] and sum(map(len, inside.values())) == len(found) - 1
    # What it is given is read by others, too, and in it twice: the terms of that gradient leave one by one.
    assert not any(found[label] for label in inside[networks[0]][:-1])
    # What follows is no output of the model, and nothing looks through it to what it is made of.
    assert not found[inside[networks[1]][-1]] and "result of a network" in found[inside[networks[2]][-1]]
    keras.utils.set_random_seed(0)
    assert_trains_alike(model, optimized_one_by_one(model), modes=("graph", "eager"), free_batch=True)


class Headed(keras.Model):
    """Ends in a network whose last layer has an activation, as classifiers do."""

    def __init__(self, classes: int, activation: str) -> None:
        super().__init__()
        self.body = layers.Dense(64, "tanh")
        outputs = layers.Dense(classes, activation=activation)
        self.head = keras.Sequential([layers.Dense(64, "relu"), layers.Dropout(0.2, seed=1), outputs])

    def call(self, x: Any, training: Any = None) -> Any:
        return self.head(self.body(x), training=training)


@pytest.mark.parametrize(
    ("classes", "activation", "loss"),
    [(1, "sigmoid", "binary_crossentropy"), (3, "softmax", "sparse_categorical_crossentropy")],
)
def test_a_network_inside_that_ends_in_an_activation(classes: int, activation: str, loss: str) -> None:
    # Keras's crossentropies read what the activation is made of, which passes through the end of the network.
    keras.utils.set_random_seed(0)
    model = Headed(classes, activation)
    model.compile("sgd", loss, jit_compile=False)
    note_inputs(model, tf.TensorSpec((None, 8)))
    graph = tf_memsaver.capture_graph(model, batch_size=64, granularity="layer")
    units = {graph.units[op.unit].kind for op in graph.ops if op.phase is Phase.BACKWARD and op.unit is not None}
    assert {"Dense", "Dropout"} <= units
    optimized = tf_memsaver.optimize(model, batch_size=64, granularity="layer", strategy="recompute_all")
    assert optimized.memsaver_plan.recomputed
    assert_trains_alike(model, optimized, modes=("graph", "eager"), free_batch=True)


def test_networks_inside_take_less_memory_and_fit_alike() -> None:
    generator = np.random.default_rng(0)
    x = {name: generator.standard_normal((4096, 256)).astype(np.float32) for name in ("a", "b")}
    y = np.arange(4096) % 2
    found, peaks = [], []
    for optimize in (False, True):
        keras.utils.set_random_seed(0)
        model: Any = Wrapped(256)
        model.compile("adam", "sparse_categorical_crossentropy", jit_compile=False)
        note_inputs(model, x)
        if optimize:
            model = tf_memsaver.optimize(model, batch_size=2048, strategy="min_peak")
        history = model.fit(x, y, batch_size=2048, epochs=10, shuffle=False, verbose=0).history
        slots = [np.asarray(variable).tobytes() for variable in model.optimizer.variables]
        found.append((history, slots, [weight.tobytes() for weight in model.get_weights()]))
        peaks.append(tf_memsaver.measure(model, batch_size=2048, isolate=False).activation_bytes)
    assert found[0] == found[1]
    assert peaks[1] < 0.75 * peaks[0]


def test_a_network_that_has_a_plan_is_named() -> None:
    spec = tf.TensorSpec((None, 256))
    model = Wrapper(has_head=True)
    model.base = tf_memsaver.optimize(model.base, batch_size=4096, strategy="min_peak")
    assert model.base.memsaver_plan.recomputed
    for granularity in ("layer", "op"):
        with pytest.raises(UnsupportedModelError, match=r"'base' inside model '.*' already has a plan"):
            tf_memsaver.estimate(model, batch_size=64, granularity=granularity, inputs=spec)


def test_a_network_that_is_called_otherwise_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Masked(Wrapper):
        def call(self, x: Any) -> Any:
            return self.head(self.base(x, mask=tf.reduce_any(x != 0.0, axis=-1)))

    model = Masked(has_head=True)
    model.base.supports_masking = True
    tf_memsaver.optimize(model, batch_size=64, inputs=tf.TensorSpec((None, 256)))
    assert "self.base = tf_memsaver.optimize(self.base, batch_size=...)" in caplog.text


class Flow(keras.Model):
    """Networks with a running total beside them, as a flow's log-determinant is."""

    def __init__(self) -> None:
        super().__init__()
        self.networks = [network(f"network_{number}") for number in range(4)]

    def call(self, x: Any, training: bool = False) -> Any:
        total = 0.0
        for each in self.networks:
            made = each(x, training=training)
            total = total + tf.reduce_mean(made, axis=1)
            x = tf.tanh(x * tf.exp(0.1 * made) + made)
        return x + total[:, None]


def test_a_running_total_does_not_join_the_networks_beside_it() -> None:
    model = Flow()
    note_inputs(model, tf.TensorSpec((None, 8)))
    graph = tf_memsaver.capture_graph(model, batch_size=8)
    cut = {cut.position for cut in graph.cuts}
    for name in (each.name for each in model.networks[:-1]):
        units = [unit.index for unit in graph.units if unit.label.startswith(f"{name}/")]
        assert len(cut.intersection(units)) >= 4, name
    optimized = tf_memsaver.optimize(model, batch_size=8, strategy="recompute_all")
    assert len(optimized.memsaver_plan.recomputed) > 8
    assert_trains_alike(model, optimized)


class MaskedBlock(layers.Layer):
    """Reads a mask several times."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_masking = True
        self.norm, self.attention = layers.LayerNormalization(), layers.MultiHeadAttention(2, 8)

    def call(self, x: Any, mask: Any = None) -> Any:
        y = self.norm(x)
        return x + self.attention(y, y, query_mask=mask, value_mask=mask)


class MaskedBlocks(keras.Model):
    """Blocks that all read one mask."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = [MaskedBlock() for _ in range(3)], layers.Dense(2)

    def call(self, x: Any) -> Any:
        mask = tf.reduce_any(tf.not_equal(x, 0.0), axis=-1)
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.head(x)


def test_a_mask_that_many_blocks_read_pins_none() -> None:
    model = MaskedBlocks()
    note_inputs(model, tf.TensorSpec((None, 5, 16)))
    units = tf_memsaver.capture_graph(model, batch_size=4).units
    assert [unit.pinned for unit in units if unit.kind == "MaskedBlock"] == ["", "", ""]
    keras.utils.set_random_seed(0)
    assert_trains_alike(model, optimized_one_by_one(model), modes=("graph",))
