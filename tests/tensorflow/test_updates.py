"""What an optimizer works out without a gradient waits for that gradient, and no bit changes."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tf_memsaver.check.watch import StepWatch
from tf_memsaver.ir.graph import MemoryKind
from tf_memsaver.judge.simulate import Simulator
from tf_memsaver.parity.grappler import HELD_IN_ORDER
from tf_memsaver.runtime import order, updates
from tools.shared import memory as memory  # It has memory counted.
from tools.shared.processes import in_own_process

UNITS = 512
WEIGHT = 4 * UNITS * UNITS

OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
    "lion": lambda: keras.optimizers.Lion(1e-3),
    "adamw": lambda: keras.optimizers.AdamW(1e-3, weight_decay=0.1),
    "ema": lambda: keras.optimizers.Adam(use_ema=True),
    "clipped": lambda: keras.optimizers.SGD(0.01, momentum=0.9, global_clipnorm=1.0),
    "rmsprop": lambda: keras.optimizers.RMSprop(momentum=0.9, centered=True),
}


def dense(optimizer: Any) -> Any:
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((UNITS,))
    for _ in range(6):
        x = layers.Dense(UNITS, "tanh")(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def trained(make: Any, *, plan: Any = None) -> tuple[list[bytes], list[int]]:
    """Return what five steps of ``fit`` leave, and what each takes beyond what was there."""
    generator = np.random.default_rng(0)
    x, y = (generator.standard_normal((5 * 1024, size)).astype("float32") for size in (UNITS, 1))
    model, watch = dense(make()), StepWatch()
    if plan is not None:
        model = tf_memsaver.apply_plan(model, plan)
    model.fit(x, y, batch_size=1024, shuffle=False, verbose=0, callbacks=[watch])
    found = [np.asarray(each).tobytes() for each in (*model.variables, *model.optimizer.variables)]
    pairs = list(zip(watch.steps.peaks, watch.steps.lives, strict=True))[1:]
    return found, [peak - live for peak, live in pairs]


@pytest.mark.parametrize(
    ("name", "length", "warns"), [("adamw", None, True), ("adamw", 2, False), ("lion", None, False)]
)
def test_a_decay_in_the_step_that_finds_the_end_of_the_data_is_a_warning(
    name: str, length: int | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, x, y = dense(OPTIMIZERS[name]()), np.ones((64, UNITS), "float32"), np.ones((64, 1), "float32")
    specs = tf.TensorSpec((None, UNITS)), tf.TensorSpec((None, 1))
    data = tf.data.Dataset.from_generator(lambda: iter([(x, y)] * 2), output_signature=specs)
    if length:
        data = data.apply(tf.data.experimental.assert_cardinality(length))
    plan = tf_memsaver.optimize(model, data=data, batch_size=64, strategy="recompute_all").memsaver_plan
    tf_memsaver.apply_plan(model, plan, data=data)
    tf_memsaver.trace(model, data=data, batch_size=64).apply(plan)
    assert caplog.text.count("decay once more") == 3 * warns


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_results_are_those_of_the_plain_model(name: str) -> None:
    make = OPTIMIZERS[name]
    plan = tf_memsaver.search_plan(dense(make()), batch_size=1024, strategy="min_peak")
    assert any(segment.mode.value == "recompute" for segment in plan.segments)
    assert trained(make)[0] == trained(make, plan=plan)[0]


# Products with momentum would be there from the start of the step, copies of decayed weights from the forward pass on.
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_what_updates_need_is_not_there_all_through_the_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = OPTIMIZERS[name]
    plan = tf_memsaver.search_plan(dense(make()), batch_size=1024, strategy="min_peak")
    held = trained(make, plan=plan)[1]
    monkeypatch.setattr(order, "hold_updates", lambda *_: None)
    free = trained(make, plan=plan)[1]
    # Six weights, some of whose gradients are there already when most is live; threads race in what no order holds.
    assert statistics.median(held) + 2 * WEIGHT < statistics.median(free)
    assert max(held) <= plan.peak_bytes


def moments_that_wait() -> list[bool]:
    """Return, for each kernel's moment, whether its first read in a step waits for something."""
    inputs = x = keras.Input((128,))
    for _ in range(6):
        x = layers.Dense(128, "gelu")(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile(OPTIMIZERS["momentum"](), "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    optimized = tf_memsaver.optimize(model, batch_size=8192, strategy="min_peak")
    assert optimized.memsaver_plan.recomputed
    step = tf.function(optimized.train_step).get_concrete_function((tf.ones((8192, 128)), tf.ones((8192, 1))))
    handles = {id(inner): outer for outer, inner in step.graph.captures}
    kernels = {id(each.value.handle) for each in model.optimizer.variables if each.shape == (128, 128)}
    first: dict[int, Any] = {}
    for operation in step.graph.get_operations():
        if operation.type == "ReadVariableOp" and id(handles.get(id(operation.inputs[0]))) in kernels:
            first.setdefault(id(operation.inputs[0]), operation)
    return [bool(read.control_inputs) for read in first.values()]


def test_updates_wait_in_the_first_graph_of_a_process_those_of_small_variables_too() -> None:
    # A GPU's allocator counts them, and a model has many: EfficientNetB0 with Lion took 93 MiB where 82 are enough.
    # A graph whose tracing had begun when somebody asked to be told of its end was not told of.
    assert in_own_process(moments_that_wait) == [True] * 6


def test_sums_of_gradients_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # Sums of sums become one sum only where nobody waits for them: a WGAN with a gradient penalty trained otherwise.
    keras.utils.set_random_seed(0)
    shared = [layers.Dense(UNITS, "tanh") for _ in range(3)]
    inputs = keras.Input((UNITS,))
    twice = []
    for x in (inputs, layers.Dense(UNITS)(inputs)):
        for layer in shared:
            x = layer(x)
        twice.append(x)
    model = keras.Model(inputs, layers.Dense(1)(layers.add(twice)))
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", jit_compile=False)
    model = tf_memsaver.optimize(model, batch_size=1024, strategy="min_peak")
    waited_for: list[str] = []
    monkeypatch.setattr(updates, "wait_for", lambda _, other: waited_for.append(other.type))
    model.fit(np.ones((1024, UNITS), "float32"), np.ones((1024, 1), "float32"), batch_size=1024, verbose=0)
    assert waited_for
    assert set(waited_for) <= HELD_IN_ORDER | {"NoOp"}


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_kernels_of_convolutions_stay_where_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update of a kernel that the gradient of its input still reads would take another buffer in each step."""
    make = OPTIMIZERS.get(name, lambda: keras.optimizers.SGD(0.01))
    assert moves_of_kernels(make()) == 0
    monkeypatch.setattr(order, "update_in_place", lambda operations, held: None)
    assert moves_of_kernels(make()) >= 6


def moves_of_kernels(optimizer: Any) -> int:
    """Return how often large kernels got another buffer in the steps of ``fit`` after the first."""
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((24, 24, 128))
    for _ in range(8):
        x = layers.Conv2D(128, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    model = keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))
    model.compile(optimizer, "mse", jit_compile=False)
    model = tf_memsaver.optimize(model, batch_size=16, strategy="min_peak")
    places: list[list[int]] = []
    kernels = [each for each in model.trainable_variables if each.path.endswith("kernel") and len(each.shape) == 4]
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: places.append(addresses(kernels)))
    x, y = np.ones((5 * 16, 24, 24, 128), "float32"), np.ones((5 * 16, 1), "float32")
    model.fit(x, y, batch_size=16, verbose=0, callbacks=[note])
    return sum(
        old != new for before, after in itertools.pairwise(places) for old, new in zip(before, after, strict=True)
    )


def addresses(variables: Any) -> list[int]:
    """Return where variables lie in memory: reading one on a CPU copies nothing."""
    return [each.value.read_value()._numpy_internal().__array_interface__["data"][0] for each in variables]


@pytest.mark.parametrize(("name", "moves"), [("momentum", True), ("lion", True), ("adamw", False)])
def test_what_is_assigned_takes_over_the_buffer_of_its_new_value(name: str, moves: bool) -> None:
    graph = tf_memsaver.capture_graph(dense(OPTIMIZERS[name]()), batch_size=8)
    replaced = Simulator(graph).replaced_variables
    variables = [graph.values[variable] for variable, _ in replaced]
    # The moments of the six large layers; others are added to in place.
    assert [each.nbytes for each in variables] == [WEIGHT] * 6 * moves
    assert all(each.kind is MemoryKind.OPTIMIZER for each in variables)
    assert all(graph.values[new].nbytes == WEIGHT for _, new in replaced)
