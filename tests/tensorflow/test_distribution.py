"""Training on several devices: plans by operations in replicas, and what the update takes there.

A process has its devices from its first operation on, so each test has a process of its own, with two.
"""

from __future__ import annotations

import re
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

import tf_memsaver
from tests.tensorflow import replicas
from tf_memsaver.errors import UnsupportedModelError
from tools.shared.models import small as models
from tools.shared.processes import run_code

TWO_DEVICES = """
    import sys
    from tools.shared import memory
    import tensorflow as tf
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    import keras
    import tf_memsaver
    from tests.tensorflow import replicas
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert strategy.num_replicas_in_sync == 2
"""


def in_replicas(code: str, *arguments: Any) -> str:
    """Run code in a process with two devices; return what it printed."""
    done = run_code(f"{TWO_DEVICES}{code}", *map(str, arguments))
    assert done.returncode == 0, done.stderr[-3000:]
    return str(done.stdout + done.stderr)


@pytest.mark.parametrize(("build", "optimizer"), [("functional", "adam"), ("own_call", "momentum")])
def test_eight_steps_of_fit_are_the_plain_ones(build: str, optimizer: str) -> None:
    """Losses, and the weights, state and slots of both replicas, all of which change."""
    code = """
    build, optimizer = sys.argv[1:]
    plain = replicas.fitted(strategy, build, optimizer)
    unchanged = [name for name in plain.final if plain.final[name] == plain.start.get(name)]
    assert all("learning_rate" in name for name in unchanged), unchanged
    for granularity in ("op", "auto", "layer"):
        ours = replicas.fitted(strategy, build, optimizer, granularity)
        assert plain.losses == ours.losses
        assert plain.final.keys() == ours.final.keys()
        different = [name for name in plain.final if plain.final[name] != ours.final[name]]
        assert not different, (granularity, different)
    """
    in_replicas(code, build, optimizer)


def test_what_the_update_takes_is_predicted() -> None:
    """The weights are all that takes memory: sums over the replicas, and slots. Both devices have one allocator.

    So half of what that counts is a replica's. Threads decide how many weights are updated at once: 15% either way.
    """
    code = """
    import numpy as np
    for name in ("sgd", "momentum", "adam", "scaled", "clipped"):
        with strategy.scope():
            before = memory.live()
            model = replicas.wide(name)
            predicted = tf_memsaver.estimate(model, batch_size=2).peak_bytes
        peaks = replicas.Peaks()
        x = np.ones((24, 512), "float32")
        model.fit(x, x[:, :8], batch_size=4, verbose=0, callbacks=[peaks])
        assert memory.live("CPU:0") == memory.live("CPU:1")
        measured = (np.median(peaks.found[1:]) - before) / 2
        assert 0.85 < predicted / measured < 1.15, (name, predicted, measured)
        del model
        keras.backend.clear_session()
    """
    in_replicas(code)


def small(layer: Any) -> Any:
    inputs = keras.Input((8,))
    x = layers.Dense(16, activation="gelu")(inputs)
    model = keras.Model(inputs, layers.Dense(2)(layers.Dense(16, activation="gelu")(layer(x))))
    model.compile("adam", "mse", jit_compile=False)
    return model


class AsksWhichReplica(layers.Layer):
    def call(self, x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        return x + tf.cast(0 if context is None else context.replica_id_in_sync_group, x.dtype)


@pytest.mark.parametrize("layer", [lambda: layers.BatchNormalization(synchronized=True), AsksWhichReplica])
def test_what_depends_on_the_replica_is_planned_by_layers(layer: Any) -> None:
    """The operations are copied for each replica: a sum over all, or a replica's number, would be lost."""
    reason = r"^(by layers alone: )?a layer exchanges values with the other replicas.*granularity='layer'\.$"
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = small(replicas.Alone(layer()))
        with pytest.raises(UnsupportedModelError, match=reason):
            tf_memsaver.search_plan(model, batch_size=4, granularity="op")
        plan = tf_memsaver.search_plan(model, batch_size=4)
        assert plan.opened == () and re.match(reason, plan.note)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_a_synchronized_norm_trains_alike(activation: str) -> None:
    """The backward pass of one replica holds operations of the other one, which were put in order twice, in a cycle.

    After a gelu, last bits differ (docs/limits.md).
    """
    code = """
    replicas.ACTIVATION = sys.argv[1]
    plain = replicas.fitted(strategy, "synchronized", "adam")
    ours = replicas.fitted(strategy, "synchronized", "adam", "layer")
    assert any("batch_normalization" in name for name in ours.model.memsaver_plan.recomputed)
    assert plain.losses == ours.losses
    assert (plain.final == ours.final) is (replicas.ACTIVATION != "gelu")
    """
    in_replicas(code, activation)


def test_real_steps_are_not_run_on_one_device_instead() -> None:
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = small(layers.Dropout(0.1))
        optimized = tf_memsaver.optimize(model, batch_size=4)
        with pytest.raises(UnsupportedModelError, match=r"tf\.distribute strategy.*one device.*without the strategy"):
            tf_memsaver.verify(model, optimized, batch_size=4)


def test_a_distribution_of_keras_is_said_to_do_nothing(caplog: pytest.LogCaptureFixture) -> None:
    try:
        distribution = keras.distribution.DataParallel(devices=["cpu:0"])
    except AttributeError:
        pytest.skip("Keras 3.12 cannot make one on TensorFlow")
    with distribution.scope():
        model = models.chain()
        assert not isinstance(model.variables[0].value, tf.distribute.DistributedValues)
        for _ in range(2):
            tf_memsaver.search_plan(model, batch_size=4)
    said = [each.getMessage() for each in caplog.records if "keras.distribution" in each.getMessage()]
    assert len(said) == 1 and "DataParallel" in said[0] and "MirroredStrategy" in said[0]
