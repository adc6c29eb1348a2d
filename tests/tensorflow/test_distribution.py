"""Training on several devices: plans by operations in replicas, and what the update takes there.

A process has its devices from its first operation on, so each test has a process of its own, with two.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging
from keras import layers

import tf_memsaver
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


@pytest.mark.parametrize("granularity", ["op", "auto", "layer"])
@pytest.mark.parametrize(("build", "optimizer"), [("functional", "adam"), ("own_call", "momentum")])
def test_eight_steps_of_fit_are_the_plain_ones(build: str, optimizer: str, granularity: str) -> None:
    """Losses, and the weights, state and slots of both replicas, all of which change."""
    code = """
    build, optimizer, granularity = sys.argv[1:]
    plain = replicas.fitted(strategy, build, optimizer)
    ours = replicas.fitted(strategy, build, optimizer, granularity)
    assert plain.losses == ours.losses
    assert plain.final.keys() == ours.final.keys()
    different = [name for name in plain.final if plain.final[name] != ours.final[name]]
    assert not different, different
    unchanged = [name for name in plain.final if plain.final[name] == plain.start.get(name)]
    assert all("learning_rate" in name or "momentum_0" in name for name in unchanged), unchanged
    """
    in_replicas(code, build, optimizer, granularity)
