"""``verify`` says so when all is the same, and says so when anything is not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_memsaver
from tests.tensorflow.plans import naive, optimized_between_cuts, optimized_by_hand
from tf_memsaver.check.training_step import KeptState
from tf_memsaver.check.trial import Trial
from tf_memsaver.check.verify import Verification, _compare, _compared_by
from tf_memsaver.errors import InvalidRequestError
from tf_memsaver.program.told import told_of
from tools.shared.models import small as models


@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_the_same(mode: str) -> None:
    model = models.residual_net()
    before = [v.numpy().tobytes() for v in model.variables]
    outcome = tf_memsaver.verify(model, optimized_between_cuts(model), batch_size=4, mode=mode)
    assert outcome.identical and outcome.passed and not outcome.deterministic_ops
    kinds = {check.kind for check in outcome.checks}
    assert kinds == {"loss", "gradient", "weight", "state"}
    assert len([c for c in outcome.checks if c.kind == "gradient"]) == 3 * len(model.trainable_variables)
    assert "identical" in str(outcome) and not outcome.to_json()["differing"]
    assert [v.numpy().tobytes() for v in model.variables] == before


def test_within_rounding_under_xla() -> None:
    model = models.residual_net(blocks=2)
    outcome = tf_memsaver.verify(model, optimized_between_cuts(model), batch_size=4, mode="xla", steps=2)
    assert outcome.passed and outcome.worst.relative_difference < 1e-3


def test_a_compiled_model_is_trained_with_a_copy_of_its_optimizer() -> None:
    model = models.residual_net(blocks=2)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    optimized = optimized_between_cuts(model)
    assert tf_memsaver.verify(model, optimized, batch_size=4, mode="eager").identical
    assert int(model.optimizer.iterations.numpy()) == 0


@pytest.mark.parametrize("steps", [1, 2])
def test_its_fit_leaves_the_batch_free_in_any_number_of_steps(steps: int) -> None:
    seen = []

    class Seeing(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            seen.append(x.shape[0])
            return x

    model = keras.Sequential([keras.Input((8,)), Seeing(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with KeptState(model) as state:
        trial = Trial(model, told_of(model, {"data": None, "batch_size": 4}), steps, "graph", state)
        seen.clear()
        trial.fit(model)
    assert set(seen) == {None}


def test_naive_replays_are_different() -> None:
    model = models.residual_net()
    outcome = tf_memsaver.verify(model, naive(model, ("norm0", "add1")), batch_size=4, mode="eager")
    assert not outcome.passed and "DIFFERENT" in str(outcome)
    assert {check.kind for check in outcome.checks if not check.identical} == {"loss", "gradient", "weight", "state"}
    assert outcome.to_json()["differing"]


def _broken(model: Any, change: Callable[[list[Any]], list[Any]], last: str = "d2") -> Any:
    optimized = optimized_by_hand(model, ("d0", last))
    forward = optimized._memsaver.run

    def changed(*arguments: Any) -> Any:
        outputs = forward(*arguments)
        return keras.tree.pack_sequence_as(outputs, change(keras.tree.flatten(outputs)))

    optimized._memsaver.run = changed
    return optimized


def test_a_gradient_that_is_off_in_one_place() -> None:
    model = models.chain()

    @tf.custom_gradient
    def bent(x: Any) -> Any:
        return tf.identity(x), lambda g: g * 1.000001

    outcome = tf_memsaver.verify(model, _broken(model, lambda ys: [bent(ys[0])]), batch_size=4, mode="eager", steps=1)
    assert {check.kind for check in outcome.checks if not check.identical} == {"gradient", "weight"}
    assert not outcome.passed and 0 < outcome.worst.relative_difference < 1e-4


def test_a_gradient_that_is_zero_instead_of_none() -> None:
    model = models.two_by_two()
    broken = _broken(model, lambda ys: [ys[0], tf.stop_gradient(ys[1])], last="d1")
    outcome = tf_memsaver.verify(model, broken, batch_size=4, mode="eager", steps=1)
    worst = outcome.worst
    assert not outcome.passed and worst.kind == "gradient" and worst.largest_difference == float("inf")


def test_large_differences_do_not_pass_under_xla() -> None:
    model = models.chain()
    outcome = tf_memsaver.verify(model, _broken(model, lambda ys: [ys[0] * 1.01]), batch_size=4, mode="xla", steps=1)
    assert not outcome.passed


def test_models_that_do_not_share_variables() -> None:
    with pytest.raises(InvalidRequestError, match="share"):
        tf_memsaver.verify(models.chain(), models.chain(), batch_size=4)


@pytest.mark.parametrize("options", [{"mode": "fast"}, {"batch_size": None}])
def test_arguments_without_meaning(options: dict[str, Any]) -> None:
    model = models.chain()
    with pytest.raises(InvalidRequestError):
        tf_memsaver.verify(model, model, **{"batch_size": 4, **options})


def _trained_in_turns(plain: list[float], optimized: float) -> Callable[[str], Any]:
    """Return what trains a plain model, with these results in turns, and an optimized one."""
    results = itertools.cycle(plain)

    def train(model: str) -> dict[tuple[str, str, int], Any]:
        result = optimized if model == "optimized" else next(results)
        return {("weight", "w", 0): np.float32(result)}

    return train


@pytest.mark.parametrize(
    ("plain", "optimized", "identical", "passed", "varies"),
    [
        ([1.0], 1.0, True, True, False),
        ([1.0], 1.0001, False, False, False),
        ([1.0, 1.0, 1.0001], 1.0001, True, True, False),
        ([1.0, 1.0002, 1.0, 1.0001], 1.0001, True, True, False),
        ([1.0, 1.0, 1.0002], 1.0001, False, True, True),
        ([1.0, 1.0, 1.0002], 1.5, False, False, True),
    ],
)
def test_a_plain_model_that_varies_is_run_again(
    plain: list[float], optimized: float, identical: bool, passed: bool, varies: bool
) -> None:
    found = _compared_by(_trained_in_turns(plain, optimized), "plain", "optimized", "graph")
    outcome = Verification(
        mode="graph",
        batch_size=1,
        steps=1,
        deterministic_ops=found.deterministic_ops,
        checks=found.checks,
        plain_varies=found.plain_varies,
    )
    assert (outcome.identical, outcome.passed, outcome.plain_varies) == (identical, passed, varies)
    assert ("Runs of the plain model differ" in str(outcome)) == varies


def test_weights_of_the_same_path_are_all_compared() -> None:
    inputs = keras.Input((8,))
    towers = []
    for name in ("first", "second"):
        x = keras.Input((8,))
        towers.append(keras.Model(x, keras.layers.Dense(8, "tanh", name="same")(x), name=name))
    joined = keras.layers.Add()([tower(inputs) for tower in towers])
    model = keras.Model(inputs, keras.layers.Dense(1, name="head")(joined))
    assert len({variable.path for variable in model.variables}) < len(model.variables)
    told = told_of(model, {"batch_size": 4, "data": None, "step": None})
    with KeptState(model) as state:
        trial = Trial(model, told, 1, "eager", state)
        record = trial.train(model, trial.step_of(model))
    assert len([key for key in record if key[0] == "gradient"]) == len(model.trainable_variables)


def test_a_record_that_lacks_numbers_or_has_others_differs() -> None:
    one = {("weight", "a", 0): np.zeros(2, np.float32)}
    both = one | {("weight", "b", 0): np.zeros(2, np.float32)}
    assert [check.identical for check in _compare(one, both)] == [True, False]
    assert [check.identical for check in _compare(both, one)] == [True, False]


def test_the_worst_difference_is_the_one_with_a_number_missing() -> None:
    plain = {("weight", name, 0): np.ones(3, np.float32) for name in "abc"}
    other = dict(plain)
    other["weight", "a", 0] = np.float32([1, 1, 2])
    other["weight", "b", 0] = np.float32([1, np.nan, 1])
    found = Verification(
        mode="xla", batch_size=1, steps=1, deterministic_ops=False, checks=_compare(plain, other), plain_varies=False
    )
    assert found.worst.name == "b" and found.worst.largest_difference == np.inf and not found.passed


class Noise(keras.layers.Layer):
    """Draws without a seed: no two runs are alike, and TensorFlow refuses to make it deterministic."""

    def call(self, x: Any) -> Any:
        return x + tf.random.normal(tf.shape(x))


def test_a_model_that_draws_without_a_seed_varies(caplog: pytest.LogCaptureFixture) -> None:
    tf.random.set_seed(None)
    inputs = keras.Input((8,))
    x = Noise()(keras.layers.Dense(8, "tanh", name="d0")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(8, "tanh", name="d1")(x)))
    outcome = tf_memsaver.verify(model, optimized_by_hand(model, ("d0", "d0")), batch_size=4, mode="graph", steps=1)
    assert outcome.plain_varies and not outcome.deterministic_ops and not outcome.identical
    assert "cannot be trained with deterministic operations" in caplog.text
