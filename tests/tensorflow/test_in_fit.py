"""Optimized models where people meet them: in Keras's own ``fit``, and in training steps of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tests.tensorflow.plans import labels, optimized_by_hand
from tools.shared.models import small as models
from tools.shared.models.small import register
from tools.shared.records import Record, array_of, assert_identical
from tools.shared.training import assert_fit_alike, kept_state, train

GRANULARITIES = ("layer", "op")


@register
class HalfBlock(layers.Layer):
    def __init__(self, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.up, self.drop = layers.Dense(4 * width, activation="gelu"), layers.Dropout(0.5)
        self.down, self.norm = layers.Dense(width), layers.BatchNormalization()

    def call(self, x: Any) -> Any:
        return x + self.norm(self.down(self.drop(self.up(x))))


@register
class Untold(keras.Model):
    """A model whose call takes no ``training``."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.halves = [HalfBlock(8) for _ in range(3)]
        self.head = layers.Dense(3)

    def call(self, x: Any) -> Any:
        for half in self.halves:
            x = half(x)
        return self.head(x)


@register
class Told(Untold):
    """The same with ``training``, a keyword of its own, and a default."""

    def call(self, x: Any, *, scale: float = 1.0, training: bool = False) -> Any:
        for half in self.halves:
            x = half(scale * x, training=training)
        return self.head(x)


def batches(samples: int = 10, width: int = 8, classes: int = 3) -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    return generator.standard_normal((samples, width)).astype("float32"), generator.integers(0, classes, samples)


def compiled(model: Any, loss: Any = None) -> Any:
    model.compile("adam", loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("build", [Untold, Told])
def test_a_model_is_called_as_fit_calls_its_class(build: Callable[[], Any], granularity: str) -> None:
    model = compiled(build())
    optimized = tf_memsaver.optimize(
        model, batch_size=4, inputs=tf.TensorSpec((None, 8)), strategy="recompute_all", granularity=granularity
    )
    assert optimized.memsaver_plan.recomputed
    assert_fit_alike(model, optimized, *batches(), batch_size=4)


@pytest.mark.parametrize("build", [Untold, Told, models.chain, models.backbone])
def test_keras_reads_off_call_what_it_reads_off_the_class(build: Callable[[], Any]) -> None:
    model = build()
    width = None if hasattr(model, "inputs") else 8
    inputs = {"inputs": tf.TensorSpec((None, width))} if width else {}
    optimized = tf_memsaver.optimize(model, batch_size=4, **inputs)
    assert inspect.signature(optimized.call) == inspect.signature(model.call)
    assert inspect.getfullargspec(optimized.call) == inspect.getfullargspec(model.call)
    for name in ("_call_has_training_arg", "_call_has_mask_arg", "_call_context_args", "call_signature_parameters"):
        assert getattr(optimized, name) == getattr(model, name), name
    stripped = tf_memsaver.strip(optimized)
    assert stripped._call_signature == optimized._call_signature == model._call_signature


class Counted:
    """How often segments were replayed: a segment is one operation of a graph."""

    def __init__(self, function: Callable[[Any], Any], *specs: tf.TensorSpec) -> None:
        graph = tf.function(function).get_concrete_function(*specs).graph
        self.segments = sum(op.type == "IdentityN" for op in graph.get_operations())


def _under_a_tape(model: Any, **arguments: Any) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, **arguments)))
        return tape.gradient(loss, model.trainable_variables)

    return step


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("arguments", [{}, {"training": None}, {"training": False}, {"training": True}])
def test_segments_run_under_a_tape_whatever_training_is(arguments: dict[str, Any], granularity: str) -> None:
    model = models.dropout_chain()
    optimized = tf_memsaver.optimize(model, batch_size=4, strategy="recompute_all", granularity=granularity)
    spec = tf.TensorSpec((None, *model.input_shape[1:]))
    assert Counted(_under_a_tape(optimized, **arguments), spec).segments
    assert not Counted(_under_a_tape(model, **arguments), spec).segments


@pytest.mark.parametrize("arguments", [{}, {"training": False}])
def test_inference_is_the_plain_path(arguments: dict[str, Any]) -> None:
    model = models.dropout_chain()
    optimized = tf_memsaver.optimize(model, batch_size=4, strategy="recompute_all")
    spec = tf.TensorSpec((None, *model.input_shape[1:]))
    assert not Counted(lambda x: optimized(x, **arguments), spec).segments


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_keywords_of_ones_own_leave_segments_on(granularity: str) -> None:
    model = Told()
    optimized = tf_memsaver.optimize(
        model, batch_size=4, inputs=tf.TensorSpec((None, 8)), strategy="recompute_all", granularity=granularity
    )
    arguments = {"training": True, "scale": 0.5}
    assert Counted(_under_a_tape(optimized, **arguments), tf.TensorSpec((None, 8))).segments
    x = batches()[0]
    model.trainable = optimized.trainable = True
    assert_identical(*(_gradients(each, x, **arguments) for each in (model, optimized)))


def _gradients(model: Any, x: Any, **arguments: Any) -> Record:
    """Return the gradients of one step in a graph; the state is put back."""
    with kept_state(model):
        gradients = tf.function(_under_a_tape(model, **arguments))(tf.constant(x))
        return {
            **{("gradient", place): array_of(gradient) for place, gradient in enumerate(gradients)},
            **{("variable", variable.path): array_of(variable) for variable in model.variables},
        }


@pytest.mark.parametrize("training", [None, False, True])
def test_nested_models_see_the_training_that_keras_gives_them(training: bool | None) -> None:
    """A nested model that is told ``training`` in the graph leaves it to layers behind it, in Keras as here."""
    inputs = keras.Input((6,))
    x = layers.Dropout(0.5)(layers.Dense(6)(inputs))
    told = keras.Sequential([keras.Input((6,)), layers.Dropout(0.5), layers.Dense(6, "gelu")], name="told")
    x = layers.Dropout(0.5)(told(x, training=True))
    off = keras.Sequential([keras.Input((6,)), layers.Dense(6), layers.BatchNormalization()], name="off")
    x = layers.Dropout(0.5)(off(x, training=False))
    model = keras.Model(inputs, layers.Dense(2)(x))
    optimized = tf_memsaver.optimize(model, batch_size=4, strategy="recompute_all")
    arguments = {} if training is None else {"training": training}
    x = np.random.default_rng(0).standard_normal((4, 6)).astype("float32")
    assert_identical(*(_gradients(each, x, **arguments) for each in (model, optimized)))


@pytest.mark.parametrize("frozen", [(2,), (0, 2, 3)])
@pytest.mark.parametrize("later", [False, True])
def test_frozen_layers_among_equal_ones(frozen: tuple[int, ...], later: bool) -> None:
    dense = [layers.Dense(8, "gelu") for _ in range(6)]
    model = keras.Sequential([keras.Input((8,)), *dense, layers.Dense(3)])

    def freeze() -> None:
        for place in frozen:
            dense[place].trainable = False

    if not later:
        freeze()
    optimized = tf_memsaver.optimize(model, batch_size=4, strategy="recompute_all")
    assert len(optimized.memsaver_plan.recomputed) == 6
    if later:
        freeze()
    assert_fit_alike(compiled(model), compiled(optimized), *batches(), batch_size=4)
    assert_identical(train(model, batch_size=4), train(optimized, batch_size=4))


class _Net(layers.Layer):
    """A whole network in one layer that is called as a whole."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.parts = [layers.Dense(512, "relu") for _ in range(6)]

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


@register
class OwnLossStep(Told):
    """A model whose training step only ``fit`` runs; it may be made to train otherwise where it is optimized."""

    otherwise = False

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True))
            if self.otherwise and hasattr(self, "memsaver_plan"):
                loss *= 1.01
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"own_loss": loss}


def test_verify_runs_what_fit_runs() -> None:
    model = compiled(OwnLossStep())
    optimized = tf_memsaver.optimize(model, batch_size=4, inputs=tf.TensorSpec((None, 8)), strategy="recompute_all")
    before = [v.numpy() for v in model.variables]
    found = tf_memsaver.verify(model, optimized, batch_size=4, steps=2)
    assert found.identical
    assert {"log of fit", "weight after fit", "state after fit", "slot after fit"} <= {
        each.kind for each in found.checks
    }
    assert ("own_loss", 1) in {(each.name, each.step) for each in found.checks}
    assert model.train_function is None and optimized.train_function is None and not model.optimizer.built
    assert all((v.numpy() == old).all() for v, old in zip(model.variables, before, strict=True))
    OwnLossStep.otherwise = True
    try:
        found = tf_memsaver.verify(model, optimized, batch_size=4, steps=2)
    finally:
        OwnLossStep.otherwise = False
    differing = {each.kind for each in found.checks if not each.identical}
    assert not found.passed and differing and all("fit" in kind for kind in differing)


def test_verify_says_where_fit_cannot_run(caplog: pytest.LogCaptureFixture) -> None:
    class Picky(Told):
        def train_step(self, data: Any) -> dict[str, Any]:
            raise ValueError("no such data")

    model = compiled(Picky())
    optimized = tf_memsaver.optimize(model, batch_size=4, inputs=tf.TensorSpec((None, 8)), strategy="recompute_all")
    with caplog.at_level("WARNING", logger="absl"):
        found = tf_memsaver.verify(model, optimized, batch_size=4, steps=1)
    assert found.identical and not any("fit" in each.kind for each in found.checks)
    assert any("cannot be trained by fit on this data" in said and "no such data" in said for said in _said(caplog))


def _said(capture: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in capture.records if record.levelname == "WARNING"]


def test_a_plan_that_saves_nothing_says_why(caplog: pytest.LogCaptureFixture) -> None:
    model = keras.Sequential([keras.Input((512,)), _Net(name="net"), layers.Dense(3)])
    with caplog.at_level("WARNING", logger="absl"):
        tf_memsaver.optimize(model, batch_size=4096)
    (said,) = _said(caplog)
    assert "saves no memory" in said and "by one layer, 'net'" in said and "granularity='op'" in said
    assert "The plan is by layers alone, since it is not compiled (compile it first if fit trains it)" in said


def test_a_plan_that_saves_says_what(caplog: pytest.LogCaptureFixture) -> None:
    model = keras.Sequential([keras.Input((512,)), *(layers.Dense(512, "relu") for _ in range(8)), layers.Dense(3)])
    with caplog.at_level("INFO", logger="absl"):
        optimized = tf_memsaver.optimize(model, batch_size=8192, strategy="min_peak")
    assert not _said(caplog)
    alone = "(a step of this model alone: it is not compiled)"
    assert f"model '{model.name}' {alone}: {optimized.memsaver_plan}" in caplog.text


def test_silu_of_one_tensor_in_every_block() -> None:
    """The sigmoid of one block's gradient must not be taken for that of another block's replay."""
    model = compiled(models.diffusion(), "mse")
    optimized = tf_memsaver.optimize(model, batch_size=4, strategy="recompute_all")
    assert len(optimized.memsaver_plan.recomputed) > 15
    generator = np.random.default_rng(0)
    x = [generator.standard_normal(shape).astype("float32") for shape in ((18, 6, 6, 8), (18, 16))]
    y = generator.standard_normal((18, 6, 6, 3)).astype("float32")
    assert_fit_alike(model, optimized, x, y, batch_size=4)


def test_gelu_in_front_of_a_dilated_convolution() -> None:
    # Its gradient comes out of a BatchToSpaceND, whose batch size has a symbol of its own in the plain step, too.
    inputs = keras.Input((8, 8, 4))
    x = layers.Conv2D(8, 1, activation="gelu", name="ends_here")(layers.Conv2D(8, 1, name="kept")(inputs))
    model = keras.Model(inputs, layers.Conv2D(3, 3, padding="same", dilation_rate=2)(x))
    model.compile("sgd", "mse", jit_compile=False)
    x, y = np.random.default_rng(0).random((10, 8, 8, 4), np.float32), np.zeros((10, 8, 8, 3), np.float32)
    optimized = tf_memsaver.optimize(
        model, data=(x, y), batch_size=4, granularity="layer", keep=["kept"], recompute=["ends_here"]
    )
    assert_fit_alike(model, optimized, x, y, batch_size=4)


@pytest.mark.parametrize("size", [7, 8])
def test_prelu_with_shared_axes_in_a_functional_model(size: int) -> None:
    inputs = keras.Input((size, size, 3))
    x = layers.PReLU(shared_axes=[1, 2])(layers.Conv2D(8, 3, padding="same")(inputs))
    outputs = layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling2D()(x))
    model = compiled(keras.Model(inputs, outputs), "sparse_categorical_crossentropy")
    optimized = optimized_by_hand(model, *[(name, name) for name in labels(model)[:3]])
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((18, size, size, 3)).astype("float32"), generator.integers(0, 3, 18)
    assert_fit_alike(model, optimized, x, y, batch_size=4, epochs=4)


def test_a_model_of_several_inputs_runs_its_plan_of_operations() -> None:
    """Keras calls it with a list of masks, which are None."""
    parts = [keras.Input((8,)), keras.Input((8,))]
    x = layers.Dense(8, "gelu")(layers.Add()([layers.Dense(8, "gelu")(part) for part in parts]))
    model = keras.Model(parts, layers.Dense(3)(x))
    optimized = tf_memsaver.optimize(model, batch_size=4, strategy="recompute_all", granularity="op")
    specs = [tf.TensorSpec((None, 8))] * 2
    step = _under_a_tape(optimized, training=True)
    assert Counted(lambda *x: step(list(x)), *specs).segments


@pytest.mark.parametrize("granularity", ["layer", "op"])
@pytest.mark.parametrize("weighted", ["sample_weight", "class_weight"])
def test_weighted_crossentropies_with_a_smaller_last_batch(weighted: str, granularity: str) -> None:
    # The gradient of a weighted crossentropy has another symbol for its batch than the products of an exact gelu.
    generator = np.random.default_rng(0)
    x, y = generator.standard_normal((10, 16)).astype(np.float32), generator.integers(0, 3, 10)
    weights: Any = generator.random(10).astype(np.float32) if weighted == "sample_weight" else {0: 0.7, 1: 1.3, 2: 2.1}
    found = []
    for optimize in (False, True):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((16,))
        hidden = layers.Dense(32, "gelu")(layers.Dense(32, "gelu")(inputs))
        model: Any = keras.Model(inputs, layers.Dense(3, "softmax")(hidden))
        model.compile("adam", "sparse_categorical_crossentropy", jit_compile=False)
        if optimize:
            model = tf_memsaver.optimize(model, batch_size=4, strategy="recompute_all", granularity=granularity)
        history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, **{weighted: weights}).history
        found.append((history, [weight.tobytes() for weight in model.get_weights()]))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["jacobian", "batch_jacobian"])
def test_jacobians_of_a_call_outside_a_graph(kind: str) -> None:
    # TensorFlow takes their gradients inside a graph.
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    hidden = layers.Dropout(0.2, seed=1)(layers.Dense(8, "gelu")(layers.Dense(8, "tanh")(inputs)))
    model = keras.Model(inputs, layers.Dense(3)(hidden))
    model.compile("sgd", "mse")
    optimized = tf_memsaver.optimize(model, batch_size=6, strategy="recompute_all", granularity="layer")
    x, found = tf.constant(np.random.default_rng(0).standard_normal((6, 4)), tf.float32), []
    for each in (model, optimized):
        with kept_state(model), tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = each(x, training=True)
        found.append(getattr(tape, kind)(y, x if kind == "batch_jacobian" else model.trainable_variables[0].value))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-7)
