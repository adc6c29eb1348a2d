"""Plans that cut inside some layers and between others: ``granularity="auto"``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tests.tensorflow.plans import optimized_between_cuts
from tf_memsaver.errors import HintError
from tf_memsaver.plan.plan import Plan
from tools.shared.models import small as models
from tools.shared.models.own_call import Attention
from tools.shared.training import assert_trains_alike

WIDTH, LENGTH = 16, 24


class Residual(keras.Model):
    """Blocks with the sums around them in ``call``."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.attentions = [Attention(name=f"attention_{n}") for n in range(blocks)]
        self.wide = [layers.Dense(2 * WIDTH, activation="gelu", name=f"wide_{n}") for n in range(blocks)]
        self.narrow = [layers.Dense(WIDTH, name=f"narrow_{n}") for n in range(blocks)]
        self.out = layers.Dense(3, name="out")

    def call(self, x: Any, training: Any = None) -> Any:
        for attention, wide, narrow in zip(self.attentions, self.wide, self.narrow, strict=True):
            x = x + attention(x, training=training)
            x = x + narrow(wide(x))
        return self.out(x)


def residual() -> Any:
    """Return a model with a ``call`` of its own, compiled."""
    model = Residual()
    model(np.zeros((2, LENGTH, WIDTH), np.float32))
    model.compile("adam", "mse")
    return model


def functional() -> Any:
    """Return a Functional model, one of whose layers somebody put together."""
    inputs = keras.Input((LENGTH, WIDTH))
    x = layers.Dense(WIDTH, activation="gelu", name="before")(inputs)
    for number in range(2):
        x = layers.Add()([x, Attention(name=f"attention_{number}")(x)])
    model = keras.Model(inputs, layers.Dense(3, activation="relu", name="out")(x))
    model.compile("adam", "mse")
    return model


def data(batch_size: int = 8) -> Any:
    numbers = np.random.default_rng(0)
    x = numbers.standard_normal((2 * batch_size + 3, LENGTH, WIDTH)).astype(np.float32)
    y = numbers.standard_normal((len(x), LENGTH, 3)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)


def fitted(build: Callable[[], Any], **options: Any) -> tuple[list[float], list[Any], Any]:
    """Return the losses of some steps of ``fit``, all variables behind them, and the model; plain without options."""
    keras.utils.set_random_seed(0)
    model = build()
    if options:
        model = tf_memsaver.optimize(model, data=data(), **options)
    losses = model.fit(data(), epochs=3, shuffle=False, verbose=0).history["loss"]
    return losses, [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)], model


@pytest.mark.parametrize("build", [residual, functional])
def test_fit_has_the_bits_of_the_plain_step(build: Callable[[], Any]) -> None:
    losses, variables, _ = fitted(build)
    found, its, model = fitted(build, granularity="auto", strategy="min_peak")
    assert found == losses
    assert all(np.array_equal(a, b) for a, b in zip(variables, its, strict=True))
    assert model.memsaver_plan.opened and model.memsaver_plan.recomputed


@pytest.mark.parametrize("build", [residual, functional])
@pytest.mark.parametrize("free_batch", [True, False], ids=["free", "known"])
def test_segments_between_all_cuts_train_alike(build: Callable[[], Any], free_batch: bool) -> None:
    keras.utils.set_random_seed(0)
    model = build()
    tf_memsaver.trace(model, data=data())  # what the model is called with is remembered
    optimized = optimized_between_cuts(model, length=1, granularity="auto")
    assert optimized.memsaver_plan.opened
    assert_trains_alike(model, optimized, modes=("graph",), free_batch=free_batch)


def test_a_plan_is_applied_where_layers_have_other_names() -> None:
    def unnamed() -> Any:
        inputs = keras.Input((LENGTH, WIDTH))
        model = keras.Model(inputs, layers.Dense(3)(Attention()(Attention()(inputs))))
        model.compile("adam", "mse")
        return model

    plan = tf_memsaver.search_plan(unnamed(), data=data(), granularity="auto", strategy="min_peak")
    other = unnamed()
    assert plan.opened and not {layer.name for layer in other.layers}.issuperset(plan.opened)
    applied = tf_memsaver.apply_plan(other, plan)
    assert_trains_alike(other, applied, modes=("graph",))


class Doubling(layers.Layer):
    """A sum of a tensor with itself: a residual around a Dropout that is off."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense = [layers.Dense(WIDTH, activation="gelu") for _ in range(2)]
        self.drop = layers.Dropout(0.0)

    def call(self, x: Any, training: Any = None) -> Any:
        x = self.dense[0](x)
        return self.dense[1](keras.ops.gelu(x + self.drop(x, training=training)))


def doubling() -> Any:
    """Return such sums in layers that somebody wrote, and between layers."""
    inputs = keras.Input((LENGTH, WIDTH))
    x = inputs
    for _ in range(2):
        x = layers.Dense(WIDTH, activation="gelu")(Doubling()(x))
        x = layers.Dense(WIDTH)(layers.Activation("gelu")(layers.Add()([x, x])))
    model = keras.Model(inputs, layers.Dense(3)(x))
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize("granularity", ["layer", "auto", "op"])
def test_a_tensor_that_is_added_to_itself(granularity: str) -> None:
    losses, variables, _ = fitted(doubling)
    found, its, model = fitted(doubling, granularity=granularity, strategy="recompute_all")
    assert found == losses
    assert all(np.array_equal(a, b) for a, b in zip(variables, its, strict=True))
    assert len(model.memsaver_plan.recomputed) >= 6


class DroppedTwice(layers.Layer):
    """A residual block that calls one Dropout twice, as many do: the second call reads the seed that the first set."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.wide = layers.Dense(8 * WIDTH, activation="gelu")
        self.narrow = layers.Dense(WIDTH)
        self.drop = layers.Dropout(0.1)

    def call(self, x: Any, training: Any = None) -> Any:
        inner = self.drop(self.wide(x), training=training)
        return x + self.drop(self.narrow(inner), training=training)


def dropped_twice() -> Any:
    """Return a model of such blocks."""
    inputs = keras.Input((LENGTH, WIDTH))
    x = inputs
    for number in range(3):
        x = DroppedTwice(name=f"block_{number}")(x)
    model = keras.Model(inputs, layers.Dense(3)(x))
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize("granularity", ["auto", "op"])
def test_a_dropout_that_is_called_twice_is_recomputed(granularity: str) -> None:
    """Nothing was: what set the seed between two calls was in the way."""
    losses, variables, _ = fitted(dropped_twice)
    found, its, model = fitted(dropped_twice, granularity=granularity, strategy="min_peak")
    assert found == losses
    assert all(np.array_equal(a, b) for a, b in zip(variables, its, strict=True))
    plan = model.memsaver_plan
    assert not any(label.startswith("block") and "dense" in label for label in plan.pinned)
    assert sum("drop" in label for label in plan.recomputed) >= 2 * 2  # not of the last block
    assert plan.peak_bytes < 0.6 * plan.plain_peak_bytes


class Flow(keras.Model):
    """Layers that scale what they read, with the sum of the logarithms of the scales, from the first to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = [layers.Dense(4 * WIDTH, "gelu", name=f"wide_{n}") for n in range(3)]
        self.scales = [layers.Dense(WIDTH, "tanh", name=f"scale_{n}") for n in range(3)]
        self.out = layers.Dense(3, name="out")

    def call(self, x: Any) -> Any:
        total = 0.0
        for wide, scale in zip(self.wide, self.scales, strict=True):
            logarithms = scale(wide(x))
            x = x * tf.exp(logarithms)
            total = total + tf.reduce_sum(logarithms, [1, 2])
        return self.out(x) * tf.sigmoid(total)[:, None, None]


def flow() -> Any:
    """Return it, compiled."""
    model = Flow()
    model(np.zeros((2, LENGTH, WIDTH), np.float32))
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize("granularity", ["auto", "op"])
def test_segments_end_between_the_terms_of_a_running_total_of_numbers(granularity: str) -> None:
    """It held all layers together, from the first term to the last."""
    losses, variables, _ = fitted(flow)
    found, its, model = fitted(flow, strategy="min_peak", granularity=granularity)
    assert found == losses
    assert all(np.array_equal(a, b) for a, b in zip(variables, its, strict=True))
    plan = model.memsaver_plan
    assert all(any(f"wide_{number}" in label for label in plan.recomputed) for number in range(3))
    assert len(plan.segments) > 3


def of_each_image() -> Any:
    """Return a model that runs a network on each of four images, as people do for videos, compiled."""
    x = image = keras.Input((LENGTH // 4, WIDTH))
    for number in range(2):
        x = layers.Conv1D(WIDTH, 3, padding="same", name=f"conv_{number}")(x)
        x = layers.ReLU()(layers.BatchNormalization(name=f"norm_{number}")(x))
    network = keras.Model(image, layers.GlobalAveragePooling1D()(x))
    inputs = keras.Input((LENGTH, WIDTH))
    frames = layers.TimeDistributed(network, name="frames")(layers.Reshape((4, LENGTH // 4, WIDTH))(inputs))
    y = layers.Dense(3 * LENGTH)(layers.GRU(8)(frames))
    model = keras.Model(inputs, layers.Reshape((LENGTH, 3))(y))
    model.compile("adam", "mse")
    return model


def test_a_network_that_is_run_on_each_image_is_taken_apart() -> None:
    """It was one layer, and each of its norms could not be recomputed, since the next image reads what it updates."""
    losses, variables, _ = fitted(of_each_image)
    found, its, model = fitted(of_each_image, strategy="min_peak")
    assert found == losses
    assert all(np.array_equal(a, b) for a, b in zip(variables, its, strict=True))
    plan = model.memsaver_plan
    assert "frames" in plan.opened and sum("norm" in label for label in plan.recomputed) >= 4
    assert plan.peak_bytes < plan.plain_peak_bytes


def test_eager_steps_are_said_to_differ(caplog: pytest.LogCaptureFixture) -> None:
    model = residual()
    optimized = tf_memsaver.optimize(model, data=data(), granularity="auto")
    assert optimized.memsaver_plan.opened
    x, y = next(iter(data()))
    with caplog.at_level("WARNING", logger="absl"):
        optimized(x, training=True)
        assert not caplog.records
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(optimized(x, training=True) - y))
            tape.gradient(loss, optimized.trainable_variables)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "in eager steps" in said and "granularity='layer'" in said


def test_what_a_call_computes_between_layers_is_planned() -> None:
    model = residual()
    by_layers = tf_memsaver.trace(model, data=data(), granularity="layer").plan(strategy="min_peak")
    traced = tf_memsaver.trace(model, data=data(), granularity="auto")
    plan = traced.plan(strategy="min_peak")
    assert plan.opened[0] == "call()" and not by_layers.opened
    sums = {unit.label for unit in traced.graph.units if unit.kind == "AddV2" and "/" not in unit.label}
    assert len(sums) == 4
    assert sums.intersection(plan.recomputed)
    assert plan.peak_bytes < by_layers.peak_bytes


def test_layers_are_opened_where_that_pays_and_stay_whole_elsewhere() -> None:
    graph = tf_memsaver.capture_graph(functional(), batch_size=4, granularity="auto")
    labels = [unit.label for unit in graph.units]
    assert {"attention_0", "attention_0/attend", "before"} <= set(graph.opened)
    assert "out" not in graph.opened and "attention_0/drop" not in graph.opened
    assert labels.count("out") == labels.count("attention_0/attend/query") == labels.count("attention_0/drop") == 1
    assert not any(label.startswith(("out/", "attention_0/drop/", "attention_0/attend/query/")) for label in labels)
    operations = tf_memsaver.capture_graph(functional(), batch_size=4, granularity="op")
    assert len(graph.units) < len(operations.units) / 2


def test_attention_and_activations_in_layers_of_keras_are_opened() -> None:
    """By layers, a ViT of Keras's own layers kept a third more, and a U-Net with silu took longer."""
    model = models.small_vit()
    model.compile("adam", "mse")
    graph = tf_memsaver.capture_graph(model, batch_size=4)
    kinds = {type(model.get_layer(name)).__name__ for name in graph.opened if "/" not in name}
    assert kinds == {"MultiHeadAttention", "Dense"}
    model.compile("adam", "mse", jit_compile=True)
    graph = tf_memsaver.capture_graph(model, batch_size=4)
    assert graph.opened == () and "XLA compiles" in graph.note


def _squeezed() -> Any:
    """Return a model with a silu after a product where there is next to nothing, as in EfficientNet."""
    x = inputs = keras.Input((32, 32, 3))
    for _ in range(2):
        x = layers.ReLU()(layers.Conv2D(8, 3, padding="same")(x))
        weights = layers.Dense(8, "sigmoid")(layers.Dense(4, "silu")(layers.GlobalAveragePooling2D(keepdims=True)(x)))
        x = layers.Multiply()([x, weights])
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


@pytest.mark.parametrize("build", [models.residual_net, models.unet, _squeezed], ids=lambda build: build.__name__)
def test_where_layers_of_keras_keep_nothing_inside_they_are_planned_as_layers(build: Callable[[], Any]) -> None:
    model = build()
    model.compile("adam", "mse")
    graph = tf_memsaver.capture_graph(model, batch_size=4, granularity="auto")
    assert graph == tf_memsaver.capture_graph(model, batch_size=4, granularity="layer")
    assert graph.opened == () and graph.note == ""


class OwnStep(Residual):
    """A model that says itself what a step does."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def compiled_with(**options: Any) -> Any:
    model = functional()
    model.compile("adam", "mse", **options)
    return model


def not_compiled() -> Any:
    model = functional()
    return keras.Model(model.input, model.output)


def with_an_own_step(kind: Any = OwnStep) -> Any:
    model = kind()
    model(np.zeros((2, LENGTH, WIDTH), np.float32))
    model.compile("adam", "mse")
    return model


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (not_compiled, "not compiled"),
        (lambda: compiled_with(run_eagerly=True), "eager"),
        (lambda: compiled_with(jit_compile=True), "XLA"),
        (with_an_own_step, "train_step"),
    ],
)
def test_layers_are_whole_where_operations_would_not_do_and_the_plan_says_why(build: Any, reason: str) -> None:
    model = build()
    spec = tf.TensorSpec((None, LENGTH, WIDTH)) if isinstance(model, Residual) else None
    plan = tf_memsaver.search_plan(model, batch_size=4, granularity="auto", inputs=spec)
    assert plan.opened == ()
    assert reason in plan.note and reason in str(plan)
    assert plan.labels == tf_memsaver.search_plan(model, batch_size=4, granularity="layer").labels


@pytest.mark.parametrize(
    ("settings", "reason"), [({"run_eagerly": True}, "eager"), ({"jit_compile": True}, "XLA")], ids=["eager", "xla"]
)
def test_networks_in_a_step_of_ones_own_are_whole_where_operations_would_not_do(settings: Any, reason: str) -> None:
    model = with_an_own_step()
    model.compile("adam", "mse", **settings)
    plan = tf_memsaver.search_plan(model, data=data(), granularity="auto")
    assert plan.opened == () and reason in plan.note


class TwoWays(OwnStep):
    """A step that calls one network as ``fit`` does, and then otherwise."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_mean((self(x, training=training) - y) ** 2) for training in (True, False))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class Penalised(OwnStep):
    """A step with a penalty on gradients in one of its calls."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                made = tf.reduce_sum(self(x, training=True))
            loss = tf.reduce_mean(inner.gradient(made, x) ** 2) + tf.reduce_mean((self(x, training=True) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


@pytest.mark.parametrize(
    ("kind", "note"),
    [(OwnStep, ""), (TwoWays, "is not always called alike"), (Penalised, "is differentiated twice in another call")],
)
def test_networks_in_a_step_of_ones_own_are_taken_apart_where_it_calls_them_in_one_way(
    kind: Any, note: str, tmp_path: Any
) -> None:
    def build() -> Any:
        return with_an_own_step(kind)

    losses, variables, _ = fitted(build)
    found, its, model = fitted(build, granularity="auto", strategy="min_peak")
    assert found == losses
    assert all(np.array_equal(a, b) for a, b in zip(variables, its, strict=True))
    plan = model.memsaver_plan
    assert plan.recomputed and bool(plan.opened) is not bool(note)
    assert note in plan.note
    # In another copy the network has another name.
    plan.save(tmp_path / "plan.json")
    applied = tf_memsaver.apply_plan(build(), Plan.load(tmp_path / "plan.json"), data=data())
    assert applied.memsaver_plan.recomputed_units == plan.recomputed_units


class Messages(layers.Layer):
    """Rows of a product that are looked up along some axis, and added to the product (a graph convolution)."""

    def __init__(self, axis: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.axis = axis
        self.wide, self.narrow = layers.Dense(4 * WIDTH, activation="gelu"), layers.Dense(WIDTH)

    def call(self, x: Any) -> Any:
        x = self.wide(x)
        sources = tf.range(tf.shape(x)[self.axis])[::-1]
        return self.narrow(tf.gather(x, sources, axis=self.axis) * tf.nn.sigmoid(x))


@pytest.mark.parametrize(("axis", "is_whole"), [(0, True), (1, False)])
def test_a_layer_that_adds_to_the_sparse_gradient_of_what_it_makes_is_whole(axis: int, is_whole: bool) -> None:
    def build() -> Any:
        inputs = keras.Input((LENGTH, WIDTH))
        x = inputs
        for number in range(3):
            x = layers.Add()([x, Attention(name=f"attention_{number}")(Messages(axis, name=f"messages_{number}")(x))])
        model = keras.Model(inputs, layers.Dense(3)(x))
        model.compile("adam", "mse")
        return model

    losses, variables, _ = fitted(build)
    found, its, model = fitted(build, granularity="auto", strategy="min_peak")
    assert found == losses
    assert all(np.array_equal(a, b) for a, b in zip(variables, its, strict=True))
    plan = model.memsaver_plan
    assert ("messages_1" not in plan.opened) is is_whole
    assert any(label.startswith("messages_1") for label in plan.recomputed)


def test_a_plan_says_what_it_chose_and_is_read_back(tmp_path: Any) -> None:
    model = functional()
    plan = tf_memsaver.search_plan(model, data=data(), granularity="auto", strategy="min_peak")
    assert "; by operations: before, attention_0, attention_0/attend and 2 more" in str(plan)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert tf_memsaver.apply_plan(functional(), loaded).memsaver_plan == plan
    # The plan has been made, so that what would speak against it for a new one does not matter.
    assert tf_memsaver.apply_plan(not_compiled(), loaded).memsaver_plan == plan


def test_hints_name_layers_that_were_taken_apart() -> None:
    traced = tf_memsaver.trace(functional(), data=data(), granularity="auto")
    kept = traced.plan(strategy="min_peak", keep="attention_0")
    free = traced.plan(strategy="min_peak")
    inside = [label for label in free.labels if label.startswith("attention_0/")]
    assert set(inside).intersection(free.recomputed)
    assert not set(inside).intersection(kept.recomputed)
    with pytest.raises(HintError):
        traced.plan(keep="attention_9")


def test_frozen_layers_are_cut_alike() -> None:
    keras.utils.set_random_seed(0)
    model = functional()
    optimized = optimized_between_cuts(model, granularity="auto")
    model.get_layer("before").trainable = False
    assert_trains_alike(model, optimized, modes=("graph",), free_batch=True)


def test_the_advice_for_a_frozen_backbone_says_that_it_is_frozen() -> None:
    x = inputs = keras.Input((16, 16, 3))
    for _ in range(4):
        x = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    backbone = keras.Model(inputs, layers.GlobalAveragePooling2D()(x))
    inputs = keras.Input((16, 16, 3))
    model = keras.Model(inputs, layers.Dense(2)(backbone(inputs)))
    assert "no gradient" not in tf_memsaver.search_plan(model, batch_size=64).advice
    backbone.trainable = False
    found = tf_memsaver.search_plan(model, batch_size=64).advice
    assert "since no gradient is taken through 6 of 7 layers" in found
    assert "Try optimizing again once layers are unfrozen" in found


class Normed(layers.Layer):
    """A layer of somebody's own, which normalizes batches."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inner = keras.Sequential(
            [layers.Dense(WIDTH), layers.BatchNormalization(), layers.ReLU(), layers.Dense(WIDTH)]
        )

    def call(self, x: Any) -> Any:
        return self.inner(x)


@pytest.mark.parametrize("granularity", ["auto", "op", "layer"])
@pytest.mark.parametrize("frozen_first", [False, True])
def test_layers_are_frozen_or_unfrozen_and_compiled_again(
    granularity: str, frozen_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A frozen BatchNorm runs other operations: the second ``fit`` of a transfer learning ended in an error."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((LENGTH, WIDTH))
    for number in range(3):
        x = Normed(name=f"normed_{number}")(x)
    backbone = keras.Model(inputs, x, name="backbone")
    inputs = keras.Input((LENGTH, WIDTH))
    model = keras.Model(inputs, layers.Dense(3, name="head")(backbone(inputs)))
    model.compile("adam", "mse", jit_compile=False)
    backbone.trainable = not frozen_first
    optimized = optimized_between_cuts(model, granularity=granularity)
    backbone.trainable = frozen_first
    assert_trains_alike(model, optimized, modes=("graph",), free_batch=True)
    assert ("frozen or unfrozen since" in caplog.text) is (granularity != "layer")
    for each in (model, optimized):
        each.compile("adam", "mse", jit_compile=False)
        each.fit(np.ones((4, LENGTH, WIDTH)), np.ones((4, LENGTH, 3)), verbose=0)
    assert caplog.text.count("Optimize it again after compile()") == 1


class Switched(layers.Layer):
    """Runs one of two branches, as the size of the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = layers.Dense(2 * WIDTH, activation="gelu"), layers.Dense(WIDTH)

    def call(self, x: Any) -> Any:
        h = keras.ops.switch(keras.ops.shape(x)[0] % 2, [lambda h: h, lambda h: h * 1.5], self.wide(x))
        return x + self.narrow(h)


@pytest.mark.parametrize("granularity", ["auto", "op"])
def test_layers_with_several_branches(granularity: str) -> None:
    """The names of the branches are of each trace alone: a plan did not fit the trace that it was applied to."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((LENGTH, WIDTH))
    model = keras.Model(inputs, layers.Dense(3)(Switched()(Switched()(inputs))))
    model.compile("adam", "mse", jit_compile=False)
    optimized = tf_memsaver.optimize(model, batch_size=4, granularity=granularity, strategy="recompute_all")
    assert_trains_alike(model, optimized, modes=("graph",), free_batch=True)


class Translating(keras.Model):
    """One embedding for what an encoder reads and what a decoder reads, or one for each."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.tokens = layers.Embedding(20, WIDTH)
        self.others = self.tokens if shared else layers.Embedding(20, WIDTH)
        self.encoder, self.decoder = Attention(name="encoder"), Attention(name="decoder")

    def call(self, x: Any, training: Any = None) -> Any:
        encoded = self.encoder(self.tokens(x), training=training)
        return self.decoder(self.others(x + 1) + encoded, training=training)


@pytest.mark.parametrize("shared", [False, True])
def test_an_embedding_that_is_looked_up_again_is_planned_by_layers(shared: bool) -> None:
    """Parts of its sparse gradient are added as they come, and cuts between them change that (KerasHub's BART)."""
    model = Translating(shared)
    model(np.zeros((2, LENGTH), np.int32))
    model.compile("adam", "mse", jit_compile=False)
    plan = tf_memsaver.search_plan(model, batch_size=2, inputs=tf.TensorSpec((None, LENGTH), tf.int32))
    assert bool(plan.opened) is not shared
    assert ("looks up one embedding several times" in plan.note) is shared


class Neighbours(layers.Layer):
    """Passes messages along a ring, as graph networks do: it looks up rows of what it is given, not of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = layers.Dense(2 * WIDTH, activation="gelu"), layers.Dense(WIDTH)

    def call(self, x: Any) -> Any:
        arriving = tf.gather(x, [(place + 1) % LENGTH for place in range(LENGTH)], axis=1)
        return x + self.narrow(self.wide(arriving))


def test_rows_of_activations_are_looked_up_in_plans_by_operations() -> None:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((LENGTH, WIDTH))
    passing = Neighbours()
    model = keras.Model(inputs, layers.Dense(3)(passing(passing(inputs))))
    model.compile("adam", "mse", jit_compile=False)
    optimized = tf_memsaver.optimize(model, batch_size=4, strategy="recompute_all")
    assert optimized.memsaver_plan.opened and not optimized.memsaver_plan.note
    assert_trains_alike(model, optimized, modes=("graph",), free_batch=True)


class Refined(layers.Layer):
    """Runs a Dense of its own in a loop over rows, or in a branch."""

    def __init__(self, runs: Callable[[Any, Any], Any], activation: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.runs, self.norm, self.dense = runs, layers.LayerNormalization(), layers.Dense(WIDTH, activation)

    def build(self, shape: Any) -> None:
        self.norm.build(shape)
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        return self.runs(lambda x: x + self.dense(self.norm(x)), x)


def three_times(step: Any, x: Any) -> Any:
    return tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, step(x)), (0, x), maximum_iterations=3)[1]


def each_sample(step: Any, x: Any) -> Any:
    return tf.map_fn(step, x)


def in_a_branch(step: Any, x: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) > -1e9, lambda: step(x), lambda: x)


class OfRefined(keras.Model):
    """Calls such layers, with a sum between them."""

    def __init__(self, runs: Callable[[Any, Any], Any], activation: str) -> None:
        super().__init__()
        self.blocks = [Refined(runs, activation, name=f"block_{number}") for number in range(2)]
        self.out = layers.Dense(3, name="out")

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


@pytest.mark.parametrize(
    ("runs", "activation", "is_recomputed"),
    [
        (three_times, "gelu", True),
        (each_sample, "tanh", True),
        (each_sample, "gelu", False),
        (in_a_branch, "tanh", False),
    ],
)
def test_layers_with_loops_are_recomputed_whole(runs: Any, activation: str, is_recomputed: bool) -> None:
    """By operations none was. A branch, or a GELU of a product of rows, may round otherwise in a first run."""

    def build() -> Any:
        model = OfRefined(runs, activation)
        model(np.zeros((2, LENGTH, WIDTH), np.float32))
        model.compile("adam", "mse", jit_compile=False)
        return model

    losses, variables, _ = fitted(build)
    found, ours, model = fitted(build, strategy="recompute_all")
    assert [f"block_{n}" in str(model.memsaver_plan.recomputed) for n in range(2)] == [is_recomputed] * 2
    assert ("'block_0' runs a loop" in model.memsaver_plan.note) == is_recomputed
    assert found == losses and all(map(np.array_equal, variables, ours))
