"""Models with a ``train_step`` of their own, planned as that step: networks and tapes are heard."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from collections import Counter
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tf_memsaver import api
from tf_memsaver.api import asked
from tf_memsaver.errors import SecondDerivativeError, UnsupportedModelError
from tf_memsaver.ir.graph import Graph, Phase
from tf_memsaver.ir.text import dump, parse
from tf_memsaver.judge.prepared import Prepared
from tf_memsaver.program.boundaries import READS_LOGITS
from tf_memsaver.program.data import Batch
from tf_memsaver.program.networks import heard_calls
from tf_memsaver.program.signature import note_batch, trained_on

WIDTH = 8
X = np.random.default_rng(0).standard_normal((192, WIDTH)).astype(np.float32)


def network(name: str) -> Any:
    """A chain of layers with dropout and state."""
    steps = [
        step
        for _ in range(3)
        for step in (layers.Dense(WIDTH, "gelu"), layers.BatchNormalization(), layers.Dropout(0.2, seed=3))
    ]
    return keras.Sequential([keras.Input((WIDTH,)), *steps, layers.Dense(WIDTH)], name=name)


def data() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(X).batch(64)


class Trained(keras.Model):
    """Networks that only ``loss_of`` brings together."""

    def __init__(self, **networks: Any) -> None:
        super().__init__()
        for name, each in networks.items():
            setattr(self, name, each)
        self.tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker]

    def loss_of(self, x: Any) -> Any:
        raise NotImplementedError

    def train_step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss_of(x)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class Pair(Trained):
    """An encoder and a decoder, with code between them."""

    def loss_of(self, x: Any) -> Any:
        hidden = self.encoder(x, training=True)
        made = self.decoder(hidden + 0.1 * tf.sin(hidden), training=True)
        return tf.reduce_mean((made - x) ** 2) + 0.01 * tf.reduce_mean(hidden**2)


class Siamese(Trained):
    """One network that is called three times."""

    def loss_of(self, x: Any) -> Any:
        a, b, c = (self.network(each, training=True) for each in (x, x + 1.0, -x))
        return tf.reduce_mean((a - b) ** 2 - 0.1 * (a - c) ** 2)


class Distilled(Trained):
    """A frozen teacher inside the tape."""

    def loss_of(self, x: Any) -> Any:
        return tf.reduce_mean((self.student(x, training=True) - self.teacher(x, training=False)) ** 2)


class InLists(Trained):
    """Networks in a list, in a dict and in a function's closure, two of them with a ``call`` of their own."""

    def loss_of(self, x: Any) -> Any:
        y = self.parts[0](x)
        y = self.by_name["second"](y, training=True)
        return tf.reduce_mean(self.closure(y) ** 2)


class Adversaries(Trained):
    """Two tapes, one after the other, with an update between them."""

    def train_step(self, x: Any) -> Any:
        fake = self.generator(x)
        with tf.GradientTape() as tape:
            d_loss = tf.reduce_mean(self.critic(fake, training=True) - self.critic(x, training=True))
        weights = self.critic.trainable_variables
        self.optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(self.critic(self.generator(x, training=True), training=True))
        weights = self.generator.trainable_variables
        self.second.apply(tape.gradient(g_loss, weights), weights)
        return {"d": d_loss, "g": g_loss}


class Attacked(Trained):
    """A network on inputs that the gradient of a tape before it has changed (FGSM)."""

    def train_step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_mean(self.network(x, training=False) ** 2)
        changed = x + 0.1 * tf.sign(tape.gradient(loss, x))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.network(tf.concat([x, changed], 0), training=True) - 1.0) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class UnfrozenLate(Trained):
    """A critic that is frozen while its tape records, and trained all the same (GauGAN)."""

    def train_step(self, x: Any) -> Any:
        fake = self.generator(x)
        with tf.GradientTape() as tape:
            d_loss = tf.reduce_mean(self.critic(fake, training=True) - self.critic(x, training=True))
        self.critic.trainable = True
        weights = self.critic.trainable_variables
        self.optimizer.apply(tape.gradient(d_loss, weights), weights)
        self.critic.trainable = False
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(self.critic(self.generator(x, training=True), training=True))
        weights = self.generator.trainable_variables
        self.second.apply(tape.gradient(g_loss, weights), weights)
        return {"d": d_loss, "g": g_loss}


class TwoTapesAtOnce(Trained):
    """Two tapes that record the same calls."""

    def train_step(self, x: Any) -> Any:
        with tf.GradientTape() as first, tf.GradientTape() as second:
            fake = self.critic(self.generator(x, training=True), training=True)
            g_loss = -tf.reduce_mean(fake)
            d_loss = tf.reduce_mean(fake**2) - tf.reduce_mean(self.critic(x, training=True))
        of_g, of_d = self.generator.trainable_variables, self.critic.trainable_variables
        g, d = first.gradient(g_loss, of_g), second.gradient(d_loss, of_d)
        self.second.apply(g, of_g)
        self.optimizer.apply(d, of_d)
        return {"d": d_loss, "g": g_loss}


class Penalized(Trained):
    """A gradient of a gradient, through one of three calls."""

    def loss_of(self, x: Any) -> Any:
        between = 0.5 * x
        with tf.GradientTape() as tape:
            tape.watch(between)
            judged = self.critic(between, training=True)
        slopes = tape.gradient(judged, between)
        return tf.reduce_mean(self.critic(x, training=True)) + tf.reduce_mean((slopes - 1.0) ** 2)


class Persistent(Trained):
    """One tape that gives two gradients."""

    def train_step(self, x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            hidden = self.encoder(x, training=True)
            one = tf.reduce_mean((self.decoder(hidden, training=True) - x) ** 2)
            other = tf.reduce_mean(hidden**2)
        self.optimizer.apply(tape.gradient(one, self.decoder.trainable_variables), self.decoder.trainable_variables)
        self.second.apply(tape.gradient(other, self.encoder.trainable_variables), self.encoder.trainable_variables)
        return {"one": one, "other": other}


class Listed(Trained):
    """A network from tokens: its first layer has a sparse gradient."""

    def loss_of(self, x: Any) -> Any:
        tokens = tf.cast(tf.abs(x) * 3, tf.int32)
        return tf.reduce_mean(self.network(tokens, training=True) ** 2)


class Captions(Trained):
    """A network from tokens that is trained twice, by a tape each."""

    def train_step(self, x: Any) -> Any:
        for tokens in (tf.cast(tf.abs(x) * 3, tf.int32), tf.cast(tf.abs(x) * 2, tf.int32)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self.network(tokens, training=True) ** 2)
            weights = self.network.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def compiled(model: Any) -> Any:
    model.compile(keras.optimizers.Adam(0.01), jit_compile=False)
    model.second = keras.optimizers.SGD(0.1, momentum=0.9)
    return model


def pair() -> Any:
    return compiled(Pair(encoder=network("encoder"), decoder=network("decoder")))


def siamese() -> Any:
    return compiled(Siamese(network=network("network")))


def distilled() -> Any:
    model = Distilled(student=network("student"), teacher=network("teacher"))
    model.teacher.trainable = False
    return compiled(model)


class Own(keras.Model):
    """A network with a ``call`` of its own."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.blocks = [keras.Sequential([layers.Dense(16, "relu"), layers.Dense(WIDTH)]) for _ in range(4)]

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = tf.sin(x) + block(x)
        return x


def in_lists() -> Any:
    third = network("third")
    model = InLists(parts=[Own("first")], by_name={"second": network("second")}, third=third)
    model.closure = lambda x: third(x, training=True)
    return compiled(model)


class Mixing(layers.Layer):
    """A block that gets a second tensor by name."""

    def __init__(self, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.up, self.down = layers.Dense(4 * width, "gelu"), layers.Dense(width)
        self.norm, self.drop = layers.BatchNormalization(), layers.Dropout(0.2, seed=3)

    def call(self, x: Any, *, context: Any = None, training: Any = None) -> Any:
        y = self.drop(self.norm(self.down(self.up(x)), training=training), training=training)
        return x + (y if context is None else y * tf.tanh(context))


class Chain(layers.Layer):
    """Blocks, and a network behind them."""

    def __init__(self, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.blocks, self.end = [Mixing(width) for _ in range(3)], network("end") if width == WIDTH else None

    def call(self, x: Any, training: Any = None) -> Any:
        for block in self.blocks:
            x = block(x, training=training)
        return x if self.end is None else self.end(x, training=training)


class Several(keras.Model):
    """A network that takes several tensors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = [Mixing(width) for _ in range(2)]

    def call(self, a: Any, b: Any, *, scale: Any = 1.0, training: Any = None) -> Any:
        return self.blocks[1](self.blocks[0](a * scale, context=b, training=training), context=a, training=training)


class Layered(Trained):
    """Layers that the step calls directly."""

    def loss_of(self, x: Any) -> Any:
        hidden = self.chain(x, training=True)
        made = self.mixing(hidden, context=tf.sin(hidden), training=True)
        made = self.several(made, hidden, scale=tf.reduce_max(tf.abs(x), axis=-1, keepdims=True), training=True)
        return tf.reduce_mean((self.dense(made) - x) ** 2) + 0.01 * tf.reduce_mean(hidden**2)


def layered(width: int = WIDTH) -> Any:
    parts = {"chain": Chain(width), "mixing": Mixing(width), "several": Several(width)}
    return compiled(Layered(**parts, dense=layers.Dense(width, "tanh", name="dense")))


class Untold(layers.Layer):
    """A block that is not told whether it trains: Keras drops ``training``, which steps give it all the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = layers.Dense(4 * width, "gelu"), layers.Dense(width, "tanh")

    def call(self, x: Any) -> Any:
        return self.down(self.up(x))


class Captioned(Trained):
    """Blocks on features that nothing trained has made, and that are read elsewhere, too."""

    def train_step(self, x: Any) -> Any:
        features = self.features(x)
        with tf.GradientTape() as tape:
            made = self.untold(self.mixing(features, context=features, training=True), training=True)
            loss = tf.reduce_mean((self.dense(made) - features) ** 2)
        variables = [v for part in (self.mixing, self.untold, self.dense) for v in part.trainable_variables]
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def captioned() -> Any:
    parts = {"mixing": Mixing(WIDTH), "untold": Untold(WIDTH), "dense": layers.Dense(WIDTH, "tanh", name="dense")}
    return compiled(Captioned(features=network("features"), **parts))


def test_what_no_gradient_is_taken_of_may_be_read_as_often_as_one_likes() -> None:
    first, *others = heard(captioned()).values()
    assert first == "no gradient is taken through it" and set(others) == {""}


def test_layers_that_a_step_calls_are_units() -> None:
    model = layered()
    graph = tf_memsaver.capture_graph(model, data=data())
    units = [unit for unit in graph.units if unit.kind != "Python"]
    blocks = [f"{model.chain.name}/{block.name}" for block in model.chain.blocks]
    others = [f"{model.several.name}/{block.name}" for block in model.several.blocks]
    # What it is given is read by others, too, and in it twice: the terms of that gradient leave one by one.
    assert not heard(model)[model.mixing.name]
    assert [unit.label for unit in units if unit.kind == "Mixing"] == [*blocks, model.mixing.name]
    # A network is opened as others are, with several arguments, too: what is inside of its blocks are units.
    assert all(any(unit.label.startswith(f"{block}/dense") for unit in units) for block in others)
    end = f"{model.chain.name}/end/"
    inside = {unit.label.removeprefix(end).split("/")[0].split("#")[0] for unit in units if end in unit.label}
    assert inside >= {layer.name for layer in model.chain.end.layers}
    assert units[-1].label == "dense"


def test_layers_that_a_step_calls_take_less_memory() -> None:
    keras.utils.set_random_seed(0)
    model, given = layered(256), np.zeros((1024, 256), np.float32)
    optimized = tf_memsaver.optimize(model, data=given)
    plan = optimized.memsaver_plan
    plain, saved = (tf_memsaver.measure(each, data=given, isolate=False, steps=3) for each in (model, optimized))
    assert plan.peak_bytes < 0.8 * plan.plain_peak_bytes
    assert saved.activation_bytes < 0.8 * plain.activation_bytes


def adversaries() -> Any:
    return compiled(Adversaries(generator=network("generator"), critic=network("critic")))


def attacked() -> Any:
    return compiled(Attacked(network=network("network")))


def unfrozen_late() -> Any:
    model = compiled(UnfrozenLate(generator=network("generator"), critic=network("critic")))
    model.critic.trainable = False
    return model


def two_tapes_at_once() -> Any:
    return compiled(TwoTapesAtOnce(generator=network("generator"), critic=network("critic")))


def penalized() -> Any:
    return compiled(Penalized(critic=network("critic")))


def persistent() -> Any:
    return compiled(Persistent(encoder=network("encoder"), decoder=network("decoder")))


def listed(cls: Any = Listed) -> Any:
    steps = [layers.Dense(32, "gelu", name=f"dense{number}") for number in range(5)]
    tokens = [keras.Input((WIDTH,), dtype="int32"), layers.Embedding(16, 12, name="tokens"), *steps]
    return compiled(cls(network=keras.Sequential(tokens, name="network")))


def captions() -> Any:
    return listed(Captions)


@pytest.mark.parametrize(
    "build",
    [
        pair,
        siamese,
        distilled,
        in_lists,
        adversaries,
        attacked,
        two_tapes_at_once,
        penalized,
        persistent,
        listed,
        captions,
        layered,
        captioned,
    ],
    ids=lambda build: build.__name__,
)
def test_steps_train_alike(build: Any) -> None:
    keras.utils.set_random_seed(0)
    model = build()
    before = dict(vars(model))
    optimized = tf_memsaver.optimize(model, data=data(), strategy="recompute_all")
    plan = optimized.memsaver_plan
    assert plan.recomputed and plan.batch_size == 64 and type(optimized).__name__ == type(model).__name__
    assert {name: value for name, value in vars(model).items() if name in before} == before
    found = tf_memsaver.verify(model, optimized, data=data(), steps=3)
    assert found.identical, str(found)
    kinds = found.to_json()["compared"]
    assert kinds["weight after fit"] and kinds["slot after fit"] and kinds["log of fit"]


class Uncompiled(Trained):
    """A step with an optimizer that nobody was told of: ``fit`` cannot run it."""

    def train_step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.network(x, training=True) - x) ** 2)
        self.second.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_a_step_of_a_model_that_is_not_compiled_is_verified_step_by_step() -> None:
    keras.utils.set_random_seed(0)
    model = Uncompiled(network=network("network"))
    model.second = keras.optimizers.SGD(0.1, momentum=0.9)
    optimized = tf_memsaver.optimize(model, data=data(), strategy="recompute_all")
    found = tf_memsaver.verify(model, optimized, data=data(), steps=3)
    assert found.identical, str(found)
    kinds = found.to_json()["compared"]
    assert kinds["result of the step"] == 3 and kinds["weight after step"] and kinds["slot after step"]
    assert "log of fit" not in kinds


def heard(model: Any) -> dict[str, str]:
    note_batch(model, Batch(tf.TensorSpec((None, WIDTH), tf.float32)))
    specs = trained_on(model)
    assert specs is not None
    return {call.path: call.plain for call in heard_calls(model, specs)}


def test_what_stays_plain_and_why() -> None:
    assert heard(distilled()) == {"student": "", "teacher": "no gradient is taken through it"}
    assert heard(penalized()) == {"critic": "has a gradient that another gradient is taken of", "critic#2": ""}
    assert heard(siamese()) == {"network": "", "network#2": "", "network#3": ""}
    assert list(heard(adversaries()).values()) == ["no gradient is taken through it", *[""] * 4]


class Worded(Trained):
    """A block with its own output layer, through whose softmax the loss looks."""

    def loss_of(self, x: Any) -> Any:
        kinds = tf.argmax(x, axis=-1)
        return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(kinds, self.block(x)))


def test_a_block_that_ends_in_a_softmax_says_what_to_do() -> None:
    block = keras.layers.Pipeline([layers.Dense(WIDTH, "gelu"), layers.Dense(WIDTH, "softmax")], name="block")
    assert heard(compiled(Worded(block=block))) == {"block": READS_LOGITS}


def test_what_is_frozen_while_it_is_called_stays_plain_where_it_is_trained() -> None:
    model = unfrozen_late()
    _, first, second, *others = heard(model).values()
    assert first == second and "set trainable before the call" in first and others == ["", ""]
    # A step leaves the critic as planning finds it, whatever it was before.
    model.critic.trainable = True
    heard(model)
    assert model.critic.trainable and all(layer.trainable for layer in model.critic.layers)


def test_a_person_is_told_what_keeps_its_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for module in (api, asked):
        monkeypatch.setattr(module, "tell", said.append)
    # It is a warning where the plan saves little.
    monkeypatch.setattr(api.logging, "warning", lambda text, *_: said.append(text))
    plan = tf_memsaver.optimize(penalized(), data=data(), strategy="recompute_all").memsaver_plan
    kept = "keeps the activations of 'critic' (has a gradient that another gradient is taken of)"
    assert said[-1] == f"tf_memsaver: the train_step of model 'penalized' {kept}"
    said.clear()
    tf_memsaver.apply_plan(penalized(), plan, data=data())
    tf_memsaver.trace(penalized(), data=data()).apply(plan)
    assert len(said) == 2 and all(each.endswith(kept) for each in said)
    said.clear()
    # A teacher that no gradient is taken through keeps none.
    tf_memsaver.optimize(distilled(), data=data(), strategy="recompute_all")
    assert not any("keeps the activations" in each or "a step of this model alone" in each for each in said)
    tf_memsaver.optimize(network("net"), batch_size=4, strategy="recompute_all")
    assert "model 'net' (a step of this model alone: it is not compiled): predicted peak" in said[-1]


def test_what_has_a_sparse_gradient_is_replayed() -> None:
    graph = tf_memsaver.capture_graph(listed(), data=data(), granularity="layer")
    assert graph.units[0].label == "network/tokens"
    assert [unit.label for unit in graph.units if unit.pinned] == ["network/dense4"]


def test_each_tape_adds_up_its_own_sparse_gradients() -> None:
    units = tf_memsaver.capture_graph(captions(), data=data(), granularity="layer").units
    pinned = [unit.label for unit in units if unit.pinned and unit.kind != "Python"]
    assert pinned == ["network/dense4", "network#2/dense4"]


class LikeKeras(keras.Model):
    """A Functional model that says itself what Keras's own ``train_step`` does."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred, training=True)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {**self.compute_metrics(x, y, y_pred), "loss": loss}


def residual(cls: Any) -> Any:
    inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    for _ in range(3):
        y = layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same", activity_regularizer="l2")(x))
        x = layers.Add()([x, layers.Dropout(0.1)(layers.Activation("swish")(layers.ReLU()(y)))])
    x = layers.Dense(3, kernel_regularizer="l2")(layers.GlobalAveragePooling2D()(x))
    model = cls(inputs, x)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model


def test_a_step_that_is_left_out_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = residual(LikeKeras)
    optimized = tf_memsaver.optimize(model, batch_size=4, strategy="recompute_all")
    tf_memsaver.estimate(model, batch_size=4)
    told = "Only its call is planned, as in a step of Keras's own train_step. Give data="
    assert caplog.text.count(told) == 1
    caplog.clear()
    given = (np.zeros((4, 16, 16, 3), np.float32), np.zeros((4,), np.int64))
    tf_memsaver.estimate(optimized, data=given)
    tf_memsaver.estimate(residual(keras.Model), batch_size=4)
    tf_memsaver.optimize(model, data=given, strategy="recompute_all")
    tf_memsaver.estimate(model, batch_size=2)
    assert told not in caplog.text


class Informed(keras.Model):
    """A loss of its own that calls the model again, and takes a gradient of its gradient (physics-informed)."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: Any = True
    ) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            made = self(x, training=training)
        slopes = tape.gradient(made, x)
        return super().compute_loss(x=x, y=y, y_pred=y_pred) + tf.reduce_mean((slopes - 1.0) ** 2)


def test_what_a_loss_differentiates_twice_stays_plain() -> None:
    inputs = keras.Input((WIDTH,))
    x = inputs
    for _ in range(4):
        x = layers.Dense(32, "gelu")(x)
    model = Informed(inputs, layers.Dense(WIDTH)(x), name="informed")
    model.compile("adam", "mse", jit_compile=False)
    given = tf.data.Dataset.from_tensor_slices((X, X)).batch(64)
    blind = tf_memsaver.optimize(model, batch_size=64, strategy="recompute_all")
    optimized = tf_memsaver.optimize(model, data=given, strategy="recompute_all")
    assert not optimized.memsaver_plan.opened
    assert optimized.memsaver_plan.recomputed == tuple(f"informed/{layer.name}" for layer in model.layers[1:-1])
    found = tf_memsaver.verify(model, optimized, data=given, steps=3)
    assert found.identical and found.to_json()["compared"]["weight after fit"]
    with pytest.raises(SecondDerivativeError, match="Give optimize data="):
        blind.fit(given, shuffle=False, verbose=0)


class Student(keras.Model):
    """A loss of its own that asks the network inside for the losses that its layers add."""

    def __init__(self, student: Any) -> None:
        super().__init__(name="learner")
        self.student = student

    def call(self, x: Any, training: Any = None) -> Any:
        return self.student(x, training=training)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **more: Any) -> Any:
        return tf.reduce_mean((y - y_pred) ** 2) + sum(self.student.losses)


def test_an_inner_network_has_the_losses_that_its_layers_add() -> None:
    inputs = x = keras.Input((WIDTH,))
    for place in range(4):
        x = layers.Dense(32, "gelu", activity_regularizer=keras.regularizers.L1(1e-2) if place == 2 else None)(x)
    model = Student(keras.Model(inputs, layers.Dense(WIDTH)(x), name="student"))
    model.compile("adam", jit_compile=False)
    given = tf.data.Dataset.from_tensor_slices((X, X)).batch(64)
    with pytest.raises(UnsupportedModelError, match="Try granularity='op'"):
        tf_memsaver.optimize(model, data=given, granularity="layer")
    for granularity in ("auto", "op"):
        optimized = tf_memsaver.optimize(model, data=given, strategy="recompute_all", granularity=granularity)
        assert optimized.memsaver_plan.recomputed
        found = tf_memsaver.verify(model, optimized, data=given, steps=3)
        assert found.identical and found.to_json()["compared"]["weight after fit"]


def by_unit(graph: Graph, phase: Phase) -> dict[int, Counter[str]]:
    found: dict[int, Counter[str]] = {}
    for op in graph.ops:
        # Terms of one gradient are added by the tape, between the gradients of layers.
        if op.unit is not None and op.phase is phase and op.type != "AddN":
            found.setdefault(op.unit, Counter())[op.type] += 1
    return found


def test_a_step_is_heard_as_it_is_put_together() -> None:
    given = (np.zeros((4, 16, 16, 3), np.float32), np.zeros((4,), np.int64))
    told = tf_memsaver.capture_graph(residual(LikeKeras), data=given)
    known = tf_memsaver.capture_graph(residual(keras.Model), data=given)
    assert [unit.signature for unit in told.units] == [unit.signature for unit in known.units]
    assert [unit.pinned for unit in told.units] == [unit.pinned for unit in known.units]
    assert by_unit(told, Phase.FORWARD) == by_unit(known, Phase.FORWARD)
    assert by_unit(told, Phase.BACKWARD) == by_unit(known, Phase.BACKWARD)
    # Nothing ends between a swish, whose gradient is a custom one, and a dropout.
    assert [cut.position for cut in told.cuts] == [cut.position for cut in known.cuts]
    assert told.joined == known.joined


def test_tapes_that_go_back_through_the_same_calls_follow_each_other() -> None:
    """What the second one needs is kept while the first one goes back through all networks (DCGAN, MelGAN)."""
    graph = tf_memsaver.capture_graph(two_tapes_at_once(), data=data())
    assert [is_forward for is_forward, _ in Prepared(graph).passes] == [True, False, False]
    assert [is_forward for is_forward, _ in Prepared(graph.in_one_pass).passes] == [True, False]
    assert parse(dump(graph)) == graph


def test_each_tape_is_a_pass_of_its_own() -> None:
    def passes(build: Any) -> list[tuple[Phase, set[str]]]:
        graph = tf_memsaver.trace(build(), data=data()).graph
        found = []
        for is_forward, ops in itertools.groupby(graph.ops, key=lambda op: op.phase is Phase.FORWARD):
            units = {op.unit for op in ops}
            names = {graph.units[unit].label.split("/")[0] for unit in units if unit is not None}
            found.append((is_forward, {name for name in names if not name.startswith("python")}))
        return found

    critics, both = {"critic", "critic#2"}, {"critic#3", "generator#2"}
    assert passes(adversaries) == [(True, critics), (False, critics), (True, both), (False, both)]
    one, other = {"network"}, {"network#2"}
    assert passes(attacked) == [(True, one), (False, one), (True, other), (False, other)]
    assert len(passes(two_tapes_at_once)) == len(passes(persistent)) == len(passes(pair)) == 2


def test_an_optimized_step_takes_less_memory() -> None:
    keras.utils.set_random_seed(0)
    wide = [keras.Sequential([keras.Input((512,)), *(layers.Dense(512, "gelu") for _ in range(6))]) for _ in range(2)]
    model = compiled(Pair(encoder=wide[0], decoder=wide[1]))
    given = np.zeros((1024, 512), np.float32)
    optimized = tf_memsaver.optimize(model, data=given)
    plan = optimized.memsaver_plan
    plain, saved = (tf_memsaver.measure(each, data=given, isolate=False, steps=3) for each in (model, optimized))
    assert plan.peak_bytes < 0.8 * plan.plain_peak_bytes
    assert saved.activation_bytes < 0.8 * plain.activation_bytes


def test_replicas_train_alike() -> None:
    devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    found = []
    for optimize in (False, True):
        keras.utils.set_random_seed(0)
        strategy = tf.distribute.MirroredStrategy(devices)
        with strategy.scope():
            model = adversaries()
        model.built = True  # Under a strategy, Keras would call it to see.
        if optimize:
            model = tf_memsaver.optimize(model, data=data(), strategy="min_peak")
            assert model.memsaver_plan.recomputed
        model.fit(data(), epochs=2, verbose=0, shuffle=False)
        found.append([variable.numpy().tobytes() for variable in model.variables])
    assert found[0] == found[1]


def test_a_step_that_trains_nothing_that_can_be_replayed_says_so() -> None:
    class Bare(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.seen = layers.Dense(WIDTH, use_bias=False), Seen()
            self.dense.build((None, WIDTH))

        def train_step(self, x: Any) -> Any:
            with tf.GradientTape() as tape:
                self.seen(self.dense.kernel)
                loss = tf.reduce_mean((x @ self.seen.kept) ** 2)
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    with pytest.raises(UnsupportedModelError, match=r"nothing that a plan could replay: 'seen' .* does not return"):
        tf_memsaver.optimize(compiled(Bare()), data=data())


class Noisy(layers.Layer):
    """Draws numbers that a replay could not draw again."""

    def call(self, x: Any) -> Any:
        return x * tf.random.uniform(tf.shape(x))


class NoisyNetwork(keras.Model):
    """Calls nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.noises = [Noisy(name="first"), Noisy(name="last")]
        self.scale = self.add_weight(shape=(WIDTH,), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        return self.noises[1](tf.tanh(self.noises[0](self.scale * x)))

    def train_step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(x, training=True) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def test_a_step_says_of_each_layer_that_a_network_calls_why_it_cannot_be_replayed() -> None:
    said = r"'noisy_network/first' runs RandomUniform, .*; 'noisy_network/last' runs RandomUniform, "
    with pytest.raises(UnsupportedModelError, match=said):
        tf_memsaver.optimize(compiled(NoisyNetwork()), data=data(), granularity="layer")
    advice = tf_memsaver.search_plan(compiled(NoisyNetwork()), data=data()).advice
    assert "recomputes nothing" in advice and "/first' runs RandomUniform" in advice


class Seen(layers.Layer):
    """Keeps what code around it reads."""

    def call(self, kernel: Any) -> Any:
        self.kept = tf.tanh(kernel)
        return 2.0 * self.kept


def test_a_step_that_cannot_be_traced_says_why() -> None:
    model = Pair(encoder=network("encoder"), decoder=network("decoder"))
    with pytest.raises(UnsupportedModelError, match=r"train_step of model 'pair' cannot be traced .*Compile the model"):
        tf_memsaver.optimize(model, data=data())


def test_an_error_in_a_call_is_told_and_not_that_keras_has_met_one() -> None:
    class Wrong(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(WIDTH)

        def call(self, x: Any) -> Any:
            return self.dense(x) @ tf.ones((3, 2))

        def train_step(self, x: Any) -> Any:
            return {"loss": tf.reduce_mean(self(x, training=True))}

    with pytest.raises(
        UnsupportedModelError, match=r"data \(ValueError: Dimensions must be equal, but are 8 and 3 for "
    ):
        tf_memsaver.optimize(compiled(Wrong()), data=data())


class OwnCall(keras.Model):
    """A network that computes in a ``call`` of its own."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name)
        self.blocks = [layers.Dense(WIDTH, "gelu") for _ in range(3)]

    def call(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x) * 2.0
        return x


class OwnCallTrained(Trained):
    def loss_of(self, x: Any) -> Any:
        return tf.reduce_mean(self.net(x) ** 2)


@pytest.mark.parametrize("granularity", ["layer", "op"])
def test_the_backward_pass_of_operations_that_are_copied_is_heard(granularity: Any) -> None:
    net = OwnCall()
    net(X[:2])
    model = OwnCallTrained(net=net)
    model.compile("sgd", jit_compile=False)
    graph = tf_memsaver.trace(model, data=data(), granularity=granularity).graph
    forward = {op.unit for op in graph.ops if op.phase is Phase.FORWARD and op.unit is not None and op.flops > 5000}
    backward = {op.unit for op in graph.ops if op.phase is Phase.BACKWARD and op.unit is not None and op.flops > 5000}
    assert forward and backward == forward


class OwnCallIn(OwnCall):
    """Asks for the length of sequences in Python, may be given a number, and keeps a tensor as an attribute."""

    def call(self, inputs: Any, training: Any = None) -> Any:
        x, factor = inputs if isinstance(inputs, (list, tuple)) else (inputs, 1.0)
        length = x.shape[1]
        self.kept = tf.tanh(self.blocks[0](x))
        mixed = tf.reshape(tf.transpose(self.kept, (0, 2, 1)), (-1, length, WIDTH))
        return x + factor * self.blocks[2](tf.nn.softmax(self.blocks[1](mixed)))


def sequences(x: Any) -> Any:
    return tf.reshape(tf.tile(x, (1, 6)), (-1, 6, WIDTH))


class OfTwoLengths(Trained):
    def loss_of(self, x: Any) -> Any:
        return sum(tf.reduce_mean(self.net(sequences(x)[:, :length], training=True) ** 2) for length in (6, 4, 6))


class WithANumber(Trained):
    def loss_of(self, x: Any) -> Any:
        factor = tf.sqrt(tf.cast(tf.shape(x)[0], tf.float32))
        return tf.reduce_mean(self.net([sequences(x), factor], training=True) ** 2)


class WithoutTraining(Trained):
    def loss_of(self, x: Any) -> Any:
        return tf.reduce_mean(self.net(sequences(x)) ** 2)


@pytest.mark.parametrize("kind", [OfTwoLengths, WithANumber, WithoutTraining])
@pytest.mark.parametrize("granularity", ["auto", "op", "layer"])
def test_networks_are_planned_for_as_the_step_calls_them(
    kind: Any, granularity: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = compiled(kind(net=OwnCallIn()))
    optimized = tf_memsaver.optimize(model, data=data(), strategy="recompute_all", granularity=granularity)
    assert optimized.memsaver_plan.recomputed and bool(optimized.memsaver_plan.opened) is (granularity == "auto")
    found = tf_memsaver.verify(model, optimized, data=data(), steps=3)
    assert found.identical and found.to_json()["compared"]["weight after fit"]
    assert "last bits" not in caplog.text


class Weighted(OwnCallIn):
    """Takes an array beside its input."""

    def call(self, x: Any, scale: Any = 1.0, training: Any = None) -> Any:
        return super().call(x) * scale


class WithArrays(Trained):
    def loss_of(self, x: Any) -> Any:
        made = [self.net(sequences(x), scale=each * np.ones(WIDTH, np.float32), training=True) for each in (1, 2)]
        return tf.reduce_mean(made[0] * made[1])


def test_a_network_that_is_given_arrays_is_planned_by_layers() -> None:
    model = compiled(WithArrays(net=Weighted()))
    optimized = tf_memsaver.optimize(model, data=data(), strategy="recompute_all")
    assert "since it is given something that is no number, text or flag" in optimized.memsaver_plan.note
    found = tf_memsaver.verify(model, optimized, data=data(), steps=3)
    assert found.identical and optimized.memsaver_plan.recomputed


def test_a_network_that_was_built_with_a_small_batch_is_planned_for_a_larger_one() -> None:
    big = np.zeros((2048, WIDTH), np.float32)
    model = Siamese(network=keras.Sequential([OwnCall() for _ in range(3)]))
    model.network(big[:1])
    plan = tf_memsaver.search_plan(compiled(model), data=(big,), batch_size=2048, strategy="min_peak")
    assert plan.peak_bytes < 0.8 * plan.plain_peak_bytes


class ReadsWhatIsKept(Trained):
    def loss_of(self, x: Any) -> Any:
        return tf.reduce_mean(self.net(sequences(x), training=True) ** 2) + tf.reduce_mean(self.net.kept)


class DifferentiatesByWhatIsKept(Trained):
    def train_step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            x = self.other(self.net(sequences(x), training=True), training=True)
            loss = tf.reduce_mean(x**2)
        *gradients, slope = tape.gradient(loss, [*self.trainable_variables, self.net.kept])
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "slope": tf.reduce_mean(tf.abs(slope))}


def test_a_network_that_keeps_a_tensor_for_the_step_is_planned_by_layers() -> None:
    model = compiled(ReadsWhatIsKept(net=OwnCallIn()))
    optimized = tf_memsaver.optimize(model, data=data(), strategy="recompute_all")
    assert "since it makes a tensor that code around it reads" in optimized.memsaver_plan.note
    assert optimized.memsaver_plan.recomputed
    found = tf_memsaver.verify(model, optimized, data=data(), steps=3)
    assert found.identical and found.to_json()["compared"]["weight after fit"]
    with pytest.raises(UnsupportedModelError, match=r"'own_call_in' makes a tensor .*granularity='layer'"):
        tf_memsaver.optimize(model, data=data(), granularity="op")


def test_a_gradient_by_a_tensor_inside_a_network_leaves_it_plain() -> None:
    model = compiled(DifferentiatesByWhatIsKept(net=OwnCallIn(name="plain"), other=OwnCallIn(name="planned")))
    optimized = tf_memsaver.optimize(model, data=data(), strategy="recompute_all")
    assert {label.partition("/")[0] for label in optimized.memsaver_plan.recomputed} == {"planned"}
    found = tf_memsaver.verify(model, optimized, data=data(), steps=3)
    assert found.identical and found.to_json()["compared"]["weight after fit"]


@keras.saving.register_keras_serializable("test_train_step")
class Reconstructed(Trained):
    """A model that Keras can save: what it trains comes of its own arguments."""

    def __init__(self, **kwargs: Any) -> None:
        super(Trained, self).__init__(**kwargs)
        self.net, self.tracker = network("net"), keras.metrics.Mean(name="loss")

    def call(self, x: Any) -> Any:
        return self.net(x)

    def loss_of(self, x: Any) -> Any:
        return tf.reduce_mean((self.net(x, training=True) - x) ** 2)


@keras.saving.register_keras_serializable("test_train_step")
class TwiceCompiled(Reconstructed):
    """A model with a ``compile`` of its own."""

    def compile(self, second: Any, **kwargs: Any) -> None:  # type: ignore[override]
        super().compile(**kwargs)
        self.second = second

    def train_step(self, x: Any) -> Any:
        assert self.second
        return super().train_step(x)


def test_a_plan_of_a_step_is_saved_with_its_model(tmp_path: Any) -> None:
    model = Reconstructed(name="saved")
    model(X[:2])
    model.compile(keras.optimizers.Adam(0.01), jit_compile=False)
    optimized = tf_memsaver.optimize(model, data=data(), strategy="recompute_all")
    optimized.fit(data(), shuffle=False, verbose=0)
    optimized.save(tmp_path / "model.keras")
    tf_memsaver.strip(optimized).save(tmp_path / "plain.keras")
    # Keras saves no state of dropout: what both go on with is what the files have.
    loaded, plain = (keras.models.load_model(tmp_path / name) for name in ("model.keras", "plain.keras"))
    assert loaded.memsaver_plan.segments == optimized.memsaver_plan.segments and loaded.memsaver_plan.recomputed
    found = [each.fit(data(), shuffle=False, verbose=0).history["loss"] for each in (loaded, plain)]
    assert found[0] == found[1]
    numbers = [[v.numpy().tobytes() for v in (*each.variables, *each.optimizer.variables)] for each in (loaded, plain)]
    assert numbers[0] == numbers[1]


def test_a_step_that_no_file_tells_how_to_compile_is_loaded_plain(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = TwiceCompiled(name="saved")
    model(X[:2])
    model.compile(keras.optimizers.SGD(), optimizer="adam", jit_compile=False)
    optimized = tf_memsaver.optimize(model, data=data(), strategy="recompute_all")
    optimized.save(tmp_path / "model.keras")
    with pytest.warns(UserWarning, match=r"`compile\(\)` method is custom"):  # Keras's own.
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is TwiceCompiled and "loaded as a plain model" in caplog.text
    assert np.array_equal(loaded.net.weights[0], model.net.weights[0])
    loaded.compile(keras.optimizers.SGD(), optimizer="adam", jit_compile=False)
    assert tf_memsaver.apply_plan(loaded, optimized.memsaver_plan, data=data()).memsaver_plan.recomputed


def test_a_step_is_heard_once_for_its_plan_and_traced_once_more_for_its_graph(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    steps = Counter[str]()
    train_step = Trained.train_step

    def counted(self: Any, x: Any) -> Any:
        steps[self.name] += 1
        return train_step(self, x)

    monkeypatch.setattr(Trained, "train_step", counted)
    unbuilt = compiled(OwnCallTrained(net=OwnCall()))
    tf_memsaver.optimize(unbuilt, data=data(), strategy="recompute_all")
    assert steps.pop(unbuilt.name) == 2
    model = Reconstructed(name="counted")
    model(X[:2])
    model.compile(keras.optimizers.Adam(0.01), jit_compile=False)
    optimized = tf_memsaver.optimize(model, data=data(), strategy="recompute_all")
    assert steps == {"counted": 2}
    tf_memsaver.apply_plan(model, optimized.memsaver_plan)
    assert steps == {"counted": 2}
    # Another search hears it anew: its code may have changed by what it reads.
    model.tracker.reset_state()
    tf_memsaver.search_plan(optimized, data=data(), strategy="recompute_all")
    assert steps == {"counted": 4}
    # What is remembered is a model's own, and no part of what is saved.
    model.save(tmp_path / "model.keras")
    copies = [
        keras.models.load_model(tmp_path / "model.keras"),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ]
    for each in [optimized, tf_memsaver.strip(optimized), keras.models.clone_model(model), *copies]:
        assert "memsaver_memo" not in vars(each)
    assert vars(model)["memsaver_memo"].made


def test_a_model_that_was_planned_is_freed() -> None:
    model = pair()
    tf_memsaver.optimize(model, data=data(), strategy="recompute_all")
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None
