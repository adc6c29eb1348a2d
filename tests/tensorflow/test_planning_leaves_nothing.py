"""Planning allocates nothing, and nothing of it stays: no slots, no graphs, no trace on the optimizer or the loss."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from tensorflow.python.framework import func_graph
from tensorflow.python.framework import ops as tensorflow_ops

import tf_memsaver
from tf_memsaver.capture import convert
from tf_memsaver.capture.data_shapes import DataShapes
from tf_memsaver.program.kept_objects import KeptObjects
from tools.shared import memory

WIDTH = 300
"""Weights of more than 256 KiB each: TensorFlow does not count smaller buffers on CPUs."""


def _dense(optimizer: Any = "adam", count: int = 3) -> keras.Model:
    hidden = [layers.Dense(WIDTH, activation="silu") for _ in range(count)]
    model = keras.Sequential([keras.Input((WIDTH,)), *hidden, layers.Dense(4)])
    model.compile(optimizer, "mse")
    return model


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[Any]:
    """Return the FuncGraphs that have been made and are alive."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    plainly = func_graph.FuncGraph.__init__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        plainly(self, *args, **kwargs)
        alive.add(self)

    monkeypatch.setattr(func_graph.FuncGraph, "__init__", noted)
    return alive


@pytest.mark.parametrize("plans", [20, pytest.param(100, marks=pytest.mark.long)])
def test_plans_allocate_nothing_and_keep_no_graph(plans: int, graphs: weakref.WeakSet[Any]) -> None:
    model = _dense(count=2)
    tf_memsaver.optimize(model, batch_size=8, granularity="op")
    gc.collect()
    graphs.clear()
    registered, before = len(tensorflow_ops.gradient_registry.list()), memory.live()
    memory.reset_peak()
    for number in range(plans):
        verb = (tf_memsaver.estimate, tf_memsaver.search_plan, tf_memsaver.optimize)[number % 3]
        verb(model, batch_size=8, granularity="op" if number % 10 == 9 else "layer")
        assert memory.live() == before
        assert not any(graph.name == "memsaver_step" for graph in graphs), "only the garbage collector would free it"
    assert memory.peak() == before
    gc.collect()
    assert not graphs
    assert len(tensorflow_ops.gradient_registry.list()) == registered


def test_a_graph_that_cannot_be_planned_is_let_go(
    graphs: weakref.WeakSet[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refuses(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            raise ValueError("cannot be traced")

    def steps() -> list[Any]:
        return [each for each in graphs if each.name == "memsaver_step" and each.get_operations()]

    tf_memsaver.search_plan(_dense(Refuses()), batch_size=8)
    assert not steps(), "the update was refused, and the step traced again without it"
    monkeypatch.setattr(convert, "build_graph", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tf_memsaver.search_plan(_dense(), batch_size=8)
    assert not steps()


def test_functions_that_somebody_keeps_keep_their_gradients() -> None:
    class Kept(layers.Layer):
        @tf.function
        def call(self, x: Any) -> Any:
            return tf.nn.silu(x)

    model = keras.Sequential([keras.Input((8,)), layers.Dense(8), Kept(), layers.Dense(8), Kept(), layers.Dense(2)])
    model.compile("sgd", "mse")
    optimized = tf_memsaver.optimize(model, batch_size=4)
    gc.collect()
    x, y = np.ones((4, 8), "float32"), np.ones((4, 2), "float32")
    model.fit(x, y, verbose=0)
    optimized.fit(x, y, verbose=0)


class Remembering(layers.Layer):
    """Keeps a tensor of its last call, and a function that is first traced when it trains."""

    @tf.function
    def gated(self, x: Any, training: bool) -> Any:
        return x * tf.sigmoid(x) if training else x

    def call(self, x: Any, training: bool = False) -> Any:
        self.last = [x]
        return self.gated(x, training)


@pytest.mark.parametrize("granularity", ["layer", "op"])
def test_functions_outlive_the_graph_that_they_were_traced_in(granularity: str) -> None:
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8), Remembering(), layers.Dense(8), Remembering()])
    model.compile("sgd", "mse")
    tf_memsaver.search_plan(model, batch_size=4, granularity=granularity)
    model.fit(np.ones((4, 8), "float32"), np.ones((4, 8), "float32"), verbose=0)
    for again in ("layer", "op"):
        tf_memsaver.search_plan(model, batch_size=4, granularity=again)


def test_a_layer_that_keras_compiles_by_itself_is_planned_whenever_garbage_is_collected() -> None:
    grouped = [layers.Conv2D(8, 3, padding="same", groups=8) for _ in range(2)]
    model = keras.Sequential([keras.Input((8, 8, 8)), *grouped, layers.GlobalAveragePooling2D(), layers.Dense(4)])
    gc.collect()
    gc.disable()
    try:
        for granularity in ("layer", "op", "op"):
            tf_memsaver.search_plan(model, batch_size=4, granularity=granularity)
    finally:
        gc.enable()


class Lion(keras.optimizers.Optimizer):
    """No configuration, and arguments of its own."""

    def __init__(self, rate: float, betas: tuple[float, float], *, decay: float) -> None:
        super().__init__(learning_rate=rate, weight_decay=decay)
        self.betas = betas

    def build(self, variables: list[Any]) -> None:
        super().build(variables)
        self.momenta = [self.add_variable_from_reference(v, name="momentum") for v in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        momentum = self.momenta[self._get_variable_index(variable)]
        step = self.betas[0] * momentum + (1 - self.betas[0]) * gradient
        self.assign_sub(variable, ops.cast(learning_rate, variable.dtype) * ops.sign(step))
        self.assign(momentum, self.betas[1] * momentum + (1 - self.betas[1]) * gradient)

    def get_config(self) -> dict[str, Any]:
        raise NotImplementedError


class Noting(Lion):
    """Slots of TensorFlow that Keras does not know, and Python state that changes as it is traced."""

    def __init__(self, model: list[Any]) -> None:
        super().__init__(0.001, (0.9, 0.99), decay=0.0)
        self.calls, self.notes, self.rule = 0, {"seen": []}, self._ruled
        self.model = model

    def build(self, variables: list[Any]) -> None:
        super().build(variables)
        self.sums = [tf.Variable(lambda v=v: tf.zeros(v.shape)) for v in variables]

    def _ruled(self, gradient: Any, variable: Any) -> None:
        self.sums[self._get_variable_index(variable)].assign_add(gradient)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        self.calls += 1
        self.notes["seen"].append(variable.name)
        self.last = gradient
        self.rule(gradient, variable)
        super().update_step(gradient, variable, learning_rate)


class Lazy(keras.optimizers.Optimizer):
    """Slots are made at the first update."""

    def __init__(self) -> None:
        super().__init__(learning_rate=0.1)
        self.slots: dict[int, Any] = {}

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        key = self._get_variable_index(variable)
        if key not in self.slots:
            self.slots[key] = tf.Variable(lambda: tf.zeros(variable.shape), trainable=False)
        self.slots[key].assign(0.9 * self.slots[key] + gradient)
        variable.assign_sub(learning_rate * self.slots[key])


class Averaging(keras.optimizers.Optimizer):
    """An optimizer around another one."""

    def __init__(self, inner: Any) -> None:
        super().__init__(learning_rate=0.0)
        self.inner = inner

    def build(self, variables: list[Any]) -> None:
        super().build(variables)
        self.inner.build(variables)
        self.slow = self.add_optimizer_variables(variables, "slow")

    def apply(self, gradients: Any, trainable_variables: Any = None) -> None:
        if not self.built:
            self.build(trainable_variables)
        self.inner.apply(gradients, trainable_variables)
        for slow, variable in zip(self.slow, trainable_variables, strict=True):
            slow.assign(0.5 * slow + 0.5 * variable)


class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule without a configuration."""

    def __init__(self, peak: float) -> None:
        self.peak, self.asked = peak, []

    def __call__(self, step: Any) -> Any:
        self.asked.append(step)
        return self.peak * ops.cast(step + 1, "float32")


adam = keras.optimizers.Adam
OPTIMIZERS: dict[str, tuple[Callable[[], Any], float]] = {
    "lion": (lambda: Lion(1e-3, (0.9, 0.99), decay=0.01), 1.0),
    "noting": (lambda: Noting([]), 2.0),
    "lazy": (Lazy, 1.0),
    "averaging": (lambda: Averaging(adam(1e-3)), 3.0),
    "warm-up": (lambda: adam(WarmUp(1e-3)), 2.0),
    "cosine": (lambda: adam(keras.optimizers.schedules.CosineDecay(0.1, 100)), 2.0),
    "callable": (lambda: keras.optimizers.SGD(lambda: 0.1, momentum=0.9), 1.0),
    "loss-scale": (lambda: keras.optimizers.LossScaleOptimizer(Lion(1e-3, (0.9, 0.99), decay=0.01)), 1.0),
    "accumulating": (lambda: adam(1e-3, gradient_accumulation_steps=3), 3.0),
    "average": (lambda: adam(1e-3, use_ema=True, ema_overwrite_frequency=2, weight_decay=0.1, clipnorm=1.0), 3.0),
}


def _looks(each: Any, depth: int = 5) -> Any:
    """Return all that an optimizer holds, to be compared with ``==``."""
    if isinstance(each, (keras.Variable, tf.Variable)):
        return id(each), each.numpy().tobytes()
    if tf.is_tensor(each):
        return id(each)
    if isinstance(each, dict):
        return id(each), [(str(key), _looks(value, depth - 1)) for key, value in each.items()]
    if isinstance(each, (list, tuple)):
        return id(each), [_looks(value, depth - 1) for value in each]
    if depth and hasattr(each, "__dict__") and type(each).__module__ != "builtins" and not isinstance(each, type):
        return id(each), _looks(dict(vars(each)), depth - 1)[1]
    return id(each)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_planned_with_and_left_as_it_was(name: str) -> None:
    make, slots = OPTIMIZERS[name]
    model = _dense(make())
    looks, before = _looks(model.optimizer), memory.live()
    memory.reset_peak()
    assert tf_memsaver.estimate(model, batch_size=8).optimizer_slots == pytest.approx(slots, abs=0.02)
    optimized = tf_memsaver.optimize(model, batch_size=8)
    assert memory.peak() == before
    assert _looks(model.optimizer) == looks and not model.optimizer.built
    assert tf_memsaver.verify(model, optimized, batch_size=8, steps=2).identical
    assert _looks(model.optimizer) == looks and not model.optimizer.built
    tf_memsaver.measure(model, batch_size=8, steps=1, isolate=False)
    assert _looks(model.optimizer) == looks and not model.optimizer.built


@pytest.mark.parametrize("name", ["lion", "noting", "warm-up", "loss-scale"])
def test_a_built_optimizer_keeps_its_slots(name: str) -> None:
    make, slots = OPTIMIZERS[name]
    model = _dense(make())
    model.fit(np.ones((8, WIDTH), "float32"), np.ones((8, 4), "float32"), verbose=0)
    looks = _looks(model.optimizer)
    assert tf_memsaver.estimate(model, batch_size=8).optimizer_slots == pytest.approx(slots, abs=0.02)
    optimized = tf_memsaver.optimize(model, batch_size=8)
    assert tf_memsaver.verify(model, optimized, batch_size=8, steps=2).identical
    assert _looks(model.optimizer) == looks and int(model.optimizer.iterations.numpy()) == 1
    optimized.fit(np.ones((8, WIDTH), "float32"), np.ones((8, 4), "float32"), verbose=0)


def test_slots_under_a_strategy_are_counted_outside_its_scope() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = _dense(Lion(1e-3, (0.9, 0.99), decay=0.01))
    assert tf_memsaver.estimate(model, batch_size=8).optimizer_slots == pytest.approx(1, abs=0.02)
    assert not model.optimizer.built


def test_an_optimizer_that_cannot_be_built_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(keras.optimizers.SGD):
        def build(self, variables: list[Any]) -> None:
            raise RuntimeError("no\nbuild")

    model = _dense(Broken(0.1))
    assert tf_memsaver.estimate(model, batch_size=8).optimizer_slots == 0
    assert "optimizer Broken cannot be built (RuntimeError: no)" in caplog.text


def test_an_update_that_cannot_be_traced_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(keras.optimizers.Adam):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            raise KeyError("oops")

    model = _dense(Broken(0.1))
    looks = _looks(model.optimizer)
    assert tf_memsaver.estimate(model, batch_size=8).optimizer_slots == pytest.approx(2, abs=0.02)
    assert "the update of its optimizer Broken cannot be traced (KeyError: 'oops')" in caplog.text
    assert _looks(model.optimizer) == looks


def test_objects_are_put_back_in_place() -> None:
    class Holder:
        pass

    holder, inner = Holder(), Holder()
    holder.list, holder.dict, holder.set, holder.inner = [1, [2]], {"a": [3]}, {4}, inner
    looks, held = _looks(holder), holder.list
    with KeptObjects(holder):
        holder.list[1].append(5)
        held.append(holder)
        holder.dict["a"].clear()
        holder.dict["b"] = inner
        holder.set.add(6)
        inner.more, holder.list = 7, None
    assert _looks(holder) == looks and holder.list is held == [1, [2]]
    assert holder.dict == {"a": [3]} and holder.set == {4} and not vars(inner)


def test_the_trace_of_a_step_holds_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    # The graph of a step may live as long as the process (MobileNetV3's does), and knows who works out its shapes.
    traced: list[DataShapes] = []
    plainly = DataShapes.graph

    def noted(self: DataShapes, name: str) -> Any:
        traced.append(self)
        return plainly(self, name)

    monkeypatch.setattr(DataShapes, "graph", noted)
    data = tf.data.Dataset.from_tensors((tf.ones((256, WIDTH)), tf.ones((256, 4))))
    alive = weakref.ref(data)
    tf_memsaver.optimize(_dense(), data=data, strategy="min_peak")
    del data
    gc.collect()
    assert traced
    assert alive() is None
